"""Sources by name, for configs and command lines: open_source('hf:beans')."""

import os
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from etils import epath

from vit_jax.data.sources import tables
from vit_jax.data.sources.folder import Folder
from vit_jax.data.sources.hugging_face import FILES, SAVED, HuggingFace
from vit_jax.data.sources.tfds import Tfds
from vit_jax.data.subsets import Slice, Source
from vit_jax.data.targets import Targets
from vit_jax.types import MACHINE, Decode, PathLike, PathRule, UserError

_READERS: dict[str, Any] = {'folder': Folder, 'tfds': Tfds, 'hf': HuggingFace}
# Files that show the kind of a folder.
_MARKS = {'features.json': 'tfds', **dict.fromkeys(SAVED, 'hf')}
_WITH_SPLIT = re.compile(r'(.+):([A-Za-z_][\w.-]*(?:\[[^\]]*\])?(?:\+.*)?)')


def open_source(
  path: Annotated[PathLike | None, MACHINE, 'or csv'] = None,
  *,
  csv: Annotated[PathLike | None, MACHINE] = None,
  targets: Targets | None = None,
  split: str | None = None,
  split_key: str | None = None,
  group_key: PathRule | None = None,
  stratified: bool = False,
  image_key: str | None = None,
  label_key: str | None = None,
  class_names: PathLike | Sequence[str] | None = None,
  channels: Literal[1, 3] = 3,
  exif: bool | None = None,
  decode: Decode | None = None,
  classes: bool = True,
) -> Source:
  """Return the source that a name such as 'tfds:cifar10:train' stands for.

    folder:PATH              images in class folders
    tfds:NAME:SPLIT          TensorFlow Datasets, by name or folder
    hf:NAME[:CONFIG]:SPLIT   Hugging Face datasets, by name, folder or files

  PATH and the folders of TFDS can be URLs (gs://, s3://). Without a kind it is
  'folder', or what the files in the folder or its ending say.

  Args:
    path: the name; default: the folder of `csv`.
    csv: a table of images, see `Folder`.
    targets: kind of the labels; default: classes, see targets.py.
    split: a split, if it is not in the name, and a slice in shuffled order, see
      `subsets.Slice`: 'train[:90%]', or '[:90%]' of all.
    stratified: whether the slice takes the same fraction of each class.
    group_key: column of the patients or objects that no slice divides; or a
      pattern, such as '(patient[0-9]+)', for a part of the path of the image.
    split_key, image_key, label_key, channels, exif, decode: passed to the
      source.
    class_names: list of names, or a file with one name per line.
    classes: False: without labels; a folder has images anywhere below it.
  """
  if path is None:
    if csv is None:
      raise UserError('Give the path of images, or csv, the path of a table.')
    folder, csv = os.path.split(os.fspath(csv))
    path = folder or '.'
  kind, name = kind_and_name(os.fspath(path))
  start, bracket, rest = (split or '').partition('[')
  if kind != 'folder' and not start and (match := _WITH_SPLIT.fullmatch(name)):
    name, start = match.groups()
  if kind == 'tfds' and not start:
    raise UserError(
      f'tfds:{name} names no split. Add it, as in tfds:{name}:train.'
    )
  options: dict[str, Any] = {
    'split': start or None,
    'csv': csv,
    'targets': targets,
    'split_key': split_key,
    'group_key': group_key if kind == 'folder' else None,
    'image_key': image_key,
    'label_key': label_key,
    'class_names': tables.class_names(class_names),
    'exif': exif,
    'decode': decode,
    # Records of TFDS have a label, which costs nothing.
    'classes': None if classes or kind == 'tfds' else False,
  }
  if kind == 'hf' and '://' not in name:
    name, _, config = name.partition(':')
    options['config'] = config or None
  options = {k: v for k, v in options.items() if v is not None}
  source: Any = _READERS[kind](name, channels=channels, **options)
  groups = None if group_key is None else _groups(source, group_key)
  if bracket:
    bounds = bracket + rest
    part = Slice(source, bounds, stratified=stratified, groups=groups)
    groups = groups and [groups[i] for i in part.indices]
    source = part
  if groups is not None:  # evaluators may not share them
    source.groups = frozenset(groups)
  return source


def _groups(source, key):
  """Return the group of each example: a cell, or a part of the path."""
  path = getattr(source, 'file_name', source.describe)
  is_column = '(' not in key
  cells = source.column(key) if is_column else map(path, range(len(source)))
  found = tables.groups(cells, key)
  none = [i for i, x in enumerate(found) if not x]
  if none:
    raise UserError(
      f'group_key={key!r}: {source.describe(none[0])} and {len(none) - 1} more '
      'have no group. Expected a column without empty cells, or a pattern '
      "with a group in (), such as '(patient[0-9]+)', that every path has."
    )
  tables.say_once(f'group_key={key!r}: {len({*found}):,} groups stay whole')
  return found


def split_and_name(text: str) -> tuple[str, str]:
  """Return SPLIT and NAME of '[SPLIT=]NAME'.

  Without SPLIT it is what the name ends with, as 'tfds:cifar10:test' does, or
  'train'.
  """
  if match := re.fullmatch(r'([A-Za-z]\w*)=(.*)', text, re.DOTALL):
    return match[1], match[2]
  match = re.search(r':([A-Za-z]\w*)(\[[^\]]*\])?$', text)
  return (match[1] if match else 'train'), text


def kind_and_name(text: str) -> tuple[str, str]:
  """Return the kind of a source and the rest of its name."""
  kind, colon, name = text.partition(':')
  if kind in _READERS and name:
    return kind, name
  if colon and not name.startswith('//') and re.fullmatch(r'\w+', kind):
    raise UserError(
      f'{text!r}: unknown kind {kind!r}. The kinds are folder:PATH,'
      ' tfds:NAME:SPLIT and hf:NAME:SPLIT. Prepare other files by'
      ' vit_jax.tools.prepare.'
    )
  if text.endswith(FILES):
    return 'hf', text
  folder = epath.Path(text).expanduser()
  marks = (kind for x, kind in _MARKS.items() if (folder / x).exists())
  return next(marks, 'folder'), text
