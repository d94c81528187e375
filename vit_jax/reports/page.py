"""WORKDIR/report.html: a run or a study as one page that needs no network.

It is made from the files in the workdir, also of a running or stopped run.
"""

import base64
import csv
import io
import json
import math
import pathlib
import re
import shlex
import sys
import urllib.parse
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax import config as configs
from vit_jax.io.files import write_atomically
from vit_jax.io.terminal import duration
from vit_jax.reports import charts, confusion
from vit_jax.reports.results import wilson
from vit_jax.reports.workdir import Workdir
from vit_jax.runs import workdirs
from vit_jax.types import PathLike, UserError, kind_of

NAME = 'report.html'
_WORST = 24  # mistakes on a page
_MISTAKES = {  # {kind of file: (title, note on their number and their file)}
  'misclassified': (
    'Worst mistakes',
    '{} examples are misclassified. The worst are shown: their true class got '
    'the lowest probability. All are in {}.',
  ),
  'worst': ('Worst predictions', 'The largest errors first; {} are in {}.'),
}


def write_at_end(workdir: PathLike) -> None:
  """Write the page of a run, on the first host; print any error."""
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


def is_complete(workdir: PathLike) -> bool:
  """Return whether a run has written its page, and what comes before it."""
  found = Workdir(workdir)
  return found.is_ended and (found.path / NAME).exists()


def write(workdir: PathLike, output: PathLike | None = None) -> epath.Path:
  """Write a run's or study's page, by default report.html; return its path."""
  found = _read(workdir)
  path = epath.Path(output) if output else found.path / NAME
  content = _study(found) if found.is_study else _run(found)
  return render(path, 'page.html', workdir=found, **content, **_setup(found))


def compare(
  workdirs: Sequence[PathLike], output: PathLike | None = None
) -> epath.Path:
  """Write a page about runs, by default compare.html next to the first one."""
  runs = [_read(x) for x in dict.fromkeys(map(str, workdirs))]
  names = [x.name for x in runs]
  if len({*names}) < len(names):
    names = [str(x.path) for x in runs]
  last = [
    {k: _metric(k, x) for k in x.last if k != 'time' and _is_shown(k, x.kinds)}
    for x in runs
  ]
  settings = [
    x.preset.get('defaults', {}) | dict(configs.walk(x.config)) for x in runs
  ]
  differ = [row for row in _rows(settings) if len({*map(str, row[1:])}) > 1]
  tables = ('Last metrics', _rows(last)), ('Keys that differ', differ)
  return render(
    epath.Path(output or runs[0].path.parent / 'compare.html'),
    'page.html',
    workdir={'name': ', '.join(names), 'preset': {}, 'done': {}},
    kind='Comparison',
    status=(f'{len(runs)} runs', ''),
    figures={},
    results=[(title, ['', *names], rows) for title, rows in tables],
    charts=charts.of_study(
      (name, '', x.records, x.kinds) for name, x in zip(names, runs)
    ),
  )


def _rows(columns):
  """Return [key, its value in each dict, ...] for all keys of dicts."""
  keys = dict.fromkeys(key for column in columns for key in column)
  return [[key, *(x.get(key, '') for x in columns)] for key in keys]


def _is_shown(metric, kinds):
  """Return whether charts and tables show a metric."""
  kind = kind_of(metric, kinds)
  return kind.group not in ('', 'Layers') and not kind.detail


def _read(workdir):
  found = Workdir(workdir)
  if not found.config and not found.records:
    raise UserError(
      f'{workdir} has neither config.json nor metrics.jsonl. Expected the '
      'workdir of a run or a study.'
    )
  return found


def closing(workdir: PathLike) -> str:
  """Return the last lines of a command: what to do next, and the page."""
  found = Workdir(workdir)
  note = found.caution or _guessing(found)
  lines = [note] * bool(note)
  if found.kind == 'train':
    names = (x for k, x in configs.walk(found.model) if k.endswith('target'))
    packages = {str(x).split('.')[0] for x in names} - {'vit_jax'}
    trust = (f'--trust={x}' for x in sorted(packages))
    weights = shlex.join([f'--weights={workdir}', *trust])
    output = shlex.quote(f'--output={workdir}/look')
    image = _an_image(found.config)
    predict = f'  python -m vit_jax.tools.predict {weights}'
    if not found.config['data'].get('labels', True):  # then no head
      predict += ' ' + shlex.quote(f'--features={workdir}/features.npz')
    look = f'  python -m vit_jax.tools.look {weights} {output} {image}'
    lines += ['Next:', f'{predict} {image}', look]
  made = found.path / NAME
  return '\n'.join([*lines, f'Report: {made if made.exists() else workdir}'])


