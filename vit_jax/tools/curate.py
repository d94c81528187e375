r"""Judge the images of a data set: near copies and likely wrong labels.

  python -m vit_jax.tools.curate --weights=WEIGHTS [SPLIT=]SOURCE ... \
      --output=DIR

WEIGHTS are as for tools.predict. SOURCE is a folder of images, that of a table
with --csv, or a name such as hf:beans:train, see docs/data.md. Several splits
are compared: train=/data/a test=/data/b. DIR gets

  index.html    rows of images; a click shows the nearest ones
  copies.csv    near copies: 'path' is the one to leave out, which is in 'train'
                if the other is in another split, else the later one
  labels.csv    labels that the other images contradict, the least likely first
  cover.csv     the --cover images to label first, each the furthest from all
                before, and from the split --labelled
  SPLIT.csv     images and labels that --leave_out leaves: trainings read it
  features.npz  features, which --features reads next time

After a kill, the same command resumes.
"""

import argparse
import csv
import os
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from vit_jax.data import images, subsets, workers
from vit_jax.data.description import Description, names_of, targets_of
from vit_jax.data.sources.named import open_source, split_and_name
from vit_jax.data.sources.tables import check, some
from vit_jax.data.targets import Labels, Numbers
from vit_jax.data.transforms import resize
from vit_jax.evals import curation, doubts
from vit_jax.evals.knn import nearest
from vit_jax.io import terminal
from vit_jax.io.files import is_local, write_csv
from vit_jax.reports import page
from vit_jax.reports.worst import thumbnail
from vit_jax.tools import arguments, features, parsers, predict
from vit_jax.types import UserError

_SHOWN, _PX = 60, 96  # images of a section, and their size
_SEARCHED = 5000  # up to so many images are all on the page
_LARGE = 4  # residual of a doubted number, in median residuals
_OPTIONS = {
  'csv': 'table of images and labels, in the folders',
  'image_key': 'column or field with the image',
  'label_key': 'column or field with the class',
  'labels': 'columns of several labels, A+B',
  'number': 'columns of numbers, A+B',
  'labelled': 'split that is labelled already',
}


class Pictures:
  """The images of all splits in a row; itself a source.

  Attributes:
    places: (split, row in its source) of each image.
    names: path or description of each, printable.
    y: labels, int [N] or float [N, K]; None without labels.
    classes: names of the classes, or of the K labels or numbers.
  """

  def __init__(self, sources: Mapping[str, Any]) -> None:
    names = [names_of(x, subsets.labels(x)) for x in sources.values()]
    self.classes = [*dict.fromkeys(y for x in names for y in x)]
    if any(x != self.classes for x in names):
      others = (subsets.ByNames(x, self.classes) for x in sources.values())
      sources = dict(zip(sources, others))
    self.sources, first = sources, next(iter(sources.values()))
    self.places = [(k, i) for k, x in sources.items() for i in range(len(x))]
    paths = map(self.describe, range(len(self)))
    self.names = [*map(terminal.printable, paths)]
    if len({*self.names}) < len(self):
      raise UserError('The splits share images. Expected each image once.')
    self.decode, self.y = images.decoder(first), None
    if not isinstance(first, subsets.Unlabelled):
      self.y = np.concatenate([*map(subsets.labels, sources.values())])
      self.targets = targets_of(first, self.y.ndim > 1)

  def keep(self, rows: np.ndarray) -> None:
    """Keep these images, in this order."""
    self.places = [self.places[i] for i in rows]
    self.names = [self.names[i] for i in rows]
    self.y = None if self.y is None else self.y[rows]

  def __len__(self) -> int:
    return len(self.places)

  def __getitem__(self, i: int) -> Mapping[str, Any]:
    split, row = self.places[i]
    return self.sources[split][row]

  def describe(self, i: int) -> str:
    """Return the path of the file, or the data set and the row."""
    split, row = self.places[i]
    return subsets.describe(self.sources[split], row)

  def caption(self, i: int) -> str:
    """Return the split, and the label in words."""
    split, _ = self.places[i]
    if self.y is None:
      return split
    return f'{split}: {self.targets.caption(self.classes, self.y[i])}'

  def pixels(self, i: int) -> np.ndarray:
    """Return the image to look at, uint8 [H, W, 1 or 3]."""
    return images.picture(self, self[i]['image'])

  def grey(self, i: int) -> np.ndarray:
    """Return the image for `curation.copies`."""
    grey = self.pixels(i).mean(axis=2, keepdims=True).astype(np.uint8)
    return resize(grey, (curation.SIDE, curation.SIDE), 'area')[..., 0]


class Found(NamedTuple):
  """Rows of a table, and (image, caption) of a section of the page."""

  title: str
  note: str
  head: Sequence[str]
  rows: Sequence[Sequence[Any]] = ()
  shown: Sequence[tuple[int, str]] = ()


