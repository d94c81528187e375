"""A study: named configs run in turn, and the reports made of them.

    config.run = 'vit_jax.study.study'
    config.runs.pretrain = (a config of its own, with its own `run`)
    config.order = ('pretrain', ...)
    config.report = (dict(target='vit_jax.reports.table.Table', cells=...),)

Every run has its own directory, workdir/NAME, and is marked as done when it
is; the same command again goes on where it stopped. Runs can build on one
another: '{workdir}' in any text of a run's config stands for the study's
workdir, and `best_of` takes values from the best of other runs:

    config.runs.final.best_of = dict(
        runs='dev_lr.*', metric='dev/accuracy', take=('schedule.lr',))

What runs have in common can be set once, in `shared`, to which they refer
(`config.shared.get_oneway_ref('weights')`); the study itself reads none of it.

--study_member=NAME (or its number) does a single run, for job arrays;
--study_report does none. Either way a report shows what is done so far.
"""

import datetime
import json
import re
import time

import jax
from etils import epath
from jax.experimental import multihost_utils

from vit_jax import study_runs, terminal, workdirs
from vit_jax.config import Reader, instantiate, locate
from vit_jax.metrics import NonFiniteError
from vit_jax.reports.results import Results


def study(config, workdir, *, member=None, report=False):
  """Runs what is not done yet, then reports. Returns what each report does.

  A run that meets NaN is over too, as 'diverged': it is no candidate of
  `best_of`, and fills no report. Any other error ends the study.

  Args:
    config: runs; order, their names in the order to run them (a ConfigDict
      sorts its keys), by default that of the alphabet; report, a sequence of
      targets called with `Results`; shared, values that runs refer to;
      discard, a regular expression of runs whose checkpoints are not worth
      their space and are removed once the run is done.
    workdir: of the study.
    member: name or number of the one run to do.
    report: whether to report only.

  Raises ValueError before any run for a mistake in the reports or in
  `best_of`, and for data or weights of any run that cannot be opened.
  """
  config, given = Reader(config), config
  workdirs.prepare(workdir)
  workdir = epath.Path(workdir)
  runs = study_runs.ordered(
    config.runs.read_all(), config.get('order'), workdir
  )
  reports = [instantiate(x) for x in config.get('report', ())]
  shared = config.get('shared', Reader({})).read_all()
  discard = config.get('discard', '')
  config.check_all_read('study')
  for each in reports:
    each.check(Results(runs, workdir, done=()))
  needs = {n: study_runs.needs(n, runs, workdir) for n in runs}
  wanted = [] if report else _wanted(runs, member)
  if member is not None:
    study_runs.check_ready(wanted[0], needs[wanted[0]], workdir)
  open_runs = {
    name: runs[name]
    for name in wanted
    if not study_runs.is_done(workdir / name)
  }
  study_runs.check_sources(open_runs)
  study_runs.check_weights(open_runs, shared, workdir)
  workdirs.record(workdir, given)
  _cache_compilations(workdir)

  progress = _Progress(runs, workdir)
  for name in open_runs:
    progress.announce(name)
    _run(study_runs.with_best(runs[name], runs, workdir), workdir / name)
    if re.fullmatch(discard, name) and jax.process_index() == 0:
      (workdir / name / 'checkpoints').rmtree(missing_ok=True)
    jax.clear_caches()  # a hundred runs' programs would fill the memory
  return _report(reports, runs, workdir)


def _report(reports, runs, workdir):
  console = terminal.console()
  done = [name for name in runs if study_runs.is_done(workdir / name)]
  diverged = [
    n for n in done if 'diverged' in study_runs.read_done(workdir / n)
  ]
  if missing := [name for name in runs if name not in done]:
    shown = ', '.join(missing[:8]) + (', ...' if len(missing) > 8 else '')
    console.print(
      f'{len(done)} of {len(runs)} runs are done. Not yet: {shown}',
      soft_wrap=True,
    )
  if diverged:
    console.print(f'Diverged: {", ".join(diverged)}', soft_wrap=True)
  results = Results(runs, workdir, [x for x in done if x not in diverged])
  made = [each(results) for each in reports]
  console.print(
    f'Reports: {workdir}\nEvery run (config, metrics, TensorBoard, '
    f'checkpoints): {workdir}/NAME',
    soft_wrap=True,
  )
  return made


def _wanted(runs, member):
  """Names of the runs to do here: all, or the one that `member` tells."""
  if member is None:
    return list(runs)
  found = [n for i, n in enumerate(runs) if str(member) in (n, str(i))]
  if not found:
    raise ValueError(
      f'study_member={member!r} is none of the runs, nor the number of one: '
      f'{", ".join(f"{i} {name}" for i, name in enumerate(runs))}.'
    )
  return found


def _run(config, workdir):
  """Does it, and marks it as done: with its seconds, and if it diverged."""
  began = time.perf_counter()
  outcome = {}
  try:
    locate(config.run)(config, str(workdir))
  except NonFiniteError as error:
    outcome['diverged'] = str(error)
    terminal.console().print(f'Diverged: {error}', soft_wrap=True)
  outcome['seconds'] = round(time.perf_counter() - began, 1)
  if jax.process_index() == 0:
    (workdir / study_runs.DONE).write_text(json.dumps(outcome) + '\n')
  if jax.process_count() > 1:  # the others read it
    multihost_utils.sync_global_devices(str(workdir))


class _Progress:
  """How far the whole study is, and how long the rest may take."""

  def __init__(self, runs, workdir):
    self._names, self._workdir = list(runs), workdir

  def announce(self, name):
    """A heading for the run that begins."""
    number = self._names.index(name) + 1
    text = f'{number}/{len(self._names)} {name}'
    done = [n for n in self._names if study_runs.is_done(self._workdir / n)]
    if done:
      seconds = [
        study_runs.read_done(self._workdir / n)['seconds'] for n in done
      ]
      left = sum(seconds) / len(done) * (len(self._names) - len(done))
      left = datetime.timedelta(seconds=round(left))
      text += f' | {len(done)} done | study eta {left}'
    terminal.console().rule(text, align='left')


def _cache_compilations(workdir):
  """Runs that differ in their seed alone share one compilation."""
  if jax.config.jax_compilation_cache_dir is None:
    jax.config.update('jax_compilation_cache_dir', str(workdir / 'xla_cache'))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
