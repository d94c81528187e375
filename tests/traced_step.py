"""The code that one training step of the quickstart really executes.

    python tests/traced_step.py

A profiler lists the functions of this project that run while `train_step` is
traced. The README states how many; `tests/test_readme.py` checks it.
"""

import collections
import pathlib
import sys
import tempfile
import threading
import types

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = str(ROOT / 'vit_jax')


class Tracer:
  """Profile function that notes the code of this project that is called.

  Attributes:
    in_step: code objects that ran while train_step was on the stack.
  """

  def __init__(self):
    self.in_step = set()
    self._depth = collections.Counter()  # of train_step, by thread

  def __call__(self, frame, event, _):
    code = frame.f_code
    if event not in ('call', 'return') or PACKAGE not in code.co_filename:
      return
    thread = threading.get_ident()
    is_step = code.co_name == 'train_step'
    if event == 'return':
      self._depth[thread] -= is_step
      return
    self._depth[thread] += is_step
    if self._depth[thread]:
      self.in_step.add(code)


def lines_of(code):
  """Return the numbers of the lines of a function and those inside it."""
  numbers = {line for _, _, line in code.co_lines() if line}
  for inner in code.co_consts:
    if isinstance(inner, types.CodeType):
      numbers |= lines_of(inner)
  return set(range(code.co_firstlineno, max(numbers) + 1))


def trace(workdir):
  """Pre-train the tiny quickstart with Adam; return the Tracer."""
  from vit_jax import config, train  # noqa: F401 (imports are not counted)

  run = config.load('vit_jax:quickstart:tiny').runs.pretrain
  run.optimizer.target = 'optax.adamw'
  tracer = Tracer()
  threading.setprofile(tracer)
  sys.setprofile(tracer)
  try:
    config.run(run, workdir)
  finally:
    sys.setprofile(None)
    threading.setprofile(None)
  return tracer


def step_lines(tracer):
  """Return {file: number of lines of its functions that a step executes}."""
  found = collections.defaultdict(set)
  for code in tracer.in_step:
    found[code.co_filename.removeprefix(f'{PACKAGE}/')] |= lines_of(code)
  return {name: len(lines) for name, lines in sorted(found.items())}


def main():
  with tempfile.TemporaryDirectory() as workdir:
    tracer = trace(workdir)
  found = step_lines(tracer)
  for name, count in found.items():
    print(f'{count:5} {name}')
  print(f'{sum(found.values()):5} lines of functions in {len(found)} files')


if __name__ == '__main__':
  main()
