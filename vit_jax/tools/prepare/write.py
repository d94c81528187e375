"""Examples of sources, checked and re-encoded, written by TFDS."""

import csv
import dataclasses
import functools
import io
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from vit_jax.data import images, views, workers
from vit_jax.data.transforms import resize
from vit_jax.tools.prepare.copies import Copies
from vit_jax.types import PathLike

Example = Mapping[str, Any]  # {'image': bytes or array, 'label': int or [K]}


def readers(source: Any) -> Iterator[Callable[[], tuple[str, Example]]]:
  """Yield functions that return (file name, example), for threads.

  Args:
    source: has len() and [i], or is an iterable of (file name, example).
  """
  if hasattr(source, '__getitem__'):
    for index in range(len(source)):
      yield functools.partial(_read, source, index)
  else:
    for example in source:
      yield functools.partial(lambda x: x, example)


def _read(source, index):
  name = getattr(source, 'file_name', lambda index: None)(index)
  return name or views.describe(source, index), source[index]


def decoded(source: Any, example: Example) -> tuple[np.ndarray, bool]:
  """Return the image, uint8 [H, W, C], and whether EXIF turned it."""
  image = example['image']
  if not isinstance(image, bytes):
    return image, False
  exif = getattr(source, 'exif', True)
  encoded = images.Encoded(image, getattr(source, 'channels', 3), exif=exif)
  return encoded.pixels(), encoded.is_turned


def reencoded(image: np.ndarray, short_side: int | None, quality: int) -> bytes:
  """Return a JPEG file of an image, shrunk to a short side by area.

  Grey images stay grey. The chroma is halved (4:2:0), as in most photographs:
  at quality 95 and 256 px 4:4:4 takes 1.33 times the bytes.
  """
  smaller = min(image.shape[:2])
  if short_side and smaller > short_side:
    factor = short_side / smaller
    height, width = (max(1, round(x * factor)) for x in image.shape[:2])
    image = resize(image, (height, width), 'area')
  if image.shape[2] == 3 and (image == image[..., :1]).all():
    image = image[..., :1]
  cv2 = images.opencv()
  options = [cv2.IMWRITE_JPEG_QUALITY, quality]
  options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR]
  options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420]
  return _encoded('.jpg', image, options)


def _encoded(kind, image, options=()):
  image = np.ascontiguousarray(image[..., ::-1])  # OpenCV has BGR
  return images.opencv().imencode(kind, image, options)[1].tobytes()


@dataclasses.dataclass(frozen=True)
class Maker:
  """Makes the records of a source.

  Attributes:
    source: the source.
    short_side: larger images are shrunk to it; None copies the bytes.
    quality: of JPEG files that are shrunk or turned.
    copies: evaluation images whose copies are left out, or None.
  """

  source: Any
  short_side: int | None = None
  quality: int = 95
  copies: Copies | None = None

  def __call__(
    self, read: Callable[[], tuple[str, Example]]
  ) -> tuple[str, Example | None, str]:
    """Return (file name, record, ''), or why it has no record."""
    name = ''
    try:
      name, example = read()
      # Decoded even if the bytes are copied: there are no unreadable images.
      image, is_turned = decoded(self.source, example)
      copy = self.copies.find(image) if self.copies else None
      if copy:
        return name, None, f'copy of {copy}'
      data = example['image']
      is_large = self.short_side and min(image.shape[:2]) > self.short_side
      if is_large or is_turned:  # TensorFlow ignores the EXIF orientation
        data = reencoded(image, self.short_side, self.quality)
      elif not isinstance(data, bytes):
        data = _encoded('.png', data)
      record = {'image': io.BytesIO(data), 'label': example['label']}
      return name, {**record, 'file_name': name}, ''
    except (OSError, ValueError) as error:
      return name, None, f'unreadable: {error}'


