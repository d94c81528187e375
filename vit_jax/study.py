"""A study: runs with configs of their own, and reports about their results.

    config.run = 'vit_jax.study.study'
    config.runs.pretrain = (a config of its own, with its own `run`)
    config.order = ('pretrain', ...)
    config.report = (dict(target='vit_jax.reports.table.Table', cells=...),)

Every run has its own directory, workdir/NAME. The same command resumes the
study. Runs can build on one another: '{workdir}' in any text of a run's config
is replaced by the workdir of the study, and `best_of` takes values from the
best of other runs:

    config.runs.final.best_of = dict(
        runs='dev_lr.*', metric='dev/accuracy', take=('schedule.lr',))
"""

import itertools
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_collections
from etils import epath
from jax.experimental import multihost_utils

from vit_jax import config as configs
from vit_jax.config import ConfigError, Provenance
from vit_jax.io import terminal
from vit_jax.reports import page
from vit_jax.reports.results import Results
from vit_jax.reports.workdir import Workdir
from vit_jax.runs import compiled, workdirs
from vit_jax.runs.monitor import NonFiniteError
from vit_jax.types import PathLike, UserError, kind_of

DONE = 'done.json'


def study(
  workdir: PathLike,
  *,
  runs: Mapping[str, ml_collections.ConfigDict],
  order: Sequence[str] | None = None,
  report: Sequence[Any] = (),
  shared: ml_collections.ConfigDict | None = None,
  discard: str = '',
  writers: ml_collections.ConfigDict | None = None,
  member: str | int | None = None,
  report_only: bool = False,
  provenance: Provenance | None = None,
  dry_run: bool = False,
) -> list[Any]:
  """Do the runs that are not done; return the values of the reports.

  A run that meets NaN is done too, as 'diverged': `best_of` does not choose it
  and reports leave it out. Any other error ends the study. Mistakes in configs,
  `best_of` and reports, and missing data, are errors before the first run.

  Args:
    order: names of the runs in order; None: alphabetical, as in a ConfigDict.
    report: objects with __call__(results), which writes about the runs that are
      done, and check(results), which raises ValueError if no run can fill it.
    shared: values that runs have in common, and refer to by
      `config.shared.get_oneway_ref('weights')`.
    discard: regular expression of runs whose checkpoints are deleted when done.
    writers: more writers of metrics, see `train`, of each run that has none.
    member: name or number of the only run to do, for job arrays.
    provenance: as in `train`; its allow_changes are 'KEY' for all runs, or
      'runs.NAME.KEY' for one.
    dry_run: make dry runs. A run that builds on another still to do starts from
      scratch, or is named if it cannot.
  """
  provenance = provenance or Provenance()
  workdir = epath.Path(workdir)
  workdirs.make(workdir, 'study', {})
  runs = ordered(runs, order, workdir)
  for config in runs.values() if writers else ():
    if config.run == 'vit_jax.train.train':
      config.logging = config.get('logging') or {}
      config = config.logging
    config.writers = config.get('writers') or writers
  for each in report:
    each.check(Results(runs, workdir, done=()))
  needs = {name: needed_by(name, runs, workdir) for name in runs}
  wanted = [] if report_only else _wanted(runs, member, needs, workdir)
  allowed = {
    name: workdirs.of_run(provenance.allow_changes, name) for name in wanted
  }
  for name in wanted:
    _check(name, runs[name], workdir / name, shared or {}, allowed[name])
  todo = {x: runs[x] for x in wanted if not outcome(workdir / x)}
  _check_sources(todo)
  if dry_run:
    _dry_runs(todo, runs, needs, workdir)
    return []
  workdirs.record_config(workdir, provenance)

  for name, following in itertools.pairwise([*todo, None]):
    _announce(name, runs, workdir)
    config = with_best(runs[name], runs, workdir)
    _run(config, workdir / name, provenance.preset, allowed[name])
    if re.fullmatch(discard, name) and jax.process_index() == 0:
      (workdir / name / 'checkpoints').rmtree(missing_ok=True)
    if not following or _programs(runs[following]) != _programs(runs[name]):
      compiled.forget()  # the programs of a hundred runs would fill the memory
  made = _report(report, runs, workdir)
  page.write_at_end(workdir)
  return made


