"""TFDS data sets in ArrayRecord files, read without TensorFlow."""

import re

import numpy as np

from vit_jax.data import prepared

_FILE_NAME = re.compile(r'(image/)?((image_?|file_?|)(name|path|id)|filename)')
_READ_AHEAD = 64  # records that labels() holds at a time; they hold images


class Tfds:
  """A TFDS data set by name and split, images left encoded; index-addressable.

  `name` is TFDS's: 'cifar10', 'my_set/config:1.2.0'. `split` takes slices and
  sums: 'train[:99%]', 'train[:800]+validation[:200]'. A prepared directory is
  enough: the code that generated the set need not be importable.

  source[i] is {'image': the encoded bytes, 'label': int or float [K]}. Only
  `image_key` and `label_key` are parsed. `num_classes` and `class_names` come
  from a ClassLabel feature, and are None for other labels. `channels` (1 or 3)
  is what the image is decoded to, whatever the feature says.

  With `label_fn` the label is label_fn(value of the feature `label_key`), of
  any kind: a number, an array, text as bytes, for Sequence({...}) a dict of
  arrays with an entry for each element. It returns an int or a float vector [K]
  and has `num_classes`, maybe `class_names`: these are then the source's. It
  travels to other processes, so make it a dataclass of a module.

  Raises:
    ValueError: unknown data set, split or key; not prepared, or prepared in
      a format without random access: with the command that prepares it;
      `label_fn` fails on the first example.
  """

  def __init__(
    self,
    name,
    *,
    split,
    data_dir=None,
    image_key='image',
    label_key='label',
    label_fn=None,
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
    self._label_fn = label_fn
    self._directory = prepared.directory(name, data_dir)
    self._open()
    if label_fn is not None:
      self._check_label_fn()
      self.num_classes = label_fn.num_classes
      self.class_names = getattr(label_fn, 'class_names', None)
      return
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
    return {
      'image': example[image_key],
      'label': self._label(example[label_key]),
    }

  def labels(self):
    """Labels of all examples: int32 [n], or float32 [n, K].

    No image is decoded, but ArrayRecord has whole records only: the split is
    read once from start to end.

    Raises:
      ValueError: `label_fn` fails, with the example.
    """
    found, key = [], self._keys[1]
    for start in range(0, len(self), _READ_AHEAD):
      block = range(start, min(start + _READ_AHEAD, len(self)))
      for index, record in zip(block, self._records.__getitems__(block)):
        value = self._parse(record, (key,))[key]
        try:
          found.append(self._label(value))
        except Exception as error:  # label_fn is anyone's
          raise ValueError(
            f'cannot label {self.describe(index)}: {error}'
          ) from error
    found = np.array(found)
    return found.astype(np.int32 if found.ndim == 1 else np.float32)

  def file_name(self, index):
    """The file's name that the data set keeps; None where it keeps none."""
    key = self._name_key
    if key is None:
      return None
    value = self._parse(self._records[int(index)], (key,))[key]
    return value.decode(errors='replace')

  def describe(self, index):
    """Data set, split and index, with the file's name where there is one."""
    where = f'{self._name} {self._split}[{int(index)}]'
    name = self.file_name(index)
    return where if name is None else f'{where} ({name})'

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
    if self._label_fn is None:
      _check_label(self._name, self._keys[1], self._features[self._keys[1]])
    names = (
      key
      for key, feature in self._features.items()
      if isinstance(feature, tfds.features.Text) and _FILE_NAME.fullmatch(key)
    )
    self._name_key = next(names, None)
    self._records = prepared.records(builder, self._name, self._split)

  def _label(self, value):
    if self._label_fn is not None:
      feature = self._features[self._keys[1]]
      value = self._label_fn(_arrays(feature, value))
    return value if np.ndim(value) else int(value)

  def _check_label_fn(self):
    """Raises ValueError unless label_fn can label the first example."""
    key, label_fn = self._keys[1], self._label_fn
    if not (callable(label_fn) and hasattr(label_fn, 'num_classes')):
      raise ValueError(
        f'label_fn is {label_fn!r}; give a callable that has num_classes, such'
        ' as vit_jax.data.vtab.ClevrCount().'
      )
    what = f'the feature {key!r} of {self._name}, {self._features[key]!r}'
    value = self._parse(self._records[0], (key,))[key]
    try:
      label = self._label(value)
    except Exception as error:  # it is anyone's
      raise ValueError(
        f'{label_fn!r} fails on {what}: {type(error).__name__}: {error} It has'
        f' {_listed(self._features)}. Choose another label_key or label_fn.'
      ) from error
    size = label_fn.num_classes
    if size is None:
      return
    if np.ndim(label):
      good = np.shape(label) == (size,)
    else:
      good = 0 <= label < size
    if not good:
      raise ValueError(
        f'{label_fn!r} makes the label {label!r} of {what}; expected an int in'
        f' [0, {size}), or a vector of {size} weights.'
      )

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


def _arrays(feature, value):
  """`value` with arrays [n, ...] for the lists that TFDS makes of sequences."""
  inner = getattr(feature, 'feature', feature)
  if isinstance(value, dict):
    return {k: _arrays(inner[k], v) for k, v in value.items()}
  if isinstance(value, list) and None not in inner.shape:
    return np.array(value, inner.np_dtype).reshape(len(value), *inner.shape)
  return value


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


def _listed(features):
  return ', '.join(f'{k} ({type(v).__name__})' for k, v in features.items())
