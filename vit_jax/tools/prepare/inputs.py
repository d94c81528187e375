"""The source that is prepared; compressed tar files are unpacked once."""

import dataclasses
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Mapping
from typing import Any

import fsspec

from vit_jax.data import fingerprints, image_files, shards, sources, tar_files
from vit_jax.data.pipeline import Source
from vit_jax.runs.files import PathLike, replacing

_OPENERS = {'gz': 'gzip', 'bz2': 'bz2', 'xz': 'xz'}
_COMPRESSED = re.compile(r'(?:(\w+):)?(?!//)(.*\.(?:tgz|tbz2|txz|tar\.\w+))')


@dataclasses.dataclass
class Input:
  """A source by name, see `sources.open_source`.

  Attributes:
    text: the name.
    split: of the source; None to take the only one.
    options: more arguments of `open_source`.
    unpacked: folder for the content of compressed tar files.
  """

  text: str
  split: str | None
  options: Mapping[str, Any]
  unpacked: pathlib.Path

  def __post_init__(self) -> None:
    self._kind, self._archives = None, []
    match = _COMPRESSED.fullmatch(self.text)
    if match is not None:
      self._kind = match[1]
      names = shards.expand(match[2], endings=tar_files.ENDINGS)
      self._archives = [x for x in names if _compression(x) is not None]
      if self._archives and len(self._archives) < len(names):
        raise ValueError(
          f'{self.text}: {len(self._archives)} of {len(names)} files are'
          ' compressed. Expected all or none of them.'
        )

  @property
  def is_compressed(self) -> bool:
    return bool(self._archives)

  def open(self, split: str | None) -> Source:
    """Return the source.

    Args:
      split: taken if the source has splits and none is named.
    """
    text = self.text
    if self._archives:
      text = self._unpack()
    options = dict(self.options)
    if self.split is not None:
      return sources.open_source(text, split=self.split, **options)
    try:
      return sources.open_source(text, **options)
    except ValueError as error:
      if split is None or 'split' not in str(error):
        raise
      return sources.open_source(text, split=split, **options)

  def fingerprint(self, source: Source | None) -> dict[str, Any]:
    """Return the fingerprint: of the compressed files, or of the source."""
    if not self._archives:
      assert source is not None
      return fingerprints.fingerprint(source)
    parts = []
    for name in self._archives:
      fs, inner = image_files.file_system(name)
      size = os.path.getsize(inner) if fs is None else fs.size(inner)
      with fsspec.open(name, 'rb') as file:
        start = zlib.crc32(file.read(2**20))
      parts.append(f'{os.path.basename(name)} {size} {start}')
    return {
      'kind': 'compressed tar files',
      'files': fingerprints.digest(parts),
      'split': self.split,
      'options': {key: str(value) for key, value in self.options.items()},
    }

  def _unpack(self):
    """Unpack what is not yet unpacked; return the name of the result."""
    self.unpacked.mkdir(parents=True, exist_ok=True)
    made = []
    for name in self._archives:
      stem = re.sub(r'\.(tgz|tbz2|txz|tar\.\w+)$', '', os.path.basename(name))
      target = self.unpacked / f'{stem}.tar'
      if not target.exists():
        _unpack_file(name, target)
      made.append(os.fspath(target))
    text = made[0] if len(made) == 1 else f'{{{",".join(made)}}}'
    return f'{self._kind}:{text}' if self._kind else text


def _compression(name):
  """Return 'gz' etc. of a compressed file, or None."""
  try:
    with fsspec.open(name, 'rb') as file:
      found = tar_files.compression(file.read(8))
  except Exception as error:  # each file system raises its own types
    raise ValueError(f'cannot open {name}: {error}') from error
  if found is None:
    return None
  ending, program = found
  if ending not in _OPENERS:
    raise ValueError(
      f'{name} is compressed ({ending}), which cannot be read. Unpack it with'
      f'\n  {program} --keep {name}'
    )
  return ending


def _unpack_file(name, target):
  kind = _OPENERS[_compression(name)]
  print(f'unpacking {name} to {target}, front to back ...', flush=True)
  try:
    with (
      replacing(target) as partial,
      fsspec.open(name, 'rb', compression=kind) as packed,
      open(partial, 'wb') as file,
    ):
      shutil.copyfileobj(packed, file, 2**20)
  except (EOFError, zlib.error, OSError) as error:
    if getattr(error, 'errno', None) is not None:  # of the disk
      raise ValueError(f'cannot unpack {name} to {target}: {error}') from error
    raise ValueError(
      f'{name} is truncated or damaged: {error}. Copy it again.'
    ) from error


def output_split(split: str | None, given: Input, source: Source | None) -> str:
  """Return the name of the prepared split.

  It is `split`, else that of the source, which its name can contain, as in
  'tfds:cifar10:test', else 'train'.
  """
  kind, _, name = given.text.partition(':')
  named = None
  if kind in sources.KINDS and sources.KINDS[kind].names_split:
    match = re.search(r'(?:^|:)([A-Za-z]\w*)(\[[^\]]*\])?$', name)
    named = match and match[1]
  known = split or given.split or named or getattr(source, 'split', None)
  match = re.match(r'[A-Za-z]\w*', str(known or 'train'))
  if match is None or (split and match[0] != split):
    raise ValueError(
      f'--split={split!r} is not a name of a split. Use letters, digits and'
      " underscores, such as 'train'. A slice of the source is chosen by"
      " --source_split='train[:90%]'."
    )
  return match[0]


def is_url(path: PathLike) -> bool:
  return '://' in os.fspath(path)