def ordered(
  runs: Mapping[str, Any], order: Sequence[str] | None, workdir: epath.Path
) -> dict[str, Any]:
  """Return {name: ConfigDict} in order, with '{workdir}' replaced."""
  order = order or tuple(runs)
  for name in {*runs} ^ {*order}:  # a flag may have made it
    raise ConfigError(
      f'runs.{name}: there is no such run{configs.suggest(name, order)}. The '
      f'runs are {", ".join(order)} (`order`).'
    )

  def filled(x):
    return x.replace('{workdir}', str(workdir)) if isinstance(x, str) else x

  return {
    name: ml_collections.ConfigDict(jax.tree.map(filled, runs[name].to_dict()))
    for name in order
  }


def needed_by(
  name: str, runs: Mapping[str, Any], workdir: epath.Path
) -> list[str]:
  """Return the names of the runs that must be done before this one."""
  text = ''.join(f'\n{x}/' for x in jax.tree.leaves(runs[name].to_dict()))
  found = [x for x in runs if f'\n{workdir / x}/' in text]
  if best := runs[name].get('best_of'):
    candidates = [x for x in runs if re.fullmatch(best.get('runs', ''), x)]
    if not candidates or sorted(best) != ['metric', 'runs', 'take']:
      raise ConfigError(
        f'runs.{name}.best_of={best.to_dict()} must have metric, take and '
        f'runs, which matches some of the runs {", ".join(runs)}.'
      )
    found += candidates
  earlier = list(runs)[: list(runs).index(name)]
  if late := [x for x in found if x not in earlier]:
    raise ConfigError(
      f'runs.{name} builds on {", ".join(late)}, which must come before it in '
      '`order`.'
    )
  return found


def with_best(config: Any, runs: Mapping[str, Any], workdir: epath.Path) -> Any:
  """Return the config with the values of the (first) best run of `best_of`."""
  config = config.copy_and_resolve_references()
  best = config.get('best_of')
  if not best:
    return config
  del config.best_of
  found = {x: Workdir(workdir / x) for x in runs if re.fullmatch(best.runs, x)}
  scores = {
    name: run.last[best.metric]
    for name, run in found.items()
    if 'diverged' not in run.done
    and math.isfinite(run.last.get(best.metric, math.nan))
  }
  if not scores:
    raise ConfigError(
      f'best_of: all runs {best.runs!r} diverged, or have no finite '
      f'{best.metric}.'
    )
  winner = kind_of(best.metric, found[next(iter(scores))].kinds).best(scores)
  values = dict(configs.walk(runs[winner]))
  taken = {path: values[path] for path in best.take}
  config.update_from_flattened_dict(taken)
  shown = ', '.join(f'{k}={v}' for k, v in taken.items())
  terminal.say(
    f'{shown} from {winner}, whose {best.metric} {scores[winner]:.4g} is the '
    f'best of {len(scores)}'
  )
  return config


def outcome(path: epath.Path) -> dict[str, Any]:
  """Return 'seconds' and maybe 'diverged' of a run that has ended, else {}."""
  return workdirs.read(path, DONE)


def _wanted(runs, member, needs, workdir):
  """Return the names of the runs to do here: all, or `member`."""
  if member is None:
    return list(runs)
  found = [n for i, n in enumerate(runs) if str(member) in (n, str(i))]
  if not found:
    raise ConfigError(
      f'study_member={member!r} is neither the name nor the number of a run: '
      f'{", ".join(f"{i} {name}" for i, name in enumerate(runs))}.'
    )
  if missing := [x for x in needs[found[0]] if not outcome(workdir / x)]:
    raise ConfigError(
      f'The study member {found[0]} builds on runs that are not done: '
      f'{", ".join(missing)}. Do these first.'
    )
  return found


