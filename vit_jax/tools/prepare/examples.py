"""One example of a source: checked, re-encoded, compared, made a record."""

import dataclasses
import functools
import io
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np

from vit_jax.config.domains import Range, checked
from vit_jax.data import images, pipeline
from vit_jax.data.pipeline import Source
from vit_jax.data.transforms import resize
from vit_jax.tools.prepare.duplicates import Index


@checked
@dataclasses.dataclass(frozen=True)
class Reencode:
  """Shrinks images to a short side, and encodes them as JPEG.

  Pixels are averaged by area, which is antialiased. The EXIF orientation is
  applied. Grey images stay grey. Images that are small enough keep their bytes,
  unless their EXIF orientation turns them.

  The chroma is halved (4:2:0), as in most photographs: at quality 95 and 256 px
  4:4:4 takes 1.33 times the bytes and 1.36 times the time to decode.

  Attributes:
    short_side: in pixels; smaller images are not enlarged.
    quality: of the JPEG files.
  """

  short_side: Annotated[int, Range(1, 2**15)]
  quality: Annotated[int, Range(1, 100)] = 95

  def __call__(
    self, image: np.ndarray, is_turned: bool = False
  ) -> bytes | None:
    """Return the bytes of a JPEG file; None to keep the image as it is.

    Args:
      image: decoded, uint8 [H, W, C].
      is_turned: whether an EXIF orientation was applied to it.
    """
    height, width = image.shape[:2]
    if min(height, width) > self.short_side:
      factor = self.short_side / min(height, width)
      size = tuple(max(1, round(x * factor)) for x in (height, width))
      image = resize(image, size, 'area')
    elif not is_turned:
      return None
    cv2 = images.opencv()
    grey = image[..., :1]
    if image.shape[2] == 3 and np.array_equal(image, grey.repeat(3, 2)):
      image = grey
    image = image[..., ::-1] if image.shape[2] == 3 else image
    options = [cv2.IMWRITE_JPEG_QUALITY, self.quality]
    options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR]
    options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420]
    return cv2.imencode('.jpg', np.ascontiguousarray(image), options)[
      1
    ].tobytes()


@dataclasses.dataclass(frozen=True)
class Features:
  """Contents of the records: an image, a label, and a text.

  Attributes:
    channels: 1 or 3.
    label: 'class' (an int that names one of `num_classes`), 'int' (of an
      unknown number of classes), or 'weights' (one float for each class).
    num_classes: None for 'int'.
    class_names: names of the classes, or None.
  """

  channels: int
  label: str
  num_classes: int | None
  class_names: tuple[str, ...] | None

  @classmethod
  def of(cls, source: Source) -> 'Features':
    """Return those of a source, from its attributes and first example."""
    if not len(source):
      raise ValueError('the source has no examples.')
    names = getattr(source, 'class_names', None)
    names = None if names is None else tuple(str(name) for name in names)
    count = getattr(source, 'num_classes', None)
    count = len(names) if count is None and names is not None else count
    label = _first_label(source)
    kind = 'int' if count is None else 'class'
    if np.ndim(label):
      kind, count = 'weights', len(label)
    if names is not None:
      _check_names(names, count)
    return cls(getattr(source, 'channels', 3), kind, count, names)

  def as_tfds(self) -> Any:
    """Return a FeaturesDict of TFDS."""
    import tensorflow_datasets as tfds

    label: Any = np.int64
    if self.label == 'weights':
      label = tfds.features.Tensor(shape=(self.num_classes,), dtype=np.float32)
    elif self.label == 'class' and self.class_names is not None:
      label = tfds.features.ClassLabel(names=self.class_names)
    elif self.label == 'class':
      label = tfds.features.ClassLabel(num_classes=self.num_classes)
    image = tfds.features.Image(shape=(None, None, self.channels))
    return tfds.features.FeaturesDict(
      {'image': image, 'label': label, 'file_name': tfds.features.Text()}
    )

  def check(self, label: Any) -> Any:
    """Return a label as a record has it; raise ValueError if it is not one."""
    if self.label == 'weights':
      vector = np.asarray(label, np.float32)
      if vector.shape != (self.num_classes,) or not np.isfinite(vector).all():
        raise ValueError(
          f'its label is {label!r}. Expected {self.num_classes} finite weights.'
        )
      return vector
    limit = self.num_classes
    is_int = isinstance(label, int | np.integer)
    if not is_int or label < 0 or (limit is not None and label >= limit):
      raise ValueError(
        f'its label is {label!r}, not an int in'
        f' [0, {"..." if limit is None else limit}).'
      )
    return int(label)


def _first_label(source):
  for index in range(min(len(source), 100)):
    try:
      return source[index]['label']
    except (OSError, ValueError) as error:
      first = error
  raise ValueError(f'none of the first examples can be read: {first}')


