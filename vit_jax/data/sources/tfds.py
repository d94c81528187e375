"""TFDS data sets in ArrayRecord files, read without TensorFlow."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from etils import epath

from vit_jax.data import images
from vit_jax.data.sources import tables
from vit_jax.data.subsets import Example, stack_labels
from vit_jax.data.targets import Classes, Targets
from vit_jax.types import MACHINE, Decode, PathLike, UserError

_FILE_NAME = re.compile(r'(image/)?((image_?|file_?|)(name|path|id)|filename)')
_READ_AHEAD = 64  # records that labels() holds at a time; they contain images


@dataclasses.dataclass(eq=False)
class Tfds(tables.Labelled):
  """A split of a TFDS data set; images stay encoded until they are needed.

  source[i] is {'image': the encoded bytes, 'label': int or float [K]}. With
  other `targets` than classes, all records are read first.
  `num_classes` and `class_names` come from `label_fn`, or from a ClassLabel
  feature; they are None for other labels.

  Attributes:
    name: TFDS name, such as 'cifar10' or 'my_set/config:1.2.0'; or the path or
      URL of a folder with dataset_info.json.
    split: TFDS split, with slices and sums: 'train[:800]+validation[:200]'.
    data_dir: folder of the data sets; default: TFDS's own.
    targets: kind of the labels, see targets.py.
    image_key, label_key: features with the image and the label.
    label_fn: computes the label, an int or a float vector [K], from the value
      of the feature `label_key`: a number, an array, text as bytes, or for
      Sequence({...}) a dict of arrays with an entry for each element. It is
      picklable and has `num_classes`, and `class_names` if they are known.
    channels, exif: of `images.Colours`; or decode: another decoder. TensorFlow,
      and so published results on these data sets, ignore the EXIF orientation.
  """

  name: str
  _: dataclasses.KW_ONLY
  split: str
  data_dir: Annotated[PathLike | None, MACHINE] = None
  targets: Targets = Classes()
  image_key: str = 'image'
  label_key: str = 'label'
  label_fn: Callable | None = None
  channels: Literal[1, 3] = 3
  exif: bool = False
  decode: Decode | None = None

  def __post_init__(self) -> None:
    import tensorflow_datasets as tfds

    self.decode = self.decode or images.Colours(self.channels, self.exif)
    builder = _builder(self.name, self.data_dir)
    self._features = features = builder.info.features
    self._records = _records(builder, self.name, self.split)
    self._parsers: dict[Any, Any] = {}
    kind = tfds.features.Text
    texts = (k for k, v in features.items() if isinstance(v, kind))
    self._name_key = next(filter(_FILE_NAME.fullmatch, texts), None)
    keys = self.targets.columns or [self.label_key]
    tables.check(self.name, features, 'label_key', *keys)
    tables.check(self.name, features, 'image_key', self.image_key)
    self.where = self.name
    self.used = {'image': self.image_key, 'label': '+'.join(keys)}
    self.used |= {'split': self.split}
    known: Any = self.label_fn or features[keys[0]]
    self._rows: Any = range(len(self._records))
    self._labels: Any = None  # unless all have been read
    self.num_classes: int | None = getattr(known, 'num_classes', None)
    self.class_names: list[str] | None = getattr(known, 'class_names', None)
    if type(known).__name__ == 'ClassLabel' and self.num_classes:
      self.class_names = list(known.names)
    if self.targets != Classes():
      names = getattr(getattr(known, 'feature', known), 'names', None)
      columns = {x: self.column(x) for x in keys}
      self._rows, labels, names = tables.labelled(
        self.name, self.targets, columns, names
      )
      super().__init__(labels, names)

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> Mapping[str, Any]:
    record = self._record(index)
    keys = [self.label_key] if self._labels is None else []
    image, *values = self._parse(record, self.image_key, *keys)
    label = self._computed(*values) if keys else self._label(index)
    read = functools.partial(self._value, record)
    return Example({'image': image, 'label': label}, self._features, read)

  def labels(self) -> np.ndarray:
    """Return the labels of all examples: int32 [n], or float32 [n, K]."""
    if self._labels is not None:
      return super().labels()
    return stack_labels(list(map(self._computed, self._values(self.label_key))))

  def held(self, keep: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Return the labels if they have been read."""
    return {} if self._labels is None else super().held()

  def column(self, name: str) -> list[Any]:
    """Return the values of a feature of all examples, bytes as texts."""
    tables.check(self.name, self._features, 'group_key', name)
    return list(map(_cell, self._values(name)))

  def _values(self, key):
    for start in range(0, len(self), _READ_AHEAD):
      block = [*map(int, self._rows[start : start + _READ_AHEAD])]
      for record in self._records.__getitems__(block):
        yield self._value(record, key)

  def file_name(self, index: int) -> str | None:
    """Return the name of the image's file, or None if there is none."""
    if self._name_key is None:
      return None
    return _cell(self._value(self._record(index), self._name_key))

  def describe(self, index: int) -> str:
    """Return data set, split and index, and the file name if there is one."""
    name = self.file_name(index)
    row = self._rows[index]
    return f'{self.name} {self.split}[{row}]' + (f' ({name})' if name else '')

  def _record(self, index):
    return self._records[int(self._rows[index])]

  def _value(self, record, key):
    return self._parse(record, key)[0]

  def _parse(self, record, *keys):
    """Return the values of these features of a record."""
    import tensorflow_datasets as tfds

    if keys not in self._parsers:
      features = {key: self._features[key] for key in keys}
      self._parsers[keys] = tfds.features.FeaturesDict(features)
    parser, skip = self._parsers[keys], tfds.decode.SkipDecoding()
    images = (k for k in keys if isinstance(parser[k], tfds.features.Image))
    decoders = dict.fromkeys(images, skip) or None
    example = parser.deserialize_example_np(record, decoders=decoders)
    return [_arrays(self._features[key], example[key]) for key in keys]

  def _computed(self, value):
    """Return the label of a value of the feature `label_key`."""
    if self.label_fn is not None:
      value = self.label_fn(value)
    return value if np.ndim(value) else int(value)