def write(
  folder: PathLike,
  makers: Mapping[str, Maker],
  *,
  shuffle: bool = False,
  shards: int | None = None,
  skip: bool = False,
) -> dict[str, int]:
  """Write a TFDS data set, which appears when it is complete.

  Examples without a record are listed in left_out.csv.

  Args:
    folder: of the data set, NAME or NAME/VERSION; it must not exist.
    makers: by split.
    shuffle: write the examples in a shuffled order.
    shards: number of files of each split; None: by the number of bytes.
    skip: leave out unreadable examples; else the first one is an error.

  Returns:
    {split: number of examples}.

  Raises:
    ValueError: the folder exists; splits with different classes; an unreadable
      example.
  """
  import tensorflow_datasets as tfds

  folder = pathlib.Path(folder).expanduser().absolute()
  if folder.exists():
    raise ValueError(f'{folder} exists. Use a new folder, or remove it.')
  partial = folder.with_name(f'{folder.name}.part')
  shutil.rmtree(partial, ignore_errors=True)
  first, *others = (maker.source for maker in makers.values())
  names = getattr(first, 'class_names', None)
  for other in others:
    if getattr(other, 'class_names', None) != names:
      raise ValueError('the splits have different classes. Give class_names.')
  features = _features(first)
  left_out: list[tuple[str, ...]] = []

  def examples(split: str) -> Iterator[tuple[int, Example]]:
    maker = makers[split]
    threads = 2 * workers.cores()
    found = workers.Threads(maker, readers(maker.source), threads)
    for index, (name, record, reason) in enumerate(found):
      if record is not None:
        yield index, record
        continue
      if reason.startswith('unreadable') and not skip:
        raise ValueError(
          f'example {index} of {split} ({name}) is {reason} Use --on_error=skip'
          ' to leave it out.'
        )
      left_out.append((split, str(index), name, reason))

  dataset, given = _name_and_version(folder)

  class Prepared(  # type: ignore[call-arg]
    tfds.core.GeneratorBasedBuilder, skip_registration=True
  ):
    name = dataset
    VERSION = tfds.core.Version(given)
    # TFDS would look for files next to the code of the class.
    pkg_dir_path, code_path = partial, None

    def _info(self):
      return tfds.core.DatasetInfo(
        builder=self, features=features, disable_shuffling=not shuffle
      )

    def _split_generators(self, dl_manager):
      return {split: examples(split) for split in makers}

    def _generate_examples(self):
      raise NotImplementedError  # the splits are generators already

  builder = Prepared(data_dir=partial, file_format='array_record')
  builder.download_and_prepare(
    download_config=tfds.download.DownloadConfig(num_shards=shards)
  )
  made = pathlib.Path(builder.data_path)
  if names and not isinstance(features['label'], tfds.features.ClassLabel):
    (made / 'class_names.json').write_text(json.dumps(list(names)))
  if left_out:
    with open(made / 'left_out.csv', 'w', newline='') as file:
      header = ('split', 'index', 'file_name', 'reason')
      csv.writer(file).writerows([header, *left_out])
  made.rename(folder)
  shutil.rmtree(partial)
  return {k: v.num_examples for k, v in builder.info.splits.items()}


def _features(source):
  """Return the features of TFDS for a source."""
  import tensorflow_datasets as tfds

  names = getattr(source, 'class_names', None)
  count = getattr(source, 'num_classes', None)
  _, example = next(readers(source))()
  label: Any = np.int64
  if np.ndim(example['label']):
    shape = np.shape(example['label'])
    label = tfds.features.Tensor(shape=shape, dtype=np.float32)
  elif names is not None:
    label = tfds.features.ClassLabel(names=list(names))
  elif count is not None:
    label = tfds.features.ClassLabel(num_classes=count)
  channels = getattr(source, 'channels', 3)
  return tfds.features.FeaturesDict(
    {
      'image': tfds.features.Image(shape=(None, None, channels)),
      'label': label,
      'file_name': tfds.features.Text(),
    }
  )


def _name_and_version(folder):
  """Return the name and version of a data set in NAME or NAME/VERSION."""
  version = '1.0.0'
  if re.fullmatch(r'\d+\.\d+\.\d+', folder.name):
    folder, version = folder.parent, folder.name
  name = re.sub(r'\W', '_', folder.name, flags=re.ASCII)
  return name if name[0].isalpha() else f'set_{name}', version
