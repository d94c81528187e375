"""WORKDIR/report.html: a run or a study as one page that needs no network.

The page has what the workdir has: a summary, curves, evaluations, confusion
matrices and misclassified images, where the time went, the config and what
differs from its preset, and the environment. All of it is read from files, so a
page can be made of any run, also of one that is running, or was stopped.
"""

import concurrent.futures
import csv
import io
import json
import math
import pathlib
import re
import shlex
import sys
import urllib.parse
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax.files import PathLike, write_atomically
from vit_jax.metrics import read_records
from vit_jax.reports import markup, series, thumbnails
from vit_jax.reports.markup import Html, fold, join, table, tag

NAME = 'report.html'
_FOLDER = pathlib.Path(__file__).parent
_MAX_BYTES = 8_000_000  # of a file that becomes part of the page
_MAX_CELLS, _MAX_CLASSES = 25, 1000  # classes of a table, of a picture
_LISTED, _PAIRS = 10, 12
_PHASES = {  # of metrics.Monitor
  'steps': ('training steps', 2),
  'setup': ('setup', 9),
  'restoring': ('restoring a checkpoint', 8),
  'compile': ('first step, including compilation', 4),
  'data': ('waiting for data', 1),
  'evals': ('evaluation', 0),
  'saving': ('saving', 5),
  'profile': ('profile', 7),
  'lost': ('lost: steps done again after a kill', 3),
}
# Metrics that a summary shows, best first; the rest is in tables.
_MAIN = ('accuracy', r'\d+shot', 'mean_average_precision', 'loss')
_DETAIL = re.compile(r'.*/class_accuracy/.*|.*_seed\d+')
_SMALLER_IS_BETTER = re.compile(r'.*(loss|ece|error)')


def write_at_end(
  workdir: PathLike, evaluators: Mapping[str, Any] | None = None
) -> None:
  """Write the page of a run that has ended; an error is only printed.

  Only the first host writes.

  Args:
    workdir: of a run or a study.
    evaluators: of the run; the images that they got wrong are saved for pages.
  """
  if jax.process_index():
    return
  try:
    for name, evaluator in (evaluators or {}).items():
      if getattr(evaluator, 'predictions', None):
        thumbnails.write(workdir, name, evaluator.data.source)
    write(workdir)
  except Exception as error:  # the run must not fail because of its page
    print(
      f'{NAME} was not written: {type(error).__name__}: {error}. The results '
      f'are complete. Try python -m vit_jax.tools.report {workdir}',
      file=sys.stderr,
    )


def write(workdir: PathLike, output: PathLike | None = None) -> epath.Path:
  """Write the page of a run or a study; return its path.

  Args:
    workdir: of a run or a study; local, or gs://...
    output: path of the page; None: report.html in the workdir.

  Raises:
    ValueError: the directory is not a workdir.
  """
  run = Workdir(workdir)
  if run.config is None and not run.records:
    raise ValueError(
      f'{workdir} has neither config.json nor metrics.jsonl. Expected the '
      'workdir of a run or a study.'
    )
  path = epath.Path(output) if output else run.path / NAME
  make = study_page if run.is_study else run_page
  write_atomically(path, make(run).encode('utf-8', 'backslashreplace'))
  return path