def _guessing(run):
  """Return a sentence if a result is not above guessing, else ''."""
  num_classes = run.model.get('model', {}).get('num_classes') or math.inf
  for name, majority in run.last.items():
    evaluator, _, metric = name.rpartition('/')
    if metric == 'majority_accuracy':
      accuracy = run.last[f'{evaluator}/accuracy']
      mean = run.last[f'{evaluator}/mean_per_class_accuracy']
      if accuracy <= 1.02 * majority and mean <= 1.1 / num_classes:
        return (
          f'{evaluator}: an accuracy of {accuracy:.1%} is not above guessing: '
          f'the largest class alone gives {majority:.1%}. Look at the labels, '
          'train for longer, try another --config.schedule.lr, or start from '
          'weights (configs/finetune.py).'
        )
  return ''


def _an_image(config):
  """Return the path of an image of a training run, quoted if there is one."""
  source = config['data'].get('source', {})
  split = (source.get('split') or '').partition('[')[0]
  files = pathlib.Path(source.get('path') or '/nowhere', split).rglob('[!.]*')
  found = (x for x in files if x.suffix.lower() in ('.jpg', '.jpeg', '.png'))
  return shlex.quote(str(next(found, 'IMAGE.jpg')))


def render(path: epath.Path, template: str, **content: Any) -> epath.Path:
  """Write a page of the content, and return its path."""
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
  text = environment.get_template(template).render(**content)
  write_atomically(path, text.encode('utf-8', 'backslashreplace'))
  return path


