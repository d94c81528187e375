"""The code that one training step of the quickstart really executes.

    python tests/traced_step.py

A profiler lists the functions of this project that run while `train_step` is
traced. The README states how many; `tests/test_readme.py` checks it.
"""

import collections
import functools
import pathlib
import sys
import types
from unittest import mock

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = str(ROOT / 'vit_jax')


def lines_of(code):
  """Return the numbers of the lines of a function and those inside it."""
  numbers = {line for _, _, line in code.co_lines() if line}
  for inner in code.co_consts:
    if isinstance(inner, types.CodeType):
      numbers |= lines_of(inner)
  return set(range(code.co_firstlineno, max(numbers) + 1))


def trace():
  """Return the code that runs while a step of the quickstart is traced."""
  import jax
  from ml_collections import ConfigDict

  from vit_jax import config, setup
  from vit_jax.tools.compile.lowering import lower

  run = ConfigDict(config.load('vit_jax:quickstart:tiny').runs['pretrain'])
  run.optimizer.target = 'optax.adamw'
  found, train_step = set(), setup.train_step

  def note(frame, event, _):
    if event == 'call' and frame.f_code.co_filename.startswith(PACKAGE):
      found.add(frame.f_code)

  @functools.wraps(train_step)
  def noted(*args, **options):
    sys.setprofile(note)
    try:
      return train_step(*args, **options)
    finally:
      sys.setprofile(None)

  with mock.patch.object(setup, 'train_step', noted):
    lower(run, jax.devices()[:1], image_shape=(24, 24, 1))
  return found


def step_lines():
  """Return {file: number of lines of its functions that a step executes}."""
  found = collections.defaultdict(set)
  for code in trace():
    found[code.co_filename.removeprefix(f'{PACKAGE}/')] |= lines_of(code)
  return {name: len(lines) for name, lines in sorted(found.items())}


def main():
  found = step_lines()
  for name, count in found.items():
    print(f'{count:5} {name}')
  print(f'{sum(found.values()):5} lines of functions in {len(found)} files')


if __name__ == '__main__':
  main()
