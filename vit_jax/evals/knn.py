"""Classification by the nearest training examples in feature space.

The weighted vote is that of DINO (Caron et al. 2021, after Wu et al. 2018):
class c gets the sum of exp(similarity / T) over its examples among the k
nearest (written from memory of the papers).

The search runs on the devices, because ImageNet takes 5e13 multiplications
(50,000 x 1,281,167 x 768), which scikit-learn would do on every host. On the
same 2 CPU cores the two are about as fast.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from vit_jax.config import checks
from vit_jax.config.domains import Count, OneOf, Positive
from vit_jax.evals import frozen
from vit_jax.parallel import sharding

METRICS = ('cosine', 'euclidean')

_QUERIES = 256  # at a time; the similarities of ImageNet then take 1.3 GB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knn(frozen.Tuned):
  """Accuracy of the vote of the k nearest training examples.

  Each device holds a part of the training features. Ties do not depend on the
  number of devices: of equally similar examples the first in the training split
  is nearer; of classes with equal votes the smallest class number wins.

  Attributes:
    k: numbers of neighbours; the search runs once, for the largest.
    temperature: T of the vote, one or several; None is a plain majority vote
      (T = infinity).
    metric: 'cosine', or 'euclidean' (the similarity is minus the squared
      distance).
    held_out: fraction of each class of train to choose k and T on if there is
      no `val`; None does not choose.
  """

  k: Count | Sequence[Count] = (10, 20, 100, 200)
  temperature: Positive | Sequence[Positive | None] | None = (0.07,)
  metric: Annotated[str, OneOf(*METRICS)] = 'cosine'
  held_out: float | None = None  # type: ignore[assignment]

  def __post_init__(self) -> None:
    object.__setattr__(self, 'k', self.ks)
    object.__setattr__(self, 'temperature', self.temperatures)
    if not self.ks or not all(isinstance(n, int) and n > 0 for n in self.ks):
      raise ValueError(f'k={self.k!r} must be integers of at least 1.')
    if not self.temperatures:
      raise ValueError('temperature is empty; give at least one, or None.')
    for t in self.temperatures:
      if t is not None:
        frozen.sweep(t, 'temperature')
    checks.one_of('metric', self.metric, METRICS)
    if self.held_out is not None:
      super().__post_init__()

  @property
  def ks(self) -> tuple[int, ...]:
    """Values of k, also if it is one number."""
    return _several(self.k)

  @property
  def temperatures(self) -> tuple[float | None, ...]:
    """Values of the temperature, also if it is one number."""
    return _several(self.temperature)

  def check(
    self,
    labels_train: np.ndarray,
    labels_test: np.ndarray,
    *,
    labels_val: np.ndarray | None = None,
  ) -> None:
    """Raise ValueError if there are fewer training examples than k."""
    del labels_test
    fitted, part = labels_train, ''
    if self._chooses(labels_val) and labels_val is None:
      fitted, part = self.rows(labels_train)[0], ' that are not held out'
    if max(self.ks) > len(fitted):
      raise ValueError(
        f'k={max(self.ks)}, but there are {len(fitted)} training examples'
        f'{part}. Use a smaller k.'
      )

  def __call__(
    self,
    train: frozen.Split,
    test: frozen.Split,
    *,
    val: frozen.Split | None = None,
    mesh: Mesh,
  ) -> dict[str, float]:
    """Return {'k{k}_t{T}' or 'k{k}_majority': accuracy}.

    If k or T is chosen, on `val` or on held-out examples, also 'chosen' (the
    accuracy of the first of the best), 'chosen_k' and, unless None, 'chosen_t'.
    """
    self.check(train.y, test.y, labels_val=None if val is None else val.y)
    found = self._accuracies(train, test, mesh)
    results = {
      f'k{k}_' + ('majority' if t is None else f't{t:g}'): value
      for (k, t), value in found.items()
    }
    if self._chooses(val):
      scores = self._accuracies(*self.split(train, val), mesh)
      k, t = best = max(scores, key=scores.get)
      results |= {'chosen': found[best], 'chosen_k': float(k)}
      if t is not None:
        results['chosen_t'] = float(t)
    return results

  def _chooses(self, val):
    several = len(self.ks) * len(self.temperatures) > 1
    return several and (val is not None or self.held_out is not None)

  def _accuracies(self, train, test, mesh):
    """Return {(k, temperature): accuracy on test}."""
    classes, numbers = np.unique(train.y, return_inverse=True)
    similar, rows = neighbours(
      train.x, test.x, max(self.ks), metric=self.metric, mesh=mesh
    )
    labels = numbers[rows]
    accuracies = {}
    for k, t in itertools.product(self.ks, self.temperatures):
      predicted = classes[vote(similar[:, :k], labels[:, :k], t)]
      accuracies[k, t] = float(np.mean(predicted == test.y))
    return accuracies


def _several(value):
  return tuple(value) if isinstance(value, list | tuple) else (value,)


def vote(
  similarities: np.ndarray,
  labels: np.ndarray,
  temperature: float | None,
  rows: int = 1024,
) -> np.ndarray:
  """Return the class with most votes, int [Q].

  Takes similarities, float32 [Q, k], nearest neighbour first, and the labels of
  the neighbours, int [Q, k]; `rows` queries at a time, to bound memory.
  """
  num_classes = labels.max() + 1
  found = []
  for i in range(0, len(labels), rows):
    near = similarities[i : i + rows].astype(np.float64)
    # Relative to the nearest, so that no temperature overflows.
    excess = near - near[:, :1]
    scale = np.inf if temperature is None else temperature
    cells = labels[i : i + rows] + num_classes * np.arange(len(near))[:, None]
    votes = np.bincount(
      cells.ravel(), np.exp(excess / scale).ravel(), len(near) * num_classes
    )
    found.append(votes.reshape(-1, num_classes).argmax(axis=1))
  return np.concatenate(found)


def neighbours(
  train: np.ndarray,
  queries: np.ndarray,
  k: int,
  *,
  metric: str = 'cosine',
  mesh: Mesh,
) -> list[np.ndarray]:
  """Return the k nearest rows of train to each query, nearest first.

  Takes float32 [N, D], N >= k, and [Q, D], numpy and equal on all hosts.
  Returns similarities float32 [Q, k] and row numbers int32 [Q, k].
  """
  if metric == 'cosine':
    train, queries = _unit(train), _unit(queries)
  padding = ((0, -len(queries) % _QUERIES), (0, 0))
  batches = np.pad(queries, padding).reshape(-1, _QUERIES, queries.shape[1])
  x, batches = frozen.put_rows(train, mesh), frozen.put_whole(batches, mesh)
  found = _search(x, batches, n=len(train), k=k, metric=metric, mesh=mesh)
  return [x.reshape(-1, k)[: len(queries)] for x in jax.device_get(found)]


@functools.partial(jax.jit, static_argnames=('n', 'k', 'metric', 'mesh'))
def _search(x, queries, *, n, k, metric, mesh):
  """Find the nearest of the first n rows of x [N, D] to queries [B, Q, D].

  Each device searches its own rows; then the best of all devices are merged. Of
  equal similarities `top_k` returns the first, which is the lowest row.
  """
  (axes,) = sharding.batch_sharding(mesh).spec
  rows, columns = PartitionSpec(axes), PartitionSpec(None, axes)

  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(rows, rows, PartitionSpec()),
    out_specs=columns,
  )
  def on_each_device(x, row, queries):
    score = jnp.matmul(queries, x.T, precision='highest')
    if metric == 'euclidean':
      score = 2 * score - jnp.sum(queries**2, axis=1, keepdims=True)
      score -= jnp.sum(x**2, axis=1)[None]
    score = jnp.where(score == 0, 0.0, score)  # top_k orders -0 below 0
    score = jnp.where(row[None] < n, score, -jnp.inf)
    score, at = jax.lax.top_k(score, min(k, len(x)))
    return score, row[at]

  def nearest(queries):
    score, row = on_each_device(x, jnp.arange(len(x)), queries)
    score, at = jax.lax.top_k(score, k)
    return score, jnp.take_along_axis(row, at, axis=1)

  return jax.lax.with_sharding_constraint(
    jax.lax.map(nearest, queries), sharding.replicated(mesh)
  )


def _unit(x):
  """Return the rows divided by their norm; a row of zeros stays."""
  norm = np.sqrt(np.einsum('nd,nd->n', x, x, dtype=np.float64))
  return (x / np.maximum(norm, 1e-30)[:, None]).astype(np.float32)
