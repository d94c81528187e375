"""Images of any number of channels and any depth, in the values of their files.

TIFFs of sensors and microscopes, 16-bit PNGs, arrays of NumPy and DICOM become
float32 [H, W, C]. No value is scaled, clipped or composited. Transforms keep
float32, and `moments` learns mean and deviation of each channel, with which
`models.dense.Standardize` gives the model numbers around 0.
"""

import contextlib
import dataclasses
import io
import math
import posixpath
import warnings
import zipfile
from typing import Any, ClassVar, Literal

import numpy as np

from vit_jax.data import images
from vit_jax.data.sources import tables
from vit_jax.data.subsets import Source, describe
from vit_jax.types import Count, Natural, UserError

_TIFF = b'II*\0', b'MM\0*', b'II+\0', b'MM\0+'  # first bytes
_MOST = 1e30  # larger values stand for something missing
_SAMPLE = 512  # images that `moments` reads
_SHOWN = 2, 98  # percentiles that are drawn black and white


@dataclasses.dataclass(frozen=True)
class Raster:
  """Decodes files, or arrays, of `channels` channels to float32 [H, W, C].

  Attributes:
    channels: number of channels of the files. A file of another number is
      unreadable, as is one whose pages are slices or times.
    bands: the channels that are used, from 0, in this order; None: all.
    axis: place of the channels in an array that does not say it, 'first' or
      'last'; None: the only axis of so many.
    missing: value of unknown pixels, which become NaN, and for the model the
      mean.
    files: texts in the names of files that have one channel each: ('_ch1',
      '_ch2', '_ch3'). The first stands for the image.
    shown: three of the used channels, drawn as red, green and blue; None: the
      first three, or the first one.
  """

  channels: Count
  bands: tuple[Natural, ...] | None = None
  axis: Literal['first', 'last'] | None = None
  missing: float | None = None
  files: tuple[str, ...] = ()
  shown: tuple[Natural, Natural, Natural] | None = None

  dtype: ClassVar = 'float32'
  most_checked: ClassVar = 2000  # in seconds: they are decoded
  endings: ClassVar = (
    *('.tif', '.tiff', '.png', '.npy', '.npz', '.dcm'),
    *('.jpg', '.jpeg', '.bmp', '.webp'),
  )

  def __post_init__(self) -> None:
    used = len(self.bands or range(self.channels))
    for name, most in (('bands', self.channels), ('shown', used)):
      if max(getattr(self, name) or (0,)) >= most:
        raise UserError(
          f'{name}={getattr(self, name)}: there are {most}, counted from 0.'
        )
    if self.files and len(self.files) != self.channels:
      raise UserError(
        f'files={self.files} are {len(self.files)}, and channels='
        f'{self.channels}. Expected a text for each channel.'
      )

  def __call__(
    self,
    data: Any,
    *,
    max_image_bytes: int = images.MAX_IMAGE_BYTES,
    check: bool = True,
  ) -> np.ndarray:
    with _reading(data):
      return self.known(self.values(data, max_image_bytes))

  def values(
    self, data: Any, max_image_bytes: int = images.MAX_IMAGE_BYTES
  ) -> np.ndarray:
    """Return the used channels of a file, [H, W, C] of its own dtype."""
    image = self._last(*_read(data, max_image_bytes))
    return image if self.bands is None else image[..., list(self.bands)]

  def known(self, values: np.ndarray) -> np.ndarray:
    """Return values as float32, with NaN for what is missing."""
    image = np.ascontiguousarray(values, np.float32)
    if self.missing is not None:
      image = np.where(image == np.float32(self.missing), np.nan, image)
    if values.dtype.kind == 'f' or self.missing is not None:
      _check_known(image)
    return image

  def takes(self, path: str) -> bool:
    """Return whether the file is an image, or the first one of it."""
    is_first = not self.files or self.files[0] in posixpath.basename(path)
    return path.lower().endswith(self.endings) and is_first

  def paths(self, path: str) -> tuple[str, ...]:
    """Return the files of an image, of which this is the first."""
    folder, name = posixpath.split(path)
    if not self.files or self.files[0] not in name:
      return (path,)
    start, _, end = name.rpartition(self.files[0])
    return tuple(posixpath.join(folder, start + x + end) for x in self.files)

  def _last(self, array, axes):
    """Return [H, W, channels] of an array with the axes of a TIFF."""
    if array.ndim == 2:
      array, axes = array[..., None], f'{axes}S'
    elif array.ndim == 3:
      known = [i for i, x in enumerate(axes) if x in 'SC']
      given = {None: known, 'first': [0], 'last': [2]}[self.axis]
      places = [i for i in given or (0, 2) if array.shape[i] == self.channels]
      if len(places) > 1:
        raise ValueError(
          f'{array.shape} has {self.channels} twice. Set axis, first or last'
        )
      array = np.moveaxis(array, places[0], 2) if places else array
    if array.ndim != 3 or array.shape[2] != self.channels:
      raise ValueError(
        f'its shape is {array.shape}, axes {axes}. Expected {self.channels} '
        'channels (--config.data.source.decode.channels)'
      )
    if array.dtype.kind not in 'biuf':
      raise ValueError(f'its values are {array.dtype}')
    return array

  def show(self, image: np.ndarray) -> np.ndarray:
    """Return uint8 [H, W, 1 or 3]; 2% of the pixels are black, 2% white."""
    if image.dtype == np.uint8:  # drawn already
      return image
    bands = self.shown or range(3 if image.shape[2] >= 3 else 1)
    chosen = image[..., list(bands)].astype(np.float32)
    with warnings.catch_warnings():
      warnings.simplefilter('ignore', RuntimeWarning)  # all pixels are NaN
      low, high = np.nanpercentile(chosen, _SHOWN, axis=(0, 1))
    scaled = (chosen - low) / np.maximum(high - low, 1e-12)
    levels = 255 * np.clip(np.nan_to_num(scaled), 0, 1)
    return np.rint(levels).astype(np.uint8)