class Workdir:
  """What the files in a workdir say; what is missing is None or empty.

  Attributes:
    path, name: of the directory.
    config, preset, environment, done: JSON values of the files.
    records: of metrics.jsonl.
    last: {metric: last value}.
  """

  def __init__(self, path: PathLike) -> None:
    self.path = epath.Path(path)
    self.name = self.path.name or str(self.path)
    self.config = self._json('config.json')
    self.preset = self._json('preset.json')
    self.environment = self._json('environment.json') or {}
    self.done = self._json('done.json')
    self.records = read_records(self.path)
    self.last = {k: v for r in self.records for k, v in r.items()}

  def _json(self, name):
    file = self.path / name
    return json.loads(file.read_text()) if file.exists() else None

  @property
  def is_study(self) -> bool:
    return isinstance((self.config or {}).get('runs'), dict)

  @property
  def kind(self) -> str:
    """What the config runs: 'train', 'evaluate', 'study' or ''."""
    return str((self.config or {}).get('run', '')).rpartition('.')[2]

  @property
  def step(self) -> int:
    return max((r['step'] for r in self.records), default=0)

  @property
  def total_steps(self) -> int | None:
    """Length of the training, or None if it is not known."""
    for record in reversed(self.records):
      if progress := record.get('progress'):
        return round(record['step'] / progress)
    return self.step if self.last.get('eta_s') == 0 else None

  @property
  def status(self) -> tuple[str, str]:
    """(what became of the run, 'good', 'bad' or 'warn')."""
    if self.done and 'diverged' in self.done:
      return 'diverged', 'bad'
    if not self.records:
      return 'no results yet', 'warn'
    if self.kind == 'evaluate' or self.step == self.total_steps:
      return 'finished', 'good'
    if self.done:
      return 'finished', 'good'
    of = f' of {self.total_steps:,}' if self.total_steps else ''
    return f'stopped or running, step {self.step:,}{of}', 'warn'

  @property
  def phases(self) -> dict[str, float]:
    """{phase: seconds} of the last account of the time, or {}."""
    found = map(_seconds, reversed(self.records))
    return next(filter(None, found), {})

  @property
  def seconds(self) -> float | None:
    """Wall time in seconds, or None if it is not known."""
    if phases := self.phases:
      return sum(phases.values())
    return (self.done or {}).get('seconds')

  @property
  def goodput(self) -> float | None:
    """Fraction of the wall time in training steps, or None."""
    phases = self.phases
    return phases['steps'] / sum(phases.values()) if 'steps' in phases else None

  def runs(self) -> list['Workdir']:
    """Return the Workdirs of a study's runs, in order."""
    names = self.config.get('order') or self.config['runs']
    names = [n for n in names if n in self.config['runs'] and '/' not in n]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
      return list(pool.map(Workdir, [self.path / name for name in names]))


def _seconds(record):
  prefix = 'seconds/'
  return {
    k.removeprefix(prefix): v for k, v in record.items() if k.startswith(prefix)
  }


def run_page(run: Workdir) -> str:
  """Return the page of a run as text."""
  charts = series.of_run(run.records)
  kinds = {'train': 'Training run', 'evaluate': 'Evaluation'}
  study = None
  if (parent := run.path.parent / 'config.json').exists():
    runs = json.loads(parent.read_text()).get('runs')
    if isinstance(runs, dict) and run.name in runs:
      study = run.path.parent.name
  what = [kinds.get(run.kind, 'Run')]
  if study:
    link = tag('a', study, href=f'../{NAME}')
    what.append(join(' of the study ', link))
  return _page(
    run,
    what,
    tiles=_run_tiles(run),
    charts=charts,
    sections=[
      _curves(charts),
      _evaluations(run),
      *_mistakes(run),
      _time(run),
      _config(run),
      _environment(run),
    ],
  )


def study_page(study: Workdir) -> str:
  """Return the page of a study as text."""
  runs = study.runs()
  charts = series.of_study({run.name: run.records for run in runs})
  done = [run for run in runs if run.done]
  bad = [run for run in runs if run.status[1] == 'bad']
  note = f'{len(bad)} diverged' if bad else None
  seconds = [run.seconds for run in runs if run.seconds]
  tiles = [('Runs done', f'{len(done)} of {len(runs)}', note)]
  if seconds:
    tiles.append(('Time of all runs', _duration(sum(seconds)), _in_steps(runs)))
  state = ('finished', 'good')
  if len(done) < len(runs):
    state = (f'{len(done)} of {len(runs)} runs are done', 'warn')
  return _page(
    study,
    ['Study'],
    status=state,
    tiles=tiles,
    charts=charts,
    sections=[
      *_reports(study),
      _runs(runs),
      _curves(charts, shared=True),
      _config(study),
      _environment(study),
    ],
  )


