"""Strict JAX settings for every test: 8 fake devices, no rank promotion."""

import collections
import gc
import os
import pathlib
import sys
import tempfile

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from vit_jax.data.sources import tables
from vit_jax.io import environment

GOLDEN = pathlib.Path(__file__).with_name('golden')
sys.path.append(str(GOLDEN))  # for its scripts

# Most of the tests' time is compilation, and without optimisation XLA compiles
# twice as fast. Processes that tests start inherit the flags.
FLAGS = '--xla_backend_optimization_level=0'
# This older code generator for fusions compiles three times as fast. Later
# versions do not have it, and end a process that names the option.
if environment.jaxlib_version().startswith('0.10.'):
  FLAGS += ' --xla_cpu_use_fusion_emitters=false'
os.environ['XLA_FLAGS'] = f'{FLAGS} {os.environ.get("XLA_FLAGS", "")}'.strip()
environment.avoid_wrong_results()

# Processes that tests start need not restart themselves for huge pages.
os.environ.setdefault('GLIBC_TUNABLES', '')

# Goldens are of CPUs: products on GPUs have fewer digits. Processes that tests
# start inherit it.
os.environ['JAX_PLATFORMS'] = 'cpu'
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')

# Processes that tests start keep compiled programs here, not in the user's
# folder. This process keeps none.
jax.config.update('jax_compilation_cache_dir', '')
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:  # set for xdist's workers
  _CACHE = tempfile.TemporaryDirectory(prefix='vit_jax_tests_')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = _CACHE.name

# By default, Orbax lets each replica write a slice of a replicated array, and
# compiles about 100 programs for that on 8 devices. Let one replica write it.
ocp.type_handlers.get_type_handler(jax.Array)._use_replica_parallel = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
  """Begin with the files that take longest, so that no worker waits long."""
  weights = collections.Counter()
  for item in items:
    weights[item.path] += 50 if item.get_closest_marker('slow') else 1
  items.sort(key=lambda item: -weights[item.path])


def pytest_collection_finish():
  """Collect garbage rarely: tracing makes much, and took 10% longer."""
  gc.freeze()  # modules and tests stay
  gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
  """Restore the compilation cache, which main changes, and say all again."""
  tables.say_once.cache_clear()
  names = (
    'jax_compilation_cache_dir',
    'jax_persistent_cache_min_compile_time_secs',
    'jax_persistent_cache_enable_xla_caches',
  )
  before = {name: getattr(jax.config, name) for name in names}
  yield
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.fixture(scope='session')
def timm_training():
  """Return {name: array}, what golden/record_timm.py records of training."""
  with np.load(GOLDEN / 'timm_training.npz') as file:
    return dict(file)
