"""Out of memory on a device: one message that says what needs how much."""

import contextlib
import os
from collections.abc import Callable, Iterator

import jax

GIB = 2**30


class OutOfMemoryError(MemoryError):
  """The memory of a device, or of a CPU's host, is exhausted."""


@contextlib.contextmanager
def explaining(explain: Callable[[], str]) -> Iterator[None]:
  """Context manager that turns errors of exhausted memory into one message.

  Args:
    explain: returns what needs the memory and what to do. It is called after
      such an error only.

  Raises:
    OutOfMemoryError: in place of the error of JAX.
  """
  try:
    yield
  except (jax.errors.JaxRuntimeError, MemoryError) as error:
    if not _is_of_a_device(error):
      raise
    text = str(error).partition('\n')[0].removeprefix('RESOURCE_EXHAUSTED: ')
    raise OutOfMemoryError(
      f'Out of memory on {_device()}. {explain()}\n  (JAX: {text[:300]})'
    ) from None


def _is_of_a_device(error):
  if isinstance(error, MemoryError):  # on a CPU, XLA's std::bad_alloc
    is_explained = isinstance(error, OutOfMemoryError)
    return jax.default_backend() == 'cpu' and not is_explained
  return 'RESOURCE_EXHAUSTED' in str(error)


def _device():
  """Return the kind of the devices, and the memory that each one has."""
  device = jax.local_devices()[0]
  limit = (device.memory_stats() or {}).get('bytes_limit')
  if limit is None and device.platform == 'cpu':
    limit = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  size = f' of {limit / GIB:.1f} GiB' if limit else ''
  return f'a device ({device.device_kind}{size})'
