"""Embedded fractals: FractalDB-like classes from a seed, cached on disk."""

import contextlib
import errno
import glob
import os
import pathlib
import threading
import zlib

import numpy as np
from absl import logging
from rich import console, progress

from vit_jax.data import arguments
from vit_jax.data.embedded import ifs

try:
  import fcntl
except ImportError:  # no such locks on this system: see `_lock`
  fcntl = None

_VERSION = 1  # part of the cache's name: raise it when a pixel changes
_SHARD_BYTES = 2**25
_MAX_SHARDS = 256  # each holds a file open


class Fractals:
  """Classes of 2-D iterated function systems: uint8 [size, size, channels].

  Class k is the first system drawn from (seed, k) that fills 0.2 of the
  picture; its images are FractalDB's weights x flips x patches and go on
  beyond them: see `ifs.render_category`. Same pixels on every machine, and
  image i of class k does not depend on how many of either there are. Example
  i has label i % num_classes.

  The constructor draws what the cache lacks (with a progress bar) and then
  only reads. Files of some 32 MB appear whole or not at all and end in a
  checksum: an interrupted generation goes on where it was, several processes
  may share a cache, and a damaged file is drawn anew, with a warning.

  Args:
    num_classes: any number.
    images_per_class: any number; 1,000 is FractalDB's grid.
    image_size: side in pixels, at least 8.
    seed: another seed is another set of classes.
    channels: 1, or 3 equal ones. The cache keeps one.
    cache_dir: where to keep the images, num_classes * images_per_class *
      image_size^2 bytes; by default vit_jax/ in the user's cache folder
      ($XDG_CACHE_HOME or ~/.cache).
    show_progress: whether to show a progress bar while drawing.

  Raises:
    PermissionError: the cache folder cannot be written and lacks images.
  """

  class_names = None

  def __init__(
    self,
    *,
    num_classes=1000,
    images_per_class=100,
    image_size=32,
    seed=0,
    channels=1,
    cache_dir=None,
    show_progress=True,
  ):
    arguments.check_int('num_classes', num_classes, 1)
    arguments.check_int('images_per_class', images_per_class, 1)
    arguments.check_int('image_size', image_size, 8)
    arguments.check_int('seed', seed, 0)
    if channels not in (1, 3):
      raise ValueError(f'channels is {channels!r}; give 1 (grey) or 3.')
    self.num_classes = num_classes
    self.images_per_class = images_per_class
    self.image_size = image_size
    self.seed = seed
    self.channels = channels
    if cache_dir is None:
      home = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
      cache_dir = pathlib.Path(home).expanduser() / 'vit_jax'
    # Whatever determines the files is in the folder's name.
    self.folder = pathlib.Path(cache_dir).expanduser() / (
      f'fractals{_VERSION}-seed{seed}-{num_classes}x{images_per_class}'
      f'-{image_size}px'
    )
    class_bytes = images_per_class * image_size * image_size
    shard_bytes = max(_SHARD_BYTES, num_classes * class_bytes // _MAX_SHARDS)
    self._classes_per_shard = max(1, shard_bytes // class_bytes)
    self._open_shards = {}
    self._thread_lock = threading.Lock()
    self._prepare(show_progress)

  def __len__(self):
    return self.num_classes * self.images_per_class

  def __getitem__(self, index):
    index = arguments.check_index(index, len(self))
    instance, label = divmod(index, self.num_classes)
    shard, row = divmod(label, self._classes_per_shard)
    image = np.array(self._shard(shard)[row, instance])[..., None]
    if self.channels == 3:
      image = np.repeat(image, 3, axis=-1)
    return {'image': image, 'label': label}

  def describe(self, index):
    """Class, image and the file that holds it."""
    instance, label = divmod(index, self.num_classes)
    path = self._path(label // self._classes_per_shard)
    return f'fractal class {label}, image {instance} (in {path})'

  def __getstate__(self):
    state = self.__dict__.copy()
    del state['_open_shards'], state['_thread_lock']
    return state

  def __setstate__(self, state):
    self.__dict__.update(state)
    self._open_shards = {}
    self._thread_lock = threading.Lock()

  def _path(self, shard):
    return self.folder / f'{shard:05d}.bin'

  def _classes(self, shard):
    first = shard * self._classes_per_shard
    return range(first, min(first + self._classes_per_shard, self.num_classes))

  def _shape(self, shard):
    size = self.image_size
    return (len(self._classes(shard)), self.images_per_class, size, size)

  def _has(self, shard):
    """Whether the file is there in full size; its checksum is read later."""
    try:
      size = self._path(shard).stat().st_size
    except FileNotFoundError:
      return False
    return size == int(np.prod(self._shape(shard))) + 4

  def _prepare(self, show_progress):
    """Draws the missing shards."""
    shards = -(-self.num_classes // self._classes_per_shard)
    missing = [s for s in range(shards) if not self._has(s)]
    if not missing:
      return
    bar = progress.Progress(
      progress.TextColumn('drawing {task.total} classes of fractals'),
      progress.BarColumn(),
      progress.MofNCompleteColumn(),
      progress.TimeRemainingColumn(),
      console=console.Console(stderr=True),
      disable=not show_progress,
    )
    with bar:
      task = bar.add_task('', total=sum(len(self._classes(s)) for s in missing))
      for shard in missing:
        self._generate(shard, lambda: bar.advance(task), keep=self._has)

  def _generate(self, shard, advance=lambda: None, *, keep):
    """Draws a shard unless `keep(shard)`, asked when nobody else writes it."""
    path = self._path(shard)
    try:
      self.folder.mkdir(parents=True, exist_ok=True)
      with _lock(path.with_suffix('.lock')):
        for leftover in glob.glob(glob.escape(str(path)) + '.*.tmp'):
          os.unlink(leftover)  # of a process that was killed
        if keep(shard):
          for _ in self._classes(shard):
            advance()
        else:
          self._write(shard, advance)
    except OSError as e:
      if e.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        raise
      raise PermissionError(
        f'Cannot write the fractals to {self.folder} ({e.strerror}); give'
        ' cache_dir=, or set XDG_CACHE_HOME, to a folder that you may write.'
      ) from e

  def _write(self, shard, advance):
    path = self._path(shard)
    temporary = f'{path}.{os.getpid()}.tmp'
    try:
      checksum = 0
      with open(temporary, 'wb') as f:
        for label in self._classes(shard):
          images = ifs.render_category(
            self.seed, label, self.images_per_class, self.image_size
          )
          checksum = zlib.crc32(images, checksum)
          f.write(images)
          advance()
        f.write(checksum.to_bytes(4, 'little'))
        f.flush()
        os.fsync(f.fileno())  # else a crash could leave the name, not the bytes
      os.replace(temporary, path)
    finally:
      with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)

  def _shard(self, shard):
    """The images of a shard, mapped; its checksum is read the first time."""
    images = self._open_shards.get(shard)
    if images is None:
      with self._thread_lock:
        images = self._open_shards.get(shard)
        if images is None:
          images = self._read(shard)
          if images is None:
            logging.warning('%s is damaged: drawing it anew', self._path(shard))
            self._generate(shard, keep=lambda s: self._read(s) is not None)
            images = self._read(shard)
          if images is None:
            raise OSError(
              f'{self._path(shard)} was drawn anew and still does not read'
              ' back as written; look at the disk, or give another cache_dir.'
            )
          self._open_shards[shard] = images
    return images

  def _read(self, shard):
    """The mapped images, or None if the file is missing or damaged."""
    if not self._has(shard):
      return None
    data = np.memmap(self._path(shard), np.uint8, mode='r')
    if zlib.crc32(data[:-4]) != int.from_bytes(data[-4:].tobytes(), 'little'):
      return None
    return data[:-4].reshape(self._shape(shard))


@contextlib.contextmanager
def _lock(path):
  """Lets one process at a time in; the system frees it when one is killed.

  Only saves work: files are replaced whole, so a file system without locks
  gets each shard drawn by several processes, equal and undamaged.
  """
  with open(path, 'wb') as f:
    if fcntl is not None:
      with contextlib.suppress(OSError):
        fcntl.flock(f, fcntl.LOCK_EX)
    yield
