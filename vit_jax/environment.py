"""Variables of the environment that runs are faster with.

Read when a process starts: they are for whoever starts one. Standard library
only, as it comes before all else.
"""

import os
import sys


def faster():
  """{variable: value} to start a process with; what users have set stands.

  On a CPU, XLA allocates its temporaries afresh in every step; with pages of
  4 KiB the faults take some 40% of a small ViT's training step. glibc (Linux)
  has its malloc take huge pages where it is told to.
  """
  if sys.platform != 'linux' or 'GLIBC_TUNABLES' in os.environ:
    return {}
  return {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}
