"""Batches of images and labels: exact, reproducible and resumable.

A source is any object with

  len(source)
  source[i]           {'image': uint8 [H, W, C] or the bytes of an image file,
                       'label': int, or float [K],
                       'exif': bool, instead of source.exif; optional}

where source[i] depends only on i and on the arguments of the constructor.
Optional attributes of a source:

  source.num_classes  K; labels are checked against it
  source.class_names  names of the K classes
  source.channels     1 or 3: image files are decoded to so many (default: 3)
  source.exif         whether the EXIF orientation is applied (default: True)
  source.describe(i)  text that identifies example i in error messages
  source.labels()     labels of all examples, if they are known without reading
                      the images: int32 [n] or float32 [n, K]
  source.fingerprint()  JSON values that differ for other data, see
                      fingerprints.py; default: from its public attributes

A transform is any function t(image uint8 [H, W, C], rng) -> uint8 [H, W, C]
that draws its random numbers from `rng`, a numpy Generator for this example,
which is used again for others after t has returned. The transforms of this
project are frozen dataclasses, so that they can be written to JSON. With the
class attribute `takes_encoded` a transform may get an `images.Encoded`, of
which it decodes as much as it needs.

Sources can wrap sources and transforms can wrap transforms: the outer
constructor takes the inner object as an argument, in Python as in a config
(nested targets). `Unlabelled` is an example. With num_workers > 0 both must be
picklable.

Training visits the positions p = 0, 1, 2, ... Epoch e = p // n visits the n
examples in an order that depends on (seed, e), and example i of epoch e draws
its augmentation from (seed, e, i). (With another `order` e counts the visits of
the example instead, see order.py.) Threads, processes and restarts change
neither. A global batch is a range of positions. Each process reads an equal,
contiguous part of this range, so the global batch does not depend on the number
of processes.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import pickle
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Protocol

import numpy as np

from vit_jax.config import checks
from vit_jax.config.domains import Natural, OneOf, Range, Size, checked
from vit_jax.data import images, workers
from vit_jax.data.order import Order, Shuffled, Visits
from vit_jax.data.transforms import scale_to

Batch = dict[str, np.ndarray]  # arrays [B, ...], by name

# Parts of making a batch, whose seconds are counted.
PARTS = ('reading', 'decoding', 'transforming')

_CHUNK = 32  # examples that a thread reads at a time
# Cores that one process keeps busy. The GIL is held for a twentieth of the time
# of an image, so more threads would begin to wait for it.
_CORES_PER_PROCESS = 8
_SHARE_OF_MEMORY = 4  # Complete batches take at most 1 / 4 of the memory.
_TRIES = 100  # consecutive unreadable examples before skipping gives up


class Source(Protocol):
  """The minimal interface of a source; see the module docstring."""

  def __len__(self) -> int: ...

  def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class Transform(Protocol):
  """The interface of a transform; see the module docstring."""

  def __call__(
    self, image: np.ndarray, rng: np.random.Generator, /
  ) -> np.ndarray: ...


@checked
@dataclasses.dataclass(frozen=True)
class Data:
  """A source and how to make batches from it.

  Attributes:
    source: see the module docstring.
    batch_size: number of examples in a batch, over all processes.
    transforms: functions t(image, rng), applied in this order.
    image_size: int or (H, W). The sizes in `transforms` are scaled so that the
      images have this size. None: as the transforms say.
    num_workers: number of reading processes, see workers.py. 0 reads on
      threads of this process, which suits decoding; processes suit sources and
      transforms that hold the GIL. None: 0 on up to 16 cores, then one for each
      8 cores.
    num_threads: number of reading threads over all of these processes. None: 2
      for each core, at most 16 in a process.
    prefetch: number of batches that are complete before they are asked for.
      They are limited to a quarter of the memory of this machine.
    on_error: 'raise' to stop at an unreadable example; 'skip' to read the next
      one by index instead (in evaluation: to leave it out).
    labels: if False, `source` is wrapped in `Unlabelled`.
    order: in which training visits the examples, see order.py, sampling.py and
      mixture.py. An epoch is always as many visits as there are examples.
    max_image_bytes: limit on H * W * channels of an image file, read from its
      header before it is decoded. A larger image is an unreadable example.
    max_worker_restarts: number of dead worker processes that an iterator over
      batches replaces, each at its position. One more is an error.

  Raises:
    ValueError: an argument has an invalid value.
  """

  source: Source
  batch_size: Annotated[int, Range(1, 2**20)]
  transforms: Sequence[Transform] = ()
  num_workers: Natural | None = None
  num_threads: Annotated[int, Range(1, 1024)] | None = None
  prefetch: Annotated[int, Range(1, 64)] = 2
  on_error: Annotated[str, OneOf('raise', 'skip')] = 'raise'
  labels: bool = True
  order: Order = Shuffled()
  image_size: Size | None = None
  max_image_bytes: Annotated[int, Range(1, 2**40)] = images.MAX_IMAGE_BYTES
  max_worker_restarts: Natural = 3

  def __post_init__(self) -> None:
    if self.num_workers is not None:
      workers.check_count('num_workers', self.num_workers)
    transforms = tuple(self.transforms)
    if self.image_size is not None:
      transforms = scale_to(transforms, self.image_size)
    object.__setattr__(self, 'transforms', transforms)
    if not self.labels and not isinstance(self.source, Unlabelled):
      object.__setattr__(self, 'source', Unlabelled(self.source))

  def processes_and_threads(self) -> tuple[int, int]:
    """Return the numbers of reading processes, and of threads in each."""
    cores, processes = workers.cores(), self.num_workers
    if processes is None:
      processes = cores // _CORES_PER_PROCESS if cores > 16 else 0
    share = max(1, processes)
    if self.num_threads is None:
      return processes, max(1, min(16, 2 * cores // share))
    return processes, math.ceil(self.num_threads / share)

  def batches_ahead(self, batch_bytes: int) -> int:
    """Return how many batches of so many bytes are complete in advance."""
    most = workers.memory() // _SHARE_OF_MEMORY // batch_bytes
    return max(1, min(self.prefetch, most))

  def tasks_ahead(self, per_batch: int) -> int:
    """Return how many chunks threads read in advance, or batches a worker."""
    processes, threads = self.processes_and_threads()
    return (
      math.ceil(threads / per_batch) + 1 if processes else threads + per_batch
    )

  def describe_reading(
    self, image_shape: Sequence[int], process_count: int = 1
  ) -> str:
    """Return what reads the batches of a host, and the memory of its images."""
    processes, threads = self.processes_and_threads()
    local, size = self.batch_size // process_count, math.prod(image_shape)
    ahead = self.tasks_ahead(math.ceil(local / _CHUNK))
    if processes:
      # A batch that is assembled counts twice. A worker also sends one.
      count = processes * (2 * ahead + 1) * local
    else:
      count = ahead * _CHUNK + local
    count += local * self.batches_ahead(local * size)
    what = f'{threads} {"thread" if threads == 1 else "threads"}'
    if processes:
      what = f'{processes} worker processes with {what} each'
    return (
      f'read by {what}; at most {count * size / 1e6:,.1f} MB of images ahead'
    )

  def first_example(self) -> dict[str, Any]:
    """Return the first readable example, transformed: {'image', 'label'}."""
    examples = _Examples(dataclasses.replace(self, on_error='skip'))
    spent: dict[str, Any] = collections.Counter()
    image, label, _ = examples.load(0, 0, spent, replace=True)
    return {'image': image, 'label': label}

  def visits(self, seed: int = 0) -> Visits:
    """Return the order of training for a seed; see order.py.

    Raises:
      ValueError: the order does not fit the source.
    """
    source = self.source
    if isinstance(source, Unlabelled):  # an order may need labels or parts
      source = source.source
    return self.order.bind(source, seed)

  def train_batches(
    self,
    *,
    seed: int = 0,
    start: int = 0,
    skipped: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    num_classes: int | None = None,
    visits: Visits | None = None,
  ) -> 'TrainBatches':
    """Return an endless iterator over training batches.

    Args:
      seed: of order and augmentation, 0 to 2**64 - 1.
      start: global position of the first example. To resume, pass the
        `.position` that the iterator had.
      skipped: number of unreadable examples before it, `.skipped`.
      process_index, process_count: which of how many processes this is.
      num_classes: checked against the labels; default: the source's.
      visits: `self.visits(seed)`, if it is known already.

    Returns:
      Iterator over {'image': uint8 [batch_size / process_count, H, W, C],
      'label': int32 [...] or float32 [..., K]} with `.position`, `.skipped`
      (number of unreadable examples so far) and `.close()`. It raises
      ValueError for unreadable examples, wrong labels and unequal shapes.
    """
    visits = visits or self.visits(seed)
    examples = _Examples(self, num_classes, seed, visits)
    chunks = _Chunks(examples, process_index, process_count, start=start)
    return TrainBatches(chunks, skipped)

  def eval_batches(
    self,
    *,
    process_index: int = 0,
    process_count: int = 1,
    num_classes: int | None = None,
  ) -> 'EvalBatches':
    """Return an iterable over all examples, each exactly once.

    Args as in `train_batches`. The batches also contain 'mask' (bool), which is
    False for the padding of the last batch and for skipped examples, and
    'index' (int32), the index of each example in the source. All processes
    have the same number of batches, `len(batches)`. `.skipped` is the number of
    unreadable examples of the current pass.
    """
    examples, end = _Examples(self, num_classes), len(self.source)
    chunks = _Chunks(examples, process_index, process_count, end=end)
    return EvalBatches(chunks)


def train_batches(
  source: Source,
  transforms: Sequence[Transform] = (),
  *,
  batch_size: int,
  **position: Any,
) -> 'TrainBatches':
  """Return the training batches of a source; see `Data.train_batches`."""
  return Data(source, batch_size, transforms).train_batches(**position)


def eval_batches(
  source: Source,
  transforms: Sequence[Transform] = (),
  *,
  batch_size: int,
  **position: Any,
) -> 'EvalBatches':
  """Return the evaluation batches of a source; see `Data.eval_batches`."""
  return Data(source, batch_size, transforms).eval_batches(**position)


def first_example(
  source: Source, transforms: Sequence[Transform] = ()
) -> dict[str, Any]:
  """Return the first readable example, transformed: {'image', 'label'}."""
  return Data(source, 1, transforms).first_example()


def labels(source: Source) -> np.ndarray:
  """Return the labels of all examples: int32 [n] or float32 [n, K].

  Images are not decoded, but they are read if the source has no `labels()`.
  """
  if callable(known := getattr(source, 'labels', None)):
    return known()
  return stack_labels([source[i]['label'] for i in range(len(source))])


def stack_labels(values: Sequence[Any]) -> np.ndarray:
  """Return labels as one array: int32 [n] or float32 [n, K]."""
  array = np.array(values)
  return array.astype(np.int32 if array.ndim == 1 else np.float32)


class Unlabelled:
  """A source whose examples all have the label 0, for label-free objectives.

  It has no classes, so that no output of a model is named after one.
  """

  num_classes = None
  class_names = None

  def __init__(self, source: Source) -> None:
    self.source = source
    self.channels: int = getattr(source, 'channels', 3)
    self.exif: bool = getattr(source, 'exif', True)

  def __len__(self) -> int:
    return len(self.source)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return {**self.source[index], 'label': 0}

  def describe(self, index: int) -> str:
    return describe(self.source, index)

  def labels(self) -> np.ndarray:
    return np.zeros(len(self), np.int32)


def describe(source: Source, index: int) -> str:
  """Return the source's own description of an example, or a default one."""
  if callable(own := getattr(source, 'describe', None)):
    return own(index)
  return f'index {index}'


