"""Sources by name, for configs and command lines: open_source('tar:x.tar')."""

import dataclasses
import functools
import inspect
import itertools
import json
import os
import posixpath
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from vit_jax.config.domains import OneOf, checked
from vit_jax.data import (
  image_files,
  imagenet,
  shards,
  splits,
  tables,
  tar_files,
)
from vit_jax.data.folder import Folder
from vit_jax.data.hugging_face import HuggingFace
from vit_jax.data.parquet import Parquet
from vit_jax.data.pipeline import Source
from vit_jax.data.splits import Slice
from vit_jax.data.tar import Tar
from vit_jax.data.tfds import Tfds
from vit_jax.data.webdataset import WebDataset
from vit_jax.runs.files import PathLike


@dataclasses.dataclass(frozen=True)
class _Kind:
  """A kind of source.

  Attributes:
    make: class or function; its first argument is the name.
    example: of a name, for messages.
    names_split: whether the split can follow the name, as in 'cifar10:train'.
  """

  make: Callable[..., Any]
  example: str
  names_split: bool = False

  def takes(self, argument: str) -> bool:
    """Return whether `make` has such an argument."""
    return argument in inspect.signature(self.make).parameters

  def requires(self, argument: str) -> bool:
    """Return whether `make` has such an argument without a default."""
    found = inspect.signature(self.make).parameters.get(argument)
    return found is not None and found.default is found.empty


@functools.wraps(Tfds, updated=())
def _tfds(name: str, **options: Any) -> Tfds:
  """Return a TFDS source by name, or by the folder of a version."""
  about = os.path.join(os.path.expanduser(name), 'dataset_info.json')
  if not os.path.isfile(about):
    return Tfds(name, **options)
  with open(about) as file:
    info = json.load(file)
  *above, name, version = os.path.abspath(os.path.dirname(about)).split('/')
  if version != info['version']:  # a folder of its own, see tools.prepare
    return Tfds(version, data_dir='/'.join([*above, name]) or '/', **options)
  config = info.get('configName')
  if config:
    *above, _ = above
  name = f'{info["name"]}{f"/{config}" if config else ""}:{version}'
  return Tfds(name, data_dir='/'.join(above) or '/', **options)


@functools.wraps(HuggingFace, updated=())
def _hugging_face(name: str, **options: Any) -> HuggingFace:
  """Return a Hugging Face data set by 'NAME:CONFIG' or by its folder."""
  match = re.fullmatch(r'([^:]+):([\w.-]+)', name)
  if match is None or os.path.exists(os.path.expanduser(name)):
    return HuggingFace(name, **options)
  return HuggingFace(match[1], config=match[2], **options)


KINDS = {
  'folder': _Kind(Folder, 'folder:/data/flowers'),
  'tar': _Kind(Tar, 'tar:/data/flowers.tar'),
  'wds': _Kind(WebDataset, 'wds:/data/train-{0000..0147}.tar'),
  'parquet': _Kind(Parquet, 'parquet:/data/train-*.parquet'),
  'hf': _Kind(_hugging_face, 'hf:beans:train', names_split=True),
  'tfds': _Kind(_tfds, 'tfds:cifar10:train', names_split=True),
  'imagenet': _Kind(imagenet.archives, 'imagenet:/data:train', True),
}


@checked
def open_source(
  path: PathLike | None,
  *,
  split: str | None = None,
  stratified: bool = False,
  csv: PathLike | None = None,
  image_key: str | None = None,
  label_key: str | None = None,
  class_names: PathLike | Sequence[str] | None = None,
  channels: Annotated[int, OneOf(1, 3)] = 3,
  exif: bool | None = None,
) -> Source:
  """Return the source that a name such as 'wds:/data/*.tar' stands for.

    folder:PATH          images in class folders
    tar:FILES            tar files, also ImageNet's own
    wds:FILES            WebDataset shards
    parquet:FILES        parquet files
    hf:NAME[:CONFIG]:SPLIT   Hugging Face datasets, by name or folder
    tfds:NAME:SPLIT      TensorFlow Datasets, by name or folder
    imagenet:FOLDER:SPLIT    the tar files of ImageNet 2012: train, validation

  PATH and FILES can be URLs; FILES can have globs and braces. Without a kind it
  is guessed: a folder by its content, other files by their endings, and a tar
  file with the labels of samples is a WebDataset shard.

  Args:
    path: the name.
    split: a split, if it is not in the name, and a slice: 'train[:90%]'. Of
      sources without splits a slice: '[:90%]'.
    stratified: whether each slice has nearly the same fraction of every class.
    csv, image_key, label_key, class_names, channels, exif: of the source; None
      is its own default.

  Raises:
    ValueError: an unknown kind; nothing to guess from; an argument that this
      kind does not have; and those of the source.
  """
  if path is None:
    raise ValueError(
      'path=None. Set it to a folder of images or another source, in a config'
      ' with --config.data.source.path or'
      f' --config.evals.NAME.data.source.path. {_listed()}'
    )
  name, kind = _parse(os.fspath(path))
  made_from = KINDS[kind]
  options: dict[str, Any] = {
    'csv': csv,
    'image_key': image_key,
    'label_key': label_key,
    'class_names': tables.class_names(class_names),
    'exif': exif,
  }
  options = {k: v for k, v in options.items() if v is not None}
  if beyond := [k for k in options if not made_from.takes(k)]:
    raise ValueError(
      f'{path}: a source of the kind {kind!r} takes no {", ".join(beyond)}.'
    )
  options['channels'] = channels
  if made_from.takes('stratified'):  # it has slices of its own
    options |= {'split': split, 'stratified': stratified}
    return made_from.make(name, **options)
  named, bounds = splits.parse(split)
  if made_from.names_split:
    name, named = _split_off(name, kind, named)
  if named is None and made_from.requires('split'):
    raise ValueError(
      f'{path} names no split. Add it, as in {made_from.example!r}, or set'
      " split='train'."
    )
  if named is not None:
    options['split'] = named
  source = made_from.make(name, **options)
  if bounds is None:
    return source
  text = f'[{bounds[0] or ""}:{bounds[1] or ""}]'
  return Slice(source, text, stratified=stratified)


