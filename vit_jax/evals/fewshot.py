"""Few-shot linear transfer: regularised least squares on frozen features.

Section 4.1 of the paper: "a regularized least-squares regression problem that
maps the (frozen) representation of a subset of training images to {-1, 1}^K
target vectors", which has a closed form. The paper does not specify whitening,
bias and strength; the defaults are big_vision's.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vit_jax.evals.frozen import Linear, Split, moments
from vit_jax.types import Count, Positive, Seed, UserError


@dataclasses.dataclass(frozen=True)
class FewShot:
  """Test accuracy after training on k examples per class, mean over draws.

  The computation is in numpy and float64, the same on every host.

  Attributes:
    shots: numbers of examples per class.
    seeds: one draw of the examples per seed.
    l2: strengths of the penalty. Of several, each draw uses the one with the
      best accuracy on its held-out shots (the largest of equals), a fifth of
      the shots of each class, at least one; all shots are fitted with it.
    whiten: whether to scale features by mean and standard deviation (+ 1e-5) of
      the examples they are fitted to.
    bias: value of a constant feature, so large that its weight is hardly
      penalised; None for no bias.
    held_out_shots: choose l2 on this many more examples of each class instead.
    allow_fewer: whether to use all examples of a class that has too few, as
      big_vision does; False raises an error.
  """

  shots: Sequence[Count] = (1, 5, 10, 25)
  seeds: Sequence[Seed] = (0, 1, 2)
  l2: Sequence[Positive] = (2.0**10,)
  whiten: bool = True
  bias: float | None = 100.0
  held_out_shots: Count | None = None
  allow_fewer: bool = False

  def __post_init__(self) -> None:
    held_out = self.held_out_shots or min(self.shots) > 1
    if len(self.l2) > 1 and not held_out:
      raise UserError(
        f'shots={self.shots} with l2={self.l2}: a single shot cannot be held '
        'out to choose l2. Give one l2, or held_out_shots, or remove 1 from '
        'shots.'
      )

  def check(self, labels: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError if a class has too few training examples."""
    self.draw(labels['train'], max(self.shots), seed=0)
    if len(unknown := np.setdiff1d(labels['test'], labels['train'])):
      raise UserError(
        f'{len(unknown)} classes of test, such as {unknown[0]}, have no '
        'training example. Use splits with the same classes.'
      )

  def __call__(
    self, train: Split, test: Split, val: Split | None = None
  ) -> dict[str, float]:
    """Return {'{k}shot', '{k}shot_std', '{k}shot_seed{s}': accuracy}.

    These are the mean over draws, the standard deviation (of the population)
    and each draw; '{k}shot_l2_seed{s}' is the chosen l2, if there are several.
    """
    del val
    results = {}
    for shots in self.shots:
      accuracies = []
      for seed in self.seeds:
        drawn = self.draw(train.y, shots, seed)
        l2 = self._choose_l2(train, drawn, shots)
        fit = train[np.concatenate([rows[:shots] for rows in drawn])]
        accuracies.append(self.solver(fit)(l2).accuracy(test))
        results[f'{shots}shot_seed{seed}'] = accuracies[-1]
        if len(self.l2) > 1:
          results[f'{shots}shot_l2_seed{seed}'] = l2
      results[f'{shots}shot'] = float(np.mean(accuracies))
      results[f'{shots}shot_std'] = float(np.std(accuracies))
    return results

  def draw(self, labels: np.ndarray, shots: int, seed: int) -> list[np.ndarray]:
    """Return the random rows of each class: the shots, then the held-out ones.

    With the same seed, fewer shots are the first of more.
    """
    count = shots + (self.held_out_shots or 0)
    rng, drawn = np.random.default_rng(seed), []
    for label in np.unique(labels):
      rows = np.flatnonzero(labels == label)
      if len(rows) < count and not self.allow_fewer:
        raise UserError(
          f'{count} shots (including held-out ones), but class {label} has '
          f'{len(rows)} training examples. Use fewer shots or a larger split, '
          'or set allow_fewer=True.'
        )
      drawn.append(rng.permutation(rows)[:count])
    return drawn

  def _choose_l2(self, train, drawn, shots):
    if len(self.l2) == 1:
      return self.l2[0]
    ends = [shots] * len(drawn)
    if not self.held_out_shots:  # at least one example is kept
      fifth = max(1, shots // 5)
      ends = [max(1, len(rows) - fifth) for rows in drawn]
    kept = [rows[:end] for rows, end in zip(drawn, ends)]
    held = [rows[end:] for rows, end in zip(drawn, ends)]
    solve = self.solver(train[np.concatenate(kept)])
    held = train[np.concatenate(held)]
    return max((solve(l2).accuracy(held), l2) for l2 in self.l2)[1]

  def solver(self, train: Split) -> Callable[[float], Linear]:
    """Return the function l2 -> `Linear` that minimises the objective.

    This is |X W - T|^2 + l2 |W|^2 with targets T of 1 for the label and -1 for
    the other classes. One eigendecomposition of the smaller of X^T X (primal)
    and X X^T (dual) serves all l2.
    """
    x, dim = np.asarray(train.x, np.float64), train.x.shape[1]
    mean, std = np.zeros(dim), np.ones(dim)
    if self.whiten:
      mean, std = moments(x)
    x = (x - mean) / std
    if self.bias is not None:
      x = np.concatenate([x, np.full((len(x), 1), self.bias)], axis=1)
    classes = np.unique(train.y)
    targets = 2.0 * (train.y[:, None] == classes) - 1
    primal = len(x) >= x.shape[1]
    values, basis = np.linalg.eigh(x.T @ x if primal else x @ x.T)
    values = np.maximum(values, 0)[:, None]
    # (X^T X + l2)^-1 X^T T = X^T (X X^T + l2)^-1 T
    right = basis.T @ (x.T @ targets if primal else targets)
    left = basis if primal else x.T @ basis

    def solve(l2):
      kernel, rest = np.split(left @ (right / (values + l2)), [dim])
      bias = self.bias * rest[0] if len(rest) else np.zeros(len(classes))
      return Linear(kernel, bias, classes, mean, std)

    return solve
