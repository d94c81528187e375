"""TFDS data sets in ArrayRecord files, read without TensorFlow."""

import dataclasses
import difflib
import functools
import json
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from vit_jax.data import fingerprints, pipeline
from vit_jax.runs.files import check_remote

_FILE_NAME = re.compile(r'(image/)?((image_?|file_?|)(name|path|id)|filename)')
# Data sets that TFDS has no code for, by the names that code bases give them.
_CLASSES = {'imagenet21k': 21_843}
_READ_AHEAD = 64  # records that labels() holds at a time; they contain images


@dataclasses.dataclass(eq=False)
class Tfds:
  """A split of a TFDS data set; images stay encoded until they are needed.

  A prepared directory is enough: the code that generated the data set need not
  be importable. Only the features `image_key` and `label_key` are parsed.

  source[i] is {'image': the encoded bytes, 'label': int or float [K]}.
  `num_classes` and `class_names` come from `label_fn`, or from a ClassLabel
  feature; they are None for other labels.

  Attributes:
    name: of TFDS: 'cifar10', 'my_set/config:1.2.0'; or the path of a folder
      with dataset_info.json, which may be in `data_dir`.
    split: of TFDS, with slices and sums: 'train[:800]+validation[:200]'.
    data_dir: folder of the data sets; default: TFDS's own.
    image_key: feature with the image.
    label_key: feature with the label.
    label_fn: computes the label from the value of the feature `label_key`,
      which may be of any kind: a number, an array, text as bytes, or for
      Sequence({...}) a dict of arrays with an entry for each element. It
      returns an int or a float vector [K] and has the attribute `num_classes`,
      and `class_names` if they are known. It must be picklable: use a dataclass
      of a module.
    channels: 1 or 3, to which the images are decoded.
    exif: apply the EXIF orientation. TensorFlow does not, and neither do the
      code bases that publish results on these data sets.

  Raises:
    ValueError: unknown data set, split or key; the data set is not prepared,
      or in a format without random access (the error contains the command to
      run); `label_fn` fails on the first example.
  """

  name: str
  _: dataclasses.KW_ONLY
  split: str
  data_dir: str | os.PathLike | None = None
  image_key: str = 'image'
  label_key: str = 'label'
  label_fn: Callable | None = None
  channels: int = 3
  exif: bool = False

  def __post_init__(self) -> None:
    import tensorflow_datasets as tfds

    if self.name is None or self.split is None:
      raise ValueError(
        f'Tfds: name={self.name!r} and split={self.split!r} must be set, in a'
        ' config with --config.data.source.name or, of an evaluator,'
        ' --config.evals.NAME.data.source.name; .split likewise.'
      )
    builder = tfds.builder_from_directory(_directory(self.name, self.data_dir))
    self._builder = builder
    self._features = builder.info.features
    self._parsers: dict[Any, Any] = {}
    image = self._feature('image_key')
    label = self._feature('label_key')
    if not isinstance(image, tfds.features.Image):
      raise ValueError(
        f'the feature {self.image_key!r} of {self.name} is not an image. It'
        f' has {self._listed()}. Set image_key to another feature.'
      )
    is_text = tfds.features.Text
    texts = (k for k, v in self._features.items() if isinstance(v, is_text))
    self._name_key = next(filter(_FILE_NAME.fullmatch, texts), None)
    self._records = _records(builder, self.name, self.split)
    if self.label_fn is None:
      self._check_label(label)
    else:
      self._check_label_fn(label)
    known = label if self.label_fn is None else self.label_fn
    self.num_classes: int | None = getattr(known, 'num_classes', None)
    self.class_names: list[str] | None = getattr(known, 'class_names', None)
    if isinstance(known, tfds.features.ClassLabel) and self.num_classes:
      self.class_names = list(known.names)
    names = builder.data_path / 'class_names.json'  # of tools.prepare
    if known is label and self.label_key == 'label' and names.exists():
      self.class_names = json.loads(names.read_text())
      self.num_classes = len(self.class_names)

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int) -> dict[str, Any]:
    record = self._records[int(index)]
    image, value = self._parse(record, self.image_key, self.label_key)
    return {'image': image, 'label': self._label(value)}

  def labels(self) -> np.ndarray:
    """Return the labels of all examples: int32 [n], or float32 [n, K].

    Images are not decoded, but whole records are read. Raises ValueError with
    the description of the example if `label_fn` fails.
    """
    found = []
    for start in range(0, len(self), _READ_AHEAD):
      block = range(start, min(start + _READ_AHEAD, len(self)))
      for index, record in zip(block, self._records.__getitems__(block)):
        (value,) = self._parse(record, self.label_key)
        try:
          found.append(self._label(value))
        except Exception as error:  # of any type, from label_fn
          what = f'cannot label {self.describe(index)}: {error}'
          raise ValueError(what) from error
    return pipeline.stack_labels(found)

  def file_name(self, index: int) -> str | None:
    """Return the name of the image's file, or None if there is none."""
    if self._name_key is None:
      return None
    record = self._records[int(index)]
    (value,) = self._parse(record, self._name_key)
    return value.decode(errors='replace')

  def describe(self, index: int) -> str:
    """Return data set, split and index, and the file name if there is one."""
    where = f'{self.name} {self.split}[{int(index)}]'
    name = self.file_name(index)
    return where if name is None else f'{where} ({name})'

  def fingerprint(self) -> dict[str, Any]:
    """Return name, version, classes and a hash of the index of the records.

    The index has the name and the size of each file, and which of its records
    belong to the split.
    """
    info = self._builder.info
    files = info.splits[self.split].file_instructions
    sizes = fingerprints.sizes([str(file.filename) for file in files])
    index = [
      f'{os.path.basename(x.filename)} {x.skip} {x.take} {size}'
      for x, size in zip(files, sizes)
    ]
    return {
      'kind': 'vit_jax.data.tfds.Tfds',
      'name': info.full_name.removesuffix(f'/{info.version}'),
      'version': str(info.version),
      'num_examples': len(self),
      'num_classes': self.num_classes,
      'classes': self.class_names,
      'files': fingerprints.digest(index),
    }

  def __reduce__(self) -> tuple[Any, ...]:
    # Files and descriptors stay behind: each process opens its own.
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    return functools.partial(Tfds, **fields), ()

  def _listed(self):
    kinds = ((k, type(v).__name__) for k, v in self._features.items())
    return ', '.join(f'{key} ({kind})' for key, kind in kinds)

  def _feature(self, argument):
    key = getattr(self, argument)
    if key not in self._features:
      raise ValueError(
        f'{self.name} has no feature {key!r} ({argument}). It has'
        f' {self._listed()}.'
      )
    return self._features[key]

  def _parse(self, record, *keys):
    """Return the values of these features; images stay encoded."""
    import tensorflow_datasets as tfds

    if keys not in self._parsers:
      features = {key: self._features[key] for key in keys}
      self._parsers[keys] = tfds.features.FeaturesDict(features)
    parser, skip = self._parsers[keys], tfds.decode.SkipDecoding()
    images = (k for k in keys if isinstance(parser[k], tfds.features.Image))
    decoders = dict.fromkeys(images, skip) or None
    example = parser.deserialize_example_np(record, decoders=decoders)
    return [example[key] for key in keys]

  def _label(self, value):
    if self.label_fn is not None:
      value = self.label_fn(_arrays(self._features[self.label_key], value))
    return value if np.ndim(value) else int(value)

  def _check_label(self, feature):
    """Raise ValueError unless labels are ints or vectors of fixed length."""
    shape = getattr(feature, 'shape', None)
    kind = np.dtype(feature.np_dtype).kind if isinstance(shape, tuple) else ''
    is_int = shape == () and kind in 'iub'
    is_vector = kind in 'iubf' and len(shape) == 1 and shape[0]
    if not (is_int or is_vector):
      raise ValueError(
        f'the feature {self.label_key!r} of {self.name} is {feature!r}. A label'
        ' is one int, or a vector with one weight for each class. Set label_key'
        ' to another feature.'
      )

  def _check_label_fn(self, feature):
    """Raise ValueError unless label_fn can label the first example."""
    label_fn = self.label_fn
    if not (callable(label_fn) and hasattr(label_fn, 'num_classes')):
      raise ValueError(
        f'label_fn={label_fn!r} must be callable and have the attribute'
        ' num_classes, such as vit_jax.data.vtab.ClevrCount().'
      )
    what = f'the feature {self.label_key!r} of {self.name}, {feature!r}'
    (value,) = self._parse(self._records[0], self.label_key)
    try:
      label = self._label(value)
    except Exception as error:  # of any type, from label_fn
      raise ValueError(
        f'{label_fn!r} fails on {what}: {type(error).__name__}: {error} Set'
        f' another label_fn, or label_key to one of {self._listed()}.'
      ) from error
    size = label_fn.num_classes
    if size is None or np.shape(label) == (size,):
      return
    if np.ndim(label) or not 0 <= label < size:
      raise ValueError(
        f'{label_fn!r} returns the label {label!r} for {what}. Expected an int'
        f' in [0, {size}), or a vector of {size} weights.'
      )


