"""A study: named configs run in turn, and the table and figure they make.

    config.run = 'vit_jax.study.study'
    config.runs.pretrain = (a config of its own, with its own `run`)
    config.order = ('pretrain', ...)
    config.cells = (dict(row=, column=, runs=, metric=), ...)

Every run has its own directory, workdir/NAME, and is marked as done when it
is; the same command again goes on where it stopped. '{workdir}' in any text of
a run's config stands for the study's workdir, so that runs can build on one
another. `config.only` names a single run (or gives its number), for jobs that
each do one; the report is written by whichever finds all of them done.
"""

import json
import re
import time

import jax
import ml_collections
import numpy as np
from etils import epath

from vit_jax import curves, terminal, workdirs
from vit_jax.build import (
  ConfigError,
  Reader,
  call,
  check_arguments,
  locate,
  resolve,
)
from vit_jax.metrics import read_records

_DONE = 'done.json'


def study(config, workdir):
  """Runs what is not done yet; then writes and shows the report.

  Keys of the config: runs; order, their names in the order to run them (a
  ConfigDict sorts its keys), by default that of the alphabet; only; title;
  cells, the table: each cell shows the mean and standard deviation over all
  values whose run and metric match its regular expressions; figure, arguments
  of `curves.plot`.
  """
  config, given = Reader(config), config
  workdirs.prepare(workdir)
  workdir = epath.Path(workdir)
  console = terminal.console()
  runs = _runs(config.runs.read_all(), config.get('order'), workdir)
  only = config.get('only')
  cells = resolve(config.get('cells', ()))
  figure = resolve(config.get('figure'))
  title = config.get('title', 'Results')
  config.check_all_read('study')
  _check_report(cells, figure, runs)
  wanted = _wanted(runs, only)
  workdirs.record(workdir, given)
  _cache_compilations(workdir)

  for i, (name, run) in enumerate(runs.items()):
    if name in wanted and not (workdir / name / _DONE).exists():
      console.rule(f'{i + 1}/{len(runs)} {name}', align='left')
      _run(run, workdir / name)
  missing = [name for name in runs if not (workdir / name / _DONE).exists()]
  if missing:
    console.print(f'No report yet; not done: {", ".join(missing)}')
    return None
  records = {name: read_records(workdir / name) for name in runs}
  made = tabulate(cells, records)
  _write_report(made, title, workdir, console)
  if figure:
    path = workdir / 'curves.png'
    call(curves.plot, figure, records, path)
    console.print(f'Learning curves: {path}', soft_wrap=True)
  console.print(
    f'Table: {workdir / "table.md"}, and as data {workdir / "table.json"}\n'
    f'Every run (config, metrics, TensorBoard, checkpoints): {workdir}/NAME',
    soft_wrap=True,
  )
  return made


def _wanted(runs, only):
  """Names of the runs to do here: all, or the one that `only` tells."""
  if only is None:
    return list(runs)
  found = [name for i, name in enumerate(runs) if str(only) in (name, str(i))]
  if not found:
    raise ConfigError(
      f'only={only!r} is none of the runs, nor the number of one: '
      f'{", ".join(f"{i} {name}" for i, name in enumerate(runs))}.'
    )
  return found


def _run(config, workdir):
  began = time.perf_counter()
  locate(config.run)(config, str(workdir))
  seconds = time.perf_counter() - began
  if jax.process_index() == 0:
    done = json.dumps({'seconds': round(seconds, 1)})
    (workdir / _DONE).write_text(done + '\n')


def tabulate(cells, records):
  """{row: {column: {'mean', 'std', 'values'}}} of the runs' last records.

  Args:
    cells: dicts of row, column, and the regular expressions runs and metric;
      mean and population standard deviation are over all that match both.
    records: {run: list of records}.

  Raises ConfigError for a cell that matches nothing.
  """
  table = {}
  for cell in cells:
    values = []
    for name, of_run in records.items():
      if re.fullmatch(cell['runs'], name):
        last = {k: v for record in of_run for k, v in record.items()}
        values += [
          v for k, v in last.items() if re.fullmatch(cell['metric'], k)
        ]
    if not values:
      raise ConfigError(f'No run has a value for {cell}.')
    table.setdefault(cell['row'], {})[cell['column']] = {
      'mean': float(np.mean(values)),
      'std': float(np.std(values)),
      'values': values,
    }
  return table


def _runs(runs, order, workdir):
  """{name: ConfigDict} in order, '{workdir}' filled in."""
  order = order or tuple(runs)
  if sorted(order) != sorted(runs):
    raise ConfigError(f'order={order} must name each of {list(runs)} once.')
  filled = {}
  for name in order:
    values = _fill(runs[name].to_dict(), str(workdir))
    filled[name] = ml_collections.ConfigDict(values)
  return filled


def _fill(value, workdir):
  if isinstance(value, str):
    return value.replace('{workdir}', workdir)
  if isinstance(value, dict):
    return {k: _fill(v, workdir) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(_fill(v, workdir) for v in value)
  return value


def _check_report(cells, figure, runs):
  """A mistake in the report is found before the first run starts."""
  wanted = []
  for cell in cells:
    if sorted(cell) != ['column', 'metric', 'row', 'runs']:
      raise ConfigError(
        f'cells: {dict(cell)} must have row, column, runs and metric.'
      )
    wanted.append(cell['runs'])
  if figure:
    check_arguments(curves.plot, figure, num_args=2)
    for panel in figure['panels']:
      wanted += [of_runs for of_runs, _ in panel['lines'].values()]
  for pattern in wanted:
    if not any(re.fullmatch(pattern, name) for name in runs):
      raise ConfigError(
        f'{pattern!r} (in cells or figure) matches none of the runs: '
        f'{", ".join(runs)}.'
      )


def _cache_compilations(workdir):
  """Runs that differ in their seed alone share one compilation."""
  if jax.config.jax_compilation_cache_dir is None:
    jax.config.update('jax_compilation_cache_dir', str(workdir / 'xla_cache'))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)


def _write_report(table, title, workdir, console):
  columns = list(dict.fromkeys(c for row in table.values() for c in row))
  rows = [
    [name, *(_show(row.get(column)) for column in columns)]
    for name, row in table.items()
  ]
  console.print(terminal.table(title, ['', *columns], rows))
  if jax.process_index():
    return
  lines = [f'# {title}', '', f'| | {" | ".join(columns)} |']
  lines += ['|---' * (len(columns) + 1) + '|']
  lines += [f'| {" | ".join(row)} |' for row in rows]
  (workdir / 'table.md').write_text('\n'.join(lines) + '\n')
  (workdir / 'table.json').write_text(json.dumps(table, indent=2) + '\n')


def _show(cell):
  if cell is None:
    return ''
  if len(cell['values']) == 1:
    return f'{cell["mean"]:.1%}'
  return f'{100 * cell["mean"]:.1f} ± {100 * cell["std"]:.1f}%'
