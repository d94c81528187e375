"""The same images in files of several kinds."""

import io
import tarfile

import numpy as np
from tiny import encode

NAMES = ('ant', 'bee', 'cat ü')


def images():
  """Return {'CLASS/NUMBER.png': bytes} in the order of a Folder."""
  found = {}
  for label, name in enumerate(NAMES):
    for i in range(label, 12, len(NAMES)):
      pixels = np.random.default_rng(i).integers(0, 255, (9, 7, 3), np.uint8)
      found[f'{name}/{i:03d}.png'] = encode(pixels)
  return found


def write_folder(path, files):
  for name, data in files.items():
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(data)
  return path


def tar_bytes(members, mode='w'):
  file = io.BytesIO()
  with tarfile.open(fileobj=file, mode=mode) as tar:
    for name, data in members.items():
      info = tarfile.TarInfo(name)
      info.size = len(data)
      tar.addfile(info, io.BytesIO(data))
  return file.getvalue()


def all_of(source):
  return [source[i] for i in range(len(source))]


def stack(source):
  """Return all images."""
  return np.stack([x['image'] for x in all_of(source)])


def contents(source):
  """Return [(bytes, class name)] of all examples."""
  return [(x['image'], source.class_names[x['label']]) for x in all_of(source)]


def expected(files):
  return [(data, name.split('/')[0]) for name, data in files.items()]
