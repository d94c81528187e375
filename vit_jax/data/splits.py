"""Splits of a source, and slices of them that contain all classes."""

import collections
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.data import fingerprints, pipeline
from vit_jax.data.pipeline import Source

# Names of folders that are splits, not classes, in lower case.
NAMES = {'train', 'training', 'val', 'valid', 'validation', 'dev'}
NAMES |= {'test', 'testing', 'eval'}

Bounds = tuple[str | None, str | None]  # such as (None, '90%')

_SLICE = re.compile(r'([^\[\]]*)\[(-?\d+%?)?:(-?\d+%?)?\]')


def parse(
  split: str | None, names: Sequence[str] = ()
) -> tuple[str | None, Bounds | None]:
  """Return ('train', (None, '90%')) for 'train[:90%]' unless it is a name."""
  if split is None or split in names:
    return split, None
  match = _SLICE.fullmatch(split)
  return (match[1] or None, (match[2], match[3])) if match else (split, None)


def choose(
  keys: Sequence[str], bounds: Bounds, labels: Sequence[int] | None = None
) -> list[int]:
  """Return the sorted indices of a slice of the examples in a shuffled order.

  Examples are often sorted by class, so a slice of them would lack classes. The
  shuffle is by checksum of the key, the same on every machine. With `labels`
  example j of the n in a class comes at (j + 1/2) / n of the order, so that
  every slice has the same fraction of each class, up to one example.
  """
  hashed = [(zlib.crc32(key.encode(errors='replace')), key) for key in keys]
  order = sorted(range(len(keys)), key=hashed.__getitem__)
  if labels is not None:
    sizes, seen = collections.Counter(labels), collections.Counter[int]()
    places = {}
    for i in order:
      places[i] = (seen[labels[i]] + 0.5) / sizes[labels[i]]
      seen[labels[i]] += 1
    order = sorted(order, key=places.__getitem__)  # stable

  def index(text):
    if text and text.endswith('%'):
      return round(len(keys) * int(text[:-1]) / 100)
    return text and int(text)

  return sorted(order[slice(*map(index, bounds))])


class Slice:
  """A slice of any source, such as the first 90% of it in a shuffled order.

  The order is the same on every machine, so that adjacent slices do not overlap
  and each contains all classes.

  Args:
    source: the source.
    bounds: '[:90%]', '[90%:]', '[100:200]'.
    stratified: whether each slice has nearly the same fraction of every class,
      also of small ones. A class with one image is in the larger slice.

  Raises:
    ValueError: other bounds; no example in the slice; `stratified`, and labels
      that are not one class per example.
  """

  def __init__(
    self, source: Source, bounds: str, *, stratified: bool = False
  ) -> None:
    name, parsed = parse(bounds)
    if parsed is None or name is not None:
      raise ValueError(
        f"bounds={bounds!r} is not a slice. Expected e.g. '[:90%]'."
      )
    labels = None
    if stratified:
      labels = pipeline.labels(source)
      if labels.ndim > 1:
        raise ValueError(
          'stratified=True needs one class per example, but the labels of'
          f' {type(source).__name__} are vectors. Use stratified=False.'
        )
      labels = labels.tolist()
    keys = [str(i) for i in range(len(source))]
    self.source, self.bounds, self.stratified = source, bounds, stratified
    self._kept = np.asarray(choose(keys, parsed, labels), np.int64)
    if not len(self._kept):
      raise ValueError(
        f'the slice {bounds!r} of {type(source).__name__}, {len(source)}'
        ' examples, contains no examples.'
      )
    self.channels: int = getattr(source, 'channels', 3)
    self.exif: bool = getattr(source, 'exif', True)
    self.num_classes: int | None = getattr(source, 'num_classes', None)
    self.class_names: Sequence[str] | None = getattr(
      source, 'class_names', None
    )

  def __len__(self) -> int:
    return len(self._kept)

  def __getitem__(self, index: int) -> Mapping[str, Any]:
    return self.source[int(self._kept[index])]

  def labels(self) -> np.ndarray:
    """Return the labels of all examples: int32 [n] or float32 [n, K]."""
    return pipeline.labels(self.source)[self._kept]

  def describe(self, index: int) -> str:
    """Return the source's description of the example."""
    return pipeline.describe(self.source, int(self._kept[index]))

  def file_name(self, index: int) -> str | None:
    """Return the source's name of the image's file, or None."""
    name = getattr(self.source, 'file_name', lambda index: None)
    return name(int(self._kept[index]))

  def fingerprint(self) -> dict[str, Any]:
    """Return that of the source, with the bounds."""
    found = fingerprints.described(self)
    return {'kind': 'vit_jax.data.splits.Slice', **found}
