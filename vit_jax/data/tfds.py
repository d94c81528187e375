"""TFDS data sets in ArrayRecord files, read without TensorFlow."""

import difflib
import os
import re

import numpy as np


class Tfds:
  """A TFDS data set by name and split, images left encoded; index-addressable.

  `name` is TFDS's: 'cifar10', 'my_set/config:1.2.0'. `split` takes slices and
  sums: 'train[:99%]', 'train[:800]+validation[:200]'. A prepared directory is
  enough: the code that generated the set need not be importable.

  source[i] is {'image': the encoded bytes, 'label': int or float [K]}. Only
  `image_key` and `label_key` are parsed. `num_classes` and `class_names` come
  from a ClassLabel feature, and are None for other labels. `channels` (1 or 3)
  is what the image is decoded to, whatever the feature says.

  Raises:
    ValueError: unknown data set, split or key; not prepared, or prepared in
      a format without random access: with the command that prepares it.
  """

  def __init__(
    self,
    name,
    *,
    split,
    data_dir=None,
    image_key='image',
    label_key='label',
    channels=3,
  ):
    if name is None or split is None:
      raise ValueError(
        f'Tfds: the name is {name!r} and the split {split!r}; give both, in a '
        'config by --config.data.source.name=NAME and .split=SPLIT (of an '
        'evaluator: --config.evals.NAME.data.source.name).'
      )
    self.channels = channels
    self._name, self._split = name, split
    self._keys = (image_key, label_key)
    self._directory = _directory(name, data_dir)
    self._open()
    label = self._features[label_key]
    self.num_classes = getattr(label, 'num_classes', None)
    self.class_names = None
    if self.num_classes is not None:
      self.class_names = list(label.names)

  def __len__(self):
    return len(self._records)

  def __getitem__(self, index):
    image_key, label_key = self._keys
    example = self._parse(self._records[int(index)], self._keys)
    image, label = example[image_key], example[label_key]
    return {'image': image, 'label': label if np.ndim(label) else int(label)}

  def describe(self, index):
    """Data set, split and index, with the file's name where there is one."""
    import tensorflow_datasets as tfds

    where = f'{self._name} {self._split}[{int(index)}]'
    keys = [
      key
      for key in self._features
      if re.fullmatch(r'(image_?|file_?|)(name|path|id)|filename', key)
      and isinstance(self._features[key], tfds.features.Text)
    ]
    if not keys:
      return where
    value = self._parse(self._records[int(index)], keys[:1])[keys[0]]
    return f'{where} ({value.decode(errors="replace")})'

  def __getstate__(self):
    state = dict(self.__dict__)
    for key in ('_records', '_features', '_parsers'):
      del state[key]  # open files and descriptors: each process has its own
    return state

  def __setstate__(self, state):
    self.__dict__.update(state)
    self._open()

  def _open(self):
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(self._directory)
    self._features = builder.info.features
    self._parsers = {}
    for key, argument in zip(self._keys, ('image_key', 'label_key')):
      if key not in self._features:
        raise ValueError(
          f'{self._name} has no feature {key!r} ({argument}); it has'
          f' {_listed(self._features)}.'
        )
    if not isinstance(self._features[self._keys[0]], tfds.features.Image):
      raise ValueError(
        f'the feature {self._keys[0]!r} of {self._name} is no image; it has'
        f' {_listed(self._features)}. Choose another image_key.'
      )
    _check_label(self._name, self._keys[1], self._features[self._keys[1]])
    self._records = _records(builder, self._name, self._split)

  def _parse(self, record, keys):
    """The features of these keys, images still encoded."""
    import tensorflow_datasets as tfds

    keys = tuple(keys)
    if keys not in self._parsers:
      features = tfds.features.FeaturesDict(
        {k: self._features[k] for k in keys}
      )
      skip = {
        key: tfds.decode.SkipDecoding()
        for key in keys
        if isinstance(self._features[key], tfds.features.Image)
      }
      self._parsers[keys] = (features, skip or None)
    features, skip = self._parsers[keys]
    return features.deserialize_example_np(record, decoders=skip)


