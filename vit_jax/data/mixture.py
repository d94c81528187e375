"""Mixtures of sources, and the order of training that visits them by weight."""

import bisect
import dataclasses
import difflib
import itertools
import zlib
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from vit_jax.config import checks
from vit_jax.config.domains import NonNegative, OneOf, checked
from vit_jax.data import fingerprints, order, pipeline
from vit_jax.data.order import Order, Shuffled
from vit_jax.data.pipeline import Source


@checked
class Mixture:
  """A source with the examples of several sources, one source after another.

  The sources are in the order of their names. Training visits each example once
  in an epoch; for other proportions of the sources use the order `Mixed`.

  Args:
    sources: {name: source}.
    classes: 'same': all sources have the same classes. 'by_name': a class is
      that of the same name in the other sources; the classes are those of the
      first source, then those of the second that the first does not have, and
      so on. 'concatenated': no two sources share a class; class c of source s
      is named 's/c'.

  Raises:
    ValueError: no sources; sources whose classes do not fit `classes`, or whose
      images have different numbers of channels.
  """

  def __init__(
    self,
    sources: Mapping[str, Source],
    *,
    classes: Annotated[str, OneOf('same', 'by_name', 'concatenated')] = 'same',
  ) -> None:
    if not sources:
      raise ValueError('Mixture: sources={} is empty. Give {name: source}.')
    self.sources: dict[str, Source] = {k: sources[k] for k in sorted(sources)}
    self.classes = classes
    channels = {k: getattr(v, 'channels', 3) for k, v in self.sources.items()}
    if len(set(channels.values())) > 1:
      raise ValueError(
        f'Mixture: the images of the sources have different channels, '
        f'{channels}. Set the same `channels` for all of them.'
      )
    self.channels: int = next(iter(channels.values()))
    self.num_classes: int | None
    self.class_names: list[str] | None
    merge = {
      'same': _same,
      'by_name': _by_name,
      'concatenated': _concatenated,
    }[classes]
    # Classes of the mixture by label of each source; None: the same.
    self._classes, self.num_classes, self.class_names = merge(self.sources)
    sizes = [len(source) for source in self.sources.values()]
    self._ends = list(itertools.accumulate(sizes))
    self._names = list(self.sources)

  def __len__(self) -> int:
    return self._ends[-1]

  def __getitem__(self, index: int) -> dict[str, Any]:
    name, inner = self._find(index)
    source = self.sources[name]
    example = {'exif': getattr(source, 'exif', True), **source[inner]}
    label = self._mapped(name, np.asarray(example['label']))
    return {**example, 'label': label if label.ndim else int(label)}

  def labels(self) -> np.ndarray:
    """Return the labels of all examples: int32 [n] or float32 [n, K]."""
    found = [
      self._mapped(name, pipeline.labels(source), axis=1)
      for name, source in self.sources.items()
    ]
    if len({x.ndim for x in found}) > 1:
      shapes = dict(zip(self._names, (x.shape for x in found)))
      raise ValueError(
        f'Mixture: some sources have one class per example, others a vector: '
        f'the labels have the shapes {shapes}. Use the same kind for all.'
      )
    return np.concatenate(found)

  def describe(self, index: int) -> str:
    """Return the name of the source, and its description of the example."""
    name, inner = self._find(index)
    return f'{name}: {pipeline.describe(self.sources[name], inner)}'

  def fingerprint(self) -> dict[str, Any]:
    """Return how classes are merged, and the fingerprints of the sources."""
    sources = {
      name: fingerprints.fingerprint(source)
      for name, source in self.sources.items()
    }
    found = fingerprints.described(self)
    return found | {'merged': self.classes, 'sources': sources}

  def starts(self) -> dict[str, int]:
    """Return {name: index of the first example} of the sources."""
    return dict(zip(self._names, [0, *self._ends]))

  def _find(self, index):
    """Return (name, index in it) of the source that has an example."""
    index = checks.index(index, len(self))
    part = bisect.bisect_right(self._ends, index)
    return self._names[part], index - [0, *self._ends][part]

  def _mapped(self, name, labels, axis=0):
    """Return labels of a source as those of the mixture.

    Args:
      name: of the source.
      labels: ints, or class weights along `axis`.
      axis: 0 for the label of one example, 1 for those of several.
    """
    classes = self._classes[name]
    if classes is None:
      return labels
    if labels.ndim > axis:
      found = np.zeros((*labels.shape[:axis], self.num_classes), np.float32)
      if labels.shape[axis] == len(classes):
        found[..., classes] = labels
        return found
    elif np.all((labels >= 0) & (labels < len(classes))):
      return classes[labels]
    raise ValueError(
      f'Mixture: a label of {name!r} does not fit its {len(classes)} classes. '
      'Check num_classes of the source, and whether the split has labels (-1 '
      'often means none).'
    )


def _known(sources, attribute):
  return {k: getattr(v, attribute, None) for k, v in sources.items()}


