"""A source with some of the examples of another one."""

from typing import Any

import numpy as np

from vit_jax.config import checks
from vit_jax.config.domains import Count, Seed, checked
from vit_jax.data import pipeline
from vit_jax.data.pipeline import Source


@checked
class Subset:
  """At most so many examples of a source, of each class or in all.

  The choice depends on the arguments and on the indices of the examples only,
  so it is the same on every machine. With the same seed, a smaller subset is
  part of a larger one. The examples keep their order.

  Args:
    source: with int labels for `per_class`. If it has no labels(), that reads
      all of its examples.
    per_class: number of examples of each class. Classes with fewer examples
      keep all.
    examples: number of examples in all, chosen from those that `per_class`
      leaves.
    seed: of the choice.

  Raises:
    ValueError: neither number; one that leaves out nothing; labels that are not
      one class per example.
  """

  def __init__(
    self,
    source: Source,
    *,
    examples: Count | None = None,
    per_class: Count | None = None,
    seed: Seed = 0,
  ) -> None:
    if examples is None and per_class is None:
      raise ValueError('Subset: set examples or per_class, or both.')
    self.source, self.seed = source, seed
    self.examples, self.per_class = examples, per_class
    self.num_classes: int | None = getattr(source, 'num_classes', None)
    self.class_names = getattr(source, 'class_names', None)
    self.channels: int = getattr(source, 'channels', 3)
    self.exif: bool = getattr(source, 'exif', True)
    # Raw numbers: they are the same in all versions of numpy.
    keys = np.random.Philox(key=seed).random_raw(len(source))
    kept, self._labels = np.arange(len(source)), None
    if per_class is not None:
      labels = pipeline.labels(source)
      kept = _first_of_classes(labels, keys, per_class)
      self._labels = labels
    if examples is not None:
      if examples > len(kept):
        left = '' if per_class is None else f' after per_class={per_class}'
        raise ValueError(
          f'Subset: examples={examples}, but the source has {len(kept)} '
          f'examples{left}. Use a smaller number, or the source itself.'
        )
      kept = kept[np.argsort(keys[kept], kind='stable')[:examples]]
    self._indices = np.sort(kept)
    if self._labels is not None:
      self._labels = self._labels[self._indices]

  def __len__(self) -> int:
    return len(self._indices)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return {**self.source[self._index(index)]}

  def labels(self) -> np.ndarray:
    """Return the labels of all examples: int32 [n] or float32 [n, K]."""
    if self._labels is None:
      if callable(known := getattr(self.source, 'labels', None)):
        self._labels = known()[self._indices]
      else:
        found = [self[i]['label'] for i in range(len(self))]
        self._labels = pipeline.stack_labels(found)
    return self._labels.copy()

  def describe(self, index: int) -> str:
    """Return the description of the wrapped source."""
    return pipeline.describe(self.source, self._index(index))

  def file_name(self, index: int) -> str | None:
    """Return the file name of the image, if the wrapped source knows it."""
    own = getattr(self.source, 'file_name', lambda index: None)
    return own(self._index(index))

  def _index(self, index):
    return int(self._indices[checks.index(index, len(self))])


def _first_of_classes(labels, keys, count):
  """Return the indices of the `count` smallest keys of each class."""
  if labels.ndim != 1:
    raise ValueError(
      f'Subset: per_class={count} needs one class per example; the labels are '
      f'{labels.dtype} {labels.shape}. Set examples instead.'
    )
  by_class = np.lexsort((keys, labels))
  _, starts, sizes = np.unique(
    labels[by_class], return_index=True, return_counts=True
  )
  if count > sizes.max():
    raise ValueError(
      f'Subset: per_class={count}, but the largest class has {sizes.max()} '
      'examples. Use a smaller number, or the source itself.'
    )
  ranks = np.arange(len(labels)) - np.repeat(starts, sizes)
  return by_class[ranks < count]
