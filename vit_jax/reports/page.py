"""WORKDIR/report.html: a run or a study as one page that needs no network.

All of it is read from the files in the workdir, so a page can be made of any
run, also of one that is running, or was stopped.
"""

import base64
import csv
import functools
import io
import json
import math
import pathlib
import re
import shlex
import sys
import urllib.parse

import jax
import numpy as np
from etils import epath

from vit_jax import config as configs
from vit_jax.reports import charts
from vit_jax.reports.workdir import Workdir
from vit_jax.runs.files import PathLike, write_atomically
from vit_jax.runs.terminal import duration
from vit_jax.types import UserError

NAME = 'report.html'
# Metrics that a summary shows, best first; the rest is in tables.
_MAIN = ('accuracy', r'\d+shot', 'mAP', 'loss')
_DETAIL = re.compile(r'class_accuracy/.*|.*_seed\d+')
_WORST = 24  # mistakes on a page


def write_at_end(workdir: PathLike) -> None:
  """Write the page of a run that has ended, on the first host.

  An error is only printed.
  """
  if jax.process_index():
    return
  try:
    write(workdir)
  except Exception as error:  # the run must not fail because of its page
    print(
      f'{NAME} was not written: {type(error).__name__}: {error}. The results '
      f'are complete. Try python -m vit_jax.tools.report {workdir}',
      file=sys.stderr,
    )


def write(workdir: PathLike, output: PathLike | None = None) -> epath.Path:
  """Write the page of a run or a study to WORKDIR/report.html, or `output`.

  Returns the path, or raises ValueError.
  """
  found = Workdir(workdir)
  if not found.config and not found.records:
    raise UserError(
      f'{workdir} has neither config.json nor metrics.jsonl. Expected the '
      'workdir of a run or a study.'
    )
  path = epath.Path(output) if output else found.path / NAME
  content = _study(found) if found.is_study else _run(found)
  text = _template().render(workdir=found, **content, **_setup(found))
  write_atomically(path, text.encode('utf-8', 'backslashreplace'))
  return path


@functools.cache
def _template():
  import jinja2  # a machine that trains may not have it

  folder = pathlib.Path(__file__).parent
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(folder),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  environment.globals['files'] = {
    str(file.relative_to(folder)): file.read_text()
    for file in (*folder.glob('page.*s'), *folder.glob('uplot/*s'))
  }
  return environment.get_template('page.html')


def _run(run):
  """Return what the template shows of a run."""
  kinds = {'train': 'Training run', 'evaluate': 'Evaluation'}
  parent = Workdir(run.path.parent)
  is_member = parent.is_study and run.name in parent.config['runs']
  return {
    'kind': kinds.get(run.kind, 'Run'),
    'study': parent.name if is_member else None,
    'status': run.status,
    'tiles': _tiles(run),
    'charts': charts.of_run(run.records),
    'evaluations': _evaluations(run.last),
    'confusions': _by_evaluator(run.path, 'confusion', _confusion),
    'mistakes': _by_evaluator(run.path, 'misclassified', _mistakes),
    'times': [
      (phase, duration(seconds), f'{seconds / run.seconds:.1%}')
      for phase, seconds in run.phases.items()
    ],
  }


def _study(study):
  """Return what the template shows of a study."""
  runs = study.runs()
  done = sum(bool(run.done) for run in runs)
  seconds = sum(run.seconds or 0 for run in runs)
  status = (f'{done} of {len(runs)} runs are done', 'warn')
  return {
    'kind': 'Study',
    'status': ('finished', 'good') if done == len(runs) else status,
    'tiles': [('Time of all runs', duration(seconds), '')],
    'charts': charts.of_study({run.name: run.records for run in runs}),
    'runs': _table_of(runs),
    'results': [
      _markdown(file.read_text()) for file in sorted(study.path.glob('*.md'))
    ],
    'figures': {x.stem: _encoded(x) for x in sorted(study.path.glob('*.png'))},
  }


def _table_of(runs):
  """Return the table of a study's runs, with links to their pages."""
  from markupsafe import Markup

  names = [name for run in runs for name in _main_metrics(run.last)]
  metrics = list(dict.fromkeys(names))[:10]
  rows = []
  for run in runs:
    name = run.name
    if (run.path / NAME).exists():
      link = Markup('<a href="{}/{}">{}</a>')
      name = link.format(urllib.parse.quote(name), NAME, name)
    values = [_metric(x, run.last[x]) if x in run.last else '' for x in metrics]
    time = duration(run.seconds) if run.seconds else ''
    step = f'{run.step:,}' if run.step else ''
    rows.append([name, run.status[0], step, time, *values])
  return {'head': ['run', 'status', 'steps', 'time', *metrics], 'rows': rows}


def _setup(found):
  """Return config, environment, and the command."""
  environment = dict(found.environment, directory=str(found.path))
  argv = [str(x) for x in environment.pop('argv', [])]
  if argv and argv[0].endswith('vit_jax/main.py'):
    argv[:1] = ['python', '-m', 'vit_jax.main']
  changed = found.preset.get('changed', {})
  return {
    'command': shlex.join(argv),
    'environment': _as_json(configs.walk(environment)),
    'config': _as_json(sorted(configs.walk(found.config))),
    'preset': found.preset.get('config'),
    'changed': _as_json((key, *x) for key, x in sorted(changed.items())),
    'defaults': _as_json(found.preset.get('defaults', {}).items()),
  }


