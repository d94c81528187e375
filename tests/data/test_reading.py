"""What reads batches: threads, processes and memory."""

import numpy as np
import pytest

from vit_jax.data import pipeline, transforms


class Photographs:
  """A source of arrays."""

  def __len__(self):
    return 10

  def __getitem__(self, index):
    return {'image': np.zeros((75, 101, 3), np.uint8), 'label': index}


@pytest.mark.parametrize(
  'cores, settings, expected',
  [
    (2, {}, (0, 4)),
    (16, {}, (0, 16)),
    (112, {}, (14, 16)),
    (112, {'num_workers': 0}, (0, 16)),
    (112, {'num_workers': 28}, (28, 8)),
    (2, {'num_workers': 2, 'num_threads': 5}, (2, 3)),
  ],
)
def test_workers_and_threads_are_chosen_from_the_machine(
  cores, settings, expected, monkeypatch
):
  monkeypatch.setattr(pipeline.workers, 'cores', lambda: cores)
  data = pipeline.Data(Photographs(), 2, **settings)
  assert data.processes_and_threads() == expected


@pytest.mark.parametrize(
  'num_workers, expected',
  [
    # 2 batches of 20 images, the chunks of one of them, and 4 + 1 chunks of 32,
    # of 32 x 32 x 3 bytes.
    (0, 'read by 4 threads; at most 0.7 MB of images ahead'),
    # 2 batches; of each worker 3 with their chunks, and the one that it sends.
    (2, 'read by 2 worker processes with 2 threads each; at most 1.0 MB of'),
  ],
)
def test_a_run_says_what_reads_its_batches(num_workers, expected, monkeypatch):
  monkeypatch.setattr(pipeline.workers, 'cores', lambda: 2)
  data = pipeline.Data(Photographs(), 20, num_workers=num_workers)
  assert data.describe_reading((32, 32, 3)).startswith(expected)


def test_complete_batches_take_a_bounded_share_of_memory(monkeypatch):
  monkeypatch.setattr(pipeline.workers, 'memory', lambda: 4 * 3 * 32 * 32 * 40)
  data = pipeline.Data(
    Photographs(), 20, (transforms.Resize(32),), prefetch=9, on_error='skip'
  )
  batches = data.train_batches()
  next(batches)
  assert len(batches._iterator[0]._next) == 1  # of 2, one with its labels
  batches.close()
