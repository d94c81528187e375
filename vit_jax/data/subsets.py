"""The interface of sources, and subsets: sources that have parts of another.

pipeline.py describes the interface. A subset of a subset is one, too.
"""

import base64
import hashlib
import os
import re
import zlib
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from vit_jax.data.sources.tables import say_once
from vit_jax.types import Count, Seed, UserError


class Source(Protocol):
  def __len__(self) -> int: ...

  def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class Example(Mapping[str, Any]):
  """Image and label, and other keys, whose values `read` returns when used."""

  def __init__(
    self, known: dict[str, Any], others: Iterable[str], read: Callable
  ) -> None:
    self._known, self._read = known, read
    self._names = dict.fromkeys((*known, *others))

  def __getitem__(self, name: str) -> Any:
    if name not in self._names:
      raise KeyError(name)
    return self._known[name] if name in self._known else self._read(name)

  def __iter__(self) -> Iterator[str]:
    return iter(self._names)

  def __len__(self) -> int:
    return len(self._names)


def labels(source: Source) -> np.ndarray:
  """Return the labels of all examples: int32 [n] or float32 [n, K]."""
  if callable(known := getattr(source, 'labels', None)):
    return known()
  return stack_labels([source[i]['label'] for i in range(len(source))])


def class_labels(source: Source) -> np.ndarray:
  """Return the labels of all examples, int32 [n]; ValueError for vectors."""
  found = labels(source)
  if found.ndim != 1:
    kind = type(getattr(source, 'targets', source)).__name__
    raise UserError(
      f'{kind}: the labels have the shape {found.shape}. Expected one class for'
      ' each example. Leave out balanced, class_weights, stratified, per_class.'
    )
  return found


def stack_labels(values: Sequence[Any]) -> np.ndarray:
  """Return labels as one array: int32 [n] or float32 [n, K]."""
  array = np.array(values)
  return array.astype(np.int32 if array.ndim == 1 else np.float32)


def describe(source: Source, index: int) -> str:
  """Return the source's own description of an example, or a default one."""
  return getattr(source, 'describe', 'index {}'.format)(index)


def fingerprint(source: Any, keep: Sequence[str] = ()) -> dict[str, Any]:
  """Return JSON values that differ for other data, wherever its files are.

  'rows' are 32 bits of the file and of the label of each example, if they are
  known without reading it, and 'examples' a hash of up to 16 whole examples.
  Classes with a method `fingerprint`, such as teachers, have their own.
  """
  if hasattr(type(source), 'fingerprint'):
    return source.fingerprint()
  count, groups = len(source), getattr(source, 'groups', None)
  places = np.linspace(0, count - 1, min(count, 16)).astype(int)
  return {
    'num_examples': count,
    'num_classes': getattr(source, 'num_classes', None),
    'classes': _hash(getattr(source, 'class_names', None)),
    'groups': groups and _hash(sorted(groups)),
    **_of_all(source, keep),
    'examples': _hash(_content(source, int(i), keep) for i in places),
  }


def _of_all(source, keep):
  """Return what differs for other files, labels or columns of all examples."""
  held = source.held(keep) if hasattr(source, 'held') else {}
  kept = held.get('kept', ())
  found = {'kept': _hash(repr(x) for column in kept for x in column)}
  if 'labels' not in held:
    return found
  (labels,), (files,) = held['labels'], held.get('files', [()])
  names = [zlib.crc32(os.fsencode(x)) for x in files] or range(len(labels))
  rows = names, [*map(zlib.crc32, np.ascontiguousarray(labels))]
  packed = zlib.compress(np.array(rows, np.uint32).tobytes(), 1)
  return found | {'rows': base64.b64encode(packed).decode()}


def changed_rows(before: str, now: str) -> str:
  """Return how 'rows' of two fingerprints differ, in words."""
  rows = (zlib.decompress(base64.b64decode(x)) for x in (before, now))
  rows = (np.frombuffer(x, np.uint32).reshape(2, -1).tolist() for x in rows)
  one, two = (dict(zip(*x, strict=True)) for x in rows)
  labels = sum(one[x] != two[x] for x in one.keys() & two.keys())
  added, removed = len(two.keys() - one.keys()), len(one.keys() - two.keys())
  return f'{added} images added, {removed} removed, {labels} labels changed'


def _content(source, index, keep):
  """Return image, label and what is kept of an example as bytes."""
  try:
    example = source[index]
  except (OSError, ValueError):
    return b'unreadable'
  image, label = example['image'], np.asarray(example['label'], np.float64)
  if not isinstance(image, bytes):
    image = repr(image.shape).encode() + image.tobytes()
  kept = (repr(np.asarray(example.get(name)).tolist()) for name in keep)
  return image + b' ' + label.tobytes() + ''.join(kept).encode()


