"""Photographs of solar cells, ELPV, from the package elpv-dataset."""

import functools
from typing import Any, Literal

import numpy as np

from vit_jax.io import terminal
from vit_jax.types import Seed, UserError


class Elpv:
  """2,624 photographs of solar cells that are lit up by a current (ELPV).

  They are grey, uint8 [300, 300, channels]. A cell is 'defective' if experts
  gave it a probability of at least 0.5 for a defect (821 cells), else
  'functional'. Deitsch et al., 2018, arXiv 1807.02894.

  `pip install -e '.[elpv]'` installs the images. Their licence is CC BY-NC-SA
  4.0: no commercial use.

  Args:
    split: 'train', 75% of each class, or 'test', the others.
    seed: chooses one of these divisions.
    channels: 3: three equal ones, as weights of colour images expect.
  """

  class_names = ('functional', 'defective')
  num_classes = 2

  def __init__(
    self,
    split: Literal['train', 'test'],
    seed: Seed = 0,
    channels: Literal[1, 3] = 1,
  ) -> None:
    from sklearn import model_selection  # takes a second

    images, labels = _cells()
    parts = model_selection.train_test_split(
      np.arange(len(labels)), test_size=0.25, stratify=labels, random_state=seed
    )
    rows = np.sort(parts[split == 'test'])
    self._rows, self._images, self._labels = rows, images, labels[rows]
    self._channels = channels

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> dict[str, Any]:
    # A copy, because the caller may modify it.
    image = np.repeat(self._images[self._rows[index]], self._channels, axis=-1)
    return {'image': image, 'label': int(self._labels[index])}

  def labels(self) -> np.ndarray:
    """Return the labels of all examples: int32 [n]."""
    return self._labels.copy()

  def describe(self, index: int) -> str:
    """Return the file name in the package."""
    return f'ELPV cell{self._rows[index] + 1:04}.png'


@functools.cache
def _cells():
  """Return all images, uint8 [n, 300, 300, 1], and labels, int32 [n]."""
  try:
    from elpv_dataset.utils import load_dataset
  except ImportError as error:
    raise UserError(
      'The photographs are in the package elpv-dataset. Install it by '
      "pip install -e '.[elpv]'."
    ) from error
  terminal.say(
    'ELPV: images by Deitsch et al., licence CC BY-NC-SA 4.0 (no commercial '
    'use), https://github.com/zae-bayern/elpv-dataset'
  )
  images, probability, _ = load_dataset()
  return images[..., None], (probability >= 0.5).astype(np.int32)
