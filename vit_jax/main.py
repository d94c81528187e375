"""python -m vit_jax.main --config=configs/quickstart.py --workdir=DIR

The config's `run` names what is done with it: vit_jax.train.train,
vit_jax.evaluate.evaluate or vit_jax.study.study. Any value in it can be
changed from the command line: --config.seed=1. The same command again resumes.
Of a study, --study_member=i does one run only, --study_report none.
"""

import functools
import os
import pathlib
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from vit_jax import compilation_cache, distributed, environment, terminal
from vit_jax.config import locate

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'File with get_config([argument]); FILE:ARGUMENT passes one.'
)
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Directory of the run; local or gs://...'
)
_DISTRIBUTED = flags.DEFINE_bool(
  'distributed',
  False,
  'Several hosts: every one of them runs this command. Clusters that jax '
  'knows (TPU pods, GKE, Slurm, Open MPI) need nothing else; elsewhere the '
  'next three flags tell, or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and '
  'JAX_PROCESS_ID.',
)
_COORDINATOR = flags.DEFINE_string(
  'coordinator_address', None, 'With --distributed: HOST:PORT of process 0.'
)
_NUM_PROCESSES = flags.DEFINE_integer(
  'num_processes', None, 'With --distributed: how many processes there are.'
)
_PROCESS_ID = flags.DEFINE_integer(
  'process_id', None, 'With --distributed: number of this process, from 0.'
)
_MEMBER = flags.DEFINE_string(
  'study_member',
  None,
  'Of a study: name or number of the one run to do, for job arrays.',
)
_REPORT = flags.DEFINE_bool(
  'study_report', False, 'Of a study: report what is done, and run nothing.'
)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {argv[1:]}')
  if not flags.FLAGS['verbosity'].present:
    logging.set_verbosity(logging.WARNING)  # libraries tell too much
  _join_other_hosts()
  try:
    config = _CONFIG.value
    run = functools.partial(locate(config.run), **_study_flags(config.run))
  except OSError as error:
    sys.exit(f'\n{error}')  # no such file, and where it was looked for
  with distributed.failing_together(), terminal.one_message():
    compilation_cache.enable(_WORKDIR.value)
    run(config, _WORKDIR.value)


def _join_other_hosts():
  given = {
    flag.name: flag.value
    for flag in (_COORDINATOR, _NUM_PROCESSES, _PROCESS_ID)
    if flag.value is not None
  }
  if _DISTRIBUTED.value:
    with terminal.one_message():
      distributed.initialize(**given)
  elif given:
    sys.exit(f'\n{" ".join(f"--{x}" for x in given)} without --distributed.')


def _study_flags(run):
  """The arguments of a study that flags have given."""
  given = {}
  if _MEMBER.value is not None:
    given['member'] = _MEMBER.value
  if _REPORT.value:
    given['report'] = True
  if given and run != 'vit_jax.study.study':
    sys.exit(
      f'\n--study_member and --study_report are for studies; this config runs '
      f'{run}. Leave them out.'
    )
  return given


def parse_flags(argv):
  """absl's parser; what is wrong with a --config flag in one line."""
  for word in argv:
    if word.lstrip('-').startswith('config='):
      # So that `from configs import common` works from any folder.
      file = pathlib.Path(word.split('=', 1)[1].split(':')[0]).absolute()
      sys.path.append(str(file.parent.parent))
  try:
    return app.parse_flags_with_usage(argv)
  except AttributeError as error:
    # ml_collections tells an unknown key by this, its text quoted twice.
    text = str(error).replace('\\n', '. ').replace("\\'", '').strip("'")
    given = [a for a in argv if a.startswith(('--config.', '-config.'))]
    sys.exit(
      f'\nUnknown key in {" ".join(given)}: {text} Only what the config file '
      'sets can be changed from the command line.'
    )


def _start_faster():
  """Starts the process anew with environment.faster(), unless it has that."""
  if settings := environment.faster():
    os.environ.update(settings)
    os.execv(sys.executable, sys.orig_argv)


if __name__ == '__main__':
  _start_faster()
  flags.mark_flags_as_required(['config', 'workdir'])
  app.run(main, flags_parser=parse_flags)
