"""What the readouts of frozen features have in common.

A readout is any object with

  check(labels_train, labels_test, *, labels_val=None)
  __call__(train, test, *, val=None, mesh) -> {metric: float}

where labels are int [N] and the rest are Splits, the same ones on every host.
`check` raises ValueError for what cannot work, before any training. What is
tested is always fitted on the whole of `train` and on nothing else; settings
are never chosen on `test`.
"""

import dataclasses

import jax
import numpy as np

from vit_jax import sharding


@dataclasses.dataclass(frozen=True)
class Split:
  """Features x, float32 [N, D], and classes y, int [N], in numpy."""

  x: np.ndarray
  y: np.ndarray

  def __getitem__(self, rows):
    return Split(self.x[rows], self.y[rows])


def sweep(value, name, *, least=None):
  """Tuple of the floats to try; of a number, that alone.

  Raises ValueError for what is no number, or not above `least`.
  """
  values = tuple(value) if isinstance(value, list | tuple) else (value,)
  for x in values:
    number = isinstance(x, int | float) and not isinstance(x, bool)
    if not number or (least is not None and not x > least):
      above = '' if least is None else f' above {least}'
      raise ValueError(
        f'{name}={value!r} must be a number{above}, or several of them.'
      )
  if not values:
    raise ValueError(f'{name} is empty; give at least one number.')
  return tuple(float(x) for x in values)


def check_held_out(fraction):
  """Raises ValueError unless it is a fraction between 0 and 1."""
  if not isinstance(fraction, float) or not 0 < fraction < 1:
    raise ValueError(
      f'held_out={fraction!r} must be a fraction above 0 and below 1, of the '
      'training examples to choose settings on.'
    )


def check_classes(labels):
  """Raises ValueError unless there are two classes at least to train on."""
  if len(np.unique(labels)) < 2:
    raise ValueError(
      f'The {len(labels)} training examples are all of one class; give a '
      'split with two or more.'
    )


def hold_out(labels, fraction, seed):
  """(kept, held): rows of a stratified split of a training set, both sorted.

  Of each class, round(fraction * n) rows drawn by seed are held, but at least
  one if there are two; one is always kept.

  Raises ValueError if no class has two.
  """
  rng = np.random.default_rng(seed)
  held = []
  for label in np.unique(labels):
    (rows,) = np.nonzero(labels == label)
    count = min(max(1, round(fraction * len(rows))), len(rows) - 1)
    held.append(rng.permutation(rows)[:count])
  held = np.sort(np.concatenate(held))
  if not len(held):
    raise ValueError(
      f'No class of the {len(labels)} training examples has two of them, so '
      'none can be held out to choose a setting on; give `val`, or one setting.'
    )
  return np.setdiff1d(np.arange(len(labels)), held), held


def for_choice(train, val, fraction, seed):
  """(Split to fit on, Split to choose on): val, else held out of train."""
  if val is not None:
    return train, val
  kept, held = hold_out(train.y, fraction, seed)
  return train[kept], train[held]


def predict(solution, x):
  """Labels [n] of features x [n, D].

  A solution has 'kernel' [D, K] and 'bias' [K], of features standardised by
  'mean' and 'std' [D]; and 'classes' [K].
  """
  kernel = solution['kernel'] / solution['std'][:, None]
  bias = solution['bias'] - solution['mean'] @ kernel
  return solution['classes'][argmax_linear(x, kernel, bias)]


def argmax_linear(x, kernel, bias, rows=8192):
  """int [N]: argmax over classes of x [N, D] @ kernel + bias, in float64."""
  return np.concatenate(
    [
      np.argmax(x[i : i + rows].astype(np.float64) @ kernel + bias, axis=1)
      for i in range(0, len(x), rows)
    ]
  )


def accuracy(predicted, labels):
  """Of labels that are none of the training's, none is ever predicted."""
  return float(np.mean(predicted == labels))


def moments(x):
  """(mean, std + 1e-5), float64 [D], of the rows of x."""
  mean = x.mean(axis=0, dtype=np.float64)
  return mean, x.std(axis=0, dtype=np.float64) + 1e-5


def standardised(x, mean, std):
  """float32 (x - mean) / std."""
  return ((x - mean.astype(np.float32)) / std.astype(np.float32)).astype('f4')


def num_shards(mesh):
  """Number of parts that rows are split into over a mesh."""
  (share,) = sharding.batch_sharding(mesh).shard_shape((mesh.size,))
  return mesh.size // share


def put_rows(x, mesh, *, tile=1):
  """Global array of x [N, ...], rows split over devices as batches are.

  Args:
    x: numpy, the same on every host.
    mesh: of `sharding.make_mesh`.
    tile: each device gets a multiple of this; rows of zeros fill it up.
  """
  multiple = num_shards(mesh) * tile
  shape = (-(-len(x) // multiple) * multiple, *x.shape[1:])

  def part(index):
    start, stop, _ = index[0].indices(shape[0])
    rows = x[start:stop]
    padding = [(0, stop - start - len(rows))] + [(0, 0)] * (x.ndim - 1)
    return np.pad(rows, padding)

  return _put(part, shape, sharding.batch_sharding(mesh))


def put_whole(x, mesh):
  """Global array of which every device has all of x (the same on each host)."""
  return _put(lambda index: x[index], x.shape, sharding.replicated(mesh))


def _put(part, shape, where):
  # jax may take this for an implicit transfer; it is not.
  with jax.transfer_guard_host_to_device('allow'):
    return jax.make_array_from_callback(shape, where, part)
