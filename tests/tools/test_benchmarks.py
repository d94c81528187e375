"""The scripts in benchmarks/."""

import pathlib
import runpy
import subprocess
import sys

import cv2
import numpy as np
import pytest
from processes import python

FOLDER = pathlib.Path(__file__).parents[2] / 'benchmarks'


def run(code, *words):
  """Return the number that a process prints last, and its errors."""
  path = f'{FOLDER}:{FOLDER.parent}'
  done = python('-c', code, *words, PYTHONPATH=path)
  assert done.returncode == 0, done.stderr
  return float(done.stdout.split()[-1]), done.stderr


def script(name, missing=()):
  """Return the code that runs a script without some packages."""
  return f"""
import runpy, sys
class Missing:
  def find_spec(self, name, path=None, target=None):
    if name.split('.')[0] in {set(missing) or {''}}:
      raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
runpy.run_path('{FOLDER / name}.py', run_name='__main__')
"""


# An accelerator machine has jax, flax, optax and orbax only.
ABSENT = ('ml_collections', 'grain', 'tensorflow_datasets', 'pydantic', 'cv2')
ABSENT += ('PIL', 'matplotlib', 'sklearn', 'datasets')
TINY = ('mu/16', '--image_size=32', '--steps=2', '--batch_size=8')


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['train', 'infer'])
def test_step_needs_no_packages_for_data(mode):
  speed, notes = run(script('step_ours', ABSENT), *TINY, f'--mode={mode}')
  assert speed > 0
  assert f'mu/16 {mode}, batch 8: compiled in' in notes


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['train', 'infer'])
def test_plain_linen(mode):
  speed, _ = run(script('step_plain_linen', ABSENT), *TINY, f'--mode={mode}')
  assert speed > 0


@pytest.mark.slow
def test_input():
  words = ('--images=records', '--batches=2', '--batch_size=4')
  speed, _ = run(script('input_ours'), *words)
  assert speed > 0


def test_jpegs(monkeypatch):
  monkeypatch.syspath_prepend(FOLDER)
  made = runpy.run_path(str(FOLDER / 'jpegs.py'))['make']('imagenet', 2)
  assert all(50_000 < len(file) < 65_000 for file in made)
  image = cv2.imdecode(np.frombuffer(made[0], np.uint8), cv2.IMREAD_COLOR)
  assert image.shape == (375, 500, 3) and made[0] != made[1]


def test_ratio_is_that_of_neighbours(monkeypatch, capsys):
  namespace = runpy.run_path(str(FOLDER / 'compare.py'))
  numbers = iter([8, 4, 2, 1, 9, 3])
  calls = []

  def fake(words, python, **variables):
    calls.append((words, python, set(variables)))
    return next(numbers)

  namespace['main'].__globals__['run'] = fake
  monkeypatch.delenv('GLIBC_TUNABLES', raising=False)
  monkeypatch.setattr('sys.argv', ['compare.py', 'a', 'b', '--peer_python=p'])
  namespace['main']()
  *_, last = capsys.readouterr().out.splitlines()
  assert last == '8 and 3: ratio 2.000 (2.000 to 3.000)'
  ours = ('a', sys.executable, {'GLIBC_TUNABLES'})
  assert calls == [ours, ('b', 'p', set())] * 3


def test_a_script_prints_its_number_last(tmp_path):
  compare = runpy.run_path(str(FOLDER / 'compare.py'))
  (tmp_path / 'x.py').write_text(
    'import os, sys\nprint("log", sys.argv[1])\nprint(os.environ["A"])'
  )
  assert compare['run'](f'{tmp_path}/x.py word', sys.executable, A='2.5') == 2.5


def test_the_command_for_gpus(tmp_path):
  text = (FOLDER / 'gpu.sh').read_text()
  for word in text.replace('"', ' ').split():
    if word.endswith('.py'):
      assert (FOLDER / word).exists(), word
  subprocess.run(['bash', '-n', str(FOLDER / 'gpu.sh')], check=True)
