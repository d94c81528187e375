"""Every order: the same examples and augmentations however they are read."""

import itertools

import numpy as np
import pytest

from vit_jax.data.mixture import Mixed, Mixture
from vit_jax.data.order import Repeated, Shuffled
from vit_jax.data.pipeline import Data
from vit_jax.data.sampling import Balanced, Weighted
from vit_jax.data.subset import Subset

BATCH = 24


class Numbers:
  """Images whose pixels are the index of the example; three classes."""

  num_classes, channels = 3, 1

  def __init__(self, count, first=0):
    self.count, self.first = count, first

  def __len__(self):
    return self.count

  def __getitem__(self, index):
    image = np.full((1, 1, 1), self.first + index, np.uint8)
    return {'image': image, 'label': int(self.labels()[index])}

  def labels(self):
    return np.minimum(np.arange(self.count) // 7, 2).astype(np.int32)


def noise(image, rng):
  """Draw numbers that identify the random stream."""
  drawn = rng.integers(256, size=(1, 1, 4), dtype=np.uint8)
  return np.concatenate([image, drawn], axis=-1)


MIXTURE = Mixture(
  {
    'one': Numbers(30),
    'two': Subset(Numbers(50, 100), examples=20, per_class=15),
  }
)
ALL = Repeated(
  3,
  Mixed(
    {'one': 2.5, 'two': 1},
    {'one': Weighted(np.arange(30) % 4), 'two': Balanced(power=0.5)},
  ),
)
KINDS = {
  'shuffled': (Numbers(50), Shuffled()),
  'balanced': (Numbers(50), Balanced()),
  'power': (Numbers(50), Balanced(power=0.5, weights=(1, 2, 0.3))),
  'weighted': (Numbers(50), Weighted(np.arange(50))),
  'repeated': (Numbers(50), Repeated(3)),
  'repeated_balanced': (Numbers(50), Repeated(2, Balanced())),
  'subset': (Subset(Numbers(50), per_class=9), Shuffled()),
  'mixture': (MIXTURE, Shuffled()),
  'mixed': (MIXTURE, Mixed({'one': 1, 'two': 3})),
  'all': (MIXTURE, ALL),
}


def rows(kind, count=8 * BATCH, *, start=0, num_workers=0, **process):
  """Return the images from a position on: uint8 [n, 5]."""
  source, order = KINDS[kind]
  options = {'order': order, 'num_workers': num_workers}
  data = Data(source, BATCH, (noise,), **options)
  batches = data.train_batches(seed=9, start=start, **process)
  size = BATCH // process.get('process_count', 1)
  found = [x['image'] for x in itertools.islice(batches, count // size)]
  assert batches.position == start + len(found) * BATCH
  batches.close()
  return np.concatenate(found).reshape(-1, 5)


@pytest.mark.parametrize('kind', KINDS)
def test_restarts_at_any_position(kind):
  whole = rows(kind)
  assert len({x.tobytes() for x in whole}) == len(whole)  # other augmentation
  for start in (1, BATCH, 3 * BATCH + 13):
    rest = rows(kind, 4 * BATCH, start=start)
    np.testing.assert_array_equal(rest, whole[start : start + 4 * BATCH])


@pytest.mark.parametrize('kind', KINDS)
def test_number_of_hosts(kind):
  hosts = [
    rows(kind, 4 * BATCH, process_index=i, process_count=2) for i in range(2)
  ]
  parts = [host.reshape(8, BATCH // 2, 5) for host in hosts]
  found = np.concatenate(parts, axis=1).reshape(-1, 5)
  np.testing.assert_array_equal(found, rows(kind))


# The order 'all' contains the others.
@pytest.mark.parametrize(
  'num_workers', [2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_number_of_worker_processes(num_workers):
  whole = rows('all', 4 * BATCH)
  found = rows('all', 3 * BATCH, start=17, num_workers=num_workers)
  np.testing.assert_array_equal(found, whole[17 : 17 + 3 * BATCH])