# One example: its place in the order, its bytes, its augmentation.


class _Unreadable(ValueError):
  """An example that cannot be read or decoded; `on_error` handles it."""


class _Examples:
  """Reads, checks and transforms single examples.

  `visits` returns the (epoch, index) of a position of training.
  """

  def __init__(
    self,
    data: Data,
    num_classes: int | None = None,
    seed: int = 0,
    visits: Visits | None = None,
  ) -> None:
    self.source, self.data, self._seed = data.source, data, seed
    self._name, count = type(self.source).__name__, len(self.source)
    if not 0 < count <= 2**32:
      raise ValueError(
        f'the source {self._name} has {count} examples. It must have 1 to'
        ' 2**32.'
      )
    if not 0 <= seed < 2**64:
      raise ValueError(f'seed={seed} must lie in [0, 2**64).')
    if num_classes is None:
      num_classes = getattr(self.source, 'num_classes', None)
    self._num_classes = num_classes
    self.visits = visits

  def load(self, epoch, index, spent, *, replace):
    """Return (image, label, number of unreadable examples before it).

    With `replace` and on_error='skip', the next readable example by index
    replaces an unreadable one and is augmented with the same random numbers.
    The seconds of each part are added to the Counter `spent`.
    """
    count, first_error = len(self.source), None
    replace = replace and self.data.on_error == 'skip'
    tries = min(_TRIES, count) if replace else 1
    for skipped in range(tries):
      actual = (index + skipped) % count
      try:
        image, label = self._read(actual, spent)
        image = self._transform(image, epoch, index, actual, spent)
        return image, label, skipped
      except _Unreadable as error:
        if not replace:
          raise
        first_error = first_error or error
    raise ValueError(
      f'gave up after {tries} unreadable examples in a row. The first error:'
      f' {first_error}'
    )

  def _read(self, index, spent):
    begin = time.perf_counter()
    try:
      example = self.source[index]
      image = example['image']
      read = time.perf_counter()
      if isinstance(image, bytes):
        image = images.Encoded(
          image,
          getattr(self.source, 'channels', 3),
          max_image_bytes=self.data.max_image_bytes,
          exif=example.get('exif', getattr(self.source, 'exif', True)),
        )
      spent['reading'] += read - begin
    except (OSError, ValueError) as error:
      raise self._unreadable(index, error) from error
    if isinstance(image, images.Encoded):
      return image, self._check_label(example['label'], index)
    if getattr(image, 'dtype', None) != np.uint8 or image.ndim != 3:
      kind = f'{getattr(image, "dtype", type(image))}, {np.shape(image)}'
      raise ValueError(
        f'the image of {self._where(index)} is {kind}. Expected uint8'
        ' [H, W, C], or the bytes of an image file.'
      )
    return image, self._check_label(example['label'], index)

  def _unreadable(self, index, error):
    return _Unreadable(
      f'cannot read {self._where(index)}: {error} (Repair or remove it, or'
      " set on_error='skip'.)"
    )

  def _check_label(self, label, index):
    limit = self._num_classes
    if isinstance(label, (int, np.integer)):
      if label >= 0 and (limit is None or label < limit):
        return label
      raise ValueError(
        f'the label of {self._where(index)} is {label}, not in'
        f' [0, {"..." if limit is None else limit}). Check num_classes={limit},'
        ' and whether this split has labels (-1 often means none).'
      )
    label = np.asarray(label)
    is_vector = label.ndim == 1 and label.dtype.kind in 'fiub'
    if is_vector and limit in (None, len(label)):
      return label.astype(np.float32)
    raise ValueError(
      f'the label of {self._where(index)} is {label.dtype} {label.shape}.'
      ' Expected an int, or a vector with one weight for each class,'
      f' num_classes={limit}.'
    )

  def _transform(self, image, epoch, index, actual, spent):
    begin, encoded = time.perf_counter(), image
    rng = _generator(self._seed, epoch, index)
    for transform in (*self.data.transforms, None):
      try:
        takes_encoded = getattr(transform, 'takes_encoded', False)
        if isinstance(image, images.Encoded) and not takes_encoded:
          image = image.pixels()
        if transform:
          image = transform(image, rng)
      except images.UnreadableError as error:
        raise self._unreadable(actual, error) from error
      except ValueError as error:
        raise ValueError(f'{error} ({self._where(actual)})') from error
      except Exception as error:
        error.add_note(f'In {transform} on {self._where(actual)}.')
        raise
    decoding = getattr(encoded, 'seconds', 0.0)
    spent['decoding'] += decoding
    spent['transforming'] += time.perf_counter() - begin - decoding
    return image

  def _where(self, index):
    try:
      what = describe(self.source, index)
    except Exception as error:  # the record itself may be broken
      what = f'no description: {error}'
    return f'example {index} of {self._name} ({what})'


