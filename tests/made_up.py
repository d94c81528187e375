"""TFDS data sets with the features of the real ones and made-up images."""

import io
import pathlib
import sys
import types

import numpy as np
import tensorflow_datasets as tfds
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
  features, make = builder.info.features, make_example or example
  examples = {
    split: [make(number, features) for number in range(size)]
    for split, size in sizes.items()
  }
  _write(builder.info, examples)


def prepare_new(data_dir, name, version, features, splits):
  """Write a data set that the TFDS package does not have.

  Args:
    data_dir: TFDS's folder of data sets.
    name, version: of the data set.
    features: {name: feature} of TFDS.
    splits: {split: examples}, dicts of values for the features.
  """
  identity = tfds.core.DatasetIdentity(
    name, tfds.core.Version(version), f'{data_dir}/{name}/{version}', __name__
  )
  features = tfds.features.FeaturesDict(features)
  _write(tfds.core.DatasetInfo(builder=identity, features=features), splits)


def _write(info, splits):
  pathlib.Path(info.data_dir).mkdir(parents=True)
  writer = tfds.core.SequentialWriter(info, 1000, file_format='array_record')
  writer.initialize_splits([*splits])
  writer.add_examples(splits)
  writer.close_all()


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
  types_of = np.resize(['mono', 'poly', 'poly'], count)
  module.load_dataset = lambda: (images, probability, types_of)
  package = types.ModuleType('elpv_dataset')
  monkeypatch.setitem(sys.modules, 'elpv_dataset', package)
  monkeypatch.setitem(sys.modules, 'elpv_dataset.utils', module)
  return images, probability
