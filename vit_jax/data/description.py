"""Description of a source in some lines, before a run trains on it.

A reader says in `where` and `used` where its data are and which columns it has
taken, see tables.Labelled. All the rest follows from the interface of sources.
"""

import collections
import dataclasses
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.data import images, subsets
from vit_jax.data.sources import tables
from vit_jax.data.sources.tables import some
from vit_jax.data.subsets import Source, Unlabelled, View
from vit_jax.data.targets import Classes, Labels, Targets

_FEW = 8  # rows that are all named in a line
_SAMPLE = 64  # images whose size is looked at
_MOST_READ = 2_000  # examples that are read for their labels
_MOST_COMPARED, _SECONDS = 20_000, 2.0  # images, and the time to find copies


@dataclasses.dataclass(frozen=True)
class Description:
  """Place, labels and sizes of the examples of a source.

  Attributes:
    where: of the data; and `used`, the columns by what they are.
    count: number of examples.
    head, rows: a table of each class, label or number; summary: in words.
    sizes: of the images of a sample, in words.
    notes: what was left out or changed on reading.
    look: what is legal, but rarely meant.
  """

  where: str
  used: Mapping[str, str]
  count: int
  head: Sequence[str]
  rows: Sequence[Sequence[Any]]
  summary: str
  sizes: str
  notes: Sequence[str]
  look: Sequence[str]

  @classmethod
  def of(cls, source: Source, train: 'Description | None' = None) -> Any:
    """Return the description of a source; `train` is that of the training."""
    whole: Any = source
    while isinstance(whole, View):
      whole = whole.source
    where = getattr(whole, 'where', '') or type(whole).__name__
    labels, head, summary = _labels(source), (), ''
    rows: Any = []
    look: list[str] = []
    sizes, lost = _sizes(source)
    if labels is not None:
      kind = targets_of(source, labels.ndim > 1)
      found = kind.statistics(names_of(source, labels), labels)
      head, (rows, look) = kind.heading, found
      summary = _summary(kind, rows)
    if train is not None and head == train.head and head[:1] != ('number',):
      look += _differences(rows, train.rows)
    return cls(
      where=where,
      used=dict(getattr(source, 'used', {})),
      count=len(source),
      head=head,
      rows=rows,
      summary=summary,
      sizes=sizes,
      notes=tables.said(where),
      look=[*look, *lost],
    )

  def lines(self) -> list[str]:
    """Return the description in few lines."""
    used = ', '.join(f'{k} {v!r}' for k, v in self.used.items())
    where = self.where + f' ({used})' * bool(used)
    found = [f'{self.count:,} images in {where}', self.summary, self.sizes]
    return [*filter(None, found), *(f'look: {x}' for x in self.look)]


def targets_of(source: Source, is_vector: bool) -> Targets:
  """Return the kind of the labels of a source, or of mixed ones."""
  found: Targets = getattr(source, 'targets', None) or Classes()
  return Labels() if is_vector and isinstance(found, Classes) else found


def names_of(source: Source, labels: Any) -> list[str]:
  """Return the names of the classes or columns of labels [n] or [n, K]."""
  if names := getattr(source, 'class_names', None):
    return [*map(str, names)]
  known = getattr(source, 'num_classes', None)
  count = labels.shape[1] if labels.ndim > 1 else known or labels.max() + 1
  return [*map(str, range(count))]


def _labels(source):
  """Return the labels of all examples; None if that would take long."""
  if isinstance(source, Unlabelled):
    return None
  held = getattr(source, 'held', dict)()
  if 'labels' in held:
    return held['labels'][0]
  return subsets.labels(source) if len(source) <= _MOST_READ else None


def _summary(kind, rows):
  """Return rows in a line; of many those of the largest and the smallest."""
  word, many = kind.heading[0], len(rows) > _FEW
  ending = ('es' if word == 'class' else 's') * (len(rows) != 1)
  if many and word != 'number':
    rows = sorted(rows, key=lambda row: -row[1])
  words = [kind.words(*row) for row in rows]
  if many:
    words[_FEW // 2 : -_FEW // 2] = ['...']
  return f'{len(rows)} {word}{ending}: {", ".join(words)}'


def _differences(rows, train):
  """Return what a source and the training do not share, by name and count."""
  here, there = ({k for k, n, *_ in x if n} for x in (rows, train))
  found = []
  if absent := sorted(there - here):
    found.append(f'the training also has images of these {some(absent)}')
  if new := sorted(here - there):
    found.append(f'the training has no image of these {some(new)}')
  return found


def _sizes(source):
  """Return the sizes of a sample of the images, and what is not read."""
  places = np.linspace(0, len(source) - 1, min(len(source), _SAMPLE))
  found, unreadable, lost = collections.Counter(), 0, collections.Counter()
  decode = images.decoder(source)
  for index in map(int, places):
    try:
      image = images.opened(decode, source[index]['image'])
      found[np.shape(image)[1::-1]] += 1
      lost.update(getattr(image, 'lost', ()))
    except (OSError, ValueError):
      unreadable += 1
  if not found:
    return 'no image could be read', []
  of = 'all' if len(places) == len(source) else f'{len(places)} looked at'
  of += f', {unreadable} unreadable' * bool(unreadable)
  sizes = min(found), max(found), found.most_common(1)[0][0]
  least, most, usual = (f'{width}x{height}' for width, height in sizes)
  if len(found) == 1:
    sizes = f'size {usual} ({of})'
  else:
    sizes = f'sizes {least} to {most}, most often {usual} ({of})'
  return sizes, [
    f'{what} ({count} of {len(places)} files); channels=N reads files whole'
    for what, count in lost.items()
  ]


def copies(one: Source, two: Source) -> list[str]:
  """Return lines about the images of `one` of which `two` has exact copies."""
  count, begin = len(one) + len(two), time.monotonic()
  if count > _MOST_COMPARED:
    return [f'copies were not looked for in {count:,} images']
  sources = one, two
  sizes: Any = [_bytes_of(x) for x in sources]
  if None in sizes:
    sizes = [[0] * len(x) for x in sources]
  shared, digests = {*sizes[0]} & {*sizes[1]}, []
  for source, own in zip(sources, sizes):
    digests.append(dict[Any, int]())
    for i in (i for i, size in enumerate(own) if size in shared):
      digests[-1][_digest(source, i)] = i
      if time.monotonic() - begin > _SECONDS:
        return ['copies were not looked for in all images, which takes long']
  here, there = digests
  both = [here[x] for x in here.keys() & there.keys() - {None}]
  if not both:
    return []
  names = [os.path.basename(subsets.describe(one, i)) for i in sorted(both)]
  return [
    f'exact copies of images of the training {some(names)}; python -m '
    'vit_jax.tools.curate lists near copies, too'
  ]


def _bytes_of(source):
  """Return the sizes of the local files of a source; None: of none."""
  if not hasattr(source, 'file_name'):
    return None
  paths = [source.describe(i) for i in range(len(source))]
  if not os.path.isfile(paths[0]):
    return None
  return [os.path.getsize(x) if os.path.exists(x) else -1 for x in paths]


def _digest(source, index):
  try:
    image = source[index]['image']
  except (OSError, ValueError):
    return None
  data = image if isinstance(image, bytes) else np.asarray(image).tobytes()
  return hashlib.blake2b(data, digest_size=16).digest()
