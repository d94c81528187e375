r"""Benchmark training, inference and input speed, optionally against a peer.

  python -m vit_jax.tools.benchmark --models=S/16,B/16 --batch_sizes=8,32 \
    --mode=train,infer,input --csv=FILE
  python -m vit_jax.tools.benchmark --models=S/16 --batch_sizes=8 --peer=timm
  python -m vit_jax.tools.benchmark --mode=input --images=imagenet,records \
    --num_threads=1,2 --batch_sizes=64 --steps=20 --peer=tf.data

Every combination of models, batch sizes, precisions, attention implementations
and remat policies is compiled, warmed up and timed in rounds, in a process of
its own: if it runs out of memory, its row says so. After each round a peer has
its round on the same device, so that a ratio compares neighbours in time, and
then the device multiplies large matrices, which gives a second MFU.

The input is timed from JPEGs in memory to batches, for every combination of its
own arguments. Its row also has the CPU time of an image, by part, and the
overhead: what a batch costs besides these parts. --peer=tf.data is what the
code of the ViT papers uses; it needs TensorFlow (pip install tensorflow-cpu).
--peer=timm has all --augmentation but augreg, and tf.data has crop only; other
cases have no peer.

--peer=timm needs torch and timm (--peer_python names an interpreter that has
them); --peer=linen is benchmarks/plain_linen_vit.py; any other script that
speaks the protocol of vit_jax/tools/benchmark/workers.py can be named by path.
"""

import argparse
import os
import platform
import sys
from collections.abc import Sequence

from vit_jax.runs import environment, terminal
from vit_jax.tools import arguments, outputs, parsers
from vit_jax.tools.benchmark import cases, input, report, rounds


def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_args(argv)
  with terminal.one_message():
    _run(args)


def parser() -> argparse.ArgumentParser:
  parser = arguments.plain_parser(__doc__, 'benchmark [--models=...] ...')
  add, several = parser.add_argument, arguments.several
  add('--models', type=several(), default='B/16', metavar='NAME,...')
  add(
    '--batch_sizes',
    type=several(convert=arguments.count),
    default='8',
    metavar='N,...',
  )
  for name, choices in cases.CHOICES.items():
    add(
      f'--{name}',
      type=several(choices),
      default=choices[0],
      metavar='NAME,...',
      help=f'some of {", ".join(choices)} (the first)',
    )
  input_ = parser.add_argument_group('of the input')
  input_.add_argument(
    '--images',
    type=several(tuple(input.KINDS)),
    default=next(iter(input.KINDS)),
    metavar='NAME,...',
    help=f'some of {", ".join(input.KINDS)} (the first)',
  )
  input_.add_argument(
    '--augmentation',
    type=several(input.AUGMENTATIONS),
    default=input.AUGMENTATIONS[0],
    metavar='NAME,...',
    help=f'some of {", ".join(input.AUGMENTATIONS)} (the first)',
  )
  for name, default, text in (
    ('num_examples', input.NUM_EXAMPLES, 'length of the source'),
    ('num_workers', 0, 'reading processes'),
    ('num_threads', 0, 'reading threads, on as many cores; 0: as in a run'),
  ):
    input_.add_argument(
      f'--{name}',
      type=several(convert=parsers.natural),
      default=str(default),
      metavar='N,...',
      help=f'{text} ({default})',
    )
  add('--scan', action='store_true', help='scan over layers')
  add(
    '--first_fit',
    action='store_true',
    help='try the batch sizes in their order until one fits (with a peer, both '
    'must fit)',
  )
  arguments.add_counts(
    parser,
    image_size=(224, 'height and width in pixels'),
    steps=(30, 'timed steps'),
    rounds=(5, 'rounds that the steps are divided into'),
    warmup=(5, 'steps before the timed ones'),
  )
  add(
    '--peer',
    default='none',
    help='timm, linen, none (default), or a script; tf.data or timm for the '
    'input',
  )
  add('--peer_python', default=sys.executable, help='interpreter of the peer')
  add(
    '--peer_compile',
    default='default',
    help='mode of torch.compile; none: eager',
  )
  add(
    '--peer_settings',
    choices=('own', 'ours'),
    default='own',
    help='own (default): the environment that users of the peer have; ours: '
    'the one that vit_jax.main sets for its users',
  )
  add('--csv', help='file for the rows', metavar='FILE')
  add('--json', help='file for the rows and all rounds', metavar='FILE')
  return parser


def _run(args):
  todo = cases.cases(args)
  peers = []
  for case in todo:
    peers.append(cases.peer_command(args.peer, args.peer_python, case))
    cases.check_peer(args.peer, case)
  records, fitted = [], []
  for case, peer in zip(todo, peers):
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
    row = report.row(case, found)
    records.append({'case': case, 'row': row} | found)
    print(report.line(row), flush=True)
    # Written after each case, so that an interruption keeps the results.
    if args.csv:
      report.write_csv(args.csv, [record['row'] for record in records])
    if args.json:
      outputs.write_values(args.json, _about() | {'cases': records})


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