def _arrays(feature, value):
  """Return `value` with arrays [n, ...] in place of the lists of sequences."""
  inner = getattr(feature, 'feature', feature)
  if isinstance(value, dict):
    return {k: _arrays(inner[k], v) for k, v in value.items()}
  if isinstance(value, list) and None not in inner.shape:
    return np.array(value, inner.np_dtype).reshape(len(value), *inner.shape)
  return value


def registered_classes(name: str, label_key: str = 'label') -> int | None:
  """Return the number of classes of a data set that need not be prepared.

  Args:
    name: of TFDS, with or without config and version.
    label_key: feature with the label.

  Returns:
    The number of classes; None if TFDS does not know the data set, or the
    feature is not a ClassLabel.
  """
  import tensorflow_datasets as tfds

  if (known := _CLASSES.get(re.split('[/:]', name)[0])) is not None:
    return known if label_key == 'label' else None
  try:
    label = tfds.builder(name).info.features[label_key]
  except Exception:  # of several types: unknown names, configs and keys
    return None
  return getattr(label, 'num_classes', None)


# Prepared data sets on disk.


def _directory(name, data_dir):
  """Return the folder of the prepared data set `name`."""
  import tensorflow_datasets as tfds

  data_dir = None if data_dir is None else os.path.expanduser(str(data_dir))
  check_remote(data_dir or '')
  folder = data_dir or os.path.expanduser(tfds.core.constants.DATA_DIR)
  prepared = os.path.join(data_dir or '', os.path.expanduser(name))
  is_path = data_dir is not None or '/' in name
  if is_path and os.path.isfile(os.path.join(prepared, 'dataset_info.json')):
    return prepared
  try:
    builder = tfds.builder(name, data_dir=data_dir)
  except tfds.core.DatasetNotFoundError:
    raise ValueError(_unknown_name(name, folder)) from None
  except Exception as error:  # of several types: unknown versions and configs
    raise ValueError(
      f'TFDS cannot open {name!r} (data_dir={data_dir!r}): {_reason(error)}'
    ) from error
  if (builder.data_path / 'dataset_info.json').exists():
    return str(builder.data_path)
  versions = builder.data_path.parent.glob('*/dataset_info.json')
  versions = sorted(info.parent.name for info in versions)
  hint = f' Prepared are the versions {versions}: use NAME:VERSION.'
  where = '' if data_dir is None else f", data_dir='{data_dir}'"
  message = (
    f'the TFDS data set {name!r} is not prepared: {builder.data_path} has no'
    f' dataset_info.json.{hint if versions else ""} Prepare it with\n'
    '  python -c "import tensorflow_datasets as tfds;'
    f" tfds.builder('{name}'{where}, file_format='array_record')"
    '.download_and_prepare()"\n'
    'Many data sets need TensorFlow for this step (pip install tensorflow, in'
    ' another environment if you prefer). Reading does not.'
  )
  if manual := getattr(builder, 'MANUAL_DOWNLOAD_INSTRUCTIONS', None):
    message += (
      f'\nFirst download these files by hand, to {folder}/downloads/manual:'
      f' {" ".join(manual.split())}'
    )
  raise ValueError(message)


