"""WORKDIR/report.html: a run or a study as one page that needs no network.

The page has what the workdir has: a summary, curves, evaluations, confusion
matrices and misclassified images, where the time went, the config and what
differs from its preset, and the environment. All of it is read from files, so a
page can be made of any run, also of one that is running, or was stopped.
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
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax import config as configs
from vit_jax.reports import charts, confusion, mistakes
from vit_jax.reports.workdir import Workdir
from vit_jax.runs.files import PathLike, write_atomically

NAME = 'report.html'
# Metrics that a summary shows, best first; the rest is in tables.
_MAIN = ('accuracy', r'\d+shot', 'mAP', 'loss')
_DETAIL = re.compile(r'class_accuracy/.*|.*_seed\d+|.*_(low|high|std)')
_SMALLER_IS_BETTER = re.compile(r'.*(loss|ece|hamming)')
_MAX_BYTES = 8_000_000  # of a file that becomes part of a page


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
        mistakes.save_images(workdir, name, evaluator.data.source)
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
  found = Workdir(workdir)
  if not found.config and not found.records:
    raise ValueError(
      f'{workdir} has neither config.json nor metrics.jsonl. Expected the '
      'workdir of a run or a study.'
    )
  path = epath.Path(output) if output else found.path / NAME
  content = _study(found) if found.is_study else _run(found)
  text = _template().render(workdir=found, **_setup(found), **content)
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
    undefined=jinja2.StrictUndefined,
  )
  environment.policies['json.dumps_kwargs'] = {'sort_keys': False}
  environment.filters |= {
    'metric': _metric,
    'number': _number,
    'duration': _duration,
    'code': functools.partial(json.dumps, ensure_ascii=False),
  }
  return environment.get_template('page.html')


def _run(run):
  """Return what the template shows of a run."""
  kinds = {'train': 'Training run', 'evaluate': 'Evaluation'}
  parent = run.path.parent / 'config.json'
  siblings = (
    json.loads(parent.read_text()).get('runs') if parent.exists() else {}
  )
  return {
    'kind': kinds.get(run.kind, 'Run'),
    'study': run.path.parent.name if run.name in (siblings or {}) else None,
    'status': run.status,
    'tiles': _tiles(run),
    'charts': charts.of_run(run.records),
    'evaluations': _evaluations(run),
    'confusions': _confusions(run),
    'mistakes': mistakes.of_run(run.path),
    'runs': [],
    'metrics': [],
    'results': [],
    'figures': {},
  }


def _study(study):
  """Return what the template shows of a study."""
  runs = study.runs()
  done = [run for run in runs if run.done]
  is_over = len(done) == len(runs)
  text = f'{len(done)} of {len(runs)} runs are done'
  tiles = [('Runs done', f'{len(done)} of {len(runs)}', '')]
  if seconds := sum(run.seconds or 0 for run in runs):
    tiles.append(('Time of all runs', _duration(seconds), ''))
  metrics = [name for run in runs for name in main_metrics(run.last, limit=8)]
  figures = {x.stem: x.read_bytes() for x in sorted(study.path.glob('*.png'))}
  return {
    'kind': 'Study',
    'study': None,
    'status': ('finished', 'good') if is_over else (text, 'warn'),
    'tiles': tiles,
    'charts': charts.of_study({run.name: run.records for run in runs}),
    'evaluations': {},
    'confusions': {},
    'mistakes': {},
    'runs': [(run, (run.path / NAME).exists()) for run in runs],
    'metrics': list(dict.fromkeys(metrics))[:10],
    'results': [
      _markdown(file.read_text()) for file in sorted(study.path.glob('*.md'))
    ],
    'figures': {name: _encoded(data) for name, data in figures.items()},
  }


def _setup(found):
  """Return config, environment, and the files that the page contains."""
  environment = dict(found.environment)
  argv = [str(x) for x in environment.pop('argv', [])]
  if argv and argv[0].endswith('vit_jax/main.py'):
    argv[:1] = ['python', '-m', 'vit_jax.main']
  devices = environment.pop('devices', [])
  if devices:
    kind = environment.pop('device_kind', '')
    environment['devices'] = f'{len(devices)} × {kind}'
  packages = environment.pop('packages', {})
  environment |= {k: v for k, v in packages.items() if v}
  folder = pathlib.Path(__file__).parent
  files = {
    'chart_css': 'uplot/uPlot.min.css',
    'chart_js': 'uplot/uPlot.iife.min.js',
    'css': 'page.css',
    'js': 'page.js',
  }
  return {
    'command': shlex.join(argv),
    'environment': environment,
    'config': sorted(configs.walk(found.config)),
    'files': {key: (folder / name).read_text() for key, name in files.items()},
  }


def _tiles(run):
  """Return [(name, value, note)]: results first, then size and speed."""
  last, found = run.last, []
  for name in main_metrics(last):
    note = ''
    if f'{name}_low' in last:
      low, high = (_metric(last[f'{name}_{x}'], name) for x in ('low', 'high'))
      note = f'95%: {low} to {high}'
    elif f'{name}_std' in last:
      note = f'± {_metric(last[f"{name}_std"], name)} (std)'
    found.append((name, _metric(last[name], name), note))
  if run.records:
    of = f'of {run.total_steps:,}' if run.total_steps else ''
    what = 'Checkpoint of step' if run.kind == 'evaluate' else 'Steps'
    found.append((what, f'{run.step:,}', of))
  if run.seconds:
    found.append(('Wall time', _duration(run.seconds), ''))
  if 'images_per_s' in last:
    mfu = f'MFU {last["mfu"]:.1%}' if 'mfu' in last else ''
    found.append(('Images per second', f'{last["images_per_s"]:,.0f}', mfu))
  if 'memory_gb' in last:
    found.append(('Peak memory', f'{last["memory_gb"]:.1f} GB', ''))
  return found


def main_metrics(last: Mapping[str, Any], limit: int = 4) -> list[str]:
  """Return the metrics of a summary: the best kind of each evaluator.

  Args:
    last: {metric: last value}.
    limit: number of metrics at most.
  """
  found: list[str] = []
  for split, stems in _by_split(last).items():
    for kind in _MAIN:
      if chosen := [x for x in stems if re.fullmatch(kind, x)]:
        found += [f'{split}/{x}' for x in chosen]
        break
  if not found and 'train/loss' in last:
    found = ['train/loss']
  return found[:limit]


def _by_split(names):
  """Return {evaluator: [name of its metric]}."""
  splits: dict[str, list[str]] = {}
  for name in names:
    split, found, stem = name.partition('/class_accuracy/')
    stem = f'class_accuracy/{stem}'
    if not found:
      split, _, stem = name.rpartition('/')
    if split and split not in ('train', 'seconds', 'data_wait'):
      splits.setdefault(split, []).append(stem)
  return splits


def _evaluations(run):
  """Return {evaluator: {'rows', 'details', 'classes'}}."""
  curves = charts.curves(run.records)
  found = {}
  for split, stems in _by_split(curves).items():
    rows, details, classes = [], [], []
    for stem in stems:
      row = _evaluation(f'{split}/{stem}', curves)
      if stem.startswith('class_accuracy/'):
        classes.append((row['last'], stem.partition('/')[2]))
      elif not re.search('_(low|high|std)$', stem):
        row['name'] = stem
        (details if _DETAIL.fullmatch(stem) else rows).append(row)
    found[split] = {
      'rows': rows,
      'details': details,
      'classes': sorted(classes),
    }
  return found


def _evaluation(name, curves):
  """Return last value, interval, best value and its step of a metric."""
  curve = curves[name]
  step = max(curve)

  def of_last(end):
    return curves.get(f'{name}_{end}', {}).get(step)

  interval = ''
  if of_last('low') is not None:
    interval = f'[{_number(of_last("low"))}, {_number(of_last("high"))}]'
  elif of_last('std') is not None:
    interval = f'± {_number(of_last("std"))} (std)'
  finite = {k: v for k, v in curve.items() if math.isfinite(v)}
  best = None
  if len(set(finite.values())) > 1:
    better = min if _SMALLER_IS_BETTER.fullmatch(name) else max
    best = better(finite, key=finite.__getitem__)
  return {
    'last': curve[step],
    'interval': interval,
    'best': None if best is None else finite[best],
    'step': best,
  }


def _confusions(run):
  """Return {evaluator: {'figure', 'pairs': the most confused classes}}."""
  found = {}
  for path in sorted(run.path.glob('confusion-*.csv')):
    if path.stat().length > _MAX_BYTES:
      continue
    text = path.read_bytes().decode('utf-8', 'replace')
    (_, *labels), *rows = csv.reader(io.StringIO(text))
    matrix = np.array([row[1:] for row in rows], np.int64)
    totals = np.maximum(matrix.sum(axis=1), 1)
    figure = path.with_suffix('.png')
    found[path.stem.removeprefix('confusion-')] = {
      'figure': _encoded(figure.read_bytes()) if figure.exists() else None,
      'pairs': [
        (labels[i], labels[j], count, count / totals[i])
        for i, j, count in confusion.most_confused(matrix)
      ],
    }
  return found


def _encoded(data):
  return base64.b64encode(data).decode()


def _markdown(text):
  """Return (title, head, rows) of a file that `table.publish` has written."""
  title, *lines = [line for line in text.splitlines() if line]
  rows = [[x.strip() for x in line.strip('|').split('|')] for line in lines]
  head, _, *body = rows
  return title.lstrip('# '), head, body


def _metric(value, name):
  """Return a fraction in percent, and any other metric with four digits."""
  if re.search(r'(accuracy|\dshot)$', name):
    return f'{100 * value:.1f}%'
  return _number(value)


def _number(value):
  """Return a number with four digits, an integer with all of its digits."""
  if math.isfinite(value) and value == int(value) and abs(value) < 1e9:
    return f'{int(value):,}'
  return f'{value:.4g}'


def _duration(seconds):
  """Return seconds as hours, minutes or seconds."""
  if seconds < 60:
    return f'{seconds:.3g} s'
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours:,} h {minutes} min' if hours else f'{minutes} min {seconds} s'
