"""Data sets read by Hugging Face's package `datasets`."""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from vit_jax.data import images
from vit_jax.data.sources import image_files, listed, tables
from vit_jax.data.subsets import Example
from vit_jax.data.targets import Classes, Targets
from vit_jax.types import Decode, PathLike, UserError

# Readers of files that are named themselves, by ending.
_BUILDERS = {'.parquet': 'parquet', '.tar': 'webdataset', '.arrow': 'arrow'}
FILES = tuple(_BUILDERS)
SAVED = ('dataset_dict.json', 'state.json')  # files of save_to_disk


class HuggingFace(tables.Labelled):
  """A split of a data set that `datasets` reads; images stay encoded.

  It is on the hub, in a folder of `load_dataset` or `save_to_disk`, or in
  parquet or WebDataset files. Without a network, set HF_HUB_OFFLINE=1 to read
  what has been prepared.

  source[i] is {'image': bytes or array, 'label': int or float [K]} and more.

  Args:
    name: 'beans', 'USER/NAME', a folder, or a glob of parquet or tar files:
      '/data/train-*.tar', whose only split is 'train'.
    split: 'train', 'train[:90%]' (consecutive examples), 'train+validation'.
      Data that `save_to_disk` has written has no slices and sums.
    config: name of the configuration, for a data set that has several.
    targets: kind of the labels, see targets.py.
    image_key: column of the image, or of paths below the data; default: the
      only column of images, else see `listed.IMAGES`.
    label_key: column of the label: a ClassLabel, ints, texts, or lists of K
      numbers; default: see `listed.LABELS`, 'cls', or the only ClassLabel.
    class_names: names of the classes in the order of their labels. Default:
      the names of the ClassLabel, else the sorted labels if they are texts.
    channels, exif: of `images.Colours`; or decode: another decoder.
    classes: if False, there are no labels: all are 0.
  """

  def __init__(
    self,
    name: PathLike,
    *,
    split: str = 'train',
    config: str | None = None,
    targets: Targets = Classes(),
    image_key: str | None = None,
    label_key: str | None = None,
    class_names: Sequence[str] | None = None,
    channels: Literal[1, 3] = 3,
    exif: bool = True,
    decode: Decode | None = None,
    classes: bool = True,
  ) -> None:
    import datasets
    import huggingface_hub.constants as hub

    self.targets = targets
    self.decode = decode or images.Colours(channels, exif)
    self.where = f'{os.fspath(name)} {split}'
    name = os.path.expanduser(name)
    try:
      data = _load(name, split, config)
    except datasets.exceptions.DatasetGenerationError as e:
      raise UserError(f'{self.where} is damaged: {e.__cause__}') from e
    except (OSError, ValueError) as e:  # of the package, the hub or a network
      raise UserError(f'{self.where} cannot be read: {e}') from e
    folder = os.path.dirname(name) if name.endswith(FILES) else name
    roots = folder, datasets.config.HF_DATASETS_CACHE, hub.HF_HUB_CACHE
    self._roots = tuple(os.path.abspath(x) + os.sep for x in roots)
    features = data.features
    likely = listed.named(features, (*listed.LABELS, 'cls'))
    likely = likely or _only(features, datasets.ClassLabel, ()) or 'label'
    keys = (targets.columns or [label_key or likely]) if classes else []
    tables.check(self.where, features, 'label_key', *keys)
    image_key = image_key or _only(features, datasets.Image, listed.IMAGES)
    self._key = image_key or 'image'
    tables.check(self.where, features, 'image_key', self._key)
    self.used = {'image': self._key}
    if isinstance(features[self._key], datasets.Image):
      data = data.cast_column(self._key, datasets.Image(decode=False))
    labels, names = np.zeros(len(data), np.int32), None
    if classes:
      self.used['label'] = '+'.join(keys)
      kind = getattr(features[keys[0]], 'feature', features[keys[0]])
      rows, labels, names = tables.labelled(
        self.where,
        targets,
        {key: data.with_format(None)[key][:] for key in keys},
        class_names or getattr(kind, 'names', None),
      )
      data = data if len(rows) == len(data) else data.select(rows)
    self._columns = {k: data.select_columns([k]) for k in features}
    super().__init__(labels, names)

  def __getitem__(self, index: int) -> Mapping[str, Any]:
    image = self._value(index, self._key)
    if isinstance(image, str):
      image = self._read(image)
    elif isinstance(image, Mapping):
      image = image['bytes'] or (image['path'] and self._read(image['path']))
    elif isinstance(image, list):
      image = np.array(image)
    if image is None:
      raise UserError(f'The column {self._key!r} is empty.')
    known = {'image': image, 'label': self._label(index)}
    read = functools.partial(self._value, index)
    return Example(known, self._columns, read)

  def describe(self, index: int) -> str:
    """Return data set, split and index, and the path if there is one."""
    image = self._value(index, self._key)
    path = image.get('path') if isinstance(image, Mapping) else image
    path = path if isinstance(path, str) else None
    return f'{self.where}[{index}]' + (f' ({path})' if path else '')

  def column(self, name: str) -> Sequence[Any]:
    """Return the values of a column."""
    tables.check(self.where, self._columns, 'group_key', name)
    return self._columns[name].with_format(None)[name][:]

  def _value(self, index, key):
    return self._columns[key][int(index)][key]

  def _read(self, path):
    """Return the bytes of an image file below the data set, or in a cache."""
    below = os.path.join(self._roots[0], path)
    path = os.path.abspath(below if os.path.exists(below) else path)
    if not path.startswith(self._roots):
      raise UserError(f'The image {path} is not below {self._roots[0]}.')
    return image_files.read(self.decode.paths(path))


def _only(features, kind, names):
  """Return the only column of this kind, or the first of the names."""
  found = [k for k, v in features.items() if isinstance(v, kind)]
  return found[0] if len(found) == 1 else listed.named(found or features, names)


def _load(name, split, config):
  """Return a datasets.Dataset."""
  import datasets

  if any(os.path.isfile(os.path.join(name, x)) for x in SAVED):
    loaded = datasets.load_from_disk(name)
    if not isinstance(loaded, Mapping):  # a single, perhaps unnamed split
      loaded = {str(loaded.split or split): loaded}
    if split not in loaded:
      raise UserError(f'{name} has the splits {[*loaded]}, not {split!r}.')
    return loaded[split]
  if builder := _BUILDERS.get(os.path.splitext(name)[1]):
    files = {'train': name}
    return datasets.load_dataset(builder, split=split, data_files=files)
  return datasets.load_dataset(name, config, split=split)
