"""Table of numbers on compiled train steps.

A row is a flat dict for one program. Its numbers are per device: a chip, or a
core of TPU v2 and v3, which have two per chip. Unknown numbers are None. TPUs
have cycles and a step time, GPUs a lower bound of it, see roofline.py.
"""

from collections.abc import Mapping
from typing import Any

from vit_jax.analysis import chips
from vit_jax.analysis.chips import Chip
from vit_jax.io import terminal
from vit_jax.runs.compiled import GIB
from vit_jax.tools.compile.hlo import Costs, costs
from vit_jax.tools.compile.roofline import roofline


def numbers(row: dict[str, Any], compiled: Any, hlo: str) -> dict[str, Any]:
  """Return what a compiled step, with its HLO as text, adds to its row."""
  counted, kind = costs(hlo), row['device_kind']
  chip = chips.find(kind)
  if chip and not chip.hbm_gib:  # only its peak is known
    chip = None
  kernels = kernel_cycles(counted, chip) if chip else 0.0
  cycles = counted.cycles and counted.cycles + kernels
  memory = compiled.memory_analysis()
  # Outputs that reuse the memory of donated arguments are part of both.
  parts = 'argument', 'output', 'temp', 'generated_code'
  total = sum(getattr(memory, f'{part}_size_in_bytes') for part in parts)
  total = (total - memory.alias_size_in_bytes) / GIB
  found = {
    'donated_gib': memory.alias_size_in_bytes / GIB,
    'temporaries_gib': memory.temp_size_in_bytes / GIB,
    'total_gib': total,
    'spare_gib': chip and chip.hbm_gib - total,
    'fits': chip and total <= chip.hbm_gib,
    'collectives_mb': {k: v / 1e6 for k, v in counted.collectives.items()},
    'megacycles': cycles / 1e6 or None,
    'kernel_megacycles': kernels / 1e6 or None,
    'loops_counted_once': counted.unknown_loops,
    'kernels_not_counted': counted.unknown_kernels,
    'operations': [[*x, n] for x, n in counted.operations.most_common()],
  }
  if chip is None:
    return found

  def mfu(seconds):
    return row['model_tflop'] * 1e12 / seconds / chip.peak_flops

  # A device sends each byte at least once, of a sum twice.
  sent = counted.collectives.total() + counted.collectives['all-reduce']
  found['collectives_ms'] = sent / chip.links_gb_s / 1e6
  if cycles:
    seconds = cycles / chip.clock_ghz / 1e9
    found |= {
      'step_ms': seconds * 1e3,
      'images_per_s': row['batch_size'] / seconds,
      'mfu': mfu(seconds),
    }
    if counted.network and chip.network_gb_s:
      found |= network(counted.network, row['slices'], chip, seconds * 1e3)
  elif kind.startswith('NVIDIA'):
    least = roofline(hlo, chip.peak_flops, 1e9 * chip.hbm_gb_s)
    seconds = least.seconds.total()
    ranked = least.seconds.most_common()
    found |= {
      'roofline_ms': seconds * 1e3,
      'mfu_at_roofline': mfu(seconds),
      'kernels': least.kernels,
      'kernels_without_flops': least.without_flops,
      'operations': [[*where, 1e6 * s] for where, s in ranked],
    }
  return found


def network(
  sent: Mapping[str, int], slices: int, chip: Chip, step_ms: float
) -> dict[str, Any]:
  """Return the time on the network between slices; `sent` is {kind: bytes}.

  A device sends each byte of a sum 2 (slices - 1) / slices times. Sums are of
  gradients, so the backward pass, two thirds of the step, can hide them;
  `network_exposed_ms` is the rest, with what is no sum.
  """
  assert chip.network_gb_s
  ms = {k: x / chip.network_gb_s / 1e6 for k, x in sent.items()}
  sums = ms.pop('all-reduce', 0.0) * 2 * (slices - 1) / slices
  others = sum(ms.values())
  return {
    'network_mb': {k: x / 1e6 for k, x in sent.items()},
    'network_ms': sums + others,
    'network_exposed_ms': max(0.0, sums - step_ms * 2 / 3) + others,
  }


def kernel_cycles(counted: Costs, chip: Chip) -> float:
  """Return the estimated cycles of the Pallas kernels that state their cost.

  Attention takes the time of its FLOPs at `kernel_rate` of the peak, or that of
  its bytes if it is longer. Other kernels take that of FLOPs at the peak and of
  bytes, -10% to +2% from schedules for S, B and L/16 on v6e and B/16 on v5e.
  """
  flops = {k: n / chip.peak_flops for k, n in counted.kernel_flops.items()}
  moved = {k: n / chip.hbm_gb_s / 1e9 for k, n in counted.kernel_bytes.items()}
  attention = flops.get('attention', 0) / chip.kernel_rate
  attention = max(attention, moved.get('attention', 0))
  layer = flops.get('layer', 0) + moved.get('layer', 0)
  return (attention + layer) * chip.clock_ghz * 1e9


def show(row: dict[str, Any], operations: int = 0) -> None:
  """Print the row, and the operations that take longest."""
  title = f'Per device, by the compiler ({row["device_kind"]})'
  unit, scale = 'Mcycles', 1e6
  if 'roofline_ms' in row:
    title += '; roofline_ms is a lower bound of the time of a step'
    unit, scale = 'ms', 1e3
  lines = [(k, text(x)) for k, x in row.items() if k != 'operations']
  terminal.table(title, ('', row['mesh']), lines)
  if ranked := row.get('operations', ())[:operations]:
    lines = [(f'{part}: {op}', f'{n / scale:,.2f}') for part, op, n in ranked]
    terminal.table('Operations', ('', unit), lines)


def text(value: Any) -> str:
  """Return a value of a row as text."""
  if isinstance(value, dict):
    return ', '.join(f'{k} {text(x)}' for k, x in value.items())
  if isinstance(value, float):
    return f'{value:,.0f}' if abs(value) >= 100 else f'{value:.3g}'
  return '-' if value is None else str(value)
