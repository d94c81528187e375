"""WebDataset shards, read at random: tar files with the parts of each sample.

A sample consists of the members with the same key, which is the path up to the
first dot of its last part: 000123.jpg and 000123.cls, or a/b.jpg and a/b.json.
"""

import json
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from absl import logging

from vit_jax.config.domains import OneOf, checked
from vit_jax.data import fingerprints, image_files, shards, tables, tar_files
from vit_jax.runs.files import PathLike

_LARGEST_LABEL = 2**20  # bytes


@checked
class WebDataset:
  """Images and labels in WebDataset shards, local or on an object store.

  The headers of the shards are read once (of remote shards, about all bytes),
  in parallel, and kept in a cache. Each shard is kept when it has been read, so
  that an interrupted pass resumes. Images are read at their places in a shard,
  over the network too.

  source[i] is {'image': bytes, 'label': int or float [K]}. The order is that of
  the shards and of their members. `.ignored` is the number of samples without
  an image and of members that belong to no sample.

  Args:
    files: names, globs ('train-*.tar') or braces ('train-{0000..0147}.tar') of
      shards, see shards.py; a folder of shards; or an index in JSON as the
      package webdataset writes it ('shardlist'), whose numbers of samples are
      checked.
    split: reads only the shards of this split, see `shards.expand`.
    image_key: endings of the image, separated by ';': the first that a sample
      has is its image.
    label_key: ending of the label, or several: 'cls;json:label'. '.cls',
      '.index' and '.txt' contain an int or a class name. 'json:KEY' is an entry
      of the sample's JSON: an int, a name, or a list of K weights;
      'json:a.b' is an entry of an entry. '' is for images without labels: each
      label is 0.
    class_names: names of the classes in the order of their labels, or a file
      with one name per line, or a JSON list. Default: the file classnames.txt
      next to the shards or in the folder above, if it exists and labels are
      ints; the sorted labels, if they are names.
    channels: 1 or 3, to which the images are decoded.
    exif: apply the EXIF orientation; see `images.decode`.
    cache_dir: folder of the indices of shards; default: vit_jax/index in the
      user's cache folder. An empty string disables the cache.

  Raises:
    ValueError: no such shard; a shard that is not a tar file, or compressed,
      truncated or damaged (says at which byte); a sample without a label, or
      with two members of the same ending; no samples.
  """

  def __init__(
    self,
    files: PathLike | Sequence[PathLike],
    *,
    split: str | None = None,
    image_key: str = 'jpg;jpeg;png;webp;bmp',
    label_key: str = 'cls;index;json:label',
    class_names: PathLike | Sequence[str] | None = None,
    channels: Annotated[int, OneOf(1, 3)] = 3,
    exif: bool = True,
    cache_dir: PathLike | None = None,
  ) -> None:
    self.channels: int = channels
    self.exif: bool = exif
    self._image_keys = [x.lower().lstrip('.') for x in image_key.split(';')]
    self._label_keys = _label_keys(label_key)
    names, counts = _shards(files, split)
    self._shards = shards.Shards(names)
    self._name = names[0] if len(names) == 1 else f'{names[0]}, ...'
    found = shards.index(
      self._shards,
      self._scan,
      kind=f'webdataset {image_key} {label_key}',
      cache_dir=cache_dir,
    )
    _check_counts(names, counts, [len(x['offsets']) for x in found])
    sizes = [len(x['offsets']) for x in found]
    self._shard = np.repeat(np.arange(len(names), dtype=np.int32), sizes)
    self._offset, self._size, self._modified = (
      np.concatenate([x[key] for x in found])
      for key in ('offsets', 'sizes', 'modified')
    )
    self.ignored: int = sum(int(x['others']) for x in found)
    if not len(self._shard):
      raise ValueError(
        f'{self._name} has no samples with an image, but {self.ignored} others.'
        f' Images end in {image_key}. Set image_key to another ending.'
      )
    self._paths = _joined(found, 'paths')
    known = tables.class_names(class_names)
    if self._label_keys:
      values = [json.loads(text) for text in _joined(found, 'labels')]
      if known is None and all(isinstance(x, int) for x in values):
        known = _names_beside(names[0])
      self._labels, known = tables.encode(self._name, values, known)
    else:
      self._labels = np.zeros(len(self._shard), np.int32)
    self.class_names: list[str] | None = known
    self.num_classes: int | None = None if known is None else len(known)
    if self._labels.ndim > 1:
      self.num_classes = self._labels.shape[1]
    if self.ignored:
      logging.warning(
        f'WebDataset {self._name}: {len(self)} images. Ignored {self.ignored}'
        ' samples without an image and members without a key.'
      )

  def __len__(self) -> int:
    return len(self._shard)

  def __getitem__(self, index: int) -> dict[str, Any]:
    index = range(len(self))[index]
    place = int(self._shard[index]), int(self._offset[index])
    data = self._shards.read(*place, int(self._size[index]))
    label = self._labels[index]
    return {'image': data, 'label': label.copy() if label.ndim else int(label)}

  def labels(self) -> np.ndarray:
    """Return the labels of all examples: int32 [n] or float32 [n, K]."""
    return self._labels.copy()

  def file_name(self, index: int) -> str:
    """Return the path of the image in its shard."""
    return self._paths[index]

  def describe(self, index: int) -> str:
    """Return the shard, the path of the image in it, and its place."""
    name = self._shards[int(self._shard[index])]
    place = f'{int(self._size[index])} bytes at {int(self._offset[index])}'
    return f'{self.file_name(index)} in {name}, {place}'

  def fingerprint(self) -> dict[str, Any]:
    """Return class sizes and hashes of what the headers of the images say."""
    headers = np.stack([self._size, self._modified]).astype('<i8')
    labels = self._labels.astype(self._labels.dtype.newbyteorder('<'))
    return {
      'kind': 'vit_jax.data.webdataset.WebDataset',
      'num_examples': len(self),
      'classes': tables.class_sizes(self._labels, self.class_names),
      'files': fingerprints.digest([self._paths.data.tobytes()]),
      'sizes': fingerprints.digest([headers.tobytes()]),
      'labels': fingerprints.digest([labels.tobytes()]),
    }

  def _scan(self, shard):
    """Return the index of one shard."""
    name = self._shards[shard]
    read = shards.Ahead(self._shards, shard)
    samples: dict[str, dict[str, Any]] = {}
    texts: dict[tuple[str, str], bytes] = {}
    endings = {x.partition(':')[0] for x in self._label_keys}
    others = 0
    size = self._shards.sizes[shard]
    for member in tar_files.members(read, size, name):
      folder, last = posixpath.split(member.path)
      stem, dot, ending = last.partition('.')
      if not dot:
        others += 1
        continue
      key, ending = posixpath.join(folder, stem), ending.lower()
      sample = samples.setdefault(key, {})
      if ending in sample:
        raise ValueError(
          f'{name} has two members {member.path!r}, at the bytes'
          f' {sample[ending].offset} and {member.offset}. Each sample needs a'
          ' key of its own. Write the shard again.'
        )
      sample[ending] = member
      if ending in endings:
        texts[key, ending] = read(
          member.offset, min(member.size, _LARGEST_LABEL)
        )
    found, labels = [], []
    for key, sample in samples.items():
      image = next((sample[x] for x in self._image_keys if x in sample), None)
      if image is None:
        others += 1
        continue
      found.append(image)
      if self._label_keys:
        labels.append(json.dumps(self._label(name, key, sample, texts)))
    paths = shards.Texts.of(x.path for x in found)
    label_texts = shards.Texts.of(labels)
    numbers = np.array([x[1:] for x in found], np.int64).reshape(-1, 3)
    offsets, sizes, modified = numbers.T
    return {
      'paths': paths.data,
      'paths_ends': paths.ends,
      'labels': label_texts.data,
      'labels_ends': label_texts.ends,
      'offsets': offsets,
      'sizes': sizes,
      'modified': modified,
      'others': np.array(others),
    }

  def _label(self, name, key, sample, texts):
    """Return the label of a sample: an int, a name, or a list of numbers."""
    where = f'the sample {key!r} of {name}'
    problem = ''
    for label_key in self._label_keys:
      ending, _, entry = label_key.partition(':')
      if ending not in sample:
        continue
      text = texts[key, ending]
      try:
        if ending != 'json':
          value = text.decode().strip()
          is_int = re.fullmatch(r'[+-]?\d+', value)
          return int(value) if is_int else _filled(value)
        value = json.loads(text)
        for part in entry.split('.'):
          value = value[part]
        return _filled(value)
      except (ValueError, KeyError, TypeError) as error:
        at = sample[ending].offset
        problem = (
          f' Its .{ending} at byte {at} contains {text[:60]!r}:'
          f' {type(error).__name__}: {error}.'
        )
    raise ValueError(
      f'{where} has no label {" or ".join(self._label_keys)}. It has'
      f' {", ".join(f".{x}" for x in sample)}, from byte'
      f' {next(iter(sample.values())).offset} on.{problem} Set label_key to'
      " another ending ('txt') or entry ('json:KEY'), or to '' for images"
      ' without labels.'
    )


