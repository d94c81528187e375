"""The compilation cache: its folder, and equal bits from it."""

import pathlib

import jax
import numpy as np
import pytest
from processes import PLAIN, python, records

from vit_jax.parallel import compilation_cache
from vit_jax.runs import checkpoint


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
  """Return a cache folder of the user, with nothing set."""
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
  assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.05

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


def test_a_folder_of_the_users_choice(home, tmp_path, monkeypatch):
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
  assert not home.exists()


def test_a_folder_that_is_not_writable(monkeypatch, capsys):
  monkeypatch.setenv('XDG_CACHE_HOME', '/proc/no_such_place')
  compilation_cache.enable('/workdir')
  error = capsys.readouterr().err
  assert error.startswith('No compilation cache: ') and '/proc/no_such' in error


COUNTED = """
import collections
import functools
import jax
from vit_jax import train as training

EVENTS = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: EVENTS.update([name]))

@functools.wraps(training.train)
def train(workdir, **kwargs):
  training.train(workdir, **kwargs)
  names = ('cache_misses', 'cache_hits')
  found = [EVENTS[f'/jax/compilation_cache/{name}'] for name in names]
  print('MISSES %d HITS %d' % tuple(found))
"""


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_gives_the_same_bits(
  home, tmp_path
):
  (tmp_path / 'counted.py').write_text(COUNTED)
  config = PLAIN.replace('vit_jax.train.train', 'counted.train')
  (tmp_path / 'config.py').write_text(config)

  def start(name):
    done = python(
      *('-m', 'vit_jax.main', f'--config={tmp_path}/config.py'),
      *(f'--workdir={tmp_path / name}', '--config.total_steps=3'),
      JAX_PLATFORMS='cpu',
      JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
      PYTHONPATH=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    lines = done.stdout.splitlines()
    counts = next(x for x in lines if x.startswith('MISSES')).split()
    params = checkpoint.load_params(tmp_path / name)[0]
    return int(counts[1]), int(counts[3]), records(tmp_path / name), params

  misses, hits, recorded, params = start('first')
  assert misses > 5 > hits  # few programs are compiled twice by one start
  assert len(list(home.rglob('*-cache'))) == misses
  again = start('second')
  assert again[:3] == (0, misses + hits, recorded)
  for path, value in params.items():
    np.testing.assert_array_equal(value, again[3][path], err_msg=path)
