"""Examples of sources, checked and re-encoded, written by TFDS."""

import csv
import io
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from vit_jax.data import images, views, workers
from vit_jax.data.transforms import resize
from vit_jax.runs import terminal
from vit_jax.tools.prepare.copies import Copies
from vit_jax.types import PathLike, UserError

Example = Mapping[str, Any]  # {'image': bytes or array, 'label': int or [K]}
_QUALITY = 95  # of JPEG files; 4:4:4 would take 1.33 times the bytes at 256 px


def process(
  source: Any, function: Callable[[str, Callable[[], Example]], Any]
) -> Iterable[Any]:
  """Yield function(file name, read) for each example, computed by threads.

  Args:
    source: has len() and [i], or is an iterable of (file name, example).
    function: its `read()` returns the example.
  """

  def of_index(index):
    name = getattr(source, 'file_name', lambda index: None)(index)
    name = name or views.describe(source, index)
    return function(name, lambda: source[index])

  threads = 2 * workers.cores()
  if hasattr(source, '__getitem__'):
    return workers.read_ahead(of_index, range(len(source)), threads)
  return workers.read_ahead(
    lambda x: function(x[0], lambda: x[1]), source, threads
  )


def decoded(source: Any, example: Example) -> tuple[np.ndarray, bool]:
  """Return the image, uint8 [H, W, C], and whether EXIF turned it."""
  image = example['image']
  if not isinstance(image, bytes):
    return image, False
  encoded = images.Encoded(image, exif=getattr(source, 'exif', True))
  return encoded.pixels(), encoded.is_turned


def write(
  folder: PathLike,
  sources: Mapping[str, Any],
  *,
  short_side: int | None = None,
  shuffle: bool = False,
  copies: Copies | None = None,
) -> dict[str, int]:
  """Write a TFDS data set, which appears when it is complete.

  Unreadable images and copies are left out, and listed in left_out.csv.

  Args:
    folder: of the data set, NAME or NAME/VERSION; it must not exist.
    sources: by split.
    short_side: larger images are shrunk to it; None copies their bytes.
    shuffle: write the examples in a shuffled order.
    copies: evaluation images whose copies are left out.

  Returns:
    {split: number of examples}.

  Raises:
    ValueError: the folder exists, or the splits have different classes.
  """
  import tensorflow_datasets as tfds

  folder = pathlib.Path(folder).expanduser().absolute()
  if folder.exists():
    raise UserError(f'{folder} exists. Use a new folder, or remove it.')
  partial = folder.with_name(f'{folder.name}.part')
  shutil.rmtree(partial, ignore_errors=True)
  first, *others = sources.values()
  names = getattr(first, 'class_names', None)
  if any(getattr(other, 'class_names', None) != names for other in others):
    raise UserError('the splits have different classes. Give class_names.')
  features = _features(first, names)
  left_out: list[tuple[str, ...]] = []

  def examples(split: str) -> Iterator[tuple[int, Example]]:
    source = sources[split]

    def record(name, read):
      try:
        return name, *_record(source, read(), short_side, copies)
      except (OSError, ValueError) as error:
        return name, None, f'unreadable: {error}'

    found = process(source, record)
    for index, (name, example, reason) in enumerate(found):
      if example is None:
        left_out.append((split, str(index), name, reason))
      else:
        yield index, {**example, 'file_name': name}

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
      return {split: examples(split) for split in sources}

    def _generate_examples(self):
      raise NotImplementedError  # the splits are generators already

  builder = Prepared(data_dir=partial, file_format='array_record')
  builder.download_and_prepare()
  made = pathlib.Path(builder.data_path)
  if names and not isinstance(features['label'], tfds.features.ClassLabel):
    (made / 'class_names.json').write_text(json.dumps(list(names)))
  if left_out:
    with open(made / 'left_out.csv', 'w', newline='') as file:
      header = ('split', 'index', 'file_name', 'reason')
      csv.writer(file).writerows([header, *left_out])
    terminal.say(f'Left out {len(left_out):,}, see {folder}/left_out.csv.')
  made.rename(folder)
  shutil.rmtree(partial)
  return {k: v.num_examples for k, v in builder.info.splits.items()}


def _record(source, example, short_side, copies):
  """Return (record, ''), or (None, why it has none)."""
  # Decoded even if the bytes are copied, to find unreadable images.
  image, is_turned = decoded(source, example)
  if copies and (copy := copies.find(image)):
    return None, f'copy of {copy}'
  data = example['image']
  is_large = short_side and min(image.shape[:2]) > short_side
  if is_large or is_turned:  # TensorFlow ignores the EXIF orientation
    data = _jpeg(image, short_side if is_large else None)
  elif not isinstance(data, bytes):
    data = _encoded('.png', data)
  return {'image': io.BytesIO(data), 'label': example['label']}, ''


def _jpeg(image, short_side):
  """Return a JPEG file of an image, shrunk to a short side by area."""
  if short_side:
    factor = short_side / min(image.shape[:2])
    size = tuple(max(1, round(x * factor)) for x in image.shape[:2])
    image = resize(image, size, 'area')
  if image.shape[2] == 3 and (image == image[..., :1]).all():
    image = image[..., :1]  # grey stays grey
  cv2 = images.opencv()
  options = [cv2.IMWRITE_JPEG_QUALITY, _QUALITY]
  options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR]
  options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420]
  return _encoded('.jpg', image, options)


def _encoded(kind, image, options=()):
  image = np.ascontiguousarray(image[..., ::-1])  # OpenCV has BGR
  return images.opencv().imencode(kind, image, options)[1].tobytes()


def _features(source, names):
  """Return the features of TFDS for a source."""
  import tensorflow_datasets as tfds

  indexed = hasattr(source, '__getitem__')
  example = source[0] if indexed else next(iter(source))[1]
  shape = np.shape(example['label'])
  count = getattr(source, 'num_classes', None)
  label: Any = np.int64
  if shape:
    label = tfds.features.Tensor(shape=shape, dtype=np.float32)
  elif names is not None:
    label = tfds.features.ClassLabel(names=list(names))
  elif count is not None:
    label = tfds.features.ClassLabel(num_classes=count)
  return tfds.features.FeaturesDict(
    {
      'image': tfds.features.Image(shape=(None, None, 3)),
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
