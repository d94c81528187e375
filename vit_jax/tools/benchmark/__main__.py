r"""How fast models train, answer and are fed here, and against whom.

  python -m vit_jax.tools.benchmark --models=S/16,B/16 --batch_sizes=8,32 \
    --mode=train,infer,input --csv=FILE
  python -m vit_jax.tools.benchmark --models=S/16 --batch_sizes=8 --peer=timm

Every combination of models, batch sizes, precisions, attention implementations
and remat policies is compiled, warmed up and timed in rounds, each in a process
of its own: too little memory is a row that says so. Between rounds a peer takes
its turn on the same device, so that the ratio is one of neighbours in time; so
does a large matrix product, of which the MFU is told as well.

--peer=timm needs torch and timm (--peer_python names an interpreter that has
them); --peer=linen is benchmarks/plain_linen_vit.py; any other script that
speaks the protocol of vit_jax/tools/benchmark/workers.py can be named by path.
"""

import argparse
import contextlib
import itertools
import os
import platform
import sys

from vit_jax import environment, terminal
from vit_jax.models import attention, common, names
from vit_jax.tools import arguments
from vit_jax.tools.benchmark import peers, report, timing, workers

MODES = ('train', 'infer', 'input')
PRECISIONS = ('float32', 'bfloat16')
NUM_CLASSES = 1000


def cases(args):
  """Every combination that the arguments ask for: a list of dicts."""
  out = []
  shared = {'image_size': args.image_size, 'num_workers': args.num_workers}
  if 'input' in args.mode:
    for size in args.batch_sizes:
      out.append({'mode': 'input', 'model': '', 'batch_size': size} | shared)
  for model, batch_size, precision, attend, remat, mode in itertools.product(
    *(args.models, args.batch_sizes, args.precision, args.attention),
    *(args.remat, [m for m in args.mode if m != 'input']),
  ):
    out.append(
      {
        'mode': mode,
        'model': model,
        'batch_size': batch_size,
        'precision': precision,
        'attention': attend,
        'remat': remat,
        'scan': args.scan,
        'fields': fields(model, precision, attend, remat, args.scan),
        'num_classes': NUM_CLASSES,
        'timm_name': peers.timm_name(model),
      }
      | shared
    )
  return out


def fields(model, precision, attend, remat, scan):
  """Fields of the model, with its target; those at their default are left out.

  Raises:
    ValueError: no such model.
  """
  given = {'dtype': precision, 'num_classes': NUM_CLASSES}
  if attend != 'auto':
    given['attention'] = attend
  if remat != 'none':
    given['remat'] = remat
  if scan:
    given['scan'] = True
  return names.settings(model, **given)


def ours_command():
  """The command of the worker that runs this project's own step."""
  return [sys.executable, '-m', 'vit_jax.tools.benchmark.ours']


