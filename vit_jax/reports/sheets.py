"""Sheets of pictures at the end of a run: WORKDIR/sheet-NAME.png."""

import re
from collections.abc import Mapping, Sequence

import numpy as np
from etils import epath

from vit_jax.reports import attention_figures
from vit_jax.types import PathLike


def write_all(
  workdir: PathLike, sheets: Mapping[str, Sequence[Sequence[np.ndarray]]]
) -> None:
  """Draw {title: rows of images}, uint8 [H, W, C] of one size in a sheet."""
  for number, (title, rows) in enumerate(sheets.items(), 1):
    name = re.sub(r'\W+', '-', title.partition(' (')[0].lower())
    path = epath.Path(workdir) / f'sheet-{number}-{name}.png'
    attention_figures.sheet(rows, path, title=title)