def _unknown_name(name, folder):
  import tensorflow_datasets as tfds

  stem = re.split('[/:]', name)[0]
  home = os.path.join(folder, stem)
  if os.path.isdir(home):
    return (
      f'no TFDS data set {name!r}: {home} contains {sorted(os.listdir(home))}.'
      ' Use NAME:VERSION or NAME/CONFIG:VERSION.'
    )
  known = tfds.list_builders(with_community_datasets=False)
  known = known + (os.listdir(folder) if os.path.isdir(folder) else [])
  close = difflib.get_close_matches(stem, known, n=3)
  close = f' Did you mean {" or ".join(close)}?' if close else ''
  return (
    f'no TFDS data set {name!r}: tensorflow_datasets has no code for it, and'
    f' {folder} no prepared copy.{close} For your own data set, set data_dir to'
    ' the folder that contains NAME/VERSION/dataset_info.json.'
  )


def _records(builder, name, split):
  """Return random access to the serialized examples of a split."""
  import tensorflow_datasets as tfds

  try:
    return builder.as_data_source(
      split=split,
      deserialize_method=tfds.core.decode.DeserializeMethod.RAW_BYTES,
    )
  except NotImplementedError:
    path, kind = builder.data_path, builder.info.file_format.value
    raise ValueError(
      f'the TFDS data set {name!r} in {path} is prepared as {kind}, which has'
      ' no random access. Convert it with the following command, which keeps'
      f' the old files:\n  python -m vit_jax.tools.to_array_record {path}'
    ) from None
  except Exception as error:  # ValueError, and AssertionError for slices
    is_empty = 'length' in str(error)  # array_record's error for zero files
    reason = 'it contains no examples.' if is_empty else _reason(error)
    sizes = {k: v.num_examples for k, v in builder.info.splits.items()}
    raise ValueError(
      f'cannot read the split {split!r} of the TFDS data set {name!r}: {reason}'
      f' The splits and their sizes are {sizes}. Slices look like'
      " 'train[:99%]' or 'train[:800]+train[900:]'."
    ) from error


def _reason(error):
  return str(error).strip().splitlines()[0]
