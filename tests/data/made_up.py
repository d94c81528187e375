"""TFDS data sets with the features of the real ones and made-up images."""

import io
import sys
import types

import numpy as np
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image
from tiny import encode


def prepare(data_dir, name, sizes, *, make_example=None):
  """Write the files of download_and_prepare, with as many examples as said.

  Args:
    data_dir: TFDS's folder of data sets.
    name: name of a builder in the TFDS package, 'NAME/CONFIG' as needed.
    sizes: {split: number of examples}.
    make_example: fn(number, features) -> dict of values for the features;
      default: `example`.
  """
  builder = tfds.builder(name, data_dir=data_dir, file_format='array_record')
  features = builder.info.features
  directory = builder.data_path
  directory.mkdir(parents=True)
  infos = []
  for split, size in sizes.items():
    template = tfds.core.ShardedFileTemplate(
      data_dir=directory,
      dataset_name=builder.name,
      filetype_suffix='array_record',
      split=split,
    )
    infos.append(
      tfds.core.SplitInfo(
        name=split,
        shard_lengths=[size],
        num_bytes=0,
        filename_template=template,
      )
    )
    (path,) = infos[-1].filepaths
    writer = ArrayRecordWriter(str(path), 'group_size:1')
    for number in range(size):
      values = (make_example or example)(number, features)
      encoded = features.encode_example(values)
      writer.write(features.serialize_example(encoded))
    writer.close()
  builder.info.set_splits(tfds.core.SplitDict(infos))
  builder.info.write_to_directory(directory)


def prepare_new(data_dir, name, version, features, splits, **info):
  """Write a data set that the TFDS package does not have.

  Args:
    data_dir: TFDS's folder of data sets.
    name, version: of the data set.
    features: {name: feature} of TFDS.
    splits: {split: examples}, dicts of values for the features.
    **info: other arguments of DatasetInfo.
  """

  class NewSet(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version(version)
    pkg_dir_path = data_dir

    def _info(self):
      of = tfds.features.FeaturesDict(features)
      return tfds.core.DatasetInfo(builder=self, features=of, **info)

    def _split_generators(self, manager):
      return {split: enumerate(found) for split, found in splits.items()}

    def _generate_examples(self):
      raise NotImplementedError

  NewSet.name = name
  NewSet(data_dir=data_dir, file_format='array_record').download_and_prepare()


def example(number, features):
  """Return example `number`, whose class is its number."""
  return {k: _value(number, feature) for k, feature in features.items()}


def _value(number, feature):
  """Return a value that the feature can encode."""
  if isinstance(feature, tfds.features.Image):
    image = Image.new('RGB', (8, 8), (number, 0, 0))
    return io.BytesIO(encode(image))
  if isinstance(feature, tfds.features.Sequence):
    return [_value(number + i, feature.feature) for i in range(number % 3)]
  if isinstance(feature, tfds.features.ClassLabel):
    return number % feature.num_classes
  if isinstance(feature, tfds.features.Text):
    return f'{number}.png'
  return np.full(feature.shape, number, feature.np_dtype)


def install_elpv(monkeypatch, count=80, size=300):
  """Make the package elpv-dataset importable, with noise as cells.

  A quarter is defective. Return (images, probabilities of a defect).
  """
  rng = np.random.default_rng(0)
  images = rng.integers(1, 256, (count, size, size), np.uint8)
  levels = np.array([0, 1 / 3, 0, 1, 1 / 3, 0, 2 / 3, 1 / 3])
  probability = np.resize(levels, count)
  module = types.ModuleType('elpv_dataset.utils')
  module.load_dataset = lambda: (images, probability, None)
  package = types.ModuleType('elpv_dataset')
  monkeypatch.setitem(sys.modules, 'elpv_dataset', package)
  monkeypatch.setitem(sys.modules, 'elpv_dataset.utils', module)
  return images, probability