def measure(
  case,
  shares,
  *,
  ours,
  peer=None,
  peer_name='',
  peer_settings='own',
  **settings,
):
  """What `report.row` is made of.

  Args:
    case: of `cases`.
    shares: steps of each round.
    ours, peer: commands of the workers.
    peer_name: to be shown.
    peer_settings: 'ours' if its process starts in our environment, too.
    **settings: of both, beside the case's.
  """
  found = {}
  try:
    with contextlib.ExitStack() as stack:
      # Two share the device's memory: none takes most of it beforehand.
      env = {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'} if peer else {}
      our_env = env | environment.faster()
      mine = stack.enter_context(workers.Worker(ours, our_env))
      found['started'] = mine.ask('start', **case, **settings)
      timed = [_rounds_of(mine, found.setdefault('cpu_times', []))]
      if peer and case['mode'] != 'input':
        found |= {'peer': peer_name, 'peer_settings': peer_settings}
        their_env = our_env if peer_settings == 'ours' else env
        theirs = stack.enter_context(workers.Worker(peer, their_env))
        if started := _start_peer(theirs, found, case | settings):
          found['peer_started'] = started
          cpu = found.setdefault('peer_cpu_times', [])
          timed.append(_rounds_of(theirs, cpu))
      if case['mode'] != 'input':
        ceilings = []
        timed.append(_ceilings_of(mine, ceilings))
      times = timing.in_turn(timed, shares)
      found['times'] = times[0]
      if 'peer_started' in found:
        found['peer_times'] = times[1]
      if case['mode'] != 'input':
        found['ceiling'] = max(ceilings, default=None)
  except workers.WorkerError as error:
    what = {'oom': 'out of memory', 'failed': 'failed'}[error.kind]
    found['error'] = f'{what}: {error}'
  return found


def _rounds_of(worker, cpu_times):
  """steps -> seconds; CPU seconds a step are appended to cpu_times."""

  def run(steps):
    answer = worker.ask('round', steps=steps)
    cpu_times.append(answer['cpu_seconds'] / steps)
    return answer['seconds']

  return run


def _ceilings_of(worker, ceilings):
  """A worker that takes no part but measures matrix products."""

  def run(steps):
    # Memory may not suffice for the matrices beside a model.
    with contextlib.suppress(workers.WorkerError):
      ceilings.append(worker.ask('ceiling')['flops'])
    return 0.0

  return run


def _start_peer(worker, found, settings):
  """The peer's first answer; None, and an error in found, if it cannot run."""
  try:
    started = worker.ask('start', **settings)
  except workers.WorkerError as error:
    what = {'oom': 'out of memory', 'failed': 'failed'}[error.kind]
    found['error'] = f'peer {what}: {error}'
    return None
  if notes := started.get('notes'):
    found['peer'] += f' ({notes})'
  return started


def main(argv=None):
  args = parser().parse_args(argv)
  with terminal.one_message():
    _run(args)


def _run(args):
  peer = peers.command(args.peer, args.peer_python)
  rows, records, todo = [], [], cases(args)
  for case in todo:
    peers.check(args.peer, case)
  fitted = []  # cases that ran, but for their batch size
  for case in todo:
    kind = case | {'batch_size': None}
    if args.first_fit and kind in fitted:
      continue
    found = measure(
      case,
      timing.split(args.steps, args.rounds),
      ours=ours_command(),
      peer=peer,
      peer_name=args.peer,
      peer_settings=args.peer_settings,
      warmup=args.warmup,
      compile=args.peer_compile,
    )
    rows.append(report.row(case, found))
    print(report.line(rows[-1]), flush=True)
    if 'error' not in found:
      fitted.append(kind)
    records.append({'case': case, 'row': rows[-1]} | found)
    # After every case: what is cut off leaves what was done.
    if args.csv:
      report.write_csv(args.csv, rows)
    if args.json:
      report.write_json(args.json, about() | {'cases': records})


def about():
  """What else a reader of the figures needs: command, machine, settings."""
  settings = ('GLIBC_TUNABLES', 'XLA_FLAGS', 'OMP_NUM_THREADS')
  return {
    'command': sys.argv,
    'machine': platform.platform(),
    'cpus': os.cpu_count(),
    'environment': {k: os.environ[k] for k in settings if k in os.environ},
    'our_settings': environment.faster(),
  }


def parser():
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    usage='python -m vit_jax.tools.benchmark [--models=...] ...',
  )
  add = parser.add_argument
  count = arguments.count
  lists = {'metavar': 'NAME,...'}
  add('--models', type=_list(), default=['B/16'], **lists)
  add('--batch_sizes', type=_list(count), default=[8], metavar='N,...')
  add(
    '--first_fit',
    action='store_true',
    help='of the batch sizes, in their order, only until one fits; with a '
    'peer, both',
  )
  add('--mode', type=_list(of=MODES), default=['train'], **lists)
  add('--precision', type=_list(of=PRECISIONS), default=['float32'], **lists)
  add(
    '--attention',
    type=_list(of=attention.IMPLEMENTATIONS),
    default=['auto'],
    **lists,
  )
  add('--remat', type=_list(of=common.REMAT), default=['none'], **lists)
  add('--scan', action='store_true', help='one layer, looped over')
  add('--image_size', type=count, default=224, metavar='N')
  add('--steps', type=count, default=30, metavar='N', help='timed (30)')
  add('--rounds', type=count, default=5, metavar='N', help='of them (5)')
  add('--warmup', type=count, default=5, metavar='N', help='steps before (5)')
  add('--num_workers', type=int, default=0, metavar='N', help='of the input')
  add('--peer', default='none', help='timm, linen, none, or a script')
  add('--peer_python', default=sys.executable, metavar='PATH')
  add(
    '--peer_compile',
    default='default',
    metavar='MODE',
    help="of torch.compile, or 'none' for eager",
  )
  add(
    '--peer_settings',
    choices=('own', 'ours'),
    default='own',
    help="own: the peer runs as its users run it; ours: with this project's "
    'settings of the process, which vit_jax.main makes for its users',
  )
  add('--csv', metavar='FILE')
  add('--json', metavar='FILE')
  return parser


def _list(convert=str, *, of=None):
  """For `type` of an argument: 'a,b' as ['a', 'b'], each one of `of`."""

  def read(text):
    for item in text.split(','):
      if of and item not in of:
        raise argparse.ArgumentTypeError(f'{item!r} is none of {", ".join(of)}')
    return [convert(item) for item in text.split(',')]

  return read


if __name__ == '__main__':
  main()