def _in_steps(runs):
  """The goodput of several runs as a note, or None."""
  phases = [run.phases for run in runs if run.goodput is not None]
  total = sum(sum(x.values()) for x in phases)
  return (
    f'{sum(x["steps"] for x in phases) / total:.0%} in steps' if total else None
  )


def _page(run, what, *, tiles, charts, sections, status=None):
  """Return the whole document."""
  status, color = status or run.status
  times = [r['time'] for r in run.records if 'time' in r]
  when = None
  if times:
    when = f' · last record {times[-1].replace("T", " ")[:16]} UTC'
  steps = [x for chart in charts for s in chart['series'] for x in s['x']]
  data = {
    'charts': charts,
    'steps': [min(steps, default=0), max(steps, default=1)],
    'shared': run.is_study,
  }
  shown = [
    tag(
      'div',
      tag('dt', name),
      tag('dd', value, tag('small', note) if note else None),
    )
    for name, value, note in tiles
  ]
  diverged = (run.done or {}).get('diverged')
  body = [
    tag('h1', run.name),
    tag('p', *what, ' · ', tag('span', status, class_=color), when),
    tag('p', diverged, class_='bad') if diverged else None,
    tag('dl', *shown, class_='tiles') if shown else None,
    *sections,
    tag('div', class_='hidden', id='live', aria_live='polite'),
    markup.script(data),
    Html(f'<script>{(_FOLDER / "page.js").read_text()}</script>'),
  ]
  # The policy forbids every connection; all the page needs is in it.
  head = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<link rel="icon" href="data:,">{tag('title', f'{run.name} · vit_jax')}
