r"""Run two scripts in turn, each of which prints one number, and compare them.

  python benchmarks/compare.py 'step_ours.py B/16 --batch_size=64' \
      'step_timm.py B/16 --batch_size=64' [--rounds=3] [--peer_python=PYTHON]

Each round starts both scripts in processes of their own, one after the other,
so each has the device to itself. The last line has the median of both, and of
the ratios of neighbouring rounds, with the smallest and largest. The first
script runs with the environment that vit_jax.main sets for its users, the
second one as its own users run it.
"""

import argparse
import os
import pathlib
import shlex
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from vit_jax.io import environment  # noqa: E402


def run(words, python, **variables):
  """Return the number that a script prints last."""
  script, *words = shlex.split(words)
  path = os.pathsep.join([str(HERE.parent), os.environ.get('PYTHONPATH', '')])
  done = subprocess.run(
    [python, str(HERE / script), *words],
    env=os.environ | {'PYTHONPATH': path} | variables,
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  return float(done.stdout.split()[-1])


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('ours', help='script of this folder, and its arguments')
  parser.add_argument('peer', help='the same')
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--peer_python', default=sys.executable)
  args = parser.parse_args()
  pairs = []
  for _ in range(args.rounds):
    ours = run(args.ours, sys.executable, **environment.faster())
    pairs.append((ours, run(args.peer, args.peer_python)))
    print(*pairs[-1], flush=True)
  ours, peer = (statistics.median(numbers) for numbers in zip(*pairs))
  ratios = [a / b for a, b in pairs]
  print(
    f'{ours:.5g} and {peer:.5g}: ratio {statistics.median(ratios):.3f} '
    f'({min(ratios):.3f} to {max(ratios):.3f})'
  )


if __name__ == '__main__':
  main()
