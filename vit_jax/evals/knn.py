"""Classification by the nearest training examples in feature space.

The weighted vote is DINO's (Caron et al. 2021, after Wu et al. 2018): class c
gets the sum of exp(similarity / T) over those of the k nearest that are of it
(written from memory of the papers).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from vit_jax import sharding
from vit_jax.evals import readout

METRICS = ('cosine', 'euclidean')

# Similarities are computed in blocks of this size whatever the number of
# devices, so that the last bits, and with them the neighbours, are the same.
_TILE, _QUERIES = 1024, 256


class Knn:
  """Accuracy of the vote of the k nearest training examples.

  Ties: of equally similar examples the first in the training set is nearer; of
  classes with equal votes the smallest label wins. Both are the same on any
  number of devices. Each device holds its share of the training features.

  Args:
    k: numbers of neighbours; they are found once, for the largest.
    temperature: T of the vote, one or several; None is a plain majority vote
      (T = infinity).
    metric: 'cosine', or 'euclidean' (the similarity is minus the square of
      the distance).
    held_out: a fraction of train to choose k and T on where there is no `val`;
      None then leaves the choice to the reader of the table.
    seed: of what is held out.
  """

  def __init__(
    self,
    k=(10, 20, 100, 200),
    temperature=(0.07,),
    metric='cosine',
    held_out=None,
    seed=0,
  ):
    self._k = tuple(k) if isinstance(k, list | tuple) else (k,)
    if not self._k or not all(isinstance(n, int) and n > 0 for n in self._k):
      raise ValueError(f'k={k!r} must be integers of 1 or more.')
    several = isinstance(temperature, list | tuple)
    temperatures = temperature if several else (temperature,)
    self._temperatures = tuple(
      t if t is None else readout.sweep(t, 'temperature', least=0)[0]
      for t in temperatures
    )
    if not self._temperatures:
      raise ValueError('temperature is empty; give at least one, or None.')
    if metric not in METRICS:
      raise ValueError(f'metric={metric!r} must be one of {METRICS}.')
    if held_out is not None:
      readout.check_held_out(held_out)
    self._metric, self._held_out, self._seed = metric, held_out, seed

  def check(self, labels_train, labels_test, *, labels_val=None):
    """Raises ValueError if there are fewer training examples than k."""
    del labels_test
    count, what = len(labels_train), 'training examples'
    if self._chooses(labels_val) and labels_val is None:
      kept, _ = readout.hold_out(labels_train, self._held_out, self._seed)
      count, what = len(kept), 'training examples that are not held out'
    if max(self._k) > count:
      raise ValueError(
        f'k={max(self._k)}: there are {count} {what}; use a smaller k.'
      )

  def __call__(self, train, test, *, val=None, mesh):
    """{'k{k}_t{T}' or 'k{k}_majority': accuracy}.

    Of several, where there is `val` or held_out, also 'chosen' (accuracy with
    what is best there, the first of equals), 'chosen_k' and, where it has one,
    'chosen_t'.
    """
    self.check(train.y, test.y, labels_val=None if val is None else val.y)
    found = self._accuracies(train, test, mesh)
    results = {_name(k, t): value for (k, t), value in found.items()}
    if self._chooses(val):
      parts = readout.for_choice(train, val, self._held_out, self._seed)
      there = self._accuracies(*parts, mesh)
      k, t = best = max(there, key=there.get)
      results |= {'chosen': found[best], 'chosen_k': float(k)}
      if t is not None:
        results['chosen_t'] = t
    return results

  def _chooses(self, val):
    several = len(self._k) * len(self._temperatures) > 1
    return several and (val is not None or self._held_out is not None)

  def _accuracies(self, train, test, mesh):
    """{(k, temperature): accuracy on test}."""
    classes, numbers = np.unique(train.y, return_inverse=True)
    similar, rows = neighbours(
      train.x, test.x, max(self._k), metric=self._metric, mesh=mesh
    )
    return {
      (k, t): readout.accuracy(
        classes[vote(similar[:, :k], numbers[rows[:, :k]], t)], test.y
      )
      for k in self._k
      for t in self._temperatures
    }


def _name(k, temperature):
  return f'k{k}_' + ('majority' if temperature is None else f't{temperature:g}')


def vote(similarities, labels, temperature, rows=1024):
  """int [Q]: the class with most votes, by neighbours [Q, k], nearest first."""
  num_classes = labels.max() + 1
  found = []
  for i in range(0, len(labels), rows):
    near = similarities[i : i + rows].astype(np.float64)
    # Relative to the nearest, so that no temperature makes it overflow.
    excess = near - near[:, :1]
    scale = np.inf if temperature is None else temperature
    cells = labels[i : i + rows] + num_classes * np.arange(len(near))[:, None]
    votes = np.bincount(
      cells.ravel(), np.exp(excess / scale).ravel(), len(near) * num_classes
    )
    found.append(votes.reshape(-1, num_classes).argmax(axis=1))
  return np.concatenate(found)


def neighbours(train, queries, k, *, metric='cosine', mesh):
  """The k nearest rows of train, nearest first.

  Args:
    train: float32 [N, D], N >= k; numpy, the same on every host.
    queries: float32 [Q, D].
    metric: one of METRICS.
    mesh: of `sharding.make_mesh`.

  Returns:
    Similarities float32 [Q, k], and the rows' numbers, int32 [Q, k].
  """
  if metric == 'cosine':
    train, queries = _unit(train), _unit(queries)
  x = readout.put_rows(train, mesh, tile=_TILE)
  first = np.arange(0, x.shape[0], _TILE, dtype=np.int32)
  first = readout.put_rows(first, mesh)
  found = []
  for i in range(0, len(queries), _QUERIES):
    batch = queries[i : i + _QUERIES]
    padding = ((0, _QUERIES - len(batch)), (0, 0))
    batch = readout.put_whole(np.pad(batch, padding), mesh)
    found.append(
      _search(x, first, batch, n=len(train), k=k, metric=metric, mesh=mesh)
    )
    if len(found) > 1:  # one batch behind, so that the device is never idle
      found[-2] = jax.device_get(found[-2])
  found[-1] = jax.device_get(found[-1])
  similar, rows = (np.concatenate(part)[: len(queries)] for part in zip(*found))
  return similar, rows


@functools.partial(jax.jit, static_argnames=('n', 'k', 'metric', 'mesh'))
def _search(x, first, queries, *, n, k, metric, mesh):
  """Each device's k nearest to queries [Q, D], and the k nearest of those."""

  def merge(best, tile):
    rows, start = tile
    score = _similarity(queries, rows, metric)
    index = start + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
    score = jnp.where(index < n, score, -jnp.inf)
    return _nearest(
      jnp.concatenate([best[0], score], axis=1),
      jnp.concatenate([best[1], index], axis=1),
      k,
    ), None

  def local(x, first, queries):
    shape = (len(queries), k)
    start = (jnp.full(shape, -jnp.inf), jnp.full(shape, n, jnp.int32))
    tiles = x.reshape(-1, _TILE, x.shape[-1])
    return jax.lax.scan(merge, start, (tiles, first))[0]

  axes = sharding.batch_sharding(mesh).spec[0]
  rows, whole = PartitionSpec(axes), PartitionSpec()
  candidates = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(rows, rows, whole),
    out_specs=PartitionSpec(None, axes),
    check_vma=False,
  )(x, first, queries)
  candidates = jax.lax.with_sharding_constraint(
    candidates, sharding.replicated(mesh)
  )
  return _nearest(*candidates, k)


def _nearest(scores, index, k):
  """Of equal scores the first, which has the lowest index, comes first."""
  scores, at = jax.lax.top_k(scores, k)
  return scores, jnp.take_along_axis(index, at, axis=1)


def _similarity(queries, rows, metric):
  """[Q, D], [N, D] -> [Q, N]."""
  score = jnp.matmul(queries, rows.T, precision='highest')
  if metric == 'euclidean':
    norms = (
      jnp.sum(queries**2, axis=1)[:, None] + jnp.sum(rows**2, axis=1)[None]
    )
    score = 2 * score - norms
  return jnp.where(score == 0, 0.0, score)  # top_k has -0 below 0


def _unit(x):
  """Rows divided by their norm; a row of zeros stays."""
  norm = np.sqrt(np.einsum('nd,nd->n', x, x, dtype=np.float64))
  return (x / np.maximum(norm, 1e-30)[:, None]).astype(np.float32)