_of_thread = threading.local()


def _generator(seed, epoch, index):
  """Return the random generator of a visit.

  It is counter-based: (seed, epoch) is its key and `index` a word of its
  counter, so no two visits share a stream. A new one takes 8 us, so each thread
  has one, whose state is set: 2 us.
  """
  if not hasattr(_of_thread, 'generator'):
    _of_thread.generator = np.random.Generator(np.random.Philox())
  _of_thread.generator.bit_generator.state = {
    'bit_generator': 'Philox',
    'state': {
      'counter': np.array([0, 0, index, 0], np.uint64),
      'key': np.array([seed, epoch], np.uint64),
    },
    'buffer': np.zeros(4, np.uint64),
    'buffer_pos': 4,  # of 4: it is used up
    'has_uint32': 0,
    'uinteger': 0,
  }
  return _of_thread.generator


# Chunks of consecutive examples: the tasks of threads and processes.


class _Chunks:
  """Sequence whose element k is chunk k of this process.

  A chunk is a dict of lists over its examples, 'skipped' and 'spent'. If it
  fails, it is {'error': exception} instead: returned errors arrive unchanged
  and in order from threads and processes.
  """

  def __init__(
    self,
    examples: _Examples,
    process_index: int,
    process_count: int,
    start: int = 0,
    end: int | None = None,
  ) -> None:
    batch_size = examples.data.batch_size
    if batch_size % process_count:
      raise ValueError(
        f'batch_size={batch_size} must be a multiple of the number of'
        f' processes, {process_count}.'
      )
    if not 0 <= process_index < process_count:
      raise ValueError(
        f'process_index={process_index} must lie in [0, {process_count}).'
      )
    checks.integer('start', start, 0)
    self.data, self.start = examples.data, start
    self._examples, self._end = examples, end
    self._local_size = batch_size // process_count
    self._offset = start + process_index * self._local_size
    self.per_batch = math.ceil(self._local_size / _CHUNK)
    self.num_batches = 2**40  # training does not end
    if end is not None:
      self.num_batches = math.ceil(end / batch_size)

  def __len__(self) -> int:
    return self.num_batches * self.per_batch

  def __getitem__(self, chunk: int) -> dict[str, Any]:
    batch, part = divmod(int(chunk), self.per_batch)
    first = self._offset + batch * self.data.batch_size
    positions = range(first, first + self._local_size)
    positions = positions[part * _CHUNK : (part + 1) * _CHUNK]
    try:
      if self._end is None:
        return self._train(positions)
      return self._evaluation(positions)
    except Exception as error:
      return {'error': _portable(error)}

  def _train(self, positions):
    load, visits = self._examples.load, self._examples.visits
    spent: dict[str, Any] = collections.Counter()
    rows = [load(*visits(p), spent, replace=True) for p in positions]
    skipped = sum(skipped for _, _, skipped in rows)
    return _columns(rows, skipped=skipped, spent=spent)

  def _evaluation(self, positions):
    spent = collections.Counter()
    rows = [self._evaluation_row(index, spent) for index in positions]
    mask = [row is not None for row in rows]
    # Padding is zero and has the shape of any other example.
    like = next(filter(None, rows), None)
    like = like or self._examples.load(0, 0, spent, replace=True)
    padding = (np.zeros_like(like[0]), np.zeros_like(like[1]), 0)
    skipped = sum(i < self._end for i in positions) - sum(mask)
    return _columns(
      [row or padding for row in rows],
      mask=mask,
      index=list(positions),
      skipped=skipped,
      spent=spent,
    )

  def _evaluation_row(self, index, spent):
    """Return the loaded example; None for padding and skipped examples."""
    if index >= self._end:
      return None
    try:
      return self._examples.load(0, index, spent, replace=False)
    except _Unreadable:
      if self.data.on_error == 'raise':
        raise
      return None


