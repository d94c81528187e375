"""The worst mistakes of an evaluator, with small images, for a page.

A run saves the images in thumbnails-NAME.json when it ends, because a data set
need not consist of files, and files may move. Keys are the column `index` of
misclassified-NAME.csv, values PNG or JPEG files in base64.
"""

import base64
import csv
import io
import json
from typing import Any

import numpy as np
from etils import epath

from vit_jax.runs.files import PathLike, write_atomically

COUNT, _PX = 24, 160


def read_csv(path: epath.Path) -> list[list[str]]:
  """Return the rows of a CSV file; names may have bytes that are not UTF-8."""
  text = path.read_bytes().decode('utf-8', 'replace')
  return list(csv.reader(io.StringIO(text)))


def save_images(workdir: PathLike, name: str, source: Any) -> None:
  """Save the images of the first rows of misclassified-NAME.csv.

  The source is that of the data of the evaluator NAME.
  """
  # A machine that trains may have no packages for images.
  from vit_jax.data import images

  folder = epath.Path(workdir)
  _, *rows = read_csv(folder / f'misclassified-{name}.csv')
  found = {}
  for *_, index in rows[:COUNT]:
    pixels = source[int(index)]['image']
    if isinstance(pixels, bytes):
      pixels = images.decode(pixels)
    found[index] = base64.b64encode(_thumbnail(pixels)).decode()
  path = folder / f'thumbnails-{name}.json'
  write_atomically(path, json.dumps(found) + '\n')


def _thumbnail(pixels):
  """Return a small PNG or JPEG of uint8 [H, W, C]."""
  from PIL import Image

  pixels = np.asarray(pixels)
  image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
  image.thumbnail((_PX, _PX))
  file = io.BytesIO()  # JPEG blurs small drawings
  image.save(file, 'PNG' if max(image.size) < 96 else 'JPEG')
  return file.getvalue()


def of_run(folder: epath.Path) -> dict[str, dict[str, Any]]:
  """Return {evaluator: {'count', 'rows': the worst, with their 'image'}}."""
  found = {}
  for path in sorted(folder.glob('misclassified-*.csv')):
    name = path.stem.removeprefix('misclassified-')
    header, *rows = read_csv(path)
    saved = folder / f'thumbnails-{name}.json'
    images = json.loads(saved.read_text()) if saved.exists() else {}
    worst: list[dict[str, Any]] = []
    for row in rows[:COUNT]:
      worst.append(dict(zip(header, row), image=images.get(row[-1])))
    found[name] = {'count': len(rows), 'rows': worst}
  return found
