"""Images in files of many: the same examples as a folder, tar, shards."""

import io
import tarfile

import cv2
import numpy as np

NAMES = ('ant', 'bee', 'cat ü')


def images(count=12, classes=NAMES, ending='png'):
  """Return {'CLASS/NUMBER.png': bytes} in the order of a Folder."""
  found = {}
  for label, name in enumerate(classes):
    for i in range(label, count, len(classes)):
      pixels = np.random.default_rng(i).integers(0, 255, (9, 7, 3), np.uint8)
      data = cv2.imencode(f'.{ending}', pixels)[1].tobytes()
      found[f'{name}/{i:03d}.{ending}'] = data
  return found


def write_folder(path, files):
  for name, data in files.items():
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(data)
  return path


def tar_bytes(files, format=tarfile.PAX_FORMAT, mode='w'):
  """Return a tar file of {path: bytes}, or of (path, bytes or TarInfo)."""
  file = io.BytesIO()
  with tarfile.open(fileobj=file, mode=mode, format=format) as tar:
    for name, data in files.items() if isinstance(files, dict) else files:
      info = data
      if isinstance(data, bytes):
        info = tarfile.TarInfo(name)
        info.size = len(data)
      tar.addfile(info, io.BytesIO(data if isinstance(data, bytes) else b''))
  return file.getvalue()


def link(name, target, kind=tarfile.SYMTYPE):
  info = tarfile.TarInfo(name)
  info.type, info.linkname = kind, target
  return name, info


def write_tar(path, files, **options):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(tar_bytes(files, **options))
  return path


def samples(files, classes=NAMES):
  """Return the members of WebDataset shards, with .cls and .json labels."""
  found = {}
  for name, data in files.items():
    folder, base = name.split('/')
    stem, ending = base.split('.')
    label = classes.index(folder)
    found[f'{stem}.{ending}'] = data
    found[f'{stem}.cls'] = str(label).encode()
    found[f'{stem}.json'] = b'{"label": %d, "a": {"b": "%s"}}' % (
      label,
      folder.encode(),
    )
  return found


def all_of(source):
  return [source[i] for i in range(len(source))]


def contents(source):
  """Return [(bytes, class name)] of all examples."""
  return [(x['image'], source.class_names[x['label']]) for x in all_of(source)]


def expected(files):
  return [(data, name.split('/')[0]) for name, data in files.items()]
