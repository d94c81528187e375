"""An installed package has the configs; they load from any folder."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from vit_jax import config

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = ('vit_jax', 'configs', 'setup.py', 'pyproject.toml', 'README.md')

# Load every config by name, and one of a user's own.
LOAD = """
import pathlib, sys
import vit_jax
from vit_jax import config
installed = pathlib.Path(sys.argv[1])
assert installed in pathlib.Path(vit_jax.__file__).parents, vit_jax.__file__
for name, path in config.shipped_configs().items():
  assert installed / 'vit_jax' / 'configs' in path.parents
  config.load(f'vit_jax:{name}')
  print(name)
pathlib.Path('own.py').write_text(
  'from configs import common, finetune\\n'
  'def get_config():\\n  return common.__file__')
assert config.load('own.py') == str(installed / 'vit_jax/configs/common.py')
config.import_configs()
from configs import quickstart
assert pathlib.Path(quickstart.__file__).parents[2] == installed
"""


def run(*words, cwd, **environ):
  done = subprocess.run(
    [str(x) for x in words],
    cwd=cwd,
    env={k: v for k, v in os.environ.items() if k != 'PYTHONPATH'} | environ,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
  return done.stdout


def copy_sources(folder):
  for name in SOURCES:
    copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
    copy(ROOT / name, folder / name)
  return folder


def check(python, installed, cwd, **environ):
  """Load all configs with the package that is installed in a folder."""
  cwd.mkdir()
  names = run(python, '-c', LOAD, installed, cwd=cwd, **environ).split()
  assert set(names) == set(config.shipped_configs()) and len(names) >= 19


def test_a_source_distribution_has_the_configs(tmp_path):
  pytest.importorskip('setuptools', minversion='77')
  (tmp_path / 'source').mkdir()
  source = copy_sources(tmp_path / 'source')
  run(sys.executable, 'setup.py', '-q', 'sdist', cwd=source)
  (archive,) = (source / 'dist').iterdir()
  run('tar', '-xf', archive, cwd=tmp_path)
  (unpacked,) = tmp_path.glob('vit_jax-*')
  build = ('build', '--build-lib', tmp_path / 'installed')
  run(sys.executable, 'setup.py', '-q', *build, cwd=unpacked)
  installed = tmp_path / 'installed'
  check(sys.executable, installed, tmp_path / 'x', PYTHONPATH=str(installed))
