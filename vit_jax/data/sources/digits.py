"""Scans of handwritten digits that scikit-learn ships."""

import dataclasses
import functools
from typing import Any, Literal

import numpy as np

from vit_jax.data.sources.tables import Labelled
from vit_jax.types import Count, Seed

# The set lists one writer after the other, each with the same sequence of
# digits. These sequences start at 0, 130, 256, ..., 1029, 1157, 1287, ...
_SPLITS = {'train': slice(1029), 'test': slice(1029, None)}


@dataclasses.dataclass(kw_only=True, eq=False)
class Digits(Labelled):
  """The 1,797 handwritten digits of scikit-learn: uint8 [8, 8, 1].

  Levels 0 to 16 become 0 to 255. The splits share no writer and keep the order:
  'train' is the first 1,029 scans (98 to 107 per class), 'test' the last 768.

  Attributes:
    examples_per_class: number of scans of each class, chosen at random with
      `seed`; smaller classes, and None, keep all. A smaller subset is part of a
      larger one.
  """

  split: Literal['train', 'test']
  examples_per_class: Count | None = None
  seed: Seed = 0

  def __post_init__(self) -> None:
    scans, labels = _scans()
    rows = np.arange(len(labels))[_SPLITS[self.split]]
    if (count := self.examples_per_class) is not None:
      rng = np.random.default_rng(self.seed)
      of_class = (rows[labels[rows] == label] for label in range(10))
      chosen = [rng.permutation(found)[:count] for found in of_class]
      rows = np.sort(np.concatenate(chosen))
    self._rows, self._images = rows, scans[rows]  # rows of scikit-learn's set
    super().__init__(labels[rows].astype(np.int32), list('0123456789'))

  def __getitem__(self, index: int) -> dict[str, Any]:
    image = self._images[index].copy()  # the caller may modify it
    return {'image': image, 'label': self._label(index)}

  def describe(self, index: int) -> str:
    """Return the split and the row in scikit-learn's set."""
    return f'digits {self.split}, scan {self._rows[index]} of load_digits()'


@functools.cache
def _scans():
  from sklearn import datasets  # takes a second

  data = datasets.load_digits()
  scans = np.rint(data.images * (255 / 16)).astype(np.uint8)[..., None]
  return scans, data.target
