"""Environment variables that make a process faster, and its results correct.

This module uses the standard library only: a process reads the variables when
it starts, or when JAX computes for the first time.
"""

import importlib.metadata
import importlib.util
import os
import sys

# The first dimension of a product of two matrices, summed on a CPU: these
# versions of jaxlib compute wrong values from element 32,768 on (jax issue
# 39103). 0.11.0, 0.11.1, 0.11.2, 0.12.0 and 0.12.0.1 were found correct. A list
# of versions, because XLA ends a process that names an option it does not know.
WRONG_JAXLIB = ('0.10.1', '0.10.2')
OPTION = '--xla_cpu_experimental_ynn_fusion_type'  # Empty: fuse nothing.


def faster() -> dict[str, str]:
  """Return {variable: value} to start a process with; users' settings win.

  On a CPU, XLA allocates its temporaries again in every step. With pages of
  4 KiB, page faults take about 40% of a training step of a small ViT. On Linux,
  glibc's malloc uses huge pages if this variable asks for them.
  """
  if sys.platform != 'linux' or 'GLIBC_TUNABLES' in os.environ:
    return {}
  return {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}


def start(**variables: str) -> None:
  """Set variables that are not set, and start this process with `faster`."""
  for name, value in variables.items():
    os.environ.setdefault(name, value)
  if settings := faster():
    os.environ.update(settings)  # read when a process starts
    os.execv(sys.executable, sys.orig_argv)


def avoid_wrong_results() -> None:
  """Append OPTION to XLA_FLAGS if the installed jaxlib needs it.

  XLA_FLAGS stays as it is if it names that option, or a file of options.
  """
  flags = os.environ.get('XLA_FLAGS', '').strip()
  is_file = flags and not flags.startswith('-')
  if jaxlib_version() in WRONG_JAXLIB and not is_file and OPTION not in flags:
    os.environ['XLA_FLAGS'] = f'{flags} {OPTION}='.strip()


def drop_missing_backend() -> None:
  """Remove MPLBACKEND, which Jupyter and Colab set, if theirs is not here."""
  kind, _, module = os.environ.get('MPLBACKEND', '').partition('://')
  if kind == 'module' and not importlib.util.find_spec(module.split('.')[0]):
    del os.environ['MPLBACKEND']


def jaxlib_version() -> str:
  """Return the version of the installed jaxlib."""
  return importlib.metadata.version('jaxlib').partition('+')[0]
