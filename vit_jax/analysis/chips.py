"""Kinds of accelerators: peaks, memory, clocks and bandwidths."""

import re
from typing import NamedTuple


class Chip(NamedTuple):
  """A kind of device, from memory of the vendors' data sheets; 0: not known.

  At `clock_ghz` a TPU's matrix units reach `peak_flops`, in bfloat16 (float16
  of V100 and T4). `hbm_gib` is what libtpu 0.0.51 says a program can have, or
  as in tools/compile/gpus/. Links are all of a chip; a GPU's NVLinks, or PCIe
  of the L4, in one direction. Networks, to other slices, are those of Google's
  pages. `kernel_rate` is the part of the peak that models/pallas/attention.py
  reaches by libtpu's schedules for B/16; v2 and v3 were not looked at.
  """

  peak_flops: float
  hbm_gib: float = 0
  clock_ghz: float = 0
  links_gb_s: float = 0
  hbm_gb_s: float = 0
  network_gb_s: float = 0
  kernel_rate: float = 0.31


# By a regex of a part of device_kind; the first match counts. A device of a TPU
# v2 or v3 is a core; a chip has two. A GH200 has not the memory of an H200.
CHIPS = {
  'TPU v2': Chip(23e12, 7.48, 0.7, 124, 700),
  'TPU v3': Chip(61.5e12, 15.48, 0.94, 164, 900),
  'TPU v4': Chip(275e12, 30.75, 1.05, 300, 1228, 0, 0.2),
  'TPU v5( lite|e)': Chip(197e12, 15.75, 1.5, 200, 819, 3.125),
  'TPU v5p?': Chip(459e12, 95.73, 1.75, 600, 2765, 6.25),
  'TPU v6( lite|e)': Chip(918e12, 31.24, 1.75, 448, 1640, 12.5, 0.12),
  'B200': Chip(2250e12),
  'H100 PCIe': Chip(756e12),
  'H100 80GB HBM3': Chip(989e12, 79.1, 1.98, 450, 3352),
  'NVIDIA H200': Chip(989e12, 141.0, 1.98, 450, 4800),
  'H[12]00': Chip(989e12),
  'A100-SXM4-80GB': Chip(312e12, 79.2, 1.41, 300, 2039),
  'A100': Chip(312e12),
  'L40S': Chip(362e12),
  'L40': Chip(181e12),
  'L4': Chip(121e12, 21.9, 2.04, 32, 300),
  'V100': Chip(125e12),
  'T4': Chip(65e12),
  'RTX 4090': Chip(165e12),
  'RTX 3090': Chip(71e12),
}


def find(device_kind: str) -> Chip | None:
  """Return the kind of a device, or None if it is not known."""
  found = (c for k, c in CHIPS.items() if re.search(rf'{k}\b', device_kind))
  return next(found, None)
