"""Description of a source in some lines, before a run trains on it.

A reader says in `where` and `used` where its data are and which columns it has
taken, see tables.Labelled. All the rest follows from the interface of sources.
"""

import collections
import dataclasses
import hashlib
import io
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
    if labels is not None:
      kind = targets_of(source, labels.ndim > 1)
      names = getattr(source, 'class_names', None)
      names = [*map(str, names or range(_width(source, labels)))]
      head, (rows, look) = kind.heading, kind.statistics(names, labels)
      ending = ('es' if head[0] == 'class' else 's') * (len(rows) != 1)
      words = [kind.words(*row) for row in rows]
      counts = [0 if head[0] == 'number' else row[1] for row in rows]
      summary = f'{len(rows)} {head[0]}{ending}: {_shortened(words, counts)}'
    if train is not None and head == train.head and head[:1] != ('number',):
      look += _differences(rows, train.rows)
    return cls(
      where=where,
      used=dict(getattr(source, 'used', {})),
      count=len(source),
      head=head,
      rows=rows,
      summary=summary,
      sizes=_sizes(source),
      notes=tables.said(where),
      look=look,
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


def _width(source, labels):
  known = getattr(source, 'num_classes', None)
  return labels.shape[1] if labels.ndim > 1 else known or labels.max() + 1


def _labels(source):
  """Return the labels of all examples; None if that would take long."""
  if isinstance(source, Unlabelled):
    return None
  held = getattr(source, 'held', dict)()
  if 'labels' in held:
    return held['labels'][0]
  return subsets.labels(source) if len(source) <= _MOST_READ else None


def _shortened(words, counts):
  """Return words in a line; of many those of the largest and the smallest."""
  if len(words) <= _FEW:
    return ', '.join(words)
  order = np.argsort([-x for x in counts], kind='stable').tolist()
  first, last = order[: _FEW // 2], order[-_FEW // 2 :]
  return ', '.join(
    [words[i] for i in first] + ['...'] + [words[i] for i in last]
  )


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
  """Return the sizes of a sample of the images in words."""
  places = np.linspace(0, len(source) - 1, min(len(source), _SAMPLE))
  found = collections.Counter()
  for index in map(int, places):
    try:
      found[_size(source[index]['image'])] += 1
    except (OSError, ValueError):
      found['unreadable'] += 1
  sizes = [x for x in found if x != 'unreadable']
  if not sizes:
    return 'no image could be read'
  of = 'all' if len(places) == len(source) else f'{len(places)} looked at'
  bad = f', {found["unreadable"]} unreadable' if found['unreadable'] else ''
  if len(sizes) == 1:
    return f'size {sizes[0][0]}x{sizes[0][1]} ({of}{bad})'
  (w, h), least, most = found.most_common(1)[0][0], min(sizes), max(sizes)
  return (
    f'sizes {least[0]}x{least[1]} to {most[0]}x{most[1]}, most often {w}x{h}'
    f' ({of}{bad})'
  )


def _size(image):
  """Return (width, height)."""
  if isinstance(image, bytes):
    with images.pillow().open(io.BytesIO(image)) as opened:
      return opened.size
  return image.shape[1], image.shape[0]


def copies(one: Source, two: Source) -> list[str]:
  """Return lines about the images of `one` of which `two` has exact copies."""
  count, begin = len(one) + len(two), time.monotonic()
  if count > _MOST_COMPARED:
    return [f'copies were not looked for in {count:,} images']
  sizes = [_bytes_of(x) for x in (one, two)]
  if None not in sizes:
    shared = {*sizes[0]} & {*sizes[1]}
    rows = [[i for i, n in enumerate(x) if n in shared] for x in sizes]
  else:
    rows = [range(len(one)), range(len(two))]
  here: dict[Any, int] = {}
  there: dict[Any, int] = {}
  for source, found, digests in (one, rows[0], here), (two, rows[1], there):
    for i in found:
      digests[_digest(source, i)] = i
      if time.monotonic() - begin > _SECONDS:
        return ['copies were not looked for in all images, which takes long']
  both = [here[x] for x in here if x in there and x is not None]
  if not both:
    return []
  names = [os.path.basename(subsets.describe(one, i)) for i in sorted(both)]
  return [f'exact copies of images of the training {some(names)}']


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
