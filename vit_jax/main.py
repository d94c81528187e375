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
from typing import Any

from vit_jax.runs import environment


def first_line(words: Sequence[str]) -> str:
  """Return the first line that a run prints, from its arguments.

  It is empty without a workdir, and where stdout is for something else.
  """
  given = {}
  for word, following in zip(words, [*words[1:], '']):
    name, equals, value = word.lstrip('-').partition('=')
    if word.startswith('-'):
      given[name] = value if equals else following
  if not {'config', 'workdir'} <= given.keys() or 'print_config' in given:
    return ''
  return f'{given["config"]} in {given["workdir"]}: loading JAX ...'


if __name__ == '__main__':  # before the imports that take seconds
  if settings := environment.faster():
    os.environ.update(settings)
    os.execv(sys.executable, sys.orig_argv)
  # Of several hosts only the first prints, and none knows its number yet.
  if '--distributed' not in sys.argv and first_line(sys.argv[1:]):
    print(first_line(sys.argv[1:]), flush=True)

from absl import app, flags, logging  # noqa: E402

from vit_jax import config  # noqa: E402
from vit_jax.parallel import compilation_cache, hosts  # noqa: E402
from vit_jax.runs import (  # noqa: E402
  canary,
  changes,
  terminal,
  workdirs,
)

_CONFIG = flags.DEFINE_string(
  'config',
  None,
  'File with get_config([argument]), or vit_jax:NAME for a config of this '
  'project; FILE:ARGUMENT passes an argument. --config.KEY=VALUE changes a '
  'value.',
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
  'Several hosts, each of which runs this command. Clusters that JAX knows '
  '(TPU pods, GKE, Slurm, Open MPI) need no more flags. Elsewhere set the '
  'next three flags, or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and '
  'JAX_PROCESS_ID.',
)
_COORDINATOR = flags.DEFINE_string(
  'coordinator_address', None, 'With --distributed: HOST:PORT of process 0.'
)
_NUM_PROCESSES = flags.DEFINE_integer(
  'num_processes', None, 'With --distributed: number of processes.'
)
_PROCESS_ID = flags.DEFINE_integer(
  'process_id', None, 'With --distributed: number of this process, from 0.'
)
_MEMBER = flags.DEFINE_string(
  'study_member',
  None,
  'For a study: name or number of the only run to do, for job arrays.',
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
  del argv
  if not flags.FLAGS['verbosity'].present:
    logging.set_verbosity(logging.WARNING)  # libraries log too much at INFO
  with terminal.one_message():
    resolved, preset = load_config(_CONFIG.value)
    supplied = _supplied(resolved)
    if _PRINT_CONFIG.value:
      found, _ = config.plan_run(resolved, **supplied)
      print(*config.settings(found), sep='\n')
      return
    if not _WORKDIR.value:
      raise config.ConfigError(
        '--workdir=DIR is missing, the folder for results. For example '
        '--workdir=/tmp/run.'
      )
  _join_other_hosts()
  with hosts.failing_together(), terminal.one_message():
    if _DISTRIBUTED.value:
      facts = changes.facts(*config.plan_run(resolved, **supplied))
      hosts.refuse_differences(facts)
    compilation_cache.enable(_WORKDIR.value)
    canary.refuse_wrong_results()
    if _DISTRIBUTED.value:
      terminal.say(first_line(sys.argv[1:]))
    gc.freeze()  # collections need not visit what imports made
    config.run(resolved, _WORKDIR.value, preset=preset, **supplied)
    if not _DRY_RUN.value:
      terminal.say(workdirs.written(_WORKDIR.value))


def load_config(spec: str | None) -> tuple[Any, dict[str, Any]]:
  """Return the ConfigDict of --config, with --config.KEY=VALUE applied.

  Also return its origin for `config.run`: file and changes.
  """
  if not spec:
    raise config.ConfigError(
      '--config=FILE is missing. For example --config=vit_jax:quickstart '
      '--workdir=/tmp/quickstart; --help lists all flags.'
    )
  found = config.load(spec)
  changed = config.override(found, assignments)
  return found, {'config': spec, 'changed': changed}


def _supplied(resolved):
  """Arguments that flags have given to the function that the config names."""
  supplied = {'dry_run': _DRY_RUN.value}
  if _ALLOW_CHANGES.value:
    if resolved.get('run') == 'vit_jax.evaluate.evaluate':
      raise config.ConfigError(
        '--allow_changes is for training and studies, which resume; this '
        'config runs vit_jax.evaluate.evaluate. Leave it out.'
      )
    found = (key.strip() for key in _ALLOW_CHANGES.value)
    supplied['allow_changes'] = [key.removeprefix('config.') for key in found]
  if _MEMBER.value is not None:
    supplied['member'] = _MEMBER.value
  if _REPORT.value:
    supplied['report_only'] = True
  of_study = {'member', 'report_only'} & supplied.keys()
  if of_study and resolved.get('run') != 'vit_jax.study.study':
    raise config.ConfigError(
      '--study_member and --study_report are for studies; this config runs '
      f'{resolved.get("run")}. Leave them out.'
    )
  return supplied


def _join_other_hosts():
  given = {
    flag.name: flag.value
    for flag in (_COORDINATOR, _NUM_PROCESSES, _PROCESS_ID)
    if flag.value is not None
  }
  if _DISTRIBUTED.value:
    with terminal.one_message():
      hosts.initialize(**given)
  elif given:
    sys.exit(f'\n{" ".join(f"--{x}" for x in given)} without --distributed.')


def parse_flags(argv: Sequence[str]) -> list[str]:
  """Parse the flags by absl; keep --config.KEY=VALUE for `load_config`.

  A flag without '=' takes the next word as its value, or True before another
  flag. The process exits after help with the status 0, after a flag that does
  not exist or a word that is no flag with one line and 1.
  """
  rest, words = [], list(argv)
  assignments.clear()
  while words:
    word = words.pop(0)
    name = word.lstrip('-')
    if not word.startswith('-') or not name.startswith('config.'):
      rest.append('--help' if word == '-h' else word)
      continue
    if '=' not in name and words and not words[0].startswith('--'):
      name = f'{name}={words.pop(0)}'
    assignments.append(name.removeprefix('config.'))
  try:
    program, *unknown = flags.FLAGS(rest)
  except flags.Error as error:
    problem = ' '.join(str(error).split()).replace(' ?', '?')
    stop = '' if problem.endswith(('.', '?')) else '.'
    sys.exit(f'{problem}{stop} --help lists all flags.')
  except SystemExit as stop:  # absl's help flags exit with 1
    sys.exit(stop.code if isinstance(stop.code, str) else 0)
  if unknown:
    meant = f'--config={unknown[0]}' if '.py' in unknown[0] else '--FLAG=VALUE'
    sys.exit(f'{unknown[0]!r} is not a flag. Write it as {meant}.')
  return [program]


if __name__ == '__main__':
  app.run(main, flags_parser=parse_flags)
