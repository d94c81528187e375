"""Data sets in the format of Hugging Face's package `datasets`."""

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from vit_jax.config.domains import OneOf, checked
from vit_jax.data import arrow, fingerprints, tables
from vit_jax.runs.files import PathLike


@checked
class HuggingFace:
  """A split of a Hugging Face data set; images stay encoded.

  The data set is on the hub, in a local folder that `load_dataset` understands
  (parquet files, class folders of images, ...), or in one that `save_to_disk`
  has written. It is prepared in the cache of `datasets`, once. Without a
  network, set HF_HUB_OFFLINE=1: what has been prepared is still found.

  source[i] is {'image': bytes, 'label': int or float [K]}.

  Args:
    name: 'beans', 'USER/NAME', or a folder; a URL of one that `save_to_disk`
      has written.
    split: 'train', also with slices and sums as `datasets` reads them:
      'train[:90%]', 'train+validation'. Slices are consecutive examples.
    config: of a data set that has several.
    revision: commit, branch or tag on the hub.
    data_dir: folder of the data set that is read.
    image_key: column of the image.
    label_key: column of the label: a ClassLabel, ints, texts, or lists of K
      numbers. '' is for images without labels: each label is 0.
    class_names: names of the classes in the order of their labels, or a file
      with one name per line, or a JSON list. Default: those of the ClassLabel;
      else the sorted labels, if they are texts.
    channels: 1 or 3, to which the images are decoded.
    exif: apply the EXIF orientation; see `images.decode`.
    cache_dir: folder of prepared data sets; default: that of `datasets`.

  Raises:
    ValueError: the package is not installed; no such data set, split or column;
      a column of the wrong type; empty or invalid labels.
  """

  def __init__(
    self,
    name: PathLike,
    *,
    split: str,
    config: str | None = None,
    revision: str | None = None,
    data_dir: PathLike | None = None,
    image_key: str = 'image',
    label_key: str = 'label',
    class_names: PathLike | Sequence[str] | None = None,
    channels: Annotated[int, OneOf(1, 3)] = 3,
    exif: bool = True,
    cache_dir: PathLike | None = None,
  ) -> None:
    datasets = _package()
    self.channels: int = channels
    self.exif: bool = exif
    self.name, self.split, self.config = os.fspath(name), split, config
    self._image_key = image_key
    options = {
      'name': config,
      'revision': revision,
      'data_dir': data_dir,
      'cache_dir': cache_dir,
    }
    options = {k: v for k, v in options.items() if v is not None}
    data = _load(datasets, self.name, split, options)
    where = f'{self.name} {split}'
    if not len(data):
      raise ValueError(f'{where} has no examples.')
    self._check_columns(where, data, label_key)
    if isinstance(data.features[image_key], datasets.Image):
      undecoded = datasets.Image(decode=False)
      data = data.cast_column(image_key, undecoded)
    known = tables.class_names(class_names)
    if known is None and label_key:
      feature = data.features[label_key]
      known = getattr(feature, 'names', None)
    if label_key:
      column = data.select_columns([label_key]).with_format('arrow')[:]
      self._labels, known = arrow.encode_labels(
        f'{where}, column {label_key!r}', column.column(label_key), known
      )
    else:
      self._labels = np.zeros(len(data), np.int32)
    self._images = data.select_columns([image_key]).with_format(None)
    self.class_names: list[str] | None = None if known is None else list(known)
    self.num_classes: int | None = None if known is None else len(known)
    if self._labels.ndim > 1:
      self.num_classes = self._labels.shape[1]

  def __len__(self) -> int:
    return len(self._labels)

  def __getitem__(self, index: int) -> dict[str, Any]:
    index = range(len(self))[index]
    cell = self._images[index][self._image_key]
    label = self._labels[index]
    return {
      'image': arrow.image_bytes(cell, os.path.expanduser(self.name)),
      'label': label.copy() if label.ndim else int(label),
    }

  def labels(self) -> np.ndarray:
    """Return the labels of all examples: int32 [n] or float32 [n, K]."""
    return self._labels.copy()

  def file_name(self, index: int) -> str | None:
    """Return the name of the image's file, or None if there is none."""
    cell = self._images[range(len(self))[index]][self._image_key]
    path = cell.get('path') if isinstance(cell, Mapping) else None
    return None if path is None else os.path.basename(path)

  def describe(self, index: int) -> str:
    """Return data set, split and index, and the file name if there is one."""
    where = f'{self.name} {self.split}[{range(len(self))[index]}]'
    name = self.file_name(index)
    return where if name is None else f'{where} ({name})'

  def fingerprint(self) -> dict[str, Any]:
    """Return name, version, class sizes and a hash of the labels."""
    labels = self._labels.astype(self._labels.dtype.newbyteorder('<'))
    info = self._images.info
    found = {
      'kind': 'vit_jax.data.hugging_face.HuggingFace',
      'name': os.path.basename(self.name.rstrip('/')),
      'config': self.config,
      'version': str(info.version) if info.version else None,
      'num_examples': len(self),
      'classes': tables.class_sizes(self._labels, self.class_names),
      'bytes': self._images.data.nbytes,
      'labels': fingerprints.digest([labels.tobytes()]),
    }
    return {k: v for k, v in found.items() if v is not None}

  def _check_columns(self, where, data, label_key):
    """Raise ValueError unless the columns exist and can be read."""
    features, listed = data.features, ', '.join(data.features)
    for argument, key in (
      ('image_key', self._image_key),
      ('label_key', label_key),
    ):
      if key and key not in features:
        none = ", or to '' for images without labels"
        none = none if argument == 'label_key' else ''
        raise ValueError(
          f'{where} has no column {key!r} ({argument}). It has {listed}. Set'
          f' {argument} to one of them{none}.'
        )
    kind = data.data.schema.field(self._image_key).type
    if not arrow.is_image_type(kind):
      raise ValueError(
        f'the column {self._image_key!r} of {where} is'
        f' {features[self._image_key]}. Expected images. It has {listed}. Set'
        ' image_key to another one.'
      )