def copies(data: Pictures, pairs: Iterable[Any]) -> Found:
  """Return what is found about pairs (i, j, distance) of near copies."""
  rows, shown, across = [], [], 0
  for *pair, distance in pairs:
    kept, out = sorted(pair, key=lambda i: (data.places[i][0] == 'train', i))
    one, two = data.caption(out), data.caption(kept)
    is_across = data.places[out][0] != data.places[kept][0]
    across += is_across
    paths = data.names[out], data.names[kept]
    rows.append([*paths, one, two, f'{distance:.4f}'])
    words = f'{distance:.2f}' + ', across splits' * is_across
    shown += [(out, f'{one}, {words}'), (kept, f'copy of {two}')]
  note = f'{len(rows):,} pairs, {across:,} across splits. Crops are not found.'
  head = ['path', 'copy_of', 'label', 'label_of', 'distance']
  return Found('Near copies', note, head, rows, shown)


def labels(data: Pictures, x: np.ndarray, *near: np.ndarray) -> Found:
  """Return the labels that other images contradict, the least likely first.

  Args:
    x: features, [N, D].
    near: by `nearest`.
  """
  head = ['path', 'split', 'column', 'label', 'expected', 'score']
  if data.y is None:
    return Found('Likely wrong labels', 'The images have no labels.', head)
  y, columns, names, found = data.y, data.classes, ['no', 'yes'], []
  if y.ndim == 1:
    y = np.where(y < 0, np.nan, y)[:, None]
    columns, names = ['class'], data.classes
  is_number = isinstance(data.targets, Numbers)
  for column, values in zip(columns, y.T.astype(float)):
    if is_number:
      expected = doubts.numbers(x, values)
      residuals = np.abs(values - expected)
      score = -residuals / max(np.nanmedian(residuals), 1e-30)
      rows = np.flatnonzero(score < -_LARGE)
    else:
      score, expected = doubts.classes(x, values, *near)
      rows = np.flatnonzero((expected != values) & ~np.isnan(score))
    for i in rows.tolist():
      pair = values[i], expected[i]
      words = (f'{v:.6g}' if is_number else names[round(v)] for v in pair)
      found.append((score[i], i, column, *words))
  found.sort()
  note = f'{len(found):,} that the other images contradict, and what they say. '
  note += 'Not all are wrong: look at each.'
  rows = [
    [data.names[i], data.places[i][0], *z, f'{s:.4g}'] for s, i, *z in found
  ]
  shown = [(i, f'{of}: {y} → {other}') for _, i, of, y, other in found]
  return Found('Likely wrong labels', note, head, rows, shown)


def cover(data: Pictures, rows: Iterable[int]) -> Found:
  """Return the images to label first."""
  table = [[data.names[i], data.places[i][0]] for i in rows]
  note = f'{len(table):,} images, each the furthest from all before.'
  shown = [(i, data.caption(i)) for i in rows]
  return Found('Images to label first', note, ['path', 'split'], table, shown)


def compare(
  data: Pictures, x: np.ndarray, args: argparse.Namespace
) -> tuple[dict[str, Found], np.ndarray]:
  """Return what is found by features [N, D], and the nearest images, [N, k]."""
  near = nearest(x, args.neighbours)
  read = workers.read_ahead(data.grey, range(len(x)), 2 * workers.cores())
  grey = np.stack([*terminal.track(read, len(x), unit='images')])
  pairs = curation.copies(near[1], grey, args.copies)
  known = [i for i, (k, _) in enumerate(data.places) if k == args.labelled]
  return {
    'copies': copies(data, pairs),
    'labels': labels(data, x, *near),
    'cover': cover(data, curation.cover(x, args.cover, known)),
  }, near[1]


def write_page(
  path: pathlib.Path,
  data: Pictures,
  found: Mapping[str, Found],
  near: np.ndarray,
) -> None:
  """Write the page; `near` has the nearest images of each."""
  shown = {k: x.shown[:_SHOWN] for k, x in found.items()}
  here = {i for x in shown.values() for i, _ in x}
  here = {*range(len(data))} if len(data) <= _SEARCHED else here
  order = sorted(here.union(*(near[i].tolist() for i in here)))
  read = workers.read_ahead(lambda i: thumbnail(data.pixels(i), _PX), order, 8)
  pictures = {
    i: {
      'name': data.names[i],
      'caption': data.caption(i),
      'image': image,
      'near': near[i].tolist() if i in here else [],
    }
    for i, image in zip(order, read)
  }
  page.render(
    epath.Path(path),
    'curate.html',
    title=f'{len(data):,} images: {", ".join(data.sources)}',
    note=f'{len(pictures):,} of them are on this page.',
    sections=[(k, x, shown[k]) for k, x in found.items()],
    pictures=pictures,
  )


