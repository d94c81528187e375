"""Chunks of consecutive examples: the tasks of the pipeline's workers."""

import dataclasses
import math
import pickle
import traceback

import numpy as np

from vit_jax.data.examples import Unreadable

_CHUNK = 32  # examples to a task: amortises Grain's overhead of some 100 us


@dataclasses.dataclass(frozen=True)
class Plan:
  """Which global positions make up which chunk of this process."""

  batch_size: int
  process_index: int
  process_count: int
  start: int = 0
  count: int | None = None  # of an evaluation; training has no end

  def __post_init__(self):
    if self.batch_size < 1 or self.batch_size % self.process_count:
      raise ValueError(
        f'batch_size is {self.batch_size}, for all processes together; it must'
        f' be a positive multiple of their number, {self.process_count}.'
      )
    if not 0 <= self.process_index < self.process_count:
      raise ValueError(
        f'process_index is {self.process_index}; it lies in'
        f' [0, process_count={self.process_count}).'
      )
    if self.start < 0:
      raise ValueError(f'start is {self.start}; positions begin at 0.')

  @property
  def local_size(self):
    return self.batch_size // self.process_count

  @property
  def chunks_per_batch(self):
    return math.ceil(self.local_size / _CHUNK)

  @property
  def num_batches(self):
    if self.count is None:
      return 2**40
    return math.ceil(self.count / self.batch_size)

  def positions(self, chunk):
    batch, part = divmod(chunk, self.chunks_per_batch)
    first = self.start + batch * self.batch_size
    first += self.process_index * self.local_size
    stop = first + self.local_size
    first += part * _CHUNK
    return range(first, min(first + _CHUNK, stop))


class Chunks:
  """For Grain: element k is chunk k of this process, as a dict of arrays.

  Errors are returned, not raised, so that they arrive whole and in order
  through threads and processes alike.
  """

  def __init__(self, examples, plan):
    self._examples, self._plan = examples, plan

  def __len__(self):
    return self._plan.num_batches * self._plan.chunks_per_batch

  def __getitem__(self, chunk):
    try:
      if self._plan.count is None:
        return self._train(self._plan.positions(int(chunk)))
      return self._evaluation(self._plan.positions(int(chunk)))
    except Exception as error:
      return {'error': _portable(error)}

  def _train(self, positions):
    out = _Rows(len(positions))
    skipped = 0
    for row, position in enumerate(positions):
      epoch, index = self._examples.at(position)
      image, label, before = self._examples.load(epoch, index, replace=True)
      out.put(row, image, label)
      skipped += before
    return {**out.arrays, 'skipped': skipped}

  def _evaluation(self, positions):
    out = _Rows(len(positions))
    mask = np.zeros(len(positions), bool)
    skipped = 0
    for row, index in enumerate(positions):
      if index >= self._plan.count:
        break
      try:
        image, label, _ = self._examples.load(0, index, replace=False)
      except Unreadable:
        if self._examples.on_error == 'raise':
          raise
        skipped += 1
        continue
      out.put(row, image, label)
      mask[row] = True
    if not mask.any():  # nothing but padding: its shape is the others'
      image, label, _ = self._examples.load(0, 0, replace=True)
      out.put(0, np.zeros_like(image), np.zeros_like(label))
    index = np.array(positions, np.int32)
    return {**out.arrays, 'mask': mask, 'index': index, 'skipped': skipped}


class _Rows:
  """Images and labels, stacked as they come; rows not put stay zero."""

  def __init__(self, count):
    self._count = count
    self.arrays = None

  def put(self, row, image, label):
    if self.arrays is None:
      is_vector = isinstance(label, np.ndarray) and label.ndim
      self.arrays = {
        'image': np.zeros((self._count, *image.shape), np.uint8),
        'label': np.zeros(
          (self._count, *np.shape(label)),
          np.float32 if is_vector else np.int32,
        ),
      }
    _check_shape(self.arrays['image'], image)
    self.arrays['image'][row] = image
    self.arrays['label'][row] = label


def _check_shape(images_, image):
  if images_.shape[1:] != image.shape:
    raise ValueError(
      f'images of one batch have the shapes {images_.shape[1:]} and'
      f' {image.shape}; end the transforms in one of fixed size, such as'
      ' Resize, InceptionCrop or CentralCrop.'
    )


def assemble(chunks):
  """One batch out of its chunks."""
  for chunk in chunks:
    if 'error' in chunk:
      return chunk
  skipped = sum(int(chunk.pop('skipped')) for chunk in chunks)
  if len(chunks) == 1:
    return {**chunks[0], 'skipped': skipped}
  for chunk in chunks[1:]:
    try:
      _check_shape(chunks[0]['image'], chunk['image'][0])
    except ValueError as error:
      return {'error': error}
  batch = {
    key: np.concatenate([chunk[key] for chunk in chunks]) for key in chunks[0]
  }
  return {**batch, 'skipped': skipped}


def _portable(error):
  """The error with its traceback as a note, fit to leave a process."""
  if isinstance(error, Unreadable):  # the message says it all
    return ValueError(str(error))
  if isinstance(error, ValueError):
    return error
  try:
    pickle.loads(pickle.dumps(error))
  except Exception:  # an exception class with arguments of its own
    error = RuntimeError(f'{type(error).__name__}: {error}')
  error.add_note('In the data pipeline:\n' + traceback.format_exc())
  return error