<style>{(_FOLDER / 'page.css').read_text()}</style></head>"""
  return f'{head}<body>{join(*body)}</body></html>\n'


def _section(title, *children):
  children = [child for child in children if child]
  return tag('section', tag('h2', title), *children) if children else None


# Summary


def _run_tiles(run):
  """[(name, value, note)]: results first, then size and speed."""
  last, tiles = run.last, []
  for name in _main_metrics(run.last):
    low, high = (last.get(f'{name}_{end}') for end in ('low', 'high'))
    note = None
    if low is not None:
      note = f'95%: {_percent(name, low)} to {_percent(name, high)}'
    elif f'{name}_std' in last:
      note = f'± {_percent(name, last[f"{name}_std"])} (std)'
    tiles.append((name, _percent(name, last[name]), note))
  if run.kind == 'evaluate':
    tiles.append(('Checkpoint of step', f'{run.step:,}', None))
  elif run.records:
    total = run.total_steps
    of = f'of {total:,}' if total and total != run.step else None
    tiles.append(('Steps', f'{run.step:,}', of))
  if run.seconds:
    note = None if run.goodput is None else f'{run.goodput:.0%} in steps'
    tiles.append(('Wall time', _duration(run.seconds), note))
  if 'images_per_s' in last:
    mfu = f'MFU {last["mfu"]:.1%}' if 'mfu' in last else None
    tiles.append(('Images per second', f'{last["images_per_s"]:,.0f}', mfu))
  if 'memory_gb' in last:
    tiles.append(('Peak memory', f'{last["memory_gb"]:.1f} GB', None))
  devices = run.environment.get('devices') or []
  if devices:
    kind = run.environment.get('device_kind')
    hosts = run.environment.get('process_count', 1)
    note = f'on {hosts} hosts' if hosts > 1 else None
    tiles.append(('Devices', f'{len(devices)} × {kind}', note))
  return tiles


def _main_metrics(last, limit=4):
  """The metrics of a summary: the best kind that each evaluator has."""
  splits = {}
  for name in last:
    split, _, stem = name.rpartition('/')
    if split and split not in ('train', 'seconds') and not _DETAIL.match(name):
      splits.setdefault(split, []).append(stem)
  found = []
  for split, stems in splits.items():
    for kind in _MAIN:
      if chosen := [x for x in stems if re.fullmatch(kind, x)]:
        found += [f'{split}/{x}' for x in chosen]
        break
  if not found and 'train/loss' in last:
    found = ['train/loss']
  return found[:limit]


def _percent(name, value):
  """A fraction as percent if the metric is one, else four digits."""
  if re.search(r'(accuracy|\dshot)$', name):
    return f'{100 * value:.1f}%'
  return _number(value)


def _number(value):
  if isinstance(value, bool) or not isinstance(value, int | float):
    return str(value)
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  if value == int(value) and abs(value) < 1e9:
    return f'{int(value):,}'
  return f'{value:.4g}'


def _duration(seconds):
  if seconds < 60:
    return f'{seconds:.3g} s'
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours:,} h {minutes} min' if hours else f'{minutes} min {seconds} s'


# Curves


def _curves(charts, shared=False):
  if not charts:
    return None
  shown = []
  for group, title in (
    ('results', None),
    ('optimizer', 'Optimizer'),
    ('speed', 'Speed and memory'),
  ):
    if any(chart['group'] == group for chart in charts):
      holder = tag('div', class_='charts', data_charts=group)
      shown.append(tag('h3', title) if title else None)
      shown.append(holder)
  help = (
    'Point at a curve for its values; drag to zoom in, double-click to zoom '
    'out. With the keyboard, focus a chart and use the arrow keys.'
  )
  reset = tag(
    'button', 'Show all steps', id='reset', class_='toggle', hidden='hidden'
  )
  return _section(
    'Learning curves',
    tag('p', help, ' ', reset, class_='muted'),
    tag('noscript', tag('p', 'The curves need JavaScript.')),
    tag('div', id='shared') if shared else None,
    *shown,
  )


# Evaluations


def _evaluations(run):
  """A table per evaluator: last and best value, and its interval."""
  found = series.curves(run.records)
  splits = {}
  for name in found:
    split, _, stem = name.rpartition('/')
    if '/class_accuracy/' in name:
      split, stem = name.split('/class_accuracy/')[0], None
    if split and split not in ('train', 'seconds'):
      stems = splits.setdefault(split, [])
      if stem and not re.search(r'_(low|high|std)$', stem):
        stems.append(stem)
  parts = []
  for split, stems in splits.items():
    rows, details = [], []
    for stem in stems:
      name = f'{split}/{stem}'
      row = [stem, *_value_cells(name, found)]
      (details if _DETAIL.fullmatch(name) else rows).append(row)
    head = ['', 'last', 'interval', 'best', 'at step']
    # Columns without a value are left out.
    used = [i for i in range(5) if i < 2 or any(row[i] for row in rows)]

    def shown(rows, head=head, used=used):
      cells = [[row[i] for i in used] for row in rows]
      return table([head[i] for i in used], cells, numbers=(1, 2, 3, 4))

    parts.append(tag('h3', split))
    parts.append(shown(rows))
    if details:
      parts.append(fold('Single draws', shown(details)))
    parts.append(_classes(split, found))
  return _section('Evaluation', *parts)


def _value_cells(name, found):
  """Last value, interval, best value and its step of a metric."""
  curve = found[name]
  step = max(curve)

  def bound(end):
    return found.get(f'{name}_{end}', {}).get(step)

  interval = ''
  if bound('low') is not None and bound('high') is not None:
    interval = f'[{_number(bound("low"))}, {_number(bound("high"))}]'
  elif bound('std') is not None:
    interval = f'± {_number(bound("std"))} (std)'
  cells = [_number(curve[step]), interval]
  finite = {k: v for k, v in curve.items() if math.isfinite(v)}
  if len(set(finite.values())) < 2:
    return [*cells, '', '']
  better = min if _SMALLER_IS_BETTER.fullmatch(name) else max
  best = better(finite, key=finite.get)
  return [*cells, _number(finite[best]), f'{best:,}']


def _classes(split, found):
  """The accuracy of each class, lowest first, folded."""
  prefix = f'{split}/class_accuracy/'
  values = {
    name.removeprefix(prefix): curve[max(curve)]
    for name, curve in found.items()
    if name.startswith(prefix)
  }
  if not values:
    return None
  rows = [
    [name, f'{100 * value:.1f}%']
    for name, value in sorted(values.items(), key=lambda x: x[1])
  ]
  inner = table(['class', 'accuracy'], rows, numbers=(1,), sortable=True)
  return fold(f'Accuracy of {len(rows)} classes', inner)


# Confusion matrices and misclassified images, see reports/confusion.py


def _mistakes(run):
  for name in _evaluators(run.path, 'confusion-', '.csv'):
    yield _section(f'Confusion matrix: {name}', *_confusion(run.path, name))
  for name in _evaluators(run.path, 'misclassified-', '.csv'):
    yield _section(f'Worst mistakes: {name}', *_misclassified(run.path, name))


def _evaluators(folder, prefix, suffix):
  files = sorted(x.name for x in folder.glob(f'{prefix}*{suffix}'))
  return [x.removeprefix(prefix).removesuffix(suffix) for x in files]


def _confusion(folder, name):
  """The matrix as a table or a picture, and the most confused pairs."""
  file = folder / f'confusion-{name}.csv'
  if file.stat().length > _MAX_BYTES:
    return [tag('p', f'{file.name} is too large for this page.')]
  (_, *labels), *rows = csv.reader(io.StringIO(_text(file)))
  matrix = np.array([row[1:] for row in rows], np.int64)
  totals = matrix.sum(axis=1, keepdims=True)
  shares = matrix / np.maximum(totals, 1)
  errors = matrix * ~np.eye(len(matrix), dtype=bool)
  places = np.argsort(-errors, axis=None, kind='stable')[:_PAIRS]
  pairs = [divmod(int(place), len(matrix)) for place in places]
  pairs = [
    [labels[i], labels[j], f'{matrix[i, j]:,}', f'{shares[i, j]:.1%}']
    for i, j in pairs
    if errors[i, j]
  ]
  if len(labels) <= _MAX_CELLS:
    shown = _cells(matrix, shares, labels)
  elif len(labels) <= _MAX_CLASSES:
    shown = _pixels(shares, name)
  else:
    shown = None
  head = ['true', 'predicted', 'examples', 'of the class']
  listed = tag(
    'div',
    tag('h3', 'Most confused'),
    table(head, pairs, numbers=(2, 3), sortable=True),
  )
  return [tag('div', shown, listed if pairs else None, class_='beside')]


def _cells(matrix, shares, labels):
  """Counts; the color is the fraction of the true class."""
  head = [
    tag('th', tag('span', label), scope='col', title=label) for label in labels
  ]
  corner = tag('th', tag('small', 'true ↓', Html('<br>'), 'predicted →'))
  rows = []
  for i, label in enumerate(labels):
    cells = [tag('th', label, scope='row')]
    for j, other in enumerate(labels):
      strength = round(100 * math.sqrt(shares[i, j]))
      style = (
        f'background:color-mix(in srgb,var(--heat) {strength}%,var(--soft));'
      )
      if strength > 60:
        style += 'color:var(--bg)'
      title = f'{label} predicted as {other}: {shares[i, j]:.1%}'
      text = f'{matrix[i, j]:,}' if matrix[i, j] else ''
      cells.append(tag('td', text, style=style, title=title))
    rows.append(tag('tr', *cells))
  made = tag(
    'table',
    tag('thead', tag('tr', corner, *head)),
    tag('tbody', *rows),
    class_='matrix',
  )
  return tag('div', made, class_='scroll')


def _pixels(shares, name):
  """A pixel per pair of classes: row = true, column = predicted."""
  pixels = np.zeros((*shares.shape, 4), np.uint8)
  pixels[..., :3] = 37, 99, 235
  pixels[..., 3] = np.round(255 * np.sqrt(shares))
  alt = f'confusion matrix of {name}: {len(shares)} classes'
  picture = markup.image(_png(pixels), 'png', alt=alt, class_='pixels')
  note = 'Rows: true class. Columns: predicted class.'
  return tag('div', picture, tag('p', note, class_='muted'))


def _misclassified(folder, name):
  """The worst mistakes, as images where the files still exist."""
  file = folder / f'misclassified-{name}.csv'
  worst, count = thumbnails.rows(file)
  if not count:
    return [tag('p', 'No example is misclassified.')]
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    images = list(pool.map(lambda row: _thumbnail(folder, name, row), worst))
  parts = [
    tag(
      'p',
      f'{count:,} examples are misclassified. The worst are shown, whose true '
      f'class got the lowest probability; all are in {file.name}.',
      class_='muted',
    )
  ]
  items = [
    tag(
      'li',
      image,
      tag(
        'div',
        'predicted: ',
        tag('strong', row['predicted_class']),
        f' {_share(row["predicted_probability"])}',
      ),
      tag(
        'div',
        'true: ',
        tag('strong', row['true_class'], class_='good'),
        f' {_share(row["true_probability"])}',
        class_='muted',
      ),
      title=row['file'],
    )
    for row, image in zip(worst, images)
    if image
  ]
  if items:
    parts.append(tag('ul', *items, class_='images'))
  rows = [
    [
      row['file'],
      row['true_class'],
      _share(row['true_probability']),
      row['predicted_class'],
      _share(row['predicted_probability']),
    ]
    for row in (worst if items else worst[:_LISTED])
  ]
  head = ['example', 'true', 'its probability', 'predicted', 'its probability']
  listed = table(head, rows, numbers=(2, 4))
  parts.append(fold('As a table', listed) if items else listed)
  return parts


def _share(text):
  value = float(text)
  return f'{value:.1%}' if value >= 0.001 else f'{value:.1g}'


def _thumbnail(folder, name, row):
  """Return a small picture of an example, or None if there is none."""
  data = thumbnails.read(folder, name, row)
  if data is None:
    return None
  kind = 'png' if data.startswith(b'\x89PNG') else 'jpeg'
  file = row['file'].rpartition('/')[2]
  return markup.image(data, kind, alt=file, class_=kind)


def _png(pixels):
  from PIL import Image

  file = io.BytesIO()
  Image.fromarray(pixels).save(file, 'PNG')
  return file.getvalue()


def _text(file):
  return file.read_bytes().decode('utf-8', 'replace')


# Where the time went


def _time(run):
  phases = {k: v for k, v in run.phases.items() if v > 0}
  total = sum(phases.values())
  if not total:
    return None
  order = sorted(phases, key=lambda x: -phases[x])
  bars, rows = [], []
  for phase in order:
    label, color = _PHASES.get(phase, (phase, 6))
    color, share = f'background:var(--c{color})', phases[phase] / total
    title = f'{label}: {_duration(phases[phase])}, {share:.1%}'
    bars.append(tag('i', style=f'{color};flex:{share:.4f}', title=title))
    swatch = tag('i', class_='swatch bar-swatch', style=color)
    name = join(swatch, ' ', label)
    rows.append([name, _duration(phases[phase]), f'{share:.1%}'])
  text = f'{_duration(total)} of wall time.'
  if run.goodput is not None:
    text += f' Goodput, the fraction in training steps: {run.goodput:.1%}.'
  return _section(
    'Time',
    tag('p', text),
    tag('div', *bars, class_='time', role='img', aria_label=text),
    table(None, rows, numbers=(1, 2)),
  )


# Config and environment


def _config(run):
  if not run.config:
    return None
  parts = []
  preset = run.preset
  if preset is None or 'changed' not in preset:
    text = 'This run did not record the preset that its config is from.'
    parts.append(tag('p', text, class_='muted'))
  else:
    parts.append(tag('p', 'Preset: ', tag('code', preset.get('config'))))
    rows = [
      [key, _code(before), _code(after)]
      for key, (before, after) in sorted(preset['changed'].items())
    ]
    if rows:
      parts.append(table(['changed', 'preset', 'this run'], rows))
    else:
      parts.append(tag('p', 'Nothing differs from the preset.'))
  flat = sorted(_flat(run.config).items())
  rows = [[key, _code(value)] for key, value in flat]
  parts.append(fold(f'Resolved config ({len(rows)} keys)', table(None, rows)))
  if defaults := (preset or {}).get('defaults'):
    rows = [
      [key.removeprefix('config.'), tag('code', text)]
      for key, text in defaults.items()
    ]
    title = f'Defaults that the config does not set ({len(rows)})'
    parts.append(fold(title, table(None, rows)))
  return _section('Config', *parts)


def _code(value):
  if value is None:
    return tag('span', '–', class_='muted')
  return tag('code', json.dumps(value, ensure_ascii=False))


def _flat(value, where=''):
  """{dotted key: value} of nested dicts, and of lists that have dicts."""
  if isinstance(value, list) and any(isinstance(x, dict) for x in value):
    value = {str(i): x for i, x in enumerate(value)}
  if not isinstance(value, dict) or not value:
    return {where: value}
  found = {}
  for key, inner in value.items():
    found |= _flat(inner, f'{where}.{key}' if where else key)
  return found


def _environment(run):
  found = dict(run.environment)
  if not found:
    return None
  argv = [str(x) for x in found.pop('argv', [])]
  packages = found.pop('packages', {})
  if devices := found.pop('devices', None):
    kind = found.pop('device_kind', '')
    shown = ', '.join(map(str, devices[:8])) + (', …' if devices[8:] else '')
    found['devices'] = f'{len(devices)} × {kind}: {shown}'
  found |= {k: v for k, v in packages.items() if v}
  rows = [
    [key.replace('_', ' '), tag('code', 'not known' if v is None else v)]
    for key, v in found.items()
  ]
  if argv and argv[0].endswith('vit_jax/main.py'):
    argv[:1] = ['python', '-m', 'vit_jax.main']
  command = tag('pre', shlex.join(argv)) if argv else None
  return _section(
    'Environment',
    command,
    table(None, rows),
    tag('p', 'Directory: ', tag('code', run.path)),
  )


# Studies


def _runs(runs):
  """A table of the runs with links to their pages."""
  columns = {}
  for run in runs:
    for name in _main_metrics(run.last, limit=8):
      columns[name] = columns.get(name, 0) + 1
  columns = sorted(columns, key=lambda x: -columns[x])[:10]
  head = ['run', 'status', 'steps', 'time', *columns]
  rows = []
  for run in runs:
    status, color = run.status
    name = run.name
    if (run.path / NAME).exists():
      href = f'{urllib.parse.quote(name)}/{NAME}'
      name = tag('a', name, href=href)
    seconds = run.seconds
    cells = [
      name,
      tag('span', status, class_=f'status {color}'),
      (f'{run.step:,}', run.step) if run.records else '',
      (_duration(seconds), seconds) if seconds else '',
    ]
    for metric in columns:
      value = run.last.get(metric)
      cells.append('' if value is None else (_percent(metric, value), value))
    rows.append(cells)
  numbers = range(2, len(head))
  return _section('Runs', table(head, rows, numbers=numbers, sortable=True))


def _reports(study):
  """The tables and figures that the study's own reports wrote."""
  parts = []
  for file in sorted(study.path.glob('*.md')):
    parts += _markdown(file.read_text())
  for file in sorted(study.path.glob('*.png')):
    if file.stat().length > _MAX_BYTES:
      parts.append(tag('p', f'{file.name} is too large for this page.'))
      continue
    picture = markup.image(file.read_bytes(), 'png', alt=file.stem)
    parts.append(tag('div', tag('h3', file.stem), picture, class_='figure'))
  return [_section('Results', *parts)]


def _markdown(text):
  """Headings and tables as `table.publish` writes them."""
  parts, rows = [], []
  for line in [*text.splitlines(), '']:
    if line.startswith('|'):
      rows.append([cell.strip() for cell in line.strip('|').split('|')])
      continue
    if rows:
      head, *body = (row for row in rows if set(''.join(row)) != {'-'})
      parts.append(table(head, body, numbers=range(1, len(head))))
      rows = []
    if line.startswith('#'):
      parts.append(tag('h3', line.lstrip('# ')))
    elif line.strip():
      parts.append(tag('p', line))
  return parts
