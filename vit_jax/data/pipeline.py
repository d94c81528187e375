"""Batches out of a source: exact, repeatable, on threads or processes (Grain).

A source is any object with

  len(source)
  source[i] -> {'image': uint8 [H, W, C] or encoded bytes,
                'label': int or float [K]}
  source.describe(i) -> what to show of example i in an error
  source.num_classes, source.class_names    (or None)
  source.channels   (1 or 3: what encoded images are decoded to; optional)
  source.labels()   -> those of all examples, if that is cheap (optional)

whose source[i] depends on i and its constructor's arguments only. Transforms
are called as t(image, rng); see transforms.py.

Training runs through global positions p = 0, 1, 2, ... Epoch e = p // n visits
the examples in an order drawn from (seed, e), and example i of epoch e draws
its augmentation from (seed, e, i): neither workers, nor processes, nor
restarts enter. Global batch b is a run of positions and each process takes its
contiguous share of it, so any number of processes sees the same global batch.
"""

import dataclasses
import math
import numbers
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.checks import one_of
from vit_jax.data import chunks
from vit_jax.data.examples import Examples
from vit_jax.data.unlabelled import Unlabelled


@dataclasses.dataclass(frozen=True)
class Data:
  """A source and how to make batches from it.

  Attributes:
    source: see the module docstring.
    batch_size: number of examples in a batch, over all processes.
    transforms: functions t(image, rng), applied in order.
    num_workers: number of reading processes; 0 reads on threads.
    on_error: 'raise', or 'skip' to pass over unreadable examples.
    labels: if False, `source` is wrapped in `Unlabelled`.

  Raises:
    ValueError: an argument has an invalid value.
  """

  source: Any
  batch_size: int
  transforms: Sequence = ()
  num_workers: int = 0
  on_error: str = 'raise'
  labels: bool = True

  def __post_init__(self):
    for name, least in (('batch_size', 1), ('num_workers', 0)):
      value = getattr(self, name)
      is_int = isinstance(value, numbers.Integral)
      if not is_int or isinstance(value, bool) or value < least:
        raise ValueError(
          f'{name}={value!r} must be an integer of at least {least}.'
        )
    one_of('on_error', self.on_error, ('raise', 'skip'))
    object.__setattr__(self, 'transforms', tuple(self.transforms))
    if not self.labels and not isinstance(self.source, Unlabelled):
      object.__setattr__(self, 'source', Unlabelled(self.source))

  def train_batches(
    self,
    *,
    seed=0,
    start=0,
    process_index=0,
    process_count=1,
    num_classes=None,
  ):
    """Return the iterator of the function `train_batches`."""
    return train_batches(
      self.source,
      self.transforms,
      batch_size=self.batch_size,
      seed=seed,
      start=start,
      process_index=process_index,
      process_count=process_count,
      num_workers=self.num_workers,
      on_error=self.on_error,
      num_classes=num_classes,
    )

  def eval_batches(self, *, process_index=0, process_count=1, num_classes=None):
    """Return the iterable of the function `eval_batches`."""
    return eval_batches(
      self.source,
      self.transforms,
      batch_size=self.batch_size,
      process_index=process_index,
      process_count=process_count,
      num_workers=self.num_workers,
      on_error=self.on_error,
      num_classes=num_classes,
    )


def train_batches(
  source,
  transforms=(),
  *,
  batch_size,
  seed=0,
  start=0,
  process_index=0,
  process_count=1,
  num_workers=0,
  on_error='raise',
  num_classes=None,
):
  """Endless iterator of training batches, from global position `start` on.

  Args:
    source: see the module; transforms: a sequence of t(image, rng).
    batch_size: of all processes together.
    seed: of order and augmentation, 0 to 2**64 - 1.
    start: number of examples the whole job has consumed; `.position` of the
      iterator when it was saved.
    num_workers: 0 reads on threads of this process, which suits decoding;
      else that many processes, for sources or transforms that hold the GIL.
    on_error: 'raise', or 'skip': the next readable example by index stands in
      for an unreadable one, and `.skipped` counts it.
    num_classes: labels are checked against it; the source's by default.

  Returns:
    Iterator of {'image': uint8 [batch_size / process_count, H, W, C], 'label':
    int32 [...] or float32 [..., K]}, with `.position`, `.skipped`, `.close()`.

  Raises:
    ValueError: a bad argument; from the iterator: an unreadable example, a
      label out of range, images of unequal shapes.
  """
  examples = Examples(source, transforms, seed, on_error, num_classes)
  plan = chunks.Plan(batch_size, process_index, process_count, start=start)
  return _TrainIterator(_Loader(examples, plan, num_workers))


