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


# As libtpu writes it: one instruction in each line, and comments.
SCHEDULE = """
= control target key start
LB: loop body
= control target key end

     0   :  { %4 = vsyncpa 0 } /* entry bundle: %x = fusion(%y) */
   0x1   :  { %s1 = smov 0 } /* Start region 8 */
   0x2 LB: > { %s2 = sadd.s32 1, %s1 } /* Start region 9 :: End region 8 */
   0x3 LB: >> { %v1 = vld [vmem:[%s2]
] ;; %s3 = sadd.s32 1, %s2 } /* Start region 10 */
   0x4   : >> { %p1 = scmp.ge.s32.totalorder %s3, 5 /* loop exit test */ }
   0x5   : >> { %7 = sbr.rel (!%p1) target = $region10 } /* End region 10 */
   0x6   : > { %p2 = scmp.ge.s32.totalorder %s2, 24 /* loop exit test */ }
   0x7   : > { %8 = sbr.rel (%p3) target = $region11 }
   0x8   : > { %9 = sbr.rel (!%p2) target = $region9 }
   0x9   :  {} /* Start region 11 :: End region 9 */
"""


def test_schedules_count_loops():
  schedule = runpy.run_path(str(FOLDER / 'tpu_schedule.py'))['schedule']
  assert schedule(SCHEDULE) == 3 + 24 * (4 + 5 * 3)


def test_bytes_of_arrays_on_chip_do_not_count():
  found = runpy.run_path(str(FOLDER / 'tpu_schedule.py'))['hbm_bytes']
  on_chip = 'f32[256,196]{0,1:T(8,128)S(1)}'
  assert found(f'({on_chip}, bf16[2,3]{{1,0:T(8,128)(2,1)}}, s32[])') == 16