def _run(run):
  """Return what the template shows of a run."""
  parent = Workdir(run.path.parent)
  is_member = parent.is_study and run.name in parent.config['runs']
  return {
    'kind': 'Evaluation' if run.kind == 'evaluate' else 'Training run',
    'study': parent.name if is_member else None,
    'status': run.status,
    'tiles': _tiles(run),
    'data': workdirs.read(run.path, 'data.json'),
    'charts': charts.of_run(run.records, run.kinds),
    'evaluations': _evaluations(run),
    'figures': {
      x.stem.split('-', 2)[2].replace('-', ' '): _encoded(x)
      for x in sorted(run.path.glob('sheet-*.png'))
    },
    'confusions': _by_evaluator(run.path, 'confusion', _confusion),
    'mistakes': _by_evaluator(run.path, 'misclassified', _mistakes)
    | _by_evaluator(run.path, 'worst', _mistakes),
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
  is_done = 'good' if done == len(runs) else 'warn'
  tables = [_markdown(x.read_text()) for x in sorted(study.path.glob('*.md'))]
  return {
    'kind': 'Study',
    'status': (f'{done} of {len(runs)} runs are done', is_done),
    'tiles': [('Time of all runs', duration(seconds), '')],
    'charts': charts.of_study(
      (
        re.sub(r'_seed\d+$', '', x.name),
        ' '.join(x.config.get('evals') or ''),
        x.records,
        x.kinds,
      )
      for x in runs
    ),
    'runs': _table_of(runs),
    'results': sorted(tables, key=lambda x: '95% intervals' in x[0]),
    'figures': {x.stem: _encoded(x) for x in sorted(study.path.glob('*.png'))},
  }


def _readable(metric):
  """Return the name of a metric in words."""
  words = re.sub(r'(\d)shot', r'\1-shot', metric.replace('/fewshot/', ' '))
  *split, name = words.split('/')
  return re.sub('[/_]', ' ', ' '.join([*split, charts.WORDS.get(name, name)]))


def _table_of(runs):
  """Return the table of a study's runs, with links to their pages."""
  from markupsafe import Markup

  names = [name for run in runs for name in _main_metrics(run)]
  metrics = list(dict.fromkeys(names))[:10]
  rows = []
  for run in runs:
    name = run.name
    if (run.path / NAME).exists():
      link = Markup('<a href="{}/{}">{}</a>')
      name = link.format(urllib.parse.quote(name), NAME, name)
    values = [_metric(x, run) if x in run.last else '' for x in metrics]
    time = duration(run.seconds) if run.seconds else ''
    step = f'{run.step:,}' if run.step else ''
    rows.append([name, run.status[0], step, time, *values])
  head = ['run', 'status', 'steps', 'time', *map(_readable, metrics)]
  return {'head': head, 'rows': rows}


def _setup(found):
  """Return config, environment, and the command."""
  environment = dict(found.environment, directory=str(found.path))
  argv = [str(x) for x in environment.pop('argv', [])]
  if argv and argv[0].endswith('vit_jax/main.py'):
    argv[:1] = ['python', '-m', 'vit_jax.main']
  names = tuple(re.sub(r'(?s)^-+config\.|=.*', '', x) + '.' for x in argv)
  changed = found.preset.get('changed', {})  # also what refers to another key
  typed = [k for k in changed if f'{k}.'.startswith(names)] or changed
  return {
    'command': shlex.join(argv),
    'environment': _as_json(configs.walk(environment)),
    'config': _as_json(sorted(configs.walk(found.config))),
    'preset': found.preset.get('config'),
    'changed': _as_json((key, *changed[key]) for key in sorted(typed)),
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
  found = []
  for name in _main_metrics(run)[:4]:
    count = last.get(_count(name))
    note = _interval(name, run) + (f' n = {count:,}' if count else '')
    found.append((_readable(name), _metric(name, run), note))
  of = f'of {run.total_steps:,}' if run.total_steps else ''
  found.append(('Steps', f'{run.step:,}', of))
  if run.seconds:
    found.append(('Wall time', duration(run.seconds), ''))
  if 'images_per_s' in last:
    mfu = f'MFU {last["mfu"]:.1%}' if 'mfu' in last else ''
    speeds = [x['images_per_s'] for x in run.records if 'images_per_s' in x]
    found.append(('Images per second', f'{np.median(speeds):,.0f}', mfu))
  if 'memory_gb' in last:
    found.append(('Peak memory', f'{last["memory_gb"]:.1f} GB', ''))
  return found


def _interval(name, run):
  """Return the interval or the standard deviation of a metric; '' if none."""
  last = dict(run.last)
  if name.endswith('/accuracy') and (count := last.get(_count(name))):
    ends = wilson(last[name], count)
    last = dict(zip((f'{name}_low', f'{name}_high'), ends)) | last
  low, high, std = (
    _shown(last[key], kind_of(name, run.kinds)) if key in last else ''
    for key in (f'{name}_{end}' for end in ('low', 'high', 'std'))
  )
  return f'[{low}, {high}]' if low else std and f'± {std} (std)'


def _count(name):
  """Return the metric with the number of examples of a metric."""
  return f'{name.partition("/")[0]}/num_examples'


def _main_metrics(run):
  """Return the metrics of a summary."""
  found = [name for name in run.last if kind_of(name, run.kinds).main]
  return found or [x for x in ('train/loss',) if x in run.last]


def _evaluations(run):
  """Return {evaluator: {'rows', 'details'}}, each [metric, value, interval]."""
  found: dict[str, Any] = {}
  for name in run.last:
    evaluator, _, metric = name.partition('/')
    kind = kind_of(name, run.kinds)
    if metric and evaluator != 'train' and kind.group:
      parts = found.setdefault(evaluator, {'rows': [], 'details': []})
      shown = _readable(metric)
      row = [shown, _metric(name, run), _interval(name, run)]
      parts['details' if kind.detail else 'rows'].append(row)
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
  if not (figure := path.with_suffix('.png')).exists():  # a run was killed
    confusion.draw(matrix, labels, figure, title=path.stem.partition('-')[2])
  errors = matrix * ~np.eye(len(matrix), dtype=bool)
  order = np.argsort(-errors, axis=None, kind='stable')[:12]
  pairs = [
    (labels[i], labels[j], f'{count:,}', f'{count / matrix[i].sum():.1%}')
    for i, j in zip(*np.unravel_index(order, errors.shape))
    if (count := errors[i, j])
  ]
  return {'figure': _encoded(figure), 'pairs': pairs}


def _mistakes(path, rows):
  """Return the worst rows of KIND-NAME.csv, and what they are."""
  kind, _, name = path.stem.partition('-')
  title, note = _MISTAKES[kind]
  saved = path.with_name(f'thumbnails-{name}.json')
  images = json.loads(saved.read_text()) if saved.exists() else {}
  header, *rows = rows
  worst = [
    dict(zip(header, row), image=images.get(row[-1])) for row in rows[:_WORST]
  ]
  note = note.format(len(rows), path.name)
  return {'title': title, 'note': note, 'rows': worst}


def _encoded(path):
  return base64.b64encode(path.read_bytes()).decode()


def _markdown(text):
  """Return (title, head, rows) of a file that `table.publish` has written."""
  title, *lines = [line for line in text.splitlines() if line]
  rows = [[x.strip() for x in line.strip('|').split('|')] for line in lines]
  head, _, *body = rows
  return title.lstrip('# '), head, body


def _metric(name, run):
  """Return a metric as text, see `_shown`."""
  return _shown(run.last[name], kind_of(name, run.kinds))


def _shown(value, kind):
  """Return a fraction in percent, and any other number with four digits."""
  if kind.unit == '%':
    return f'{100 * value:.2f}%'
  if math.isfinite(value) and value == int(value) and abs(value) < 1e9:
    return f'{int(value):,}'
  return f'{value:.4g}'
