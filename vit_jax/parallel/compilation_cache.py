"""Compiled programs, kept from one start to the next by JAX's own cache.

The cache returns the very code that was compiled, so a resumed run stays
bit-identical.
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

from vit_jax.runs.files import PathLike, is_local

MAX_BYTES = 10 * 2**30
_MIN_COMPILE_S = 0.2  # Programs that compile faster are not worth a file.
_THRESHOLD = 'jax_persistent_cache_min_compile_time_secs'


def enable(workdir: PathLike) -> None:
  """Choose the folder of JAX's compilation cache, unless the user has.

  The user chooses with JAX_COMPILATION_CACHE_DIR, which may be gs://...; an
  empty string disables the cache. The default on one host is the user's cache
  folder, shared by all runs. On several hosts it is in the workdir, which all
  hosts see: JAX lets only the first host write, and on GPUs hosts divide the
  autotuning of kernels, so a host that compiled alone would wait forever.
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
    print(
      f'Compiled programs are not kept for the next start: {error}. Set '
      'JAX_COMPILATION_CACHE_DIR to a writable folder.',
      file=sys.stderr,
    )
    return
  jax.config.update('jax_compilation_cache_dir', os.fspath(folder))
  if _THRESHOLD.upper() not in os.environ:
    jax.config.update(_THRESHOLD, _MIN_COMPILE_S)
  if not is_local(folder):
    # XLA's own cache of GPU kernels, in the same folder, opens no URLs.
    jax.config.update('jax_persistent_cache_enable_xla_caches', 'none')
  elif not chosen and jax.process_count() == 1:
    make_room(folder)


def _default(workdir):
  if jax.process_count() > 1:
    folder = epath.Path(workdir) / 'xla_cache'
  else:
    home = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    folder = epath.Path(home).expanduser() / 'vit_jax' / 'xla'
  # JAX's keys do not include the CPU's model, on which the code depends.
  return folder / _cpu() if jax.default_backend() == 'cpu' else folder


def _cpu():
  """Return a name for the CPU's model and instructions: 'cpu-1f0c2a9b'."""
  facts = {platform.machine(), platform.processor()}
  with contextlib.suppress(OSError):  # Linux only
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    facts |= {x for x in lines if x.startswith(('model name', 'flags', 'Feat'))}
  return 'cpu-' + hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:8]


def make_room(folder: PathLike, max_bytes: int = MAX_BYTES) -> None:
  """Remove the least recently used entries until the rest fits max_bytes.

  jax_compilation_cache_max_size would do this, but in jax 0.10.2 a single entry
  that was written without it, or by a process killed in between, stops all
  further writes (jax issue 39880).
  """
  entries = []
  for path in pathlib.Path(folder).glob('*-cache'):
    with contextlib.suppress(FileNotFoundError):  # removed by another process
      stat = path.stat()
      entries.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
  total = sum(size for _, size, _ in entries)
  for _, size, path in sorted(entries):
    if total <= max_bytes:
      break
    path.unlink(missing_ok=True)
    total -= size