def _check_label(name, key, feature):
  """Raises unless labels are single ints or vectors of fixed length."""
  shape = getattr(feature, 'shape', None)
  kind = np.dtype(feature.np_dtype).kind if isinstance(shape, tuple) else ''
  is_int = shape == () and kind in 'iub'
  is_vector = kind in 'iubf' and len(shape) == 1 and shape[0]
  if not (is_int or is_vector):
    raise ValueError(
      f'the feature {key!r} of {name} is {feature!r}; a label is one int, or a'
      ' vector with one weight for each class. Choose another label_key.'
    )


def _directory(name, data_dir):
  """The folder of the prepared data set `name`."""
  import tensorflow_datasets as tfds

  data_dir = None if data_dir is None else os.path.expanduser(str(data_dir))
  try:
    builder = tfds.builder(name, data_dir=data_dir)
  except tfds.core.DatasetNotFoundError:
    raise ValueError(_unknown(name, data_dir)) from None
  except Exception as error:  # unknown versions and configs: several types
    reason = str(error).strip().splitlines()[0]
    raise ValueError(
      f'TFDS cannot open {name!r} (data_dir={data_dir!r}): {reason}'
    ) from error
  if (builder.data_path / 'dataset_info.json').exists():
    return str(builder.data_path)
  parent, others = builder.data_path.parent, []
  if parent.exists():
    others = sorted(
      x.name for x in parent.iterdir() if (x / 'dataset_info.json').exists()
    )
  hint = ''
  if others:
    hint = f' Prepared versions there: {others}; name one as NAME:VERSION.'
  raise ValueError(
    f'the TFDS data set {name!r} is not prepared: nothing in'
    f' {builder.data_path}.{hint} Prepare it with\n'
    f'  {_prepare_command(name, data_dir)}\n'
    'The code of many sets needs TensorFlow for this step (pip install'
    ' tensorflow, in another environment if you like); reading does not.'
  )


def _prepare_command(name, data_dir):
  where = '' if data_dir is None else f", data_dir='{data_dir}'"
  return (
    'python -c "import tensorflow_datasets as tfds;'
    f" tfds.builder('{name}'{where}, file_format='array_record')"
    '.download_and_prepare()"'
  )


def _unknown(name, data_dir):
  import tensorflow_datasets as tfds

  known = tfds.list_builders(with_community_datasets=False)
  folder = data_dir or tfds.core.constants.DATA_DIR
  if os.path.isdir(folder):
    known = known + [x for x in os.listdir(folder) if x != 'downloads']
  stem = re.split('[/:]', name)[0]
  home = os.path.join(folder, stem)
  if os.path.isdir(home):
    return (
      f'no TFDS data set {name!r}: {home} holds {sorted(os.listdir(home))}; the'
      ' name is NAME:VERSION or NAME/CONFIG:VERSION.'
    )
  close = difflib.get_close_matches(stem, known, n=3)
  close = f' Did you mean {" or ".join(close)}?' if close else ''
  return (
    f'no TFDS data set {name!r}: neither its code in tensorflow_datasets nor'
    f' a prepared one in {folder}.{close} For a set of your own give the'
    ' data_dir that holds NAME/VERSION/dataset_info.json.'
  )


def _records(builder, name, split):
  """Random access to the serialized examples of a split."""
  import tensorflow_datasets as tfds

  splits = {k: v.num_examples for k, v in builder.info.splits.items()}
  try:
    return builder.as_data_source(
      split=split,
      deserialize_method=tfds.core.decode.DeserializeMethod.RAW_BYTES,
    )
  except NotImplementedError:
    path, kind = builder.data_path, builder.info.file_format.value
    raise ValueError(
      f'the TFDS data set {name!r} in {path} is prepared as {kind}, which has'
      ' no random access. Convert it, keeping the old files, with\n'
      f'  python -m vit_jax.tools.to_array_record {path}'
    ) from None
  except Exception as error:  # ValueError, and AssertionError of slices
    reason = str(error).strip().splitlines()[0]
    if 'length' in reason:  # what array_record says of no files
      reason = 'it selects no examples.'
    raise ValueError(
      f'cannot take the split {split!r} of the TFDS data set {name!r}: {reason}'
      f' Its splits and their sizes are {splits}; slices are written as'
      " 'train[:99%]' or 'train[:800]+train[900:]'."
    ) from error


def _listed(features):
  return ', '.join(f'{k} ({type(v).__name__})' for k, v in features.items())