def _same(sources):
  first, *others = sources
  counts = _known(sources, 'num_classes')
  names = _known(sources, 'class_names')
  for name in others:
    if counts[name] != counts[first]:
      what = f'{counts[first]} and {counts[name]} classes'
    elif None in (names[first], names[name]):
      continue  # the number of the classes is all that is known
    elif list(map(str, names[first])) != list(map(str, names[name])):
      pairs = enumerate(zip(names[first], names[name]))
      label, (one, other) = next(x for x in pairs if x[1][0] != x[1][1])
      what = f'other classes: class {label} is {one!r} and {other!r}'
    else:
      continue
    raise ValueError(
      f"Mixture: classes='same', but the sources {first!r} and {name!r} have "
      f"{what}. Use classes='by_name' if classes of one name are the same, or "
      "'concatenated' if sources share no class. To train without labels, wrap "
      'each source in vit_jax.data.pipeline.Unlabelled.'
    )
  known = next((x for x in names.values() if x is not None), None)
  known = None if known is None else list(map(str, known))
  return dict.fromkeys(sources), counts[first], known


def _by_name(sources):
  labels: dict[str, int] = {}
  found = {}
  for name, names in _known(sources, 'class_names').items():
    if names is None:
      raise ValueError(
        f"Mixture: classes='by_name', but the source {name!r} has no "
        "class_names. Use 'same' or 'concatenated', or a source with names."
      )
    names = list(map(str, names))
    if twice := [x for x in dict.fromkeys(names) if names.count(x) > 1]:
      raise ValueError(
        f"Mixture: classes='by_name', but the source {name!r} has several "
        f'classes of the name {twice[0]!r}. Give it unique class_names.'
      )
    for each in names:
      labels.setdefault(each, len(labels))
    found[name] = np.array([labels[x] for x in names], np.int32)
  return found, len(labels), list(labels)


def _concatenated(sources):
  counts = _known(sources, 'num_classes')
  if unknown := [name for name, count in counts.items() if count is None]:
    raise ValueError(
      f"Mixture: classes='concatenated', but the source {unknown[0]!r} has no "
      'num_classes. Use a source that knows its classes.'
    )
  found, start = {}, 0
  for name, count in counts.items():
    found[name] = np.arange(start, start + count, dtype=np.int32)
    start += count
  names = _known(sources, 'class_names')
  if any(x is None for x in names.values()):
    return found, start, None
  return found, start, [f'{k}/{each}' for k, v in names.items() for each in v]


@checked
@dataclasses.dataclass(frozen=True)
class Mixed:
  """The sources of a `Mixture` in proportion to weights.

  The proportions are exact over short windows: weights 3 and 1 give each 4
  consecutive positions 3 examples of the one source and 1 of the other, in an
  order that depends on the seed and the position. Each source is visited in an
  order of its own, for example each example once in its own epoch. See
  `order.Turns`.

  Attributes:
    weights: {name: weight} of all sources; a source of weight 0 is left out.
    orders: {name: order} of sources; the others are Shuffled.

  Raises:
    ValueError: (in `bind`) the source is no Mixture; unknown or missing names;
      weights that are all 0.
  """

  weights: Mapping[str, NonNegative]
  orders: Mapping[str, Order] = dataclasses.field(default_factory=dict)

  def bind(self, source: Source, seed: int) -> order.Visits:
    if not isinstance(source, Mixture):
      raise ValueError(
        f'the order Mixed needs a Mixture, but the source is '
        f'{type(source).__name__}. Use vit_jax.data.mixture.Mixture, and put '
        'what wraps a source, such as Subset, around the sources in it.'
      )
    names = list(source.sources)
    self._check(names)
    weights = np.array([self.weights[name] for name in names], np.float64)
    order.check_weights(f'Mixed: weights={dict(self.weights)}', weights)
    used = [name for name, weight in zip(names, weights) if weight]
    parts = []
    for name in used:
      # By name, so that a source keeps its order when others are added.
      seeds = np.random.SeedSequence([seed, zlib.crc32(name.encode())])
      own = int(seeds.generate_state(1, np.uint64)[0])
      inner = self.orders.get(name, Shuffled()).bind(source.sources[name], own)
      parts.append((source.starts()[name], inner))
    turns = order.Turns(weights[weights > 0].tolist(), seed)
    return MixedOrder(turns, parts)

  def _check(self, names):
    for what, given in ('weights', self.weights), ('orders', self.orders):
      for name in given:
        if name not in names:
          near = difflib.get_close_matches(str(name), names, n=1)
          hint = f' Did you mean {near[0]!r}?' if near else ''
          raise ValueError(
            f'Mixed: {what} has {name!r}, which is no source of the Mixture. '
            f'Its sources are {", ".join(names)}.{hint}'
          )
    if missing := [name for name in names if name not in self.weights]:
      raise ValueError(
        f'Mixed: {", ".join(map(repr, missing))} has no weight. Give each '
        'source of the Mixture a weight; 0 leaves it out.'
      )


class MixedOrder:
  """Visits of sources that take turns.

  Args:
    turns: of the sources.
    parts: (index of the first example, visits) of each source.
  """

  def __init__(
    self, turns: order.Turns, parts: list[tuple[int, order.Visits]]
  ) -> None:
    self._turns, self._parts = turns, parts

  def __call__(self, position: int) -> tuple[int, int]:
    """Return (visit, index of the example) of a position."""
    part, turn = self._turns(position)
    start, visits = self._parts[part]
    visit, index = visits(turn)
    return visit, start + index