def _split_off(name, kind, split):
  """Return (name, split) of 'cifar10:train' or 'set:1.0.0:train[:90%]'."""
  if kind == 'imagenet' and name in imagenet.SPLITS:
    name = f'{imagenet.downloads()}:{name}'
  match = re.fullmatch(r'(.+):([A-Za-z_][\w.-]*(?:\[[^\]]*\])?(?:\+.*)?)', name)
  if match is None or (kind == 'hf' and split not in (None, match[2])):
    return name, split  # what follows the name is its configuration
  if split not in (None, match[2]):
    raise ValueError(
      f'the source {kind}:{name} names the split {match[2]!r}, but'
      f' split={split!r}. Name one of them.'
    )
  return match[1], match[2]


def _listed():
  examples = ', '.join(each.example for each in KINDS.values())
  return f'The kinds of sources are, for example, {examples}.'


def _parse(text):
  """Return (name without its kind, kind)."""
  kind, colon, name = text.partition(':')
  if kind in KINDS and colon and not name.startswith('//'):
    if not name:
      raise ValueError(f'{text!r} has no name, as in {KINDS[kind].example!r}.')
    return name, kind
  is_kind = colon and re.fullmatch(r'\w+', kind) and not name.startswith('//')
  if is_kind and not os.path.exists(text):
    raise ValueError(f'{text!r}: unknown kind {kind!r}. {_listed()}')
  return text, _guess(text)


def _guess(text):
  """Return the kind of a source from its name and content."""
  lower = text.lower()
  if lower.endswith('.parquet'):
    return 'parquet'
  if lower.endswith('.json'):
    return 'wds'
  if re.search(r'\.(tar|tgz|tar\.\w+)$', lower):
    return _kind_of_tar(text)
  fs, inner = image_files.file_system(text)
  try:
    if fs is None:
      folders = {x.name: x.is_dir() for x in os.scandir(inner)}
    else:
      listed = {x['name']: x['type'] for x in fs.ls(inner, detail=True)}
      folders = {
        posixpath.basename(k.rstrip('/')): v == 'directory'
        for k, v in listed.items()
      }
  except Exception as error:  # each file system raises its own types
    raise ValueError(
      f'{text!r} is neither a folder nor a file of a known kind ({error}).'
      f' {_listed()}'
    ) from error
  return _kind_of_folder(text, folders)


def _kind_of_folder(folder, is_folder):
  """Return the kind of a folder from {name: whether it is a folder}."""
  marks = {
    'features.json': 'tfds',
    'dataset_dict.json': 'hf',
    'state.json': 'hf',
  }
  for mark, kind in marks.items():
    if mark in is_folder:
      return kind
  if any(v and not k.startswith('.') for k, v in is_folder.items()):
    return 'folder'
  if any(x.startswith('ILSVRC2012_img_') for x in is_folder):
    return 'imagenet'
  kinds = {
    ending: min(found)
    for ending in ('.parquet', '.tar')
    if (found := [x for x in is_folder if x.lower().endswith(ending)])
  }
  if len(kinds) > 1:
    raise ValueError(
      f'{folder} has files of several kinds: {sorted(kinds.values())}. Name the'
      f' kind, e.g. {f"parquet:{folder}"!r}.'
    )
  if '.tar' in kinds:
    return _kind_of_tar(posixpath.join(folder, kinds['.tar']))
  return 'parquet' if kinds else 'folder'


def _kind_of_tar(text):
  """Return 'wds' if samples have more members than their image, else 'tar'."""
  names = shards.expand(text, endings=tar_files.ENDINGS)
  files = shards.Shards(names[:1])
  members = tar_files.members(shards.Ahead(files, 0), files.sizes[0], names[0])
  endings: dict[str, set[str]] = {}
  try:
    for member in itertools.islice(members, 32):
      folder, last = posixpath.split(member.path)
      stem, _, ending = last.partition('.')
      endings.setdefault(f'{folder}/{stem}', set()).add(ending.lower())
  except ValueError:  # it is reported when the source is opened
    pass
  images = {x.removeprefix('.') for x in image_files.ENDINGS}
  is_sample = any(each & images and each - images for each in endings.values())
  return 'wds' if is_sample else 'tar'