def _columns(rows, **more):
  images_, labels_, _ = zip(*rows)
  return {'image': images_, 'label': labels_, **more}


def _check_shapes(images_):
  shapes = sorted({image.shape for image in images_})
  if len(shapes) > 1:
    raise ValueError(
      f'images of one batch have the shapes {shapes[0]} and {shapes[1]}. End'
      ' the transforms with one that gives all images the same shape, such as'
      ' Resize, InceptionCrop or CentralCrop.'
    )


def _check_label_shapes(labels_):
  shapes = sorted({np.shape(label) for label in labels_})
  if len(shapes) > 1:
    raise ValueError(
      f'labels of one batch have the shapes {shapes[0]} and {shapes[1]}. All'
      ' examples need one class (an int), or one weight for each class.'
    )


def _portable(error):
  """Return the error with its traceback as a note, ready to be pickled."""
  if isinstance(error, _Unreadable):  # the message is complete
    return ValueError(str(error))
  if isinstance(error, ValueError):
    return error
  try:
    pickle.loads(pickle.dumps(error))
  except Exception:  # an exception class with arguments of its own
    error = RuntimeError(f'{type(error).__name__}: {error}')
  error.add_note('In the data pipeline:\n' + traceback.format_exc())
  return error


def _assemble(chunks):
  """Return the batch made of these chunks; raise the first error in them."""
  for chunk in chunks:
    if 'error' in chunk:
      raise chunk['error']
  skipped = sum(chunk.pop('skipped') for chunk in chunks)
  spent = sum((chunk.pop('spent') for chunk in chunks), collections.Counter())
  batch = {
    key: list(itertools.chain.from_iterable(chunk[key] for chunk in chunks))
    for key in chunks[0]
  }
  _check_shapes(batch['image'])
  _check_label_shapes(batch['label'])
  return {
    **{key: _ARRAYS[key](values) for key, values in batch.items()},
    'skipped': skipped,
    'spent': spent,
  }


