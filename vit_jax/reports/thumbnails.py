"""Small pictures of the worst mistakes: thumbnails-NAME.json in the workdir.

A run writes them when it ends, because a data set need not consist of files,
and files may move. Keys are the column `index` of misclassified-NAME.csv,
values PNG or JPEG files in base64.
"""

import base64
import csv
import io
import itertools
import json
from typing import Any

import numpy as np
from etils import epath

from vit_jax.runs.files import PathLike, write_atomically

COUNT, _PX = 24, 160


def write(workdir: PathLike, name: str, source: Any) -> None:
  """Save the images of the first rows of misclassified-NAME.csv.

  Args:
    workdir: of the run.
    name: of the evaluator.
    source: data source of the evaluator. Images that cannot be read are left
      out.
  """
  found = {}
  for row in rows(epath.Path(workdir) / f'misclassified-{name}.csv')[0]:
    image = _load(lambda row=row: source[int(row['index'])]['image'])
    if image:
      found[row['index']] = base64.b64encode(image).decode()
  path = epath.Path(workdir) / f'thumbnails-{name}.json'
  write_atomically(path, json.dumps(found) + '\n')


def rows(path: epath.Path) -> tuple[list[dict[str, str]], int]:
  """Return (the worst mistakes, number of all) of misclassified-NAME.csv."""
  text = path.read_bytes().decode('utf-8', 'replace')
  reader = csv.DictReader(io.StringIO(text))
  worst = list(itertools.islice(reader, COUNT))
  return worst, len(worst) + sum(1 for _ in reader)


def read(workdir: PathLike, name: str, row: dict[str, str]) -> bytes | None:
  """Return the saved image of a row, else that of its file, else None."""
  path = epath.Path(workdir) / f'thumbnails-{name}.json'
  saved = json.loads(path.read_text()) if path.exists() else {}
  if row.get('index') in saved:
    return base64.b64decode(saved[row['index']])
  file = epath.Path(row['file'])
  return _load(file.read_bytes)


def _load(read):
  """Return a small PNG or JPEG of what `read` returns, or None."""
  from PIL import Image

  from vit_jax.data import images

  try:
    pixels = read()
    if isinstance(pixels, bytes):
      pixels = images.decode(pixels)
    stride = max(1, min(pixels.shape[:2]) // (2 * _PX))
    pixels = pixels[::stride, ::stride]
    pixels = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    image = Image.fromarray(np.ascontiguousarray(pixels))
  except Exception:  # a text that is no path, a file that is no image, ...
    return None
  image.thumbnail((_PX, _PX))
  # JPEG blurs small drawings.
  kind, file = 'PNG' if max(image.size) < 96 else 'JPEG', io.BytesIO()
  image.save(file, kind)
  return file.getvalue()