def _hash(parts):
  """Return a hash of bytes or texts; None of None."""
  if parts is None:
    return None
  found = hashlib.sha256()
  for part in parts:
    data = part if isinstance(part, bytes) else str(part).encode()
    found.update(b'%d:' % len(data) + data)
  return found.hexdigest()[:16]


def column(source: Source, name: str) -> Sequence[Any]:
  """Return a key of all examples, which are read if there is no other way."""
  if hasattr(source, 'column'):
    return source.column(name)
  if name not in source[0]:
    raise UserError(
      f'There is no column {name!r}. There are {", ".join(source[0])}.'
    )
  return [source[i][name] for i in range(len(source))]


class View:
  """The examples `indices` of another source, with its attributes."""

  def __init__(self, source: Source, indices: Any) -> None:
    self.source, self.indices = source, indices

  def __len__(self) -> int:
    return len(self.indices)

  def __getitem__(self, index: int) -> Mapping[str, Any]:
    return self.source[int(self.indices[index])]

  def __getattr__(self, name: str) -> Any:
    if name.startswith('_'):  # pickle asks for it, before `source` is set
      raise AttributeError(name)
    return getattr(self.source, name)

  def labels(self) -> np.ndarray:
    """Return the labels of all examples: int32 [n] or float32 [n, K]."""
    if hasattr(self.source, 'labels'):
      return self.source.labels()[np.asarray(self.indices)]
    return stack_labels([self[i]['label'] for i in range(len(self))])

  def held(self, keep: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Return what the other source holds of these examples."""
    inner: Any = self.source
    found = inner.held(keep) if hasattr(inner, 'held') else {}
    rows = np.asarray(self.indices)
    return {k: [x[rows] for x in v] for k, v in found.items()}

  def column(self, name: str) -> list[Any]:
    """Return the cells of a column."""
    cells = column(self.source, name)
    return [cells[i] for i in self.indices]

  def describe(self, index: int) -> str:
    """Return the other source's description of an example."""
    return describe(self.source, int(self.indices[index]))


class Unlabelled(View):
  """A source whose examples all have the label 0, for label-free objectives."""

  num_classes = None
  class_names = None

  def __init__(self, source: Source) -> None:
    super().__init__(source, range(len(source)))

  def __getitem__(self, index: int) -> Mapping[str, Any]:
    return ChainMap({'label': 0}, super().__getitem__(index))  # type: ignore

  def labels(self) -> np.ndarray:
    """Return a label of 0 for each example: int32 [n]."""
    return np.zeros(len(self), np.int32)


class Slice(View):
  """A slice of a source in shuffled order, such as the first 90% of it.

  The shuffled order is always the same, so adjacent slices do not overlap, and
  each contains all classes. The examples keep the order of the source.

  Args:
    bounds: '[:90%]', '[90%:]', '[100:200]'.
    stratified: whether each slice has nearly the same fraction of every class,
      also of small ones. Both sides of a bound in percent have at least one
      example of each class with two. A class with one is in the larger slice.
      Of several labels, the rarest that an example has is its class. Numbers
      are not stratified.
    groups: group of each example, such as its patient. Examples of a group are
      in the same slice, and the class of a group is its most frequent one, or
      the rarest of its labels.
  """

  def __init__(
    self,
    source: Source,
    bounds: str,
    *,
    stratified: bool = False,
    groups: Sequence[Any] | None = None,
  ) -> None:
    if not (match := _SLICE.fullmatch(bounds)):
      raise UserError(f"bounds={bounds!r}: expected a slice such as '[:90%]'.")
    count = len(source)
    classes = labels(source) if stratified else np.zeros(count, int)
    names, units, sizes = np.unique(
      range(count) if groups is None else groups,
      return_inverse=True,
      return_counts=True,
    )
    order = _shuffled(len(names), seed=0)
    # Unit j of n in a class is at (j + 1/2) / n of the order.
    classes = _classes(units, classes, len(names))[order]
    rank, size = ranks(classes), np.bincount(classes)[classes]
    by_place = np.argsort((rank + 0.5) / size, kind='stable')
    order, rank, size = order[by_place], rank[by_place], size[by_place]
    middle = np.cumsum(sizes[order]) - sizes[order] / 2
    slices = slice(*(_bound(text, count) for text in match.groups()))
    before = [middle < x for x in slices.indices(count)[:2]]
    for text, is_before in zip(match.groups(), before):
      if text and text[-1] == '%' and int(text[:-1]) % 100:
        if stratified:
          is_before |= (rank == 0) & (size > 1)
          is_before &= (rank < size - 1) | (size == 1)
        if groups is not None and len(names) > 1:
          is_before[[0, -1]] = True, False
    kept = np.flatnonzero(np.isin(units, order[before[1] & ~before[0]]))
    if not len(kept):
      raise UserError(f'The slice {bounds!r} has none of {count} examples.')
    super().__init__(source, kept)
    self.used = {**getattr(source, 'used', {}), 'slice': bounds}
    asked = len(range(count)[slices])
    if abs(len(kept) - asked) > asked / 4:
      where = getattr(source, 'where', type(source).__name__)
      say_once(
        f'{where}: the slice {bounds!r} has {len(kept)} of {count} examples, '
        f'not {asked}, as groups and rare classes are not divided'
      )


class ByNames(View):
  """The examples of a source, whose labels are numbered by other names.

  Args:
    source: with class_names, of which those that are ints index `names`.
    names: names in order. A label that the source lacks is missing (NaN).

  Raises:
    UserError: if the source has examples of a class without a name.
  """

  def __init__(self, source: Source, names: Sequence[str]) -> None:
    super().__init__(source, range(len(source)))
    own, found = [*getattr(source, 'class_names', ())], labels(source)
    if all(map(str.isdecimal, own)) and not {*own} & {*names}:
      own = [names[int(x)] if int(x) < len(names) else x for x in own]
    place = {name: i for i, name in enumerate(names)}
    index = np.array([place.get(x, -1) for x in own])
    used = found[found >= 0] if found.ndim == 1 else np.nonzero(found > 0)[1]
    if unknown := [own[i] for i in np.unique(used) if index[i] < 0]:
      raise UserError(
        f'The data has {unknown[:5]}, which are not among the {len(names)} '
        f'classes or labels of the model, {[*names[:5]]}.'
      )
    if found.ndim == 1:
      made = np.where(found < 0, -1, index[found]).astype(np.int32)
    else:
      made = np.full((len(found), len(names)), np.nan, np.float32)
      made[:, index[index >= 0]] = found[:, index >= 0]
    self._labels, self.class_names = made, [*names]
    self.num_classes = len(names)

  def __getitem__(self, index: int) -> Mapping[str, Any]:
    label = self._labels[index]
    label = label if label.ndim else int(label)
    return {**super().__getitem__(index), 'label': label}

  def labels(self) -> np.ndarray:
    return self._labels.copy()


class Subset(View):
  """At most so many examples of a source, of each class or in all.

  The choice depends only on the arguments and the indices of the examples. With
  the same seed, a smaller subset is part of a larger one. The examples keep the
  order of the source.

  Args:
    source: with int labels for `per_class`.
    per_class: number of examples of each class. Smaller classes keep all.
    examples: number of examples in all, of those that `per_class` leaves.
  """

  def __init__(
    self,
    source: Source,
    *,
    examples: Count | None = None,
    per_class: Count | None = None,
    seed: Seed = 0,
  ) -> None:
    if per_class is None:
      order = _shuffled(len(source), seed)
    else:
      order = few(class_labels(source), per_class, seed)
    if examples is not None:
      if examples > len(order):
        raise UserError(f'Subset: examples={examples}, there are {len(order)}.')
      order = order[:examples]
    super().__init__(source, np.sort(order))


_SLICE = re.compile(r'\[(-?\d+%?)?:(-?\d+%?)?\]')


def _bound(text, count):
  if text and text.endswith('%'):
    return round(count * int(text[:-1]) / 100)
  return text and int(text)


def _shuffled(count, seed):
  """Return 0 to count - 1 in an order that all versions of numpy give."""
  return np.argsort(np.random.Philox(key=seed).random_raw(count), kind='stable')


def _classes(units, found, count):
  """Return the class of each unit, or the rarest of its labels: int [count]."""
  if found.ndim == 1:
    return _most_frequent(units, found, count)
  if not np.isin(found[~np.isnan(found)], (0, 1)).all():
    return np.zeros(count, int)  # numbers
  has = np.zeros((count, found.shape[1] + 1), bool)
  np.logical_or.at(has[:, :-1], units, found == 1)
  rarest_first = np.argsort(has[:, :-1].sum(0), kind='stable')
  has = has[:, [*rarest_first, -1]]
  has[:, -1] = True  # a class of those without labels
  return has.argmax(axis=1)


def _most_frequent(units, classes, count):
  """Return the most frequent class of each unit: int [count]."""
  known, classes = np.unique(classes, return_inverse=True)
  pairs, times = np.unique(units * len(known) + classes, return_counts=True)
  found, pairs = np.zeros(count, int), pairs[np.argsort(times, kind='stable')]
  found[pairs // len(known)] = pairs % len(known)  # the last one stays
  return found


def few(classes: np.ndarray, per_class: int, seed: int) -> np.ndarray:
  """Return at most `per_class` random rows of each class, in random order."""
  order = _shuffled(len(classes), seed)
  return order[ranks(classes[order]) < per_class]


def ranks(classes: np.ndarray) -> np.ndarray:
  """Return how many earlier elements each element is equal to: int [n]."""
  by_class = np.argsort(classes, kind='stable')
  _, starts, sizes = np.unique(
    classes[by_class], return_index=True, return_counts=True
  )
  found = np.empty(len(classes), np.int64)
  found[by_class] = np.arange(len(classes)) - np.repeat(starts, sizes)
  return found