def _package():
  try:
    import datasets
  except ImportError as error:
    raise ValueError(
      'this source needs the package datasets:'
      " pip install 'vit_jax[huggingface]'"
    ) from error
  return datasets


def _load(datasets, name, split, options):
  """Return a datasets.Dataset."""
  local = os.path.expanduser(name)
  is_url = '://' in name
  saved = is_url or any(
    os.path.isfile(os.path.join(local, x))
    for x in ('state.json', 'dataset_dict.json')
  )
  beyond = [k for k in options if k != 'cache_dir']
  if saved and beyond:
    raise ValueError(
      f'{name} was written by save_to_disk, so it takes no'
      f' {", ".join(beyond).replace("name", "config")}.'
    )
  try:
    if saved:
      return _load_saved(datasets, name if is_url else local, split)
    name = local if os.path.exists(local) else name
    found = datasets.load_dataset(name, split=split, **options)
  except Exception as error:  # of many types: of the hub, of files, of arrow
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    more = ''.join(f', {k}={v!r}' for k, v in options.items())
    raise ValueError(
      f'cannot load the Hugging Face data set {name!r}, split={split!r}{more}:'
      f' {reason.rstrip(".")}. Check the names, and the network if it is on the'
      ' hub.'
    ) from error
  return found


def _load_saved(datasets, name, split):
  """Return a split of what `save_to_disk` has written."""
  loaded = datasets.load_from_disk(name)
  if not isinstance(loaded, Mapping):  # a single, perhaps unnamed split
    loaded = {str(loaded.split or split.partition('[')[0]): loaded}
  sizes = {key: len(value) for key, value in loaded.items()}
  wanted = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
  parts = [
    loaded[each.splitname].select(range(each.from_ or 0, each.to))
    if (each.from_, each.to) != (None, None)
    else loaded[each.splitname]
    for each in wanted
  ]
  return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
