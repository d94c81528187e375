r"""Benchmark training, inference and input speed, optionally against a peer.

  python -m vit_jax.tools.benchmark --models=S/16,B/16 --batch_sizes=8,32 \
    --mode=train,infer,input --csv=FILE
  python -m vit_jax.tools.benchmark --models=S/16 --batch_sizes=8 --peer=timm

Every combination of models, batch sizes, precisions, attention implementations
and remat policies is compiled, warmed up and timed in rounds, in a process of
its own: if it runs out of memory, its row says so. After each round a peer has
its round on the same device, so that a ratio compares neighbours in time, and
then the device multiplies large matrices, which gives a second MFU.

--peer=timm needs torch and timm (--peer_python names an interpreter that has
them); --peer=linen is benchmarks/plain_linen_vit.py; any other script that
speaks the protocol of vit_jax/tools/benchmark/workers.py can be named by path.
"""

import argparse
import os
import platform
import sys

from vit_jax import environment, terminal
from vit_jax.models import attention, common
from vit_jax.tools.benchmark import cases, report, rounds


def main(argv=None):
  args = parser().parse_args(argv)
  with terminal.one_message():
    _run(args)


def parser():
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    usage='python -m vit_jax.tools.benchmark [--models=...] ...',
  )

  def add(name, default=None, help='', **settings):
    shown = '' if default is None else f' (default: {default})'
    help = f'{help}{shown}'.strip()
    parser.add_argument(f'--{name}', default=default, help=help, **settings)

  def add_list(name, default, metavar='NAME,...', convert=str, choices=None):
    read = _list_reader(convert, choices)
    add(name, default, ', '.join(choices or ()), type=read, metavar=metavar)

  def add_count(name, default, help):
    add(name, default, help, type=_count, metavar='N')

  add_list('models', 'B/16')
  add_list('batch_sizes', '8', 'N,...', _count)
  add_list('mode', 'train', choices=cases.MODES)
  add_list('precision', 'float32', choices=cases.PRECISIONS)
  add_list('attention', 'auto', choices=attention.IMPLEMENTATIONS)
  add_list('remat', 'none', choices=common.REMAT)
  parser.add_argument('--scan', action='store_true', help='scan over layers')
  parser.add_argument(
    '--first_fit',
    action='store_true',
    help='try the batch sizes in their order until one fits (with a peer, both '
    'must fit)',
  )
  add_count('image_size', 224, 'height and width in pixels')
  add_count('steps', 30, 'timed steps')
  add_count('rounds', 5, 'rounds that the steps are divided into')
  add_count('warmup', 5, 'steps before the timed ones')
  add('num_workers', 0, 'processes of the input', type=int, metavar='N')
  add('peer', 'none', 'timm, linen, none, or a script')
  add('peer_python', sys.executable, 'interpreter of the peer', metavar='PATH')
  add('peer_compile', 'default', 'mode of torch.compile; none: eager')
  add(
    'peer_settings',
    'own',
    'own: the environment that users of the peer have; ours: the one that '
    'vit_jax.main sets for its users',
    choices=('own', 'ours'),
  )
  add('csv', help='file for the rows', metavar='FILE')
  add('json', help='file for the rows and all rounds', metavar='FILE')
  return parser


def _count(text):
  """Return an int of 1 or more, for `type=`."""
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'{text!r} must be a positive integer')
  return int(text)


def _list_reader(convert, choices):
  """Return a function that reads 'a,b' as ['a', 'b'], for `type=`."""

  def read(text):
    for item in text.split(','):
      if choices and item not in choices:
        raise argparse.ArgumentTypeError(
          f'{item!r} must be one of {", ".join(choices)}'
        )
    return [convert(item) for item in text.split(',')]

  return read


def _run(args):
  todo = cases.cases(args)
  peer = cases.peer_command(args.peer, args.peer_python)
  for case in todo:
    cases.check_peer(args.peer, case)
  rows, records, fitted = [], [], []
  for case in todo:
    kind = case | {'batch_size': None}
    if args.first_fit and kind in fitted:
      continue
    found = rounds.measure(
      case,
      rounds.split(args.steps, args.rounds),
      ours=cases.our_command(),
      peer=peer,
      peer_name=args.peer,
      peer_settings=args.peer_settings,
      warmup=args.warmup,
      compile=args.peer_compile,
    )
    if 'error' not in found:
      fitted.append(kind)
    rows.append(report.row(case, found))
    records.append({'case': case, 'row': rows[-1]} | found)
    print(report.line(rows[-1]), flush=True)
    # Written after each case, so that an interruption keeps the results.
    if args.csv:
      report.write_csv(args.csv, rows)
    if args.json:
      report.write_json(args.json, _about() | {'cases': records})


def _about():
  """Return what else a reader of the numbers needs to know."""
  variables = ('GLIBC_TUNABLES', 'XLA_FLAGS', 'OMP_NUM_THREADS')
  return {
    'command': sys.argv,
    'machine': platform.platform(),
    'cpus': os.cpu_count(),
    'environment': {k: os.environ[k] for k in variables if k in os.environ},
    'our_settings': environment.faster(),
  }


if __name__ == '__main__':
  main()
