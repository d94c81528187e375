"""Worker that times the data pipeline, from JPEGs in memory to batches."""

import contextlib
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

NUM_EXAMPLES = 1_281_167  # ImageNet's; the files are repeated
_WARMUP = 3  # Batches of a round that do not count.
_PACKAGES = {'cv2': 'opencv-python-headless'}


class Kind(NamedTuple):
  """A kind of images: (height, width), quality, noise, and number of files."""

  size: tuple[int, int]
  quality: int
  noise: float
  num_files: int


KINDS = {  # the first is the default
  'imagenet': Kind((375, 500), 90, 6, 64),
  'records': Kind((256, 341), 90, 6, 64),
  'photographs': Kind((3000, 4000), 90, 4, 4),
}

AUGMENTATIONS = ('crop', 'deit', 'deit3', 'augreg')  # the first is the default


def augmentation(name: str, size: int) -> tuple[Any, ...]:
  """Return the training transforms of a recipe, for images of this size.

  Args:
    name: of AUGMENTATIONS. 'crop': InceptionCrop and FlipLR, with which all
      begin. 'deit': crops as torchvision's, bicubic, RandAugment of timm and
      random erasing. 'deit3': the same crops, 3-Augment and colour jitter.
      'augreg': RandAugment(2, 15) of big_vision, AugReg's medium level.
    size: height and width in pixels.
  """
  from vit_jax.data import augment, transforms

  if name in ('crop', 'augreg'):
    crop = transforms.InceptionCrop(size)
  else:
    crop = transforms.InceptionCrop(
      size,
      area=(0.08, 1.0),
      interpolation='bicubic',
      antialias=True,
      method='torch',
    )
  more: dict[str, tuple[Any, ...]] = {
    'crop': (),
    'deit': (
      augment.rand_augment('rand-m9-mstd0.5-inc1', interpolation='bicubic'),
      augment.RandomErasing(),
    ),
    'deit3': (augment.ThreeAugment(), augment.ColorJitter()),
    'augreg': (augment.RandAugment(2, 15),),
  }
  return (crop, transforms.FlipLR(), *more[name])


class Jpegs:
  """Source of encoded images that are held in memory.

  They show smooth shapes with some noise: noise alone is slower to decode than
  photographs.

  Args:
    kind: of KINDS. The files of 'imagenet' have 50 to 60 kB.
    num_examples: length of the source, which repeats the files.
  """

  class_names = None
  num_classes = 1000
  channels = 3

  def __init__(
    self, kind: str = 'imagenet', num_examples: int = NUM_EXAMPLES
  ) -> None:
    self.files = [_jpeg(KINDS[kind], i) for i in range(KINDS[kind].num_files)]
    self._num_examples = num_examples

  def __len__(self) -> int:
    return self._num_examples

  def __getitem__(self, index: int) -> dict[str, Any]:
    file = self.files[index % len(self.files)]
    return {'image': file, 'label': index % self.num_classes}


class Input:
  """Batches of one process, decoded, cropped and augmented.

  Args:
    settings: 'batch_size', 'image_size', 'images' (of KINDS), 'augmentation'
      (of AUGMENTATIONS), 'num_examples', 'num_workers', 'num_threads' and as
      many cores, 'warmup' (batches).
  """

  def __init__(self, settings: Any) -> None:
    self._batch_size = settings['batch_size']
    threads = settings.get('num_threads') or None
    use_cores(threads)
    try:
      from vit_jax.data import pipeline

      self._source = Jpegs(
        settings.get('images', 'imagenet'),
        settings.get('num_examples', NUM_EXAMPLES),
      )
      name = settings.get('augmentation', AUGMENTATIONS[0])
      self._data = pipeline.Data(
        self._source,
        self._batch_size,
        augmentation(name, settings['image_size']),
        num_workers=settings.get('num_workers', 0),
        num_threads=threads,
      )
      begin = time.perf_counter()
      self.round(1)
      first_batches_s = time.perf_counter() - begin
    except ModuleNotFoundError as error:
      raise ModuleNotFoundError(
        f'The input pipeline needs {error.name}, which is not installed here: '
        f'pip install {_PACKAGES.get(str(error.name), error.name)}, or leave '
        'input out of --mode.'
      ) from error
    self.round(settings.get('warmup', 0))
    files = self._source.files
    self.started = {
      'first_batches_s': first_batches_s,
      'jpeg_bytes': float(np.mean([len(file) for file in files])),
      'device_kind': 'cpu',
      'n_devices': 1,
    }

  def round(self, steps: int) -> dict[str, float]:
    """Return the 'seconds' and 'cpu_seconds' that some batches take."""
    with contextlib.closing(self._data.train_batches()) as batches:
      return time_batches(batches, steps)

  def profile(self, steps: int) -> dict[str, float]:
    """Return the milliseconds of CPU time of an image on one thread, by part.

    The parts are 'reading', 'decoding' and 'transforming'; no batch is made.

    Args:
      steps: as many batches of images are read.
    """
    from vit_jax.data import pipeline

    examples = pipeline._Examples(self._data)
    spent, count = dict.fromkeys(pipeline.PARTS, 0.0), steps * self._batch_size
    begin = time.thread_time()
    for index in range(count):
      examples.load(0, index % len(self._source), spent, replace=False)
    per_image = 1e3 * (time.thread_time() - begin) / count
    total = sum(spent.values())
    return {name: per_image * x / total for name, x in spent.items()}


def time_batches(batches: Iterator[Any], steps: int) -> dict[str, float]:
  """Return the 'seconds' and 'cpu_seconds' that some batches take.

  Batches are made ahead. So each round has an iterator of its own, whose first
  batches do not count: one that waited for its turn would have batches ready,
  and make more of them in the turn of the others.
  """
  for _ in range(_WARMUP):
    next(batches)
  begin, cpu = time.perf_counter(), _cpu_seconds()
  for _ in range(steps):
    next(batches)
  return {
    'seconds': time.perf_counter() - begin,
    'cpu_seconds': _cpu_seconds() - cpu,
  }


def use_cores(count: int | None) -> None:
  """Keep this process and its children on so many cores, where one can."""
  if count and hasattr(os, 'sched_setaffinity'):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:count])


def _cpu_seconds():
  """Return the CPU time of this process and, on Linux, of its workers."""
  parent, ticks = os.getpid(), 0
  for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
    try:
      fields = path.read_text().rpartition(')')[2].split()
    except OSError:  # it has just ended
      continue
    if int(fields[1]) == parent:
      ticks += int(fields[11]) + int(fields[12])
  return time.process_time() + ticks / os.sysconf('SC_CLK_TCK')


def _jpeg(kind, seed):
  from vit_jax.data import images

  cv2 = images.opencv()
  rng, size = np.random.default_rng((seed, *kind.size)), kind.size
  picture = np.full((*size, 3), 128, np.float32)
  for cells in (4, 16, 64):
    coarse = rng.uniform(-1, 1, (cells, cells, 3)).astype(np.float32)
    smooth = cv2.resize(coarse, size[::-1], interpolation=cv2.INTER_CUBIC)
    picture += smooth * 160 / cells**0.5
  picture += rng.normal(0, kind.noise, picture.shape).astype(np.float32)
  picture = np.uint8(np.clip(picture, 0, 255))
  quality = [cv2.IMWRITE_JPEG_QUALITY, kind.quality]
  return cv2.imencode('.jpg', picture, quality)[1].tobytes()
