"""Files of the predictions of evaluators, and the worst with their images.

KIND-NAME.csv          one row for each example, worst first
thumbnails-NAME.json   images of the worst, for the page of the run: {index: PNG
                       or JPEG file in base64}
"""

import base64
import concurrent.futures
import contextlib
import functools
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax.data.images import picture
from vit_jax.data.subsets import describe
from vit_jax.io.files import write_atomically, write_csv
from vit_jax.reports import pictures
from vit_jax.types import PathLike

_IMAGES, _PX = 24, 160


def write_all(
  workdir: PathLike,
  evaluators: Mapping[str, Any],
  *,
  class_names: Sequence[str] | None = None,
) -> list[epath.Path]:
  """Write the files of each evaluator that has predictions, on the first host.

  `class_names` are of all classes, if the data has no names. Returns the paths.
  """
  paths = []
  for name, evaluator in evaluators.items():
    p = getattr(evaluator, 'predictions', None)
    if p and jax.process_index() == 0:
      source = evaluator.data.source
      paths += p.write(epath.Path(workdir), name, source, class_names)
  return paths


def write(
  folder: epath.Path,
  kind: str,
  name: str,
  header: Sequence[str],
  rows: Sequence[Sequence[Any]],
  source: Any,
) -> epath.Path:
  """Write KIND-NAME.csv, and thumbnails of the first rows.

  Rows end with the index of the example; its file is added in front.
  """
  path, indices = folder / f'{kind}-{name}.csv', [i for *_, i in rows]
  with concurrent.futures.ThreadPoolExecutor(16) as pool:  # may read files
    files = pool.map(functools.partial(describe, source), indices)
  write_csv(path, [header, *([x, *row] for x, row in zip(files, rows))])
  # A data set need not consist of files, and files may move.
  with contextlib.suppress(OSError, ValueError):  # a page can do without images
    pixels = {i: picture(source, source[i]['image']) for i in indices[:_IMAGES]}
    found = {i: thumbnail(x) for i, x in pixels.items()}
    write_atomically(folder / f'thumbnails-{name}.json', json.dumps(found))
  return path


def thumbnail(pixels: np.ndarray, side: int = _PX) -> str:
  """Return a small PNG or JPEG in base64 of uint8 [H, W, 1 or 3]."""
  from PIL import Image

  image = Image.fromarray(pictures.rgb(pixels))
  image.thumbnail((side, side))
  file = io.BytesIO()  # JPEG blurs small drawings
  image.save(file, 'PNG' if max(image.size) < 96 else 'JPEG')
  return base64.b64encode(file.getvalue()).decode()