def _label_keys(text):
  keys = [x.strip().lstrip('.') for x in text.split(';') if x.strip()]
  for key in keys:
    ending, colon, entry = key.partition(':')
    if (ending == 'json') != bool(colon and entry):
      raise ValueError(
        f'label_key={text!r}: {key!r} is not an ending such as cls, nor an'
        " entry of the sample's JSON such as json:label."
      )
  return keys


def _filled(value):
  """Return a label; raise ValueError if it is none."""
  if value in ('', None):
    raise ValueError('it is empty')
  return value


def _shards(files, split):
  """Return the names of the shards, and their sizes from a JSON index."""
  is_one = isinstance(files, str) or not isinstance(files, Sequence)
  if not is_one or not str(files).endswith('.json'):
    names = shards.expand(files, endings=tar_files.ENDINGS, split=split)
    shards.check_one_split(names, split)
    return names, {}
  path = os.fspath(files)
  try:
    index = json.loads(image_files.read(*image_files.file_system(path)))
    listed = {x['url']: x.get('nsamples') for x in index['shardlist']}
  except Exception as error:  # each file system raises its own types
    raise ValueError(
      f'cannot read {path}: {type(error).__name__}: {error}. Expected an index'
      " of shards, {'shardlist': [{'url': ..., 'nsamples': ...}, ...]}."
    ) from error
  folder = posixpath.join(posixpath.dirname(path), index.get('base_path') or '')
  counts = {
    url if '://' in url else posixpath.join(folder, url): count
    for url, count in listed.items()
  }
  if not counts:
    raise ValueError(f'{path} lists no shards.')
  return shards.expand(list(counts), endings=('.tar',), split=split), counts


def _check_counts(names, counts, found):
  """Raise ValueError if a JSON index promises other numbers of samples."""
  for name, count in zip(names, found):
    expected = counts.get(name)
    if expected not in (None, count):
      raise ValueError(
        f'{name} has {count} samples with an image. The index says {expected}.'
        ' Copy the shard again, or write a new index.'
      )


def _names_beside(name):
  """Return the lines of classnames.txt near a shard; None without the file."""
  folder = posixpath.dirname(name)
  for place in (folder, posixpath.dirname(folder)):
    path = posixpath.join(place, 'classnames.txt')
    fs, inner = image_files.file_system(path)
    try:
      is_there = os.path.isfile(inner) if fs is None else fs.isfile(inner)
    except Exception:  # each file system raises its own types
      is_there = False
    if is_there:
      return tables.class_names(path)
  return None


def _joined(
  found: Sequence[Mapping[str, np.ndarray]], key: str
) -> shards.Texts:
  """Return the Texts of all shards as one."""
  ends, start = [], 0
  for each in found:
    ends.append(each[f'{key}_ends'] + start)
    start += len(each[key])
  data = np.concatenate([each[key] for each in found])
  return shards.Texts(data, np.concatenate(ends))
