"""Environment variables that make a process faster.

They are read when a process starts. This module uses the standard library
only, because it runs before everything else.
"""

import os
import sys


def faster():
  """Return {variable: value} to start a process with; users' settings win.

  On a CPU, XLA allocates its temporaries again in every step. With pages of
  4 KiB, page faults take about 40% of a training step of a small ViT. On Linux,
  glibc's malloc uses huge pages if this variable asks for them.
  """
  if sys.platform != 'linux' or 'GLIBC_TUNABLES' in os.environ:
    return {}
  return {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}
