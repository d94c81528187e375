"""Compiled programs, kept from one start to the next by jax's own cache.

What is read back is the very code that was compiled, so a run goes on bit for
bit. Processes can share a folder: an entry that is half written does not pass
its checksum, and is compiled instead.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import sys

import jax
from etils import epath

MAX_BYTES = 10 * 2**30
_MIN_COMPILE_S = 0.2  # what compiles faster is not worth its file
_THRESHOLD = 'jax_persistent_cache_min_compile_time_secs'


def enable(workdir):
  """Sets where jax keeps what it compiles, unless that is set or off.

  JAX_COMPILATION_CACHE_DIR sets it, gs://... included; empty, it is off. The
  default on one host is the user's cache folder, for all runs; on several it
  is in the workdir, which all share: only the first host writes, and on GPUs
  hosts share out the tuning of what they compile, so that one that has to
  compile alone would wait for ever.

  A folder that cannot be written to is a line on stderr, and nothing is kept.
  """
  chosen = jax.config.jax_compilation_cache_dir
  if chosen == '' or not jax.config.jax_enable_compilation_cache:
    return
  folder = epath.Path(chosen or _default(workdir))
  if error := _prepare(folder):
    print(
      f'What is compiled is not kept for the next start: {error}. Set '
      'JAX_COMPILATION_CACHE_DIR to a folder that can be written to, or to '
      'nothing.',
      file=sys.stderr,
    )
    jax.config.update('jax_compilation_cache_dir', None)
    return
  jax.config.update('jax_compilation_cache_dir', os.fspath(folder))
  if _THRESHOLD.upper() not in os.environ:
    jax.config.update(_THRESHOLD, _MIN_COMPILE_S)
  if '://' in os.fspath(folder):
    # XLA's own cache beside jax's, of kernels on GPUs: it opens no URLs.
    jax.config.update('jax_persistent_cache_enable_xla_caches', 'none')
  elif not chosen and jax.process_count() == 1:
    make_room(folder)


def _default(workdir):
  if jax.process_count() > 1:
    folder = epath.Path(workdir) / 'xla_cache'
  else:
    home = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    folder = epath.Path(home).expanduser() / 'vit_jax' / 'xla'
  # Code for a CPU is for its very model, which jax does not look at.
  return folder / _cpu() if jax.default_backend() == 'cpu' else folder


def _cpu():
  """A name for the CPU's model and instructions, such as 'cpu-1f0c2a9b'."""
  told = {platform.machine(), platform.processor()}
  with contextlib.suppress(OSError):  # Linux only
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    told |= {x for x in lines if x.startswith(('model name', 'flags', 'Feat'))}
  return 'cpu-' + hashlib.sha256(repr(sorted(told)).encode()).hexdigest()[:8]


def _prepare(folder):
  """Makes the folder; the error if it cannot be, or cannot be written to."""
  probe = folder / f'.write_test_{jax.process_index()}_{os.getpid()}'
  try:
    # Whoever can write there can have this user run any code.
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    probe.write_text('')
    probe.unlink()
  except Exception as error:  # each file system has errors of its own
    return error
  return None


def make_room(folder, max_bytes=MAX_BYTES):
  """Removes what was not used for longest, until the rest has max_bytes."""
  entries = []
  for path in pathlib.Path(folder).glob('*-cache'):
    with contextlib.suppress(FileNotFoundError):  # another process's doing
      stat = path.stat()
      entries.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
  total = sum(size for _, size, _ in entries)
  for _, size, path in sorted(entries):
    if total <= max_bytes:
      break
    path.unlink(missing_ok=True)
    total -= size