def eval_batches(
  source,
  transforms=(),
  *,
  batch_size,
  process_index=0,
  process_count=1,
  num_workers=0,
  on_error='raise',
  num_classes=None,
):
  """Re-iterable over every example exactly once, over all processes together.

  Arguments as of `train_batches`. Batches carry 'mask' (bool), False on the
  padding that fills up the last one and on skipped examples, and 'index'
  (int32), the number of each example in the source; every process has the
  same number of batches, `len(batches)`. `.skipped` counts the examples left
  out in the current pass.
  """
  examples = Examples(source, transforms, 0, on_error, num_classes)
  plan = chunks.Plan(
    batch_size, process_index, process_count, count=len(source)
  )
  return _EvalBatches(_Loader(examples, plan, num_workers))


def image_spec(source, transforms=()):
  """(H, W, C) of the transformed images, from the first readable example."""
  return first_example(source, transforms)['image'].shape


def first_example(source, transforms=()):
  """{'image', 'label'} of the first readable example, transformed."""
  examples = Examples(source, transforms, 0, 'skip', None)
  image, label, _ = examples.load(0, 0, replace=True)
  return {'image': image, 'label': label}


def labels(source):
  """int32 [n] or float32 [n, K] of all examples, without decoding images.

  Sources that know them cheaply have a method `labels()`; others are read.
  """
  if callable(getattr(source, 'labels', None)):
    return source.labels()
  found = np.stack([source[i]['label'] for i in range(len(source))])
  return found.astype(np.int32 if found.ndim == 1 else np.float32)


class _Loader:
  """Makes Grain iterators over the batches of a plan."""

  def __init__(self, examples, plan, num_workers):
    if num_workers < 0:
      raise ValueError(f'num_workers is {num_workers}; it is at least 0.')
    self.plan, self._workers = plan, num_workers
    self._chunks = chunks.Chunks(examples, plan)

  def __iter__(self):
    import grain

    per_batch = self.plan.chunks_per_batch
    threads = min(16, 2 * (os.cpu_count() or 1))
    if self._workers:
      _parse_flags()
      threads = max(1, threads // self._workers)
    options = grain.ReadOptions(
      num_threads=threads, prefetch_buffer_size=threads + per_batch
    )
    data = grain.MapDataset.source(self._chunks).to_iter_dataset(options)
    if self._workers:
      data = data.mp_prefetch(
        grain.MultiprocessingOptions(
          num_workers=self._workers,
          per_worker_buffer_size=math.ceil(per_batch / self._workers) + 1,
        )
      )
    data = data.batch(per_batch, batch_fn=chunks.assemble)
    # Concatenates the next batch while the caller uses this one.
    data = grain.experimental.ThreadPrefetchIterDataset(
      data, prefetch_buffer_size=1
    )
    return iter(data)


def _parse_flags():
  """Grain's processes read absl flags, which a library use has not parsed."""
  from absl import flags

  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


class _Batches:
  """Iterator over finished batches; raises what a chunk has returned."""

  def __init__(self, loader):
    self._held = [iter(loader)]
    # Also at garbage collection, and at exit: Grain's own finalisers run when
    # its modules are torn down already, so let go of it before that.
    self._close_once = weakref.finalize(self, _close, self._held)
    self.skipped = 0

  def __iter__(self):
    return self

  def __next__(self):
    if not self._held:  # closed, or at the end
      raise StopIteration
    try:
      batch = next(self._held[0])
    except BaseException:
      self.close()
      raise
    if 'error' in batch:
      self.close()
      raise batch['error']
    self.skipped += batch.pop('skipped')
    return batch

  def close(self):
    """Stops threads and processes; the iterator is of no use afterwards."""
    self._close_once()


def _close(held):
  held.pop().close()


class _TrainIterator(_Batches):
  """Training batches; `.position` is what `start` takes to go on from here."""

  def __init__(self, loader):
    super().__init__(loader)
    self._plan = loader.plan
    self.position = loader.plan.start

  def __next__(self):
    batch = super().__next__()
    self.position += self._plan.batch_size
    return batch


class _EvalBatches:
  """Each iter() is one pass over the evaluation data."""

  def __init__(self, loader):
    self._loader = loader
    self.skipped = 0

  def __len__(self):
    return self._loader.plan.num_batches

  def __iter__(self):
    self.skipped = 0
    batches = _Batches(self._loader)
    try:
      for batch in batches:
        self.skipped = batches.skipped
        yield batch
    finally:
      batches.close()
