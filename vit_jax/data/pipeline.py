"""Batches of images and labels: exact, reproducible and resumable.

A source is any object with

  len(source)
  source[i]           {'image': uint8 or float32 [H, W, C], or the bytes of an
                       image file,
                       'label': int, or float [K]} and other keys

where source[i] depends only on i and on the arguments of the constructor.
Optional attributes of a source:

  source.num_classes  K; labels are checked against it
  source.class_names  names of the K classes
  source.decode       what decodes its image files (images.Colours())
  source.describe(i)  text that identifies example i in error messages
  source.labels()     labels of all examples, if they are known without decoding
                      the images: int32 [n] or float32 [n, K]

A transform is any function t(image uint8 [H, W, C], rng) -> uint8 [H, W, C]
that draws its random numbers from `rng`, a numpy Generator for this example.
With the class attribute `takes_encoded` a transform may get an
`images.Encoded`, and decodes as much as it needs. It may return a dict of
arrays, such as the views of MultiCrop, which join the example. With the class
attribute `takes_example` a transform is t(example, rng) -> example, and changes
label, boxes or masks with the image: an example has 'image', 'label' and what
`Data.keep` names. A last transform whose `of_predictions()` returns another
decides how images of predictions are made, if no evaluator does. With
num_workers > 0 sources and transforms must be picklable.

Training visits the positions 0, 1, 2, ... of an order, see order.py. A global
batch is a range of positions. Each process reads an equal, contiguous part of
this range, so the global batch does not depend on the number of processes.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np

from vit_jax.data import images, subsets, workers
from vit_jax.data.encoded import Encoded
from vit_jax.data.order import Order, Shuffled, Visits
from vit_jax.data.subsets import Source, Unlabelled
from vit_jax.data.targets import Targets
from vit_jax.data.transforms import Interpolation, Transform, apply, sized
from vit_jax.types import HARMLESS, MACHINE, Count, Natural, Size, UserError

Batch = dict[str, np.ndarray]  # arrays [B, ...], by name

# Parts of making a batch, whose seconds are counted.
PARTS = ('reading', 'decoding', 'transforming')

# Cores that one process keeps busy. The GIL is held for a twentieth of the time
# of an image, so more threads would begin to wait for it.
_CORES_PER_PROCESS = 8
_CHUNK = 32  # most examples that a thread reads as one task
_TRIES = 100  # consecutive unreadable examples before skipping gives up
_REMEDY = (  # and `main` adds the flags
  "Repair or remove what cannot be read, or leave it out with on_error='skip'"
)
_DTYPES = (np.uint8, np.float32)  # of images
_NAMED = 10  # most skipped examples that are named


@dataclasses.dataclass(frozen=True)
class Data:
  """A source and how to make batches from it.

  Attributes:
    source: see the module docstring.
    batch_size: number of examples in a batch, over all processes.
    transforms: functions t(image, rng), applied in this order.
    image_size: int or (H, W); a size in `transforms` that is a float is a
      multiple of it. Sizes in pixels do not depend on it.
    interpolation: method for all `transforms` that interpolate; None: theirs.
    num_workers: number of reading processes, for sources and transforms that
      hold the GIL; 0: threads only. None: 0 on up to 16 cores, then one for
      each 8 cores.
    num_threads: number of reading threads over all of these processes. None: 2
      for each core, at most 16 in a process.
    prefetch: number of batches that are read ahead, by each process.
    on_error: 'raise' to stop at an unreadable example; 'skip' to read the next
      one by index instead (in evaluation: to leave it out).
    labels: if False, `source` is wrapped in `Unlabelled`.
    keep: other keys of the examples that batches have: numbers, or arrays of
      numbers of one shape. {column: kind of labels}: see `encoded.Encoded`.
    order: order in which training visits the examples, see order.py.
    max_image_bytes: limit on H * W * channels of an image file. A larger image
      is an unreadable example.
  """

  source: Source
  batch_size: Count
  transforms: Sequence[Transform] = ()
  num_workers: Annotated[Natural | None, MACHINE] = None
  num_threads: Annotated[Count | None, MACHINE] = None
  prefetch: Annotated[Count, MACHINE] = 2
  on_error: Annotated[Literal['raise', 'skip'], HARMLESS] = 'raise'
  labels: bool = True
  keep: Sequence[str] | Mapping[str, Targets] = ()
  order: Order = Shuffled()
  image_size: Size | None = None
  interpolation: Interpolation | None = None
  max_image_bytes: Annotated[Count, HARMLESS] = images.MAX_IMAGE_BYTES

  def __post_init__(self) -> None:
    transforms = sized(self.transforms, self.image_size, self.interpolation)
    object.__setattr__(self, 'transforms', transforms)
    reserved = {'image', 'label', 'mask', 'index', 'skipped', 'seconds', 'grid'}
    if own := {*self.keep} & reserved:
      raise UserError(
        f'keep={(*self.keep,)}: batches have {", ".join(sorted(own))} of their '
        'own. Keep other keys of the examples.'
      )
    if isinstance(self.keep, Mapping):
      object.__setattr__(self, 'source', Encoded(self.source, self.keep))
      object.__setattr__(self, 'keep', (*self.keep,))
    if not self.labels and not isinstance(self.source, Unlabelled):
      object.__setattr__(self, 'source', Unlabelled(self.source))

  @property
  def decode(self) -> Any:
    """Decoder of the image files of the source, see `images.Colours`."""
    return images.decoder(self.source)

  def processes_and_threads(self) -> tuple[int, int]:
    """Return the numbers of reading processes, and of threads in each."""
    cores, processes = workers.cores(), self.num_workers
    if processes is None:
      processes = cores // _CORES_PER_PROCESS if cores > 16 else 0
    share = max(1, processes)
    if self.num_threads is None:
      return processes, max(1, min(16, 2 * cores // share))
    return processes, math.ceil(self.num_threads / share)

  def first_example(self) -> dict[str, Any]:
    """Return the first readable example, transformed, as in a batch.

    Raises:
      UnreadableError: with on_error='raise', names broken files of a folder.
    """
    check = getattr(self.source, 'check_files', None)
    if check and self.on_error == 'raise':
      check(_REMEDY)
    reader = _Reader(dataclasses.replace(self, on_error='skip'))
    return reader.load(0, 0)[0]

  def name_left_out(self) -> str:
    """Return a line that names keys of the examples that batches leave out."""
    try:
      found = {*self.source[0]} - {'image', 'label', *self.keep}
    except (OSError, ValueError):  # unreadable
      return ''
    names = ', '.join(sorted(found))
    return names and f'data.keep leaves out keys of the examples: {names}.'

  def of_predictions(self, *others: Sequence[Transform]) -> dict[str, Any]:
    """Return what predictions need: decoder, transforms, names and targets.

    The transforms are the first of `others`, those of evaluators, or implied.
    """
    last = [x for x in self.transforms[-1:] if hasattr(x, 'of_predictions')]
    implied = [x.of_predictions() for x in last]
    return {
      'decode': self.decode,
      'transforms': next(filter(None, [*others, implied]), None),
      'class_names': getattr(self.source, 'class_names', None),
      'targets': getattr(self.source, 'targets', None),
    }

  def fingerprint(self) -> dict[str, Any]:
    """Return {'source.NAME': JSON value}, which differ for other data."""
    found = subsets.fingerprint(self.source, (*self.keep,))
    return {f'source.{name}': value for name, value in found.items()}

  def name_skipped(self, indices: Iterable[int]) -> str:
    """Return a line that names skipped examples."""
    found = sorted(indices)
    names = [subsets.describe(self.source, int(i)) for i in found[:_NAMED]]
    more = ', ...' * (len(found) > _NAMED)
    count = f'{len(found)} of {len(self.source)}'
    return f'Skipped {count} examples, unreadable: {", ".join(names)}{more}'

  def train_batches(
    self,
    *,
    seed: int = 0,
    start: int = 0,
    skipped: Iterable[int] = (),
    process_index: int = 0,
    process_count: int = 1,
    num_classes: int | None = None,
  ) -> 'TrainBatches':
    """Return an endless iterator over training batches.

    Args:
      seed: seed for order and augmentation, 0 to 2**64 - 1.
      start, skipped: `.position` and `.skipped` of an iterator to continue.
      process_index, process_count: which of how many processes this is.
      num_classes: checked against the labels; default: the source's.

    Returns:
      Iterator over {'image': uint8 [batch_size / process_count, H, W, C],
      'label': int32 [...] or float32 [..., K]} and what is kept. It raises
      ValueError for unreadable examples, wrong labels and unequal shapes.
    """
    source = self.source
    if hasattr(source, 'pixel_classes'):
      raise UserError(
        'Masks are for evals.patches.Patches: training moves images, but not '
        'their masks. Train on the images alone.'
      )
    if isinstance(source, Unlabelled):  # an order may need the labels
      source = source.source
    visits = self.order.bind(source, seed)
    reader = _Reader(
      self, num_classes, seed, visits, start, process_index, process_count
    )
    return TrainBatches(reader, skipped=skipped)

  def eval_batches(
    self,
    *,
    process_index: int = 0,
    process_count: int = 1,
    num_classes: int | None = None,
  ) -> 'EvalBatches':
    """Return an iterable over all examples, each exactly once.

    The batches also contain 'mask' (bool), which is False for the padding of
    the last batch and for skipped examples, and 'index' (int32), the index of
    each example in the source. All processes have the same number of them.
    """
    process = process_index, process_count
    return EvalBatches(_Reader(self, num_classes, 0, None, 0, *process))


# Reading: one example, and the batch of one process.


@dataclasses.dataclass
class _Reader:
  """A function from the number of a batch to the part of it of this process."""

  data: Data
  num_classes: int | None = None
  seed: int = 0
  visits: Visits | None = None  # None in evaluation: positions are indices
  start: int = 0  # position of the first example of the first batch
  process_index: int = 0
  process_count: int = 1

  def __post_init__(self) -> None:
    self._source = source = self.data.source
    self._decode = self.data.decode
    self._count, self._name = len(source), type(source).__name__
    if not self._count:
      raise UserError(f'The source {self._name} has no examples.')
    self._size = self.data.batch_size // self.process_count
    if not self.num_classes:  # 0: the model has no head
      self.num_classes = getattr(source, 'num_classes', None)
    _, self._threads = self.data.processes_and_threads()

  def __call__(self, number: int) -> Batch:
    """Return a batch, with 'skipped' and the 'seconds' of PARTS."""
    first = self.start + number * self.data.batch_size
    first += self.process_index * self._size
    positions = range(first, first + self._size)
    size = min(_CHUNK, math.ceil(len(positions) / self._threads))
    chunks = [positions[i : i + size] for i in range(0, len(positions), size)]
    parts = _pool(self._threads).map(self._load_chunk, chunks)
    rows = list(itertools.chain.from_iterable(parts))
    if self.visits is not None:
      return _stack(rows)
    mask = [row is not None for row in rows]
    # Padding is zero and has the shape of any other example.
    like = next((row for row in rows if row is not None), None)
    arrays, *rest = like or self.load(0, 0)
    zeros = {name: np.zeros_like(x) for name, x in arrays.items()}
    padding = [zeros, *map(np.zeros_like, rest)]
    batch = _stack([row or padding for row in rows])
    index = np.array(positions, np.int32)
    return batch | {'mask': np.array(mask), 'index': index}

  def _load_chunk(self, positions):
    if self.visits is None:
      return [self._load_eval(index) for index in positions]
    return [self.load(*self.visits(p)) for p in positions]

  def _load_eval(self, index):
    """Return the loaded example; None for padding and skipped examples."""
    if index >= self._count:
      return None
    try:
      return *self._load(index, 0, index), ()
    except images.UnreadableError:
      if self.data.on_error == 'raise':
        raise
      return None

  def load(self, epoch: int, index: int) -> tuple[Any, ...]:
    """Return an example: (arrays, seconds of PARTS, skipped indices).

    With on_error='skip', the next readable example by index replaces an
    unreadable one and is augmented with the same random numbers.
    """
    tries = min(_TRIES, self._count)
    skipped: tuple[int, ...] = ()
    for step in range(tries):
      actual = (index + step) % self._count
      try:
        return *self._load(actual, epoch, index), skipped
      except images.UnreadableError as error:
        if self.data.on_error == 'raise':
          raise
        last, skipped = error, (*skipped, int(actual))
    raise UserError(f'Gave up after {tries} unreadable examples. {last}')

  def _load(self, actual, epoch, index):
    """Return (arrays, seconds), augmented as the example at `index`."""
    begin = time.perf_counter()
    try:
      example = self._source[actual]
    except (OSError, ValueError) as error:
      raise self._unreadable(actual, error) from error
    try:
      kept = self._kept(example)
      read = time.perf_counter()
      # Later visits take less time.
      image = self._encoded(example['image'], check=epoch == 0)
      decoding = time.perf_counter() - read  # of what is decoded as a whole
      rng = _generator(self.seed, epoch, index)
      changed = apply(self.data.transforms, kept | {'image': image}, rng)
      label = self._checked_label(changed.pop('label'))
      arrays = {name: _plain(name, x) for name, x in changed.items()}
      arrays['label'] = label
    except images.UnreadableError as error:
      raise self._unreadable(actual, error) from error
    except ValueError as error:
      raise UserError(f'{error} ({self._where(actual)})') from error
    except Exception as error:
      error.add_note(f'In the transforms of {self._where(actual)}.')
      raise
    if remark := getattr(image, 'remark', ''):
      images.warn_once(f'{self._where(actual)}: {remark}. The image is used.')
    decoding += getattr(image, 'seconds', 0.0)
    rest = time.perf_counter() - read - decoding
    return arrays, np.array([read - begin, decoding, rest])

  def _encoded(self, image, check):
    """Return the image, as an `Encoded` if it is the bytes of a file."""
    options = {'max_image_bytes': self.data.max_image_bytes, 'check': check}
    image = images.opened(self._decode, image, **options)
    if isinstance(image, images.Encoded):
      return image
    if getattr(image, 'dtype', None) not in _DTYPES or image.ndim != 3:
      kind = f'{getattr(image, "dtype", type(image))}, {np.shape(image)}'
      raise UserError(
        f'The image is {kind}. Expected uint8 [H, W, C], levels 0 to 255, or '
        'float32 [H, W, C], any values; or bytes of a file.'
      )
    return image

  def _kept(self, example):
    """Return the label and what is kept, by name."""
    try:
      return {name: example[name] for name in ('label', *self.data.keep)}
    except KeyError as error:
      raise UserError(
        f'There is no {error}. Expected label and keep={(*self.data.keep,)}.'
        f' There are {", ".join(sorted(example))}.'
      ) from None

  def _checked_label(self, label):
    limit = self.num_classes
    if isinstance(label, (int, np.integer)):
      if label >= 0 and (limit is None or label < limit):
        return np.int32(label)
      found = f'is {label} (-1 often means that a split has no labels)'
    else:
      label = np.asarray(label)
      if label.ndim == 1 and limit in (None, len(label)):
        return label.astype(np.float32)
      found = f'has the shape {label.shape}'
    raise UserError(
      f'The label {found}. Expected an int from 0 to num_classes - 1, or a'
      f' vector with one weight for each class, and num_classes={limit}.'
    )

  def _unreadable(self, index, error):
    return images.UnreadableError(
      f'Cannot read {self._where(index)}: {error} {_REMEDY}'
    )

  def _where(self, index):
    try:
      what = subsets.describe(self._source, index)
    except Exception as error:  # the record itself may be damaged
      what = f'without a description ({error})'
    return f'example {index} of {self._name}, {what}'


# Threads that read examples, for all batches of this process.
_pool = functools.cache(concurrent.futures.ThreadPoolExecutor)


def _generator(seed, epoch, index):
  """Return the random generator of a visit; no two visits share a stream."""
  counter = np.array([0, 0, index, 0], np.uint64)
  key = np.array([seed, epoch], np.uint64)
  return np.random.Generator(np.random.Philox(counter=counter, key=key))


def _plain(name, x):
  """Return an array of a dtype that devices have, with the same integers."""
  x = np.asarray(x)
  narrow = {'f8': np.float32, 'i8': np.int32, 'u8': np.int32}
  found = x.astype(narrow.get(x.dtype.str[1:], x.dtype), copy=False)
  is_wide = x.dtype.kind in 'iu' and found.dtype != x.dtype
  if x.dtype.kind not in 'biuf' or (is_wide and (found != x).any()):
    raise UserError(
      f'{name!r} of an example has {x.dtype} {x.shape}, such as {x.flat[:1]}. '
      'Batches have arrays of numbers, integers of at most 32 bits.'
    )
  return found


def _stack(rows):
  """Return the batch of rows (arrays, seconds, skipped)."""
  arrays, seconds, skipped = zip(*rows)
  batch = {}
  for name in arrays[0]:
    values = [x[name] for x in arrays]
    shapes = sorted({x.shape for x in values})
    if len(shapes) > 1:
      raise UserError(
        f'{name!r} of one batch has the shapes {shapes[0]} and {shapes[1]}. End'
        ' the transforms with one that gives all examples the same shape, such'
        ' as Resize, InceptionCrop or CentralCrop for images.'
      )
    batch[name] = np.stack(values)
  seconds = np.sum(seconds, axis=0)
  return batch | {'skipped': sum(skipped, ()), 'seconds': seconds}


# Batches, in the process that uses them.


class TrainBatches(Iterator[Batch]):
  """Iterator over batches.

  Attributes:
    position: position of the first example of the next batch.
    skipped: indices of the unreadable examples so far.
    spent: {part of PARTS: seconds}, over all threads and processes so far.
  """

  def __init__(
    self, reader: _Reader, *, count: int = 2**40, skipped: Iterable[int] = ()
  ) -> None:
    data = reader.data
    self._batch_size = data.batch_size
    self.position, self.skipped = reader.start, set(skipped)
    self.spent = dict.fromkeys(PARTS, 0.0)
    processes, _ = data.processes_and_threads()
    self._batches = (
      workers.Processes(reader, range(count), processes, data.prefetch)
      if processes
      else workers.read_ahead(reader, range(count), data.prefetch)
    )
    # Also at garbage collection and at exit.
    self._close = weakref.finalize(self, self._batches.close)

  def __next__(self) -> Batch:
    if not self._close.alive:
      raise StopIteration
    try:
      batch = next(self._batches)
    except BaseException:
      self.close()
      raise
    self.skipped.update(batch.pop('skipped'))
    for part, seconds in zip(PARTS, batch.pop('seconds')):
      self.spent[part] += float(seconds)
    self.position += self._batch_size
    return batch

  def close(self) -> None:
    """Stop all threads and processes. The iterator is then at its end."""
    self._close()


@dataclasses.dataclass
class EvalBatches:
  """Iterable over the evaluation batches; each iter() is a new pass."""

  reader: _Reader

  def __len__(self) -> int:
    data = self.reader.data
    return math.ceil(len(data.source) / data.batch_size)

  def __iter__(self) -> Iterator[Batch]:
    batches = TrainBatches(self.reader, count=len(self))
    with contextlib.closing(batches):
      yield from batches
