"""The metadata of a TFDS data set, written without TensorFlow."""

import json
import os
import pathlib
import re
import tempfile
from collections.abc import Mapping, Sequence

from vit_jax.runs.files import PathLike, write_atomically
from vit_jax.tools.prepare.examples import Features

_VERSION = re.compile(r'\d+\.\d+\.\d+')
_INFO = 'dataset_info.json'
CLASS_NAMES = 'class_names.json'  # of labels that are vectors, see Tfds


def identity(folder: PathLike) -> tuple[str, str]:
  """Return (name, version) of a data set from its folder.

  They are those of dataset_info.json if there is one, else of the path: NAME or
  NAME/VERSION. Names get underscores in place of what TFDS does not allow.
  """
  path = pathlib.Path(folder).absolute()
  if (path / _INFO).exists():
    info = json.loads((path / _INFO).read_text())
    return info['name'], info['version']
  version = '1.0.0'
  if _VERSION.fullmatch(path.name):
    path, version = path.parent, path.name
  name = re.sub(r'\W', '_', path.name, flags=re.ASCII)
  name = name if re.match('[A-Za-z]', name) else f'set_{name}'
  return name, version


def shard_name(name: str, split: str, shard: int, shards: int) -> str:
  """Return the file name of a shard."""
  return f'{name}-{split}.array_record-{shard:05d}-of-{shards:05d}'


def splits(folder: PathLike) -> dict[str, list[int]]:
  """Return {split: numbers of examples of its shards}; {} if there are none."""
  path = pathlib.Path(folder) / _INFO
  if not path.exists():
    return {}
  info = json.loads(path.read_text())
  return {
    x['name']: [int(n) for n in x.get('shardLengths', ())]
    for x in info.get('splits', ())
  }


def write(
  folder: PathLike,
  features: Features,
  name: str,
  version: str,
  added: Mapping[str, tuple[Sequence[int], int]],
) -> None:
  """Write features.json and dataset_info.json; splits that exist are kept.

  Each file appears whole, and dataset_info.json last.

  Args:
    folder: of the data set.
    features: of the records.
    name, version: of the data set.
    added: {split: (numbers of examples of its shards, bytes)}.
  """
  import tensorflow_datasets as tfds

  folder = pathlib.Path(folder)
  template = tfds.core.ShardedFileTemplate(
    data_dir=folder, dataset_name=name, filetype_suffix='array_record'
  )
  infos = {}
  if (folder / _INFO).exists():
    known = tfds.builder_from_directory(str(folder)).info.splits
    infos = {split: known[split] for split in known}
  for split, (lengths, size) in added.items():
    infos[split] = tfds.core.SplitInfo(
      name=split,
      shard_lengths=list(lengths),
      num_bytes=size,
      filename_template=template.replace(split=split),
    )
  identity = tfds.core.dataset_info.DatasetIdentity(
    name=name,
    version=tfds.core.Version(version),
    data_dir=os.fspath(folder),
    module_name='',
  )
  info = tfds.core.DatasetInfo(builder=identity, features=features.as_tfds())
  info.set_file_format('array_record')
  info.set_splits(tfds.core.SplitDict([infos[k] for k in sorted(infos)]))
  with tempfile.TemporaryDirectory(dir=folder, prefix='.info-') as staging:
    info.write_to_directory(staging)
    made = pathlib.Path(staging)
    if features.label == 'weights' and features.class_names:
      (made / CLASS_NAMES).write_text(json.dumps(features.class_names))
    for path in sorted(made.iterdir(), key=lambda path: path.name == _INFO):
      write_atomically(folder / path.name, path.read_bytes())
