"""Compiled programs, kept from one start to the next by JAX's own cache.

It returns the very code that was compiled: a resumed run stays bit-identical.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import sys
from typing import Any

import jax
from etils import epath

from vit_jax.io.files import is_local
from vit_jax.types import PathLike

_MIN_COMPILE_S = 0.05  # Programs that compile faster are not worth a file.
_THRESHOLD = 'jax_persistent_cache_min_compile_time_secs'


def enable(workdir: PathLike = '') -> None:
  """Choose the folder of JAX's compilation cache, unless the user has.

  The user chooses with JAX_COMPILATION_CACHE_DIR, which may be gs://...; an
  empty string disables the cache. The default is the user's cache folder; on
  several hosts it is in the workdir, which all hosts see: JAX lets only the
  first host write, and on GPUs a host that compiled alone would wait forever,
  because hosts divide the autotuning of kernels.
  """
  settings: Any = jax.config
  chosen = settings.jax_compilation_cache_dir
  if chosen == '' or not settings.jax_enable_compilation_cache:
    return
  folder = epath.Path(chosen or _default(workdir))
  try:
    # Whoever can write there can make this user run any code.
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
  except OSError as error:
    print(f'No compilation cache: {error}', file=sys.stderr)
    return
  jax.config.update('jax_compilation_cache_dir', os.fspath(folder))
  if _THRESHOLD.upper() not in os.environ:
    jax.config.update(_THRESHOLD, _MIN_COMPILE_S)
  if not is_local(folder):
    # XLA's own cache of GPU kernels, in the same folder, opens no URLs.
    jax.config.update('jax_persistent_cache_enable_xla_caches', 'none')


def _default(workdir):
  if jax.process_count() > 1:
    folder = epath.Path(workdir) / 'xla_cache'
  else:
    home = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    folder = epath.Path(home).expanduser() / 'vit_jax' / 'xla'
  if jax.default_backend() != 'cpu':
    return folder
  # Code depends on the model of the CPU, which JAX's keys do not include.
  facts = {platform.machine(), platform.processor()}
  with contextlib.suppress(OSError):  # Linux only
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    facts |= {x for x in lines if x.startswith(('model name', 'flags', 'Feat'))}
  name = hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:8]
  return folder / f'cpu-{name}'