@contextlib.contextmanager
def _reading(data):
  """Name what cannot be read."""
  try:
    yield
  except ImportError as error:
    raise UserError(f"{error}: pip install -e '.[rasters]'") from error
  except Exception as error:  # the readers raise many types
    what = f'an array {np.shape(data)}'
    if isinstance(data, bytes):
      what = f'{len(data)} bytes that begin with {data[:8]!r}'
    raise images.UnreadableError(
      f'cannot decode {what} as a raster: {error}'
    ) from error


def _check_known(image):
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', RuntimeWarning)  # all pixels are NaN
    most = np.nanmax(np.abs(image))
  if np.isnan(most):
    raise ValueError('all its values are missing')
  if most >= _MOST:
    raise ValueError(
      f'it has the value {most:.8g}. If that stands for missing, set '
      '--config.data.source.decode.missing'
    )


def _read(data, max_image_bytes):
  """Return (array, axes) of the bytes of a file, or of an array."""
  if not isinstance(data, bytes):
    return np.asarray(data), 'Y?X?'[: np.ndim(data)]
  if data.startswith(b'PK\3\4'):  # files of one channel each, or .npz
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
      names = packed.namelist()
      parts = [_read(packed.read(x), max_image_bytes)[0] for x in names]
    if len(found := {(x.shape, x.dtype.name) for x in parts}) > 1:
      raise ValueError(f'its files differ: {sorted(found)}')
    return np.stack(parts, axis=-1), 'YXS'
  if data.startswith(_TIFF):
    import tifffile  # of the extra 'rasters'

    with tifffile.TiffFile(io.BytesIO(data)) as file:
      # Overviews, of a pyramid, are smaller, and masks are no images.
      found = [
        x
        for x in file.series
        if not (x.keyframe.is_reduced or x.keyframe.is_mask)
      ]
      if len(found) != 1:
        shapes = ', '.join(str(x.shape) for x in found[:5])
        raise ValueError(f'it has {len(found)} images, {shapes}. Expected one')
      (series,) = found
      _check(series.shape, max_image_bytes)
      return series.asarray(), series.axes
  if data.startswith(b'\x93NUMPY'):
    array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    _check(array.shape, max_image_bytes)
    return array, 'Y?X?'[: array.ndim]
  if data[128:132] == b'DICM':
    import pydicom  # of the extra 'rasters'

    file = pydicom.dcmread(io.BytesIO(data))
    values = file.pixel_array
    if file.PhotometricInterpretation == 'MONOCHROME1':  # low is white
      values = 2**file.BitsStored - 1 - values.astype(np.int32)
    values = pydicom.pixels.apply_modality_lut(values, file)
    return values, 'YXS'[: values.ndim]
  cv2 = images.opencv()
  array = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
  if array is None:
    raise ValueError('it is no TIFF, PNG, NPY or DICOM')
  _check(array.shape, max_image_bytes)
  if array.ndim == 3:  # OpenCV has BGR and BGRA
    array = array[..., [2, 1, 0, 3][: array.shape[2]]]
  return array, 'YXS'[: array.ndim]


