"""TFDS data sets of the true sizes and features, filled with made-up images.

`prepare` writes the files of download_and_prepare, with the features of the
installed package. The examples repeat: example i of a split has the number
i % distinct, and its image shows this number, which `number` reads.
"""

import io
import itertools
import math
import os

import cv2
import numpy as np
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image

# VTAB's slices depend on these sizes; tensorflow_datasets does not state them.
VTAB_SIZES = {
  'caltech101': {'train': 3059, 'test': 6084},
  'cifar100': {'train': 50000, 'test': 10000},
  'dtd': {'train': 1880, 'validation': 1880, 'test': 1880},
  'oxford_flowers102': {'train': 1020, 'validation': 1020, 'test': 6149},
  'oxford_iiit_pet': {'train': 3680, 'test': 3669},
  'sun397/tfds': {'train': 76128, 'validation': 10875, 'test': 21750},
  'svhn_cropped': {'train': 73257, 'test': 26032},
  'patch_camelyon': {'train': 262144, 'validation': 32768, 'test': 32768},
  'eurosat/rgb': {'train': 27000},
  'resisc45': {'train': 31500},
  'diabetic_retinopathy_detection/btgraham-300': {
    'train': 35126,
    'validation': 10906,
    'test': 42670,
  },
  'clevr': {'train': 70000, 'validation': 15000, 'test': 15000},
  'dmlab': {'train': 65550, 'validation': 22628, 'test': 22735},
  'kitti': {'train': 6347, 'validation': 423, 'test': 711},
  'dsprites': {'train': 737280},
  'smallnorb': {'train': 24300, 'test': 24300},
}


def prepare_vtab(data_dir):
  """Write VTAB's 16 TFDS data sets, in 3 seconds and 100 MB."""
  for name, splits in VTAB_SIZES.items():
    prepare(data_dir, name, splits)


def prepare(data_dir, name, sizes, *, make_example=None, distinct=None):
  """Write a data set that looks like the real one, as ArrayRecord files.

  Args:
    data_dir: TFDS's folder of data sets.
    name: of a builder that the TFDS package has, 'NAME/CONFIG' as needed.
    sizes: {split: number of examples}.
    make_example: fn(number, split's place in `sizes`, features) -> dict of
      values for the features; default: `example`.
    distinct: number of different examples; default: the smallest prime that
      is at least 97 and the number of classes.

  Returns:
    The directory of the version.
  """
  builder = tfds.builder(name, data_dir=data_dir, file_format='array_record')
  features = builder.info.features
  distinct = distinct or distinct_of(features)
  directory = builder.data_path
  directory.mkdir(parents=True)
  template = tfds.core.ShardedFileTemplate(
    data_dir=directory,
    dataset_name=builder.name,
    filetype_suffix='array_record',
  )
  infos = []
  for place, (split, size) in enumerate(sizes.items()):
    records = [
      features.serialize_example(
        features.encode_example((make_example or example)(i, place, features))
      )
      for i in range(min(distinct, size))
    ]
    block = distinct * 32  # small: most shards are links
    shards = [block] * (size // block) + [size % block] * (size % block > 0)
    infos.append(
      tfds.core.SplitInfo(
        name=split,
        shard_lengths=shards,
        num_bytes=size * len(records[0]),
        filename_template=template.replace(split=split),
      )
    )
    _write(infos[-1].filepaths, shards, records)
  builder.info.set_splits(tfds.core.SplitDict(infos))
  builder.info.write_to_directory(directory)
  return str(directory)


def example(number, place, features):
  """Return example `number` of the split at `place`."""
  return {
    key: _value(key, number, place, feature)
    for key, feature in features.items()
  }


def number(image):
  """Return the (number, place of the split) that an image [H, W, 3] shows."""
  if image.max() <= 1:  # dSprites
    return int(image[..., 0].sum()), 0
  first, second, third = (int(x) for x in image[0, 0])
  if first == second == third:  # grey
    return (first - 10) % 100, (first - 10) // 100
  return first + 128 * second, 255 - third


def distinct_of(features):
  """Return the default of `distinct` in `prepare`."""
  classes = [getattr(f, 'num_classes', None) or 0 for f in features.values()]
  least = max(97, *classes)
  while any(least % x == 0 for x in range(2, math.isqrt(least) + 1)):
    least += 1
  return least


def _value(key, number, place, feature):
  """Return a value that the feature can encode."""
  features = tfds.features
  if isinstance(feature, features.Image):
    return _png(number, place, feature.shape)
  if isinstance(feature, features.Sequence):
    return _sequence(number, place, feature.feature)
  if isinstance(feature, features.BBoxFeature):
    return features.BBox(ymin=0.0, xmin=0.0, ymax=0.5, xmax=1.0)
  if isinstance(feature, features.ClassLabel):
    return number % feature.num_classes
  if isinstance(feature, features.Text):
    return f'{number}.png'
  return np.full(feature.shape, number, feature.np_dtype)


def _sequence(number, place, feature):
  """Return up to 10 entries; objects have the distances VTAB's tasks need."""
  if not isinstance(feature, tfds.features.FeaturesDict):
    return [_value('', number + i, place, feature) for i in range(number % 3)]
  is_kitti = 'location' in feature
  objects = []
  for i in range(number % 8 if is_kitti else 3 + number % 8):
    values = example(number // 8 + i, place, feature)
    distance = (4, 8.25, 8.75, 9.25, 9.75, 30)[number % 6] + i
    for key in {'location', 'pixel_coords'} & set(feature):
      values[key] = np.array([-1, 1, distance], np.float32)
    objects.append(values)
  return objects


def _png(number, place, shape):
  height, width = (size or 8 for size in shape[:2])
  if shape[2] == 3:  # one colour: a palette of one is 20 times faster to write
    image = Image.new('P', (width, height))
    image.putpalette([number % 128, number // 128, 255 - place])
    file = io.BytesIO()
    image.save(file, 'PNG', bits=1)
    file.seek(0)
    return file
  if (height, width) == (64, 64):  # dSprites: 0 and 1
    image = (np.arange(64 * 64) < number).astype(np.uint8).reshape(64, 64)
  else:
    image = np.full((height, width), 10 + number % 100 + 100 * place, np.uint8)
  data = cv2.imencode('.png', image, [cv2.IMWRITE_PNG_COMPRESSION, 1])[1]
  return io.BytesIO(data.tobytes())


def _write(paths, lengths, records):
  """Write shards that start with the first record; equal ones are links."""
  written = {}
  for path, length in zip(paths, lengths):
    if length in written:
      os.link(written[length], path)
      continue
    writer = ArrayRecordWriter(str(path), 'group_size:1,uncompressed')
    for record in itertools.islice(itertools.cycle(records), length):
      writer.write(record)
    writer.close()
    written[length] = path