# How the values of the examples become an array of a batch.
_ARRAYS = {
  'image': np.stack,
  'label': stack_labels,
  'mask': np.array,
  'index': functools.partial(np.array, dtype=np.int32),
}


# Batches, in the process that uses them.


class TrainBatches:
  """Iterator over batches.

  Attributes:
    position: of the first example of the next batch.
    skipped: number of unreadable examples so far.
    spent: {part, see PARTS: seconds}, over all threads and processes, of the
      batches so far.
  """

  def __init__(self, chunks: '_Chunks', skipped: int = 0) -> None:
    self._batch_size = chunks.data.batch_size
    self.position: int = chunks.start
    self.skipped: int = skipped
    self.spent: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    self._iterator = [_Ahead(chunks)]
    # Also at garbage collection and at exit.
    self._close = weakref.finalize(self, _close_iterator, self._iterator)

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    if not self._iterator:
      raise StopIteration
    try:
      batch = next(self._iterator[0])
    except BaseException:
      self.close()
      raise
    self.skipped += int(batch.pop('skipped'))
    for part, seconds in batch.pop('spent').items():
      self.spent[part] += seconds
    self.position += self._batch_size
    return batch

  def close(self) -> None:
    """Stop all threads and processes. The iterator is then at its end."""
    self._close()


