"""Compiled programs are kept: where, when not, and bit for bit."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

from vit_jax import compilation_cache
from vit_jax.metrics import read_records

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
  """A cache folder of the user's, with nothing set."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'home'))
  monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR', raising=False)
  jax.config.update('jax_compilation_cache_dir', None)
  return tmp_path / 'home'


def folder():
  return jax.config.jax_compilation_cache_dir


def test_in_the_users_cache_folder(home, monkeypatch, tmp_path):
  compilation_cache.enable('/workdir')
  made = pathlib.Path(folder())
  assert made.parent == home / 'vit_jax' / 'xla'
  assert made.name.startswith('cpu-')  # for this CPU only
  assert made.stat().st_mode & 0o777 == 0o700
  assert list(made.iterdir()) == []
  assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.2

  jax.config.update('jax_compilation_cache_dir', None)
  monkeypatch.delenv('XDG_CACHE_HOME')
  monkeypatch.setenv('HOME', str(tmp_path / 'me'))
  compilation_cache.enable('/workdir')
  assert made.name == pathlib.Path(folder()).name
  assert folder().startswith(str(tmp_path / 'me' / '.cache' / 'vit_jax'))


def test_several_hosts_share_one_in_the_workdir(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  compilation_cache.enable(tmp_path / 'run')
  assert folder().startswith(str(tmp_path / 'run' / 'xla_cache'))


def test_an_own_folder(home, tmp_path, monkeypatch):
  name = 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'
  monkeypatch.setenv(name, '7')
  before = jax.config.jax_persistent_cache_min_compile_time_secs
  jax.config.update('jax_compilation_cache_dir', str(tmp_path / 'own'))
  compilation_cache.enable('/workdir')
  assert folder() == str(tmp_path / 'own')
  assert jax.config.jax_persistent_cache_min_compile_time_secs == before
  assert not home.exists()


def test_off(home):
  jax.config.update('jax_compilation_cache_dir', '')
  compilation_cache.enable('/workdir')
  assert folder() == ''

  jax.config.update('jax_compilation_cache_dir', None)
  jax.config.update('jax_enable_compilation_cache', False)
  try:
    compilation_cache.enable('/workdir')
  finally:
    jax.config.update('jax_enable_compilation_cache', True)
  assert folder() is None
  assert not home.exists()


@pytest.mark.parametrize('chosen', [True, False])
def test_what_cannot_be_written_to(chosen, monkeypatch, capsys):
  if chosen:
    jax.config.update('jax_compilation_cache_dir', '/proc/no_such_place')
  monkeypatch.setenv('XDG_CACHE_HOME', '/proc/no_such_place')
  compilation_cache.enable('/workdir')
  assert folder() is None
  error = capsys.readouterr().err
  assert error.startswith('Compiled programs are not kept for the next start: ')
  assert '/proc/no_such_place' in error


def test_the_longest_unused_make_room(tmp_path):
  for i, age in enumerate((30, 10, 20, 40)):
    path = tmp_path / f'jit_{i}-cache'
    path.write_bytes(b'x' * 100)
    os.utime(path, (1e9 - age, 1e9 - 1000))
  compilation_cache.make_room(tmp_path, max_bytes=250)
  left = sorted(path.name for path in tmp_path.iterdir())
  assert left == ['jit_1-cache', 'jit_2-cache']


COUNTED = """
import collections
import os
import jax

EVENTS = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: EVENTS.update([name]))

def train(config, workdir):
  from vit_jax.train import train
  train(config, workdir)
  names = ('cache_misses', 'cache_hits')
  found = [EVENTS[f'/jax/compilation_cache/{name}'] for name in names]
  print('MISSES %d HITS %d' % tuple(found))
"""

CONFIG = """
import ml_collections

def get_config():
  source = dict(target='vit_jax.data.embedded.digits.Digits', split='train')
  return ml_collections.ConfigDict(dict(
    run='counted.train',
    total_steps=3,
    log_every_steps=1,
    ema_decay=0.9,
    data=dict(source=source, batch_size=8),
    model=dict(target='vit_jax.models.vit.VisionTransformer', width=32,
               depth=1, mlp_dim=32, num_heads=2, patch_size=4, dropout=0.1),
    objective=dict(target='vit_jax.objectives.classification.softmax_xent'),
    optimizer=dict(target='vit_jax.optim.adam'),
    schedule=dict(lr=0.01),
  ))
"""


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_gives_the_same_bits(
  home, tmp_path
):
  import numpy as np

  from vit_jax import checkpoint

  (tmp_path / 'counted.py').write_text(COUNTED)
  (tmp_path / 'config.py').write_text(CONFIG)

  def start(name, **environment):
    command = [sys.executable, '-m', 'vit_jax.main']
    command += [
      f'--config={tmp_path}/config.py',
      f'--workdir={tmp_path / name}',
    ]
    environment |= {
      'JAX_PLATFORMS': 'cpu',
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'PYTHONPATH': str(tmp_path),
    }
    done = subprocess.run(
      command,
      cwd=ROOT,
      env=os.environ | environment,
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    counts = done.stdout.splitlines()[-1].split()
    losses = [r['train/loss'] for r in read_records(tmp_path / name)]
    params = checkpoint.load_params(tmp_path / name, ema=False)[0]
    return int(counts[1]), int(counts[3]), losses, params

  off = start('off', JAX_COMPILATION_CACHE_DIR='')
  assert off[:2] == (0, 0)
  assert not list(home.rglob('*-cache'))
  first = start('first')
  assert first[0] > 5 and first[1] == 0
  assert len(list(home.rglob('*-cache'))) == first[0]
  second = start('second')
  assert second[:2] == (0, first[0])
  for other in (first, second):
    assert other[2] == off[2]
    for path, value in off[3].items():
      np.testing.assert_array_equal(value, other[3][path], err_msg=path)
