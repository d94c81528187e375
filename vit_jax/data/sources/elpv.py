"""Photographs of solar cells, ELPV, from the package elpv-dataset."""

import functools
from typing import Any, Literal

import numpy as np

from vit_jax.data.sources.tables import Labelled
from vit_jax.data.targets import Classes, Targets
from vit_jax.io import terminal
from vit_jax.types import Seed, UserError

_CLASSES = ['functional', 'defective']
GRADES = ('0', '1/3', '2/3', '1')


class Elpv(Labelled):
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
    targets: by default 'class', which is 'functional' or 'defective'. There are
      also 'probability', 0, 1/3, 2/3 or 1, and 'grade', the same as a name.
  """

  def __init__(
    self,
    split: Literal['train', 'test'],
    seed: Seed = 0,
    channels: Literal[1, 3] = 1,
    targets: Targets = Classes(),
  ) -> None:
    from sklearn import model_selection  # takes a second

    images, table = _cells()
    labels, names = targets.encode(
      'ELPV', {k: table[k] for k in targets.columns or ('class',)}, _CLASSES
    )
    parts = model_selection.train_test_split(
      np.arange(len(labels)),
      test_size=0.25,
      stratify=table['class'],
      random_state=seed,
    )
    rows = np.sort(parts[split == 'test'])
    self._rows, self._images = rows, images
    self._channels, self.targets = channels, targets
    self._types = [table['type'][i] for i in rows]
    super().__init__(labels[rows], names)

  def __getitem__(self, index: int) -> dict[str, Any]:
    # A copy, because the caller may modify it.
    image = np.repeat(self._images[self._rows[index]], self._channels, axis=-1)
    return {
      'image': image,
      'label': self._label(index),
      'type': self._types[index],
    }

  def describe(self, index: int) -> str:
    """Return the file name in the package."""
    return f'ELPV cell{self._rows[index] + 1:04}.png'


@functools.cache
def _cells():
  """Return all images, uint8 [n, 300, 300, 1], and columns of labels."""
  try:
    from elpv_dataset.utils import load_dataset
  except ImportError as error:
    raise UserError("The photographs need pip install -e '.[elpv]'.") from error
  terminal.say(
    'ELPV: images by Deitsch et al., licence CC BY-NC-SA 4.0 (no commercial '
    'use), https://github.com/zae-bayern/elpv-dataset'
  )
  images, probability, types = load_dataset()
  return images[..., None], {
    'class': [_CLASSES[int(x >= 0.5)] for x in probability],
    'probability': probability,
    'type': types.tolist(),
    'grade': [GRADES[round(3 * x)] for x in probability],
  }
