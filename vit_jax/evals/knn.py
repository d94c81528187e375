"""Classification by the nearest training examples in feature space.

The weighted vote is that of DINO (Caron et al. 2021, after Wu et al. 2018):
class c gets the sum of exp(cosine similarity / T) over its examples among the k
nearest (written from memory of the papers).
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.evals import frozen
from vit_jax.types import Between, Count, Positive, Seed

# At a time: the features of ImageNet are 4 GB, its similarities 256 GB.
_ROWS, _QUERIES = 2**17, 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knn:
  """Accuracy of the vote of the k nearest training examples.

  Of equally similar examples the first in the training split is nearer; of
  classes with equal votes the smallest class number wins.

  Attributes:
    k: numbers of neighbours; the search runs once, for the largest.
    temperature: T of the vote, one or several; None is a plain majority vote
      (T = infinity).
    held_out: fraction of each class of train to choose k and T on if there is
      no `val`; None does not choose.
    seed: of the held-out examples.
  """

  k: Count | Sequence[Count] = (10, 20, 100, 200)
  temperature: Positive | Sequence[Positive | None] | None = (0.07,)
  held_out: Between | None = None
  seed: Seed = 0

  def check(self, labels: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError if there are fewer training examples than k."""
    train = labels['train']
    if 'val' not in labels and self.held_out is not None:
      train, _ = frozen.hold_out(train, self.held_out, self.seed)
    if (most := max(frozen.several(self.k))) > len(train):
      raise ValueError(
        f'k={most}, but there are {len(train)} training examples that are not '
        'held out. Use a smaller k.'
      )

  def __call__(
    self,
    train: frozen.Split,
    test: frozen.Split,
    val: frozen.Split | None = None,
  ) -> dict[str, float]:
    """Return {'k{k}_t{T}' or 'k{k}_majority': accuracy}.

    If k or T is chosen, on `val` or on held-out examples, also 'chosen' (the
    accuracy of the first of the best), 'chosen_k' and, unless None, 'chosen_t'.
    """
    found = self._accuracies(train, test)
    results = {
      f'k{k}_' + ('majority' if t is None else f't{t:g}'): value
      for (k, t), value in found.items()
    }
    if len(found) == 1 or (val is None and self.held_out is None):
      return results
    parts = frozen.tuning(train, val, self.held_out, self.seed)
    scores = self._accuracies(*parts)
    k, t = best = max(scores, key=scores.__getitem__)
    results |= {'chosen': found[best], 'chosen_k': float(k)}
    return results | ({} if t is None else {'chosen_t': float(t)})

  def _accuracies(self, train, test):
    """Return {(k, temperature): accuracy on test}."""
    ks = frozen.several(self.k)
    classes, numbers = np.unique(train.y, return_inverse=True)
    similarities, rows = neighbours(train.x, test.x, max(ks))
    labels = numbers[rows]
    accuracies = {}
    for k, t in itertools.product(ks, frozen.several(self.temperature)):
      predicted = classes[vote(similarities[:, :k], labels[:, :k], t)]
      accuracies[k, t] = float(np.mean(predicted == test.y))
    return accuracies


def vote(
  similarities: np.ndarray, labels: np.ndarray, temperature: float | None
) -> np.ndarray:
  """Return the class with most votes, int [Q].

  Takes similarities, float32 [Q, k], nearest neighbour first, and the labels of
  the neighbours, int [Q, k].
  """
  # Relative to the nearest, so that no temperature overflows.
  excess = similarities.astype(np.float64) - similarities[:, :1]
  weights = np.exp(excess / (np.inf if temperature is None else temperature))
  count = labels.max() + 1
  votes = [np.bincount(y, w, count).argmax() for y, w in zip(labels, weights)]
  return np.array(votes)


def neighbours(
  train: np.ndarray, queries: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
  """Return cosine similarities and row numbers [Q, k], nearest first.

  Takes float32 [N, D], N >= k, and [Q, D].
  """
  train, queries = _unit(train), _unit(queries)
  best = (
    np.full((len(queries), k), -np.inf, np.float32),
    np.zeros((len(queries), k), np.int32),
  )
  for first in range(0, len(train), _ROWS):
    best = _nearer(best, queries, train[first : first + _ROWS], first)
  return jax.device_get(best)


@jax.jit
def _nearer(best, queries, x, first):
  """Return `best` with the rows of x that are nearer; x[0] is row `first`."""

  def of_query(found):
    score, row, query = found
    score = jnp.concatenate([score, jnp.matmul(x, query, precision='highest')])
    row = jnp.concatenate([row, first + jnp.arange(len(x))])
    # Of equal scores top_k returns the first, which is the lowest row.
    score, at = jax.lax.top_k(score, best[0].shape[1])
    return score, row[at]

  return jax.lax.map(of_query, (*best, queries), batch_size=_QUERIES)


def _unit(x):
  """Return the rows divided by their norm; a row of zeros stays."""
  norm = np.sqrt(np.einsum('nd,nd->n', x, x, dtype=np.float64))
  return (x / np.maximum(norm, 1e-30)[:, None]).astype(np.float32)