def _as_json(rows):
  """Return rows whose cells, except for the first, are JSON texts."""
  return [
    [name, *(json.dumps(x, ensure_ascii=False) for x in values)]
    for name, *values in rows
  ]


def _tiles(run):
  """Return [(name, value, note)]: results first, then size and speed."""
  last = run.last
  found = [
    (name, _metric(name, last[name]), _interval(name, last))
    for name in _main_metrics(last)[:4]
  ]
  of = f'of {run.total_steps:,}' if run.total_steps else ''
  found.append(('Steps', f'{run.step:,}', of))
  if run.seconds:
    found.append(('Wall time', duration(run.seconds), ''))
  if 'images_per_s' in last:
    mfu = f'MFU {last["mfu"]:.1%}' if 'mfu' in last else ''
    found.append(('Images per second', f'{last["images_per_s"]:,.0f}', mfu))
  if 'memory_gb' in last:
    found.append(('Peak memory', f'{last["memory_gb"]:.1f} GB', ''))
  return found


def _interval(name, last):
  """Return the interval or the standard deviation of a metric; '' if none."""
  low, high, std = (
    _metric(name, last[key]) if (key := f'{name}_{end}') in last else ''
    for end in ('low', 'high', 'std')
  )
  return f'[{low}, {high}]' if low else std and f'± {std} (std)'


def _main_metrics(last):
  """Return the metrics of a summary: the best kind of each evaluator."""
  found = []
  for split, stems in _by_split(last).items():
    kinds = ([x for x in stems if re.fullmatch(kind, x)] for kind in _MAIN)
    found += [f'{split}/{x}' for x in next(filter(None, kinds), ())]
  return found or [x for x in ('train/loss',) if x in last]


def _by_split(names):
  """Return {evaluator: [name of its metric]}."""
  splits: dict[str, list[str]] = {}
  for name in names:
    found = re.fullmatch('(.*?)/(class_accuracy/.*)', name)
    split, stem = found.groups() if found else name.rpartition('/')[::2]
    if split and split not in ('train', 'seconds', 'data_wait'):
      splits.setdefault(split, []).append(stem)
  return splits


def _evaluations(last):
  """Return {evaluator: {'rows', 'details'}}, each [metric, value, interval]."""
  found = {}
  for split, stems in _by_split(last).items():
    found[split] = {'rows': [], 'details': []}
    for stem in stems:
      name, kind = f'{split}/{stem}', 'rows'
      if _DETAIL.fullmatch(stem):
        kind = 'details'
      if not re.search('_(low|high|std)$', stem):
        row = [stem, _metric(name, last[name]), _interval(name, last)]
        found[split][kind].append(row)
  return found


def _by_evaluator(folder, kind, read):
  """Return {evaluator: read(path of KIND-EVALUATOR.csv, its rows)}."""
  found = {}
  for path in sorted(folder.glob(f'{kind}-*.csv')):
    # Names of files may have bytes that are not UTF-8.
    text = path.read_bytes().decode('utf-8', 'replace')
    name = path.stem.removeprefix(f'{kind}-')
    found[name] = read(path, list(csv.reader(io.StringIO(text))))
  return found


def _confusion(path, rows):
  """Return the figure of confusion-NAME.csv and the most confused classes."""
  (_, *labels), *rows = rows
  matrix = np.array([row[1:] for row in rows], np.int64)
  totals = matrix.sum(axis=1)
  return {
    'figure': _encoded(path.with_suffix('.png')),
    'pairs': [
      (labels[i], labels[j], f'{count:,}', f'{count / totals[i]:.1%}')
      for i, j, count in most_confused(matrix)
    ],
  }


def most_confused(
  matrix: np.ndarray, limit: int = 12
) -> list[tuple[int, int, int]]:
  """Return [(true, predicted, count)], the largest cells off the diagonal."""
  errors = matrix * ~np.eye(len(matrix), dtype=bool)
  order = np.argsort(-errors, axis=None, kind='stable')[:limit]
  pairs = zip(*np.unravel_index(order, errors.shape))
  return [(int(i), int(j), int(errors[i, j])) for i, j in pairs if errors[i, j]]


def _mistakes(path, rows):
  """Return the number of rows of misclassified-NAME.csv, and the worst."""
  name = path.stem.replace('misclassified', 'thumbnails')
  saved = path.with_name(f'{name}.json')
  images = json.loads(saved.read_text()) if saved.exists() else {}
  header, *rows = rows
  worst = [
    dict(zip(header, row), image=images.get(row[-1])) for row in rows[:_WORST]
  ]
  return {'count': len(rows), 'rows': worst}


def _encoded(path):
  return base64.b64encode(path.read_bytes()).decode()


def _markdown(text):
  """Return (title, head, rows) of a file that `table.publish` has written."""
  title, *lines = [line for line in text.splitlines() if line]
  rows = [[x.strip() for x in line.strip('|').split('|')] for line in lines]
  head, _, *body = rows
  return title.lstrip('# '), head, body


def _metric(name, value):
  """Return a fraction in percent, and any other metric with four digits."""
  if re.search(r'(accuracy|\dshot)(_seed\d+)?$', name):
    return f'{100 * value:.2f}%'
  if math.isfinite(value) and value == int(value) and abs(value) < 1e9:
    return f'{int(value):,}'
  return f'{value:.4g}'