def _check_names(names, count):
  """Raise ValueError for names that TFDS's file of names cannot hold."""
  if len(names) != count:
    raise ValueError(
      f'the source has {len(names)} class names, but {count} classes.'
    )
  seen: set[str] = set()
  for name in names:
    if name in seen or not name or name != name.strip() or '\n' in name:
      raise ValueError(
        f'the class name {name!r} is empty, occurs twice, or has white space'
        ' at its ends. Give other names, one per line, in a file:'
        ' --class_names=FILE.'
      )
    seen.add(name)


class Made(NamedTuple):
  """Result of preparing one example.

  Attributes:
    source_index: in the source.
    description: file name, or another description.
    record: serialized tf.train.Example, or None if there is none.
    error: why the example cannot be read, or None.
    matches: the evaluation examples that it is a copy of.
    is_reencoded, is_turned: whether the image has new bytes; whether it has an
      EXIF orientation that turns or mirrors it.
  """

  source_index: int
  description: str
  record: bytes | None = None
  error: str | None = None
  matches: tuple = ()
  is_reencoded: bool = False
  is_turned: bool = False


@dataclasses.dataclass(frozen=True)
class Maker:
  """Makes records of the examples of a source; picklable.

  Attributes:
    source: the source.
    features: of the records.
    reencode: or None, to copy the bytes of the images.
    duplicates: index of evaluation sets, or None.
    leaves_out: numbers of the evaluation sets whose copies get no record.
    max_image_bytes: of `images.decode`.
  """

  source: Source
  features: Features
  reencode: Callable[..., bytes | None] | None = None
  duplicates: Index | None = None
  leaves_out: frozenset[int] = frozenset()
  max_image_bytes: int = images.MAX_IMAGE_BYTES

  def __call__(self, index: int) -> Made:
    """Return what becomes of an example; errors are part of it."""
    try:
      name = description(self.source, index)
    except Exception as error:  # the record itself may be broken
      name = f'no description: {error}'
    try:
      return self._made(index, name)
    except (OSError, ValueError) as error:
      return Made(index, name, error=str(error))

  def _made(self, index, name):
    example = self.source[index]
    image, data, is_turned = example['image'], None, False
    if isinstance(image, bytes):
      # Decoded even if the bytes are copied: a prepared set has no bad images.
      data, turns = image, getattr(self.source, 'exif', True)
      turns = example.get('exif', turns)
      is_turned = turns and orientation(data) != 1
      image = images.decode(
        data,
        self.features.channels,
        max_image_bytes=self.max_image_bytes,
        exif=turns,
      )
    else:
      _check_pixels(image)
    label = self.features.check(example['label'])
    matches = ()
    if self.duplicates is not None:
      matches = tuple(self.duplicates.find(image))
      if any(match.source in self.leaves_out for match in matches):
        return Made(index, name, matches=matches, is_turned=is_turned)
    new = self.reencode(image, is_turned) if self.reencode else None
    record = self._serialize(new or data or _png(image), label, name)
    is_new = new is not None
    return Made(index, name, record, None, matches, is_new, is_turned)

  def _serialize(self, image, label, name):
    features, serializer = self._tfds
    example = {'image': io.BytesIO(image), 'label': label, 'file_name': name}
    proto = serializer.get_tf_example(features.encode_example(example))
    # Maps of protocol buffers have no order of their own.
    return proto.SerializeToString(deterministic=True)

  @functools.cached_property
  def _tfds(self):
    from tensorflow_datasets.core import example_serializer

    features = self.features.as_tfds()
    info = features.get_serialized_info()
    return features, example_serializer.ExampleSerializer(info)

  def __getstate__(self) -> dict[str, Any]:
    fields = [field.name for field in dataclasses.fields(self)]
    return {name: self.__dict__[name] for name in fields}


def description(source: Source, index: int) -> str:
  """Return the name of the image's file, or another description."""
  name = getattr(source, 'file_name', lambda index: None)(index)
  return name or pipeline.describe(source, index)


def orientation(data: bytes) -> int:
  """Return the EXIF orientation of an image file, 1 to 8; 1 if it has none."""
  from PIL import Image

  if data[:2] == b'\xff\xd8' and b'Exif\0' not in data[: 2**16]:
    return 1
  try:
    with Image.open(io.BytesIO(data)) as image:
      found = image.getexif().get(0x0112, 1)
  except Exception:  # Pillow's readers raise many types
    return 1
  return found if found in range(1, 9) else 1


def _check_pixels(image):
  is_image = getattr(image, 'dtype', None) == np.uint8 and image.ndim == 3
  if not is_image or image.shape[2] not in (1, 3):
    kind = f'{getattr(image, "dtype", type(image))}, {np.shape(image)}'
    raise ValueError(
      f'its image is {kind}. Expected uint8 [H, W, 1 or 3], or the bytes of an'
      ' image file.'
    )


def _png(image):
  """Return an array as a PNG file."""
  image = image[..., ::-1] if image.shape[2] == 3 else image
  encoded = images.opencv().imencode('.png', np.ascontiguousarray(image))
  return encoded[1].tobytes()


def read_features(content: Mapping[str, Any]) -> Features:
  """Return the Features that a record of a preparation contains."""
  names = content['class_names']
  names = None if names is None else tuple(names)
  return Features(**{**content, 'class_names': names})