def _close_iterator(held):
  held.pop().close()


class EvalBatches:
  """Iterable over the evaluation batches; each iter() is a new pass."""

  def __init__(self, chunks: '_Chunks') -> None:
    self._chunks = chunks
    self.skipped = 0

  def __len__(self) -> int:
    return self._chunks.num_batches

  def __iter__(self) -> Iterator[Batch]:
    self.skipped = 0
    with contextlib.closing(TrainBatches(self._chunks)) as batches:
      for batch in batches:
        self.skipped = batches.skipped
        yield batch


class _Ahead:
  """Iterator that makes the next batches while the caller uses this one."""

  def __init__(self, chunks: _Chunks) -> None:
    self._data, self._batches = chunks.data, _read(chunks)
    self._pool = concurrent.futures.ThreadPoolExecutor(1)
    self._next = collections.deque([self._submit()])

  def _submit(self):
    return self._pool.submit(next, self._batches)

  def __next__(self) -> dict[str, Any]:
    batch = self._next.popleft().result()
    size = sum(x.nbytes for x in batch.values() if isinstance(x, np.ndarray))
    while len(self._next) < self._data.batches_ahead(size):
      self._next.append(self._submit())
    return batch

  def close(self) -> None:
    self._batches.close()
    self._pool.shutdown(cancel_futures=True)


def _read(chunks):
  """Return an iterator over batches, read by threads or by processes."""
  data = chunks.data
  processes, threads = data.processes_and_threads()
  ahead = data.tasks_ahead(chunks.per_batch)
  if not processes:
    return _OfThreads(chunks, threads, ahead)
  return workers.Processes(
    functools.partial(_read_in_worker, chunks, threads),
    range(chunks.num_batches),
    processes=processes,
    threads=ahead,
    ahead=ahead,
    max_restarts=data.max_worker_restarts,
  )


class _OfThreads:
  """Iterator over batches whose chunks are read by threads of this process."""

  def __init__(self, chunks: _Chunks, threads: int, ahead: int) -> None:
    self._per_batch = chunks.per_batch
    self._chunks = workers.Threads(
      chunks.__getitem__, range(len(chunks)), threads=threads, ahead=ahead
    )

  def __next__(self) -> dict[str, Any]:
    chunks = list(itertools.islice(self._chunks, self._per_batch))
    if not chunks:
      raise StopIteration
    return _assemble(chunks)

  def close(self) -> None:
    self._chunks.close()


def _read_in_worker(chunks, threads, batch):
  """Return a batch, or the error of one of its chunks, in a worker process.

  The worker assembles it, so that its parent, which has all batches to receive,
  need not copy it again.
  """
  numbers = range(batch * chunks.per_batch, (batch + 1) * chunks.per_batch)
  try:
    return _assemble(list(_pool(threads).map(chunks.__getitem__, numbers)))
  except Exception as error:  # of a chunk: `_portable`
    return error


@functools.cache
def _pool(threads):
  """Return the threads of this worker process."""
  return concurrent.futures.ThreadPoolExecutor(threads)
