"""python -m vit_jax.main --config=configs/quickstart.py --workdir=DIR

The config's `run` names the function that is called: vit_jax.train.train,
vit_jax.evaluate.evaluate or vit_jax.study.study. Every argument of everything
that a config names can be set on the command line, whether or not the config
file mentions it: --config.seed=1 --config.optimizer.layer_decay.rate=0.75. The
same command resumes the run.
"""

import gc
import os
import sys
from collections.abc import Sequence

from vit_jax.io import environment

if __name__ == '__main__':
  environment.start()

from absl import app, flags, logging

from vit_jax import config
from vit_jax.data.images import UnreadableError
from vit_jax.io import files, terminal
from vit_jax.parallel import compilation_cache, hosts
from vit_jax.reports import page
from vit_jax.runs import canary, workdirs

_CONFIG = flags.DEFINE_string(
  'config',
  None,
  'File with get_config([argument]), or vit_jax:NAME for a config of this '
  'project; FILE:ARGUMENT passes one. --config.KEY=VALUE changes a value.',
)
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Directory of the run; local or gs://...'
)
_PRINT_CONFIG = flags.DEFINE_bool(
  'print_config', False, 'Print the resolved config, defaults included; stop.'
)
_DRY_RUN = flags.DEFINE_bool(
  'dry_run',
  False,
  'Do everything up to the first step (open data, check shapes, sharding and '
  'memory), print a summary; stop.',
)
_DISTRIBUTED = flags.DEFINE_bool(
  'distributed',
  False,
  'Run on several hosts: start this command on each. Clusters that JAX knows '
  '(TPU pods, GKE, Slurm, Open MPI) need no more flags. Elsewhere set the '
  'next three flags, or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and '
  'JAX_PROCESS_ID.',
)
_COORDINATOR = flags.DEFINE_string(
  'coordinator_address', None, 'With --distributed: HOST:PORT of process 0.'
)
_PROCESSES = flags.DEFINE_integer(
  'num_processes', None, 'With --distributed: number of processes.'
)
_PROCESS_ID = flags.DEFINE_integer(
  'process_id', None, 'With --distributed: number of this process, from 0.'
)
_MEMBER = flags.DEFINE_string(
  'study_member', None, 'For a study: name or number of the only run to do.'
)
_REPORT = flags.DEFINE_bool(
  'study_report', False, 'For a study: report finished runs, and run nothing.'
)
_ALLOW_CHANGES = flags.DEFINE_list(
  'allow_changes',
  [],
  'Keys of the config, or of parts of it (schedule.lr,data), that may differ '
  'from those that the run in workdir was started with. For a study: KEY for '
  'all runs, or runs.NAME.KEY.',
)

assignments: list[str] = []  # 'KEY=VALUE' of the --config.KEY=VALUE flags


def main(argv: Sequence[str]) -> None:
  if not flags.FLAGS['verbosity'].present:
    logging.set_verbosity(logging.WARNING)  # libraries log too much at INFO
  logging.get_absl_logger().addFilter(_is_not_raised)
  with terminal.one_message():
    if argv[1:]:
      raise config.ConfigError(
        f'{argv[1]!r} is not a flag. Write --config={argv[1]} or --FLAG=VALUE.'
      )
    if not _CONFIG.value:
      raise config.ConfigError(
        '--config=FILE is missing, such as --config=vit_jax:quickstart.'
      )
    if not _WORKDIR.value and not _PRINT_CONFIG.value:
      raise config.ConfigError(
        '--workdir=DIR is missing, the folder for results, such as /tmp/run.'
      )
    resolved = config.load(_CONFIG.value)
    changed = config.override(resolved, assignments)
    call = config.plan_run(resolved, **_supplied())
    if _PRINT_CONFIG.value:
      print(*config.settings(call), sep='\n')
      return
    if _DISTRIBUTED.value:
      hosts.initialize(_COORDINATOR.value, _PROCESSES.value, _PROCESS_ID.value)
  workdir = os.path.expanduser(str(_WORKDIR.value))
  with terminal.one_message():
    if _DISTRIBUTED.value:
      hosts.refuse_differences(workdirs.facts(call, _supplied()))
    if cause := files.unreachable(workdir):
      print(f'{workdir} may take minutes to fail: {cause}.', file=sys.stderr)
    compilation_cache.enable(workdir)
    canary.refuse_wrong_results()
    gc.freeze()  # collections need not visit what imports made
    file = _CONFIG.value
    preset = {'config': file, 'about': config.about(file), 'changed': changed}
    allowed = [x.removeprefix('config.') for x in _ALLOW_CHANGES.value]
    given = {'preset': preset, 'allow_changes': allowed, **_supplied()}
    try:
      config.run(resolved, workdir, **given)
    except UnreadableError as error:
      keys = (x.key for x in config.entries(call))
      skip = [f'--config.{x}=skip' for x in keys if x.endswith('.on_error')]
      raise UnreadableError(f'{error}: {" ".join(skip)}') from error
    if not _DRY_RUN.value:
      terminal.say(page.closing(workdir))


def _is_not_raised(record):
  """Return whether no full disk is logged, which Orbax also raises."""
  return not (record.exc_info and files.is_full(record.exc_info[1]))


def _print_unraisable(unraisable):
  """Print an error, unless TensorStore has it because Orbax ended by one."""
  if str(unraisable.exc_value) != 'Event loop is closed':
    sys.__unraisablehook__(unraisable)


def _supplied():
  """Return the arguments that flags give to the function of the config."""
  given = {'member': _MEMBER.value, 'report_only': _REPORT.value or None}
  given = {k: v for k, v in given.items() if v is not None}
  return {'dry_run': _DRY_RUN.value, **given}


def parse_flags(argv: Sequence[str]) -> list[str]:
  """Parse the flags by absl; keep those of --config.KEY=VALUE for `main`."""
  own = [x for x in argv if x.lstrip('-').startswith('config.')]
  assignments[:] = [x.lstrip('-').removeprefix('config.') for x in own]
  return app.parse_flags_with_usage([x for x in argv if x not in own])


if __name__ == '__main__':
  sys.unraisablehook = _print_unraisable
  with hosts.failing_together():
    app.run(main, flags_parser=parse_flags)