def _check(name, config, path, shared, allowed):
  """Raise ConfigError if a config has a mistake, or its run began otherwise.

  Values of `best_of` are not compared: they are known later.
  """
  planned = config.copy_and_resolve_references()
  if best := planned.get('best_of') or {}:
    del planned.best_of
  try:
    call = configs.plan_run(planned)
  except ConfigError as error:
    raise ConfigError(f'runs.{name}: {error}') from error
  now = workdirs.basis_of(configs.entries(call))
  start = config.get('init_from') or {}
  if 'weights' in shared and start.get('path', '') is None:
    raise ConfigError(
      f'The run {name} starts from weights. Set --config.shared.weights=PATH.'
    )
  configs.check_set(call, config, f'runs.{name}.')
  without, is_done = best.get('take', ()), bool(outcome(path))
  workdirs.check_changes(path, now, allowed, without=without, is_done=is_done)


def _check_sources(runs):
  """Open the data of all runs; ConfigError with everything that is missing."""

  def has_source(value):
    return isinstance(value, dict) and isinstance(value.get('source'), dict)

  values = [config.to_dict() for config in runs.values()]
  found = filter(has_source, jax.tree.leaves(values, is_leaf=has_source))
  problems = {'Data of the study cannot be opened:': None}
  for source in {repr(x['source']): x['source'] for x in found}.values():
    try:
      configs.resolve(source)
    except (UserError, OSError) as error:
      problems[str(error)] = None
  if len(problems) > 1:
    raise ConfigError('\n\n'.join(problems))


def _dry_runs(todo, runs, needs, workdir):
  for name in todo:
    config, title = runs[name], name
    if pending := [x for x in needs[name] if not outcome(workdir / x)]:
      title += f' without {", ".join(pending)}'
      left_out = ('best_of', 'init_from') if 'model' in config else ('best_of',)
      values = config.copy_and_resolve_references().to_dict()
      values = {k: x for k, x in values.items() if k not in left_out}
      config = ml_collections.ConfigDict(values)
      if needed_by(name, {**runs, name: config}, workdir):
        terminal.say(f'{name}: needs {", ".join(pending)} before its dry run')
        continue
    terminal.heading(title)
    config = with_best(config, runs, workdir)
    configs.run(config, str(workdir / name), dry_run=True)
  terminal.say(f'Dry run: {len(todo)} runs would be done.')


def _programs(config):
  """Return what runs that compile the same programs have in common."""
  differs = re.compile(r'(.*\.)?seed|init_from.*')
  return [x for x in configs.walk(config) if not differs.fullmatch(x[0])]


def _announce(name, runs, workdir):
  """Print a heading for the next run, with an ETA of the study."""
  text = f'{list(runs).index(name) + 1}/{len(runs)} {name}'
  if done := [x['seconds'] for n in runs if (x := outcome(workdir / n))]:
    left = terminal.duration(sum(done) / len(done) * (len(runs) - len(done)))
    text += f' | {len(done)} done | study eta {left}'
  terminal.heading(text)


def _run(config, path, preset, allowed):
  """Do a run and mark it as done, with its seconds and whether it diverged."""
  key, changed = f'runs.{path.name}.', preset.get('changed', {})
  own = {
    name.removeprefix(key): values
    for name, values in changed.items()
    if name.startswith(key)
  }
  preset = {'config': preset.get('config'), 'changed': own}
  began, found = time.perf_counter(), {}
  try:
    configs.run(config, str(path), preset=preset, allow_changes=allowed)
  except NonFiniteError as error:
    found['diverged'] = error.cause
    terminal.say(f'Diverged: {error.cause}')
  found['seconds'] = round(time.perf_counter() - began, 1)
  workdirs.write(path, DONE, found)
  if 'diverged' in found:
    page.write_at_end(path)
  multihost_utils.sync_global_devices(str(path))  # other hosts read the file


def _report(reports, runs, workdir):
  """Return the values of the reports about the runs that are done."""
  done = {n: found for n in runs if (found := outcome(workdir / n))}
  if missing := [name for name in runs if name not in done]:
    shown = ', '.join(missing[:8]) + (', ...' if len(missing) > 8 else '')
    terminal.say(f'{len(done)} of {len(runs)} runs are done. Not done: {shown}')
  if diverged := [name for name, found in done.items() if 'diverged' in found]:
    terminal.say(f'Diverged: {", ".join(diverged)}')
  results = Results(runs, workdir, [x for x in done if x not in diverged])
  made = [each(results) for each in reports]
  terminal.say(
    f'Every run (config, metrics, TensorBoard, checkpoints): {workdir}/NAME'
  )
  return made