def _cell(value):
  """Return bytes as text, also in lists and arrays."""
  if isinstance(value, list | np.ndarray):
    return list(map(_cell, value))
  return value.decode(errors='replace') if isinstance(value, bytes) else value


def _arrays(feature, value):
  """Return `value` with arrays [n, ...] in place of the lists of sequences."""
  inner = getattr(feature, 'feature', feature)
  if isinstance(value, dict):
    return {k: _arrays(inner[k], v) for k, v in value.items()}
  if isinstance(value, list) and None not in inner.shape:
    return np.array(value, inner.np_dtype).reshape(len(value), *inner.shape)
  return value


def _builder(name, data_dir):
  """Return the TFDS builder of a prepared data set."""
  import tensorflow_datasets as tfds

  folder = epath.Path(data_dir or '').expanduser() / name
  if (folder / 'dataset_info.json').exists():
    return tfds.builder_from_directory(folder)
  try:
    builder = tfds.builder(name, data_dir=data_dir)
  except tfds.core.DatasetNotFoundError as error:
    raise UserError(
      f'{name!r} is not a data set of TFDS, and it is not prepared in'
      f' {data_dir or "~/tensorflow_datasets"}. Write it with `python -m'
      f' vit_jax.tools.prepare SOURCE DIR/{name}` (docs/data.md), and set'
      ' --config.data.source.data_dir=DIR.'
    ) from error
  if (builder.data_path / 'dataset_info.json').exists():
    return tfds.builder_from_directory(builder.data_path)
  where = '' if data_dir is None else f", data_dir='{data_dir}'"
  raise UserError(
    f'The TFDS data set {name!r} is not prepared: {builder.data_path} has no'
    ' dataset_info.json. Prepare it with\n'
    '  python -c "import tensorflow_datasets as tfds;'
    f" tfds.builder('{name}'{where}, file_format='array_record')"
    '.download_and_prepare()"\n'
    'Many data sets need TensorFlow for this step. Reading does not.'
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
    raise UserError(
      f'The TFDS data set {name!r} in {path} is prepared as {kind}, which has'
      ' no random access. Convert it with the following command, which keeps'
      f' the old files:\n  python -m vit_jax.tools.to_array_record {path}'
    ) from None
