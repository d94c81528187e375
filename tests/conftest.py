"""Strict JAX settings for every test: 8 fake devices, no rank promotion."""

import os
import tempfile

import jax
import orbax.checkpoint as ocp
import pytest

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')

# Programs that tests start keep what they compile here, not in the user's
# folder. Read by those only: jax has been imported.
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:  # set for xdist's workers
  _CACHE = tempfile.TemporaryDirectory(prefix='vit_jax_tests_')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = _CACHE.name

# Orbax slices replicated arrays so that each replica writes a part, and on 8
# fake devices compiles some 100 programs for it; one replica will do here.
ocp.type_handlers.register_type_handler(
  jax.Array,
  ocp.type_handlers.ArrayHandler(use_replica_parallel=False),
  override=True,
)


@pytest.fixture(autouse=True)
def no_cache_is_left_behind():
  """Studies, and what main calls, set where compilations are kept."""
  names = (
    'jax_compilation_cache_dir',
    'jax_persistent_cache_min_compile_time_secs',
    'jax_persistent_cache_enable_xla_caches',
  )
  before = {name: getattr(jax.config, name) for name in names}
  yield
  for name, value in before.items():
    jax.config.update(name, value)