def _check(shape, most):
  if (needed := 4 * math.prod(shape)) > most:
    raise ValueError(f'{shape} takes {needed:,} bytes. Set max_image_bytes')


def moments(source: Source) -> tuple[tuple[float, float], ...]:
  """Return (mean, standard deviation) of each channel of images of a source.

  Up to 512 images at equal distances in it are read, with all of their values
  that are not missing.

  Raises:
    UserError: if files differ in their dtype, or a channel is constant.
  """
  decode, sums, most = images.decoder(source), [], 0.0
  kinds: dict[str, str] = {}  # an image of each dtype
  places = np.linspace(0, len(source) - 1, min(len(source), _SAMPLE))
  for index in map(int, places):
    try:
      with _reading(data := source[index]['image']):
        values = decode.values(data)
        x = np.float64(decode.known(values)).reshape(-1, values.shape[2])
    except (OSError, ValueError) as error:  # the run says so, or skips it
      last = error
      continue
    kinds.setdefault(values.dtype.name, describe(source, index))
    count, x = (~np.isnan(x)).sum(axis=0), np.nan_to_num(x)
    sums.append((count, x.sum(axis=0), (x**2).sum(axis=0)))
    most = max(most, x.max())
  if not sums:
    raise UserError(f'{describe(source, 0)} and others: {last}')
  if len(kinds) > 1:
    raise UserError(
      f'Images have values of different kinds: {kinds}. Save all with one, or '
      'those of each kind in a folder of its own.'
    )
  known, total, squares = np.sum(sums, axis=0)
  mean, square = total / np.maximum(known, 1), squares / np.maximum(known, 1)
  std = np.sqrt(np.maximum(square - mean**2, 0))
  constant = [i for i, x in enumerate(std) if x <= 1e-6 * abs(mean[i])]
  if constant:
    raise UserError(
      f'Channels {constant} are the same in all pixels. Leave them out: '
      f'--config.data.source.decode.bands='
      f'{tuple(i for i in range(len(std)) if i not in constant)}'
    )
  made = tuple(
    (float(f'{x:.6g}'), float(f'{y:.6g}')) for x, y in zip(mean, std)
  )
  (dtype,), bits = kinds, int(most).bit_length()
  levels = f' (like {bits} bits)' * (dtype == 'uint16' and 8 < bits < 16)
  words = ', '.join(f'{x:.4g} ± {y:.3g}' for x, y in made)
  where = getattr(source, 'where', type(source).__name__)
  tables.say_once(
    f'{where}: {dtype} up to {most:.4g}{levels}; mean and deviation of each '
    f'channel in {len(sums):,} images: {words}'
  )
  return made
