"""Classification by the nearest training examples in feature space.

Votes are weighted as in DINO (Caron et al. 2021, after Wu et al. 2018): class c
gets the sum of exp(cosine similarity / T) over its examples among the k
nearest (written from memory of the papers).
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.evals.frozen import Split
from vit_jax.types import ACCURACY, Count, Kinds, Positive, UserError

# At a time: the features of ImageNet are 4 GB, its similarities 256 GB.
_ROWS, _QUERIES = 2**17, 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knn:
  """Accuracy of the vote of the k nearest training examples.

  Of equally similar examples the first in the training split is nearer; of
  classes with equal votes the smallest class number wins.

  Attributes:
    k: numbers of neighbours; the search runs once, for the largest.
    temperature: values of T.
  """

  k: Sequence[Count] = (10, 20, 100, 200)
  temperature: Sequence[Positive] = (0.07,)

  @property
  def metrics(self) -> Kinds:
    return dict.fromkeys(self._names(), ACCURACY)

  def _names(self):
    grid = itertools.product(self.k, self.temperature)
    return {f'k{k}_t{t:g}': (k, t) for k, t in grid}

  def check(self, labels: Mapping[str, np.ndarray]) -> None:
    if max(self.k) > len(labels['train']):
      raise UserError(
        f'k={max(self.k)}, but there are {len(labels["train"])} training '
        'examples. Use a smaller k.'
      )

  def __call__(
    self, train: Split, test: Split, val: Split | None = None
  ) -> dict[str, float]:
    """Return {'k{k}_t{T}': accuracy}."""
    classes, numbers = np.unique(train.y, return_inverse=True)
    similarities, rows = neighbours(train.x, test.x, max(self.k))
    labels, found = numbers[rows], {}
    for name, (k, t) in self._names().items():
      predicted = classes[vote(similarities[:, :k], labels[:, :k], t)]
      found[name] = float(np.mean(predicted == test.y))
    return found


def vote(
  similarities: np.ndarray, labels: np.ndarray, temperature: float
) -> np.ndarray:
  """Return the class with most votes, int [Q], of [Q, k], nearest first."""
  # Relative to the nearest, so that no temperature overflows.
  excess = similarities.astype(np.float64) - similarities[:, :1]
  weights = np.exp(excess / temperature)
  return np.array([np.bincount(y, w).argmax() for y, w in zip(labels, weights)])


def neighbours(
  train: np.ndarray, queries: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
  """Return cosine similarities and row numbers [Q, k], nearest first."""
  train, queries = _unit(train), _unit(queries)
  shape = (len(queries), k)
  best = (np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int32))
  for first in range(0, len(train), _ROWS):
    best = _nearer(best, queries, train[first : first + _ROWS], first)
  return jax.device_get(best)


def nearest(x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
  """Return cosine similarities and row numbers [N, k] of other examples."""
  count = len(x)
  k = min(k, count - 1)
  near, rows = neighbours(x, x, k + 1)
  is_own = rows == np.arange(count)[:, None]
  is_own[~is_own.any(axis=1), -1] = True  # there are k + 1 equal ones
  return near[~is_own].reshape(count, k), rows[~is_own].reshape(count, k)


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
