"""Data sets read by Hugging Face's package `datasets`."""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from vit_jax.data.sources import image_files, tables
from vit_jax.data.subsets import Example
from vit_jax.types import PathLike, UserError

# Readers of files that are named themselves, by ending.
_BUILDERS = {'.parquet': 'parquet', '.tar': 'webdataset', '.arrow': 'arrow'}
FILES = tuple(_BUILDERS)
SAVED = ('dataset_dict.json', 'state.json')  # files of save_to_disk


class HuggingFace:
  """A split of a data set that `datasets` reads; images stay encoded.

  It is on the hub, in a folder of `load_dataset` or `save_to_disk`, or in
  parquet or WebDataset files. Without a network, set HF_HUB_OFFLINE=1 to read
  what has been prepared.

  source[i] is {'image': bytes, 'label': int or float [K]} and other columns.

  Args:
    name: 'beans', 'USER/NAME', a folder, or a glob of parquet or tar files:
      '/data/train-*.tar', whose only split is 'train'.
    split: 'train', 'train[:90%]' (consecutive examples), 'train+validation'.
      Data that `save_to_disk` has written has no slices and sums.
    config: name of the configuration, for a data set that has several.
    image_key: column of the image; default: the only column of images.
    label_key: column of the label: a ClassLabel, ints, texts, or lists of K
      numbers; default: 'label', or 'cls' of a WebDataset.
    class_names: names of the classes in the order of their labels. Default:
      the names of the ClassLabel, else the sorted labels if they are texts.
    channels, exif: how images are decoded, see pipeline.py.
  """

  def __init__(
    self,
    name: PathLike,
    *,
    split: str = 'train',
    config: str | None = None,
    image_key: str | None = None,
    label_key: str | None = None,
    class_names: Sequence[str] | None = None,
    channels: Literal[1, 3] = 3,
    exif: bool = True,
  ) -> None:
    import datasets
    import huggingface_hub.constants as hub

    self.channels, self.exif = channels, exif
    self._where = f'{os.fspath(name)} {split}'
    name = os.path.expanduser(name)
    try:
      data = _load(name, split, config)
    except (OSError, ValueError) as e:  # of the package, the hub or a network
      raise UserError(f'{self._where} cannot be read: {e}') from e
    folder = os.path.dirname(name) if name.endswith(FILES) else name
    roots = folder, datasets.config.HF_DATASETS_CACHE, hub.HF_HUB_CACHE
    self._roots = tuple(os.path.abspath(x) + os.sep for x in roots)
    features = data.features
    if image_key is None:
      kinds = (k for k, v in features.items() if isinstance(v, datasets.Image))
      image_key = next(kinds, 'image')
    if label_key is None:
      label_key = 'label' if 'label' in features else 'cls'
    for argument, key in ('image_key', image_key), ('label_key', label_key):
      if key not in features:
        raise UserError(
          f'{self._where} has no column {key!r} ({argument}). It has'
          f' {", ".join(features)}.'
        )
    if isinstance(features[image_key], datasets.Image):
      data = data.cast_column(image_key, datasets.Image(decode=False))
    self._key = image_key
    self._columns = {k: data.select_columns([k]) for k in features}
    self._labels, names = tables.encode(
      f'The column {label_key!r} of {self._where}',
      data.with_format(None)[label_key][:],
      class_names or getattr(features[label_key], 'names', None),
    )
    self.class_names: list[str] | None = names
    self.num_classes: int | None = None if names is None else len(names)
    if self._labels.ndim > 1:
      self.num_classes = self._labels.shape[1]

  def __len__(self) -> int:
    return len(self._labels)

  def __getitem__(self, index: int) -> Mapping[str, Any]:
    image, label = self._value(index, self._key), self._labels[index]
    if isinstance(image, Mapping):
      image = image['bytes'] or (image['path'] and self._read(image['path']))
    if image is None:
      raise UserError(f'The column {self._key!r} is empty.')
    known = {'image': image, 'label': label if label.ndim else int(label)}
    read = functools.partial(self._value, index)
    return Example(known, self._columns, read)

  def labels(self) -> np.ndarray:
    """Return the labels of all examples: int32 [n] or float32 [n, K]."""
    return self._labels.copy()

  def describe(self, index: int) -> str:
    """Return data set, split and index, and the path if there is one."""
    image = self._value(index, self._key)
    path = image.get('path') if isinstance(image, Mapping) else None
    return f'{self._where}[{index}]' + (f' ({path})' if path else '')

  def _value(self, index, key):
    return self._columns[key][int(index)][key]

  def _read(self, path):
    """Return the bytes of an image file below the data set, or in a cache."""
    path = os.path.abspath(path)
    if not path.startswith(self._roots):
      raise UserError(f'The image {path} is not below {self._roots[0]}.')
    return image_files.read(path)


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