def write_splits(
  folder: pathlib.Path, data: Pictures, out: Collection[str]
) -> None:
  """Write a table of the images of each split, without the names in `out`."""
  head: list[str] = []
  cells: list[Any] = [[]] * len(data)
  if data.y is not None:
    is_class = data.y.ndim == 1
    head = ['label'] if is_class else data.classes
    cells = [[data.classes[k]] for k in data.y] if is_class else data.y.tolist()
  tables: dict[str, list[Any]] = {x: [] for x in data.sources}
  for i, (split, _) in enumerate(data.places):
    if data.names[i] not in out:
      path = data.describe(i)
      path = os.path.abspath(path) if is_local(path) else path
      tables[split].append([path, *cells[i]])
  for split, rows in tables.items():
    if rows and epath.Path(rows[0][0]).exists():
      rows = [['path', *head], *rows]
      write_csv(folder / f'{split}.csv', rows, odd='surrogateescape')
      terminal.say(f'{split}.csv: {len(rows) - 1:,} images')
    else:
      terminal.say(f'{split}.csv is not written: there are no files.')


def names_in(paths: Iterable[str], data: Pictures) -> set[str]:
  """Return the column 'path' of tables, which names images."""
  found: set[str] = set()
  for path in paths:
    with open(path, encoding='utf-8', errors='surrogateescape') as file:
      rows = csv.DictReader(file)
      check(path, rows.fieldnames or (), '--leave_out', 'path')
      found |= {terminal.printable(row['path']) for row in rows}
  if other := sorted(found.difference(data.names)):
    raise UserError(f'--leave_out names what is no image here {some(other)}.')
  return found


def read_features(path: pathlib.Path, data: Pictures) -> np.ndarray:
  """Return features [N, D], and keep the images that have some."""
  names, x = features.read(path)
  names = [*map(terminal.printable, names)]
  row = {name: i for i, name in enumerate(data.names)}
  if len(names) < 2 or not {*names} <= row.keys():
    raise UserError(
      f'{path} has the images {some(names)}. Expected two or more images of '
      f'the sources, such as {data.names[0]}.'
    )
  if left := sorted(row.keys() - {*names}):
    terminal.say(f'Left out images without features {some(left)}')
  rows = np.array([row[name] for name in names])
  data.keep(np.sort(rows))
  return x[np.argsort(rows)]


def parser() -> argparse.ArgumentParser:
  usage = 'tools.curate --weights=WEIGHTS [SPLIT=]SOURCE ... --output=DIR'
  made = parsers.parser(__doc__, usage)
  add = made.add_argument
  add('sources', metavar='[SPLIT=]SOURCE', nargs='+')
  add('--output', metavar='DIR', type=pathlib.Path, required=True)
  help = 'file of tools.predict --features, instead of --weights'
  add('--features', metavar='FILE', type=pathlib.Path, help=help)
  for name, help in _OPTIONS.items():
    add(f'--{name}', help=help)
  help = 'images are anywhere in the folders, and their labels are not judged'
  add('--unlabelled', action='store_true', help=help)
  help = 'table whose column path names images; may be repeated'
  add('--leave_out', metavar='CSV', action='append', default=[], help=help)
  help = 'largest distance of near copies (0.2)'
  add('--copies', metavar='X', type=float, default=0.2, help=help)
  parsers.add_counts(
    made,
    batch_size=arguments.AT_ONCE,
    neighbours=(10, 'nearest images of each'),
    cover=(100, 'images to label first'),
  )
  arguments.add_weights(made, required=False)
  return made


def _open(args, decode):
  """Return the Pictures that the arguments name, and say what they are."""
  targets, sources = None, {}
  for kind, columns in (Labels, args.labels), (Numbers, args.number):
    targets = kind(columns.split('+')) if columns else targets
  options = {k: getattr(args, k) for k in ('csv', 'image_key', 'label_key')}
  options |= {'targets': targets, 'decode': decode}
  options |= {'classes': not args.unlabelled}
  for split, name in map(split_and_name, args.sources):
    source = open_source(name, **options)
    if split in sources:
      raise UserError(f'{args.sources} name a split twice. Use SPLIT=SOURCE.')
    sources[split] = subsets.Unlabelled(source) if args.unlabelled else source
    lines = Description.of(sources[split]).lines()
    terminal.say(f'{split}: ' + '\n  '.join(lines))
  if args.labelled not in (None, *sources):
    raise UserError(f'labelled={args.labelled}: expected one of {[*sources]}.')
  return Pictures(sources)


@terminal.one_message()
def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_args(argv)
  if not args.weights and not args.features:
    raise UserError('Give --weights or --features.')
  weights: Any = arguments.read(args) if args.weights else None
  data = _open(args, weights.decode if weights else images.Colours())
  out = names_in(args.leave_out, data)
  args.output.mkdir(parents=True, exist_ok=True)
  path = args.features or args.output / 'features.npz'
  if not args.features:
    if path.exists():
      raise UserError(f'{path} exists. Add --features={path}, or remove it.')
    predict.write_features(
      path, weights, data, layer='pre_logits', batch_size=args.batch_size
    )
  x = read_features(path, data)
  found, near = compare(data, x, args)
  for name, each in found.items():
    write_csv(args.output / f'{name}.csv', [each.head, *each.rows])
    terminal.say(f'{each.title}: {each.note}')
  write_splits(args.output, data, out)
  path = args.output / 'index.html'
  write_page(path, data, found, near)
  terminal.say(f'Page: {path}')


if __name__ == '__main__':
  main()
