"""Few-shot linear transfer: regularised least squares on frozen features.

Section 4.1 of the paper: "a regularized least-squares regression problem that
maps the (frozen) representation of a subset of training images to {-1, 1}^K
target vectors", which has a closed form. The paper does not specify whitening,
bias and strength; they are big_vision's.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vit_jax import types
from vit_jax.evals.frozen import Linear, Split, moments

# A constant feature, so large that its weight is hardly penalised.
_BIAS = 100.0


@dataclasses.dataclass(frozen=True)
class FewShot:
  """Test accuracy after training on k examples per class, mean over draws.

  Attributes:
    shots: numbers of examples per class.
    seeds: one draw of the examples per seed.
    l2: strengths of the penalty. If there are several, each draw uses the best
      one on its held-out shots, by accuracy (the largest of equals).
    held_out_shots: number of more examples of each class to choose l2 on.
    allow_fewer: whether to use all examples of a class that has too few, as
      big_vision does; False raises an error.
  """

  shots: Sequence[types.Count] = (1, 5, 10, 25)
  seeds: Sequence[types.Seed] = (0, 1, 2)
  l2: Sequence[types.Positive] = (2.0**10,)
  held_out_shots: types.Natural = 0
  allow_fewer: bool = False

  def __post_init__(self) -> None:
    if len(self.l2) > 1 and not self.held_out_shots:
      raise types.UserError(
        f'l2={self.l2} needs examples to choose a strength on. Give one l2, or '
        'set held_out_shots.'
      )

  @property
  def metrics(self) -> types.Kinds:
    detail = dataclasses.replace(types.RATE, detail=True)
    found: dict[str, types.Kind] = {}
    for name in (f'{shots}shot' for shots in self.shots):
      found |= {name: types.ACCURACY, f'{name}_std': types.Kind('%', group='')}
      found |= {f'{name}_seed{x}': detail for x in self.seeds}
      found |= {f'{name}_l2_seed{x}': types.DETAIL for x in self.seeds}
    return found

  def check(self, labels: Mapping[str, np.ndarray]) -> None:
    self.draw(labels['train'], max(self.shots), seed=0)

  def __call__(
    self, train: Split, test: Split, val: Split | None = None
  ) -> dict[str, float]:
    """Return {'{k}shot': mean over draws, '{k}shot_std', '{k}shot_seed{s}'}.

    '{k}shot_l2_seed{s}' is the chosen l2, if there are several.
    """
    results = {}
    for shots in self.shots:
      accuracies = []
      for seed in self.seeds:
        drawn = self.draw(train.y, shots, seed)
        solve = self.solver(train[np.concatenate([x[:shots] for x in drawn])])
        l2 = self.l2[0]
        if len(self.l2) > 1:
          held = train[np.concatenate([x[shots:] for x in drawn])]
          l2 = max((solve(l2).accuracy(held), l2) for l2 in self.l2)[1]
          results[f'{shots}shot_l2_seed{seed}'] = l2
        accuracies.append(solve(l2).accuracy(test))
        results[f'{shots}shot_seed{seed}'] = accuracies[-1]
      results[f'{shots}shot'] = float(np.mean(accuracies))
      results[f'{shots}shot_std'] = float(np.std(accuracies))
    return results

  def draw(self, labels: np.ndarray, shots: int, seed: int) -> list[np.ndarray]:
    """Return the random rows of each class: the shots, then the held-out ones.

    With the same seed, fewer shots are the first of more.
    """
    count = shots + self.held_out_shots
    rng, drawn = np.random.default_rng(seed), []
    for label in np.unique(labels):
      rows = np.flatnonzero(labels == label)
      if len(rows) < count and not self.allow_fewer:
        raise types.UserError(
          f'{count} shots (including held-out ones), but class {label} has '
          f'{len(rows)} training examples. Use fewer shots or a larger split, '
          'or set allow_fewer=True.'
        )
      drawn.append(rng.permutation(rows)[:count])
    return drawn

  def solver(self, train: Split) -> Callable[[float], Linear]:
    """Return the function l2 -> `Linear` that minimises the objective.

    This is |X W - T|^2 + l2 |W|^2 with targets T of 1 for the label, else -1.
    An eigendecomposition of X^T X (primal) or X X^T (dual) serves all l2.
    """
    x = np.asarray(train.x, np.float64)
    mean, std = moments(x)
    x = np.pad((x - mean) / std, [(0, 0), (0, 1)], constant_values=_BIAS)
    classes = np.unique(train.y)
    targets = 2.0 * (train.y[:, None] == classes) - 1
    primal = len(x) >= x.shape[1]
    values, basis = np.linalg.eigh(x.T @ x if primal else x @ x.T)
    values = np.maximum(values, 0)[:, None]
    # (X^T X + l2)^-1 X^T T = X^T (X X^T + l2)^-1 T
    right = basis.T @ (x.T @ targets if primal else targets)
    left = basis if primal else x.T @ basis

    def solve(l2):
      weights = left @ (right / (values + l2))
      return Linear(weights[:-1], _BIAS * weights[-1], classes, mean, std)

    return solve
