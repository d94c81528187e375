"""A row of numbers on a compiled train step, and how it is shown.

A row is a flat dict for one program. Its numbers are those of one device: a
chip, or of TPU v2 and v3 a core, two to a chip. What is not known is None.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from vit_jax.models.pallas_attention import lanes_per_head
from vit_jax.runs import metrics, terminal
from vit_jax.tools.compile.hlo import Costs, costs

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """A kind of device: memory, clock, bandwidth of all links and of memory."""

  hbm_gib: float
  clock_ghz: float
  links_gb_s: float
  hbm_gb_s: float


# By device_kind. Memory is what libtpu 0.0.51 says a program can have. Clock,
# links and bandwidth are from data sheets, quoted from memory; at this clock
# the matrix units reach the peak FLOP/s that metrics.py has.
CHIPS = {
  'TPU v2': Chip(7.48, 0.7, 124, 700),
  'TPU v3': Chip(15.48, 0.94, 164, 900),
  'TPU v4': Chip(30.75, 1.05, 300, 1228),
  'TPU v5 lite': Chip(15.75, 1.5, 200, 819),
  'TPU v5': Chip(95.73, 1.75, 600, 2765),
  'TPU v6 lite': Chip(31.24, 1.75, 448, 1640),
}

COLUMNS = {  # key of a row: heading
  'config': 'config',
  'topology': 'topology',
  'mesh': 'mesh',
  'batch_size': 'batch',
  'num_classes': 'classes',
  'parameters': 'parameters',
  'attention': 'attention',
  'scan': 'scan',
  'remat': 'remat',
  'arguments_gib': 'args GiB',
  'temporaries_gib': 'temp GiB',
  'total_gib': 'total GiB',
  'fits': 'fits',
  'spare_gib': 'spare GiB',
  'model_tflop': 'model TFLOP',
  'step_tflop': 'step TFLOP',
  'collectives_mb': 'collectives MB',
  'megacycles': 'Mcycles',
  'kernel_megacycles': '- of kernels',
  'step_ms': 'step ms',
  'collectives_ms': '+ links ms',
  'images_per_s': 'images/s',
  'mfu': 'MFU',
  'compile_cpu_s': 'compile, CPU s',
  'libtpu': 'libtpu',
}


def numbers(row: dict[str, Any], compiled: Any, hlo: str) -> dict[str, Any]:
  """Return what a compiled step adds to its row.

  Args:
    row: of `step.lower`.
    compiled: jax.stages.Compiled.
    hlo: text of the optimized HLO.
  """
  counted, kind = costs(hlo), row['device_kind']
  kernels = kernel_cycles(counted, kind, row['head_dim'])
  cycles = counted.cycles and counted.cycles + kernels
  ranked = counted.operations.most_common()
  memory = compiled.memory_analysis()
  found = {
    'arguments_gib': memory.argument_size_in_bytes / GIB,
    'output_gib': memory.output_size_in_bytes / GIB,
    'alias_gib': memory.alias_size_in_bytes / GIB,
    'temporaries_gib': memory.temp_size_in_bytes / GIB,
    'code_gib': memory.generated_code_size_in_bytes / GIB,
  }
  # Outputs that reuse the memory of donated arguments are part of both.
  total = sum(found.values()) - 2 * found['alias_gib']
  spare = row['hbm_gib'] and row['hbm_gib'] - total
  found |= {
    'total_gib': total,
    'spare_gib': spare,
    'fits': None if spare is None else spare >= 0,
    'collectives_mb': {k: v / 1e6 for k, v in counted.collectives.items()},
    'megacycles': cycles / 1e6 or None,
    'kernel_megacycles': kernels / 1e6 or None,
    'unknown_loops': counted.unknown_loops,
    'unknown_kernels': counted.unknown_kernels,
    'operations': [[*name, cycles] for name, cycles in ranked],
  }
  if (chip := CHIPS.get(kind)) and cycles:
    seconds = cycles / chip.clock_ghz / 1e9
    # A device sends each byte at least once, of a sum twice.
    sent = counted.collectives.total() + counted.collectives['all-reduce']
    found |= {
      'step_ms': seconds * 1e3,
      'collectives_ms': sent / chip.links_gb_s / 1e6,
      'images_per_s': row['batch_size'] / seconds,
      'mfu': row['model_tflop'] * 1e12 / seconds / metrics.peak_flops(kind),
    }
  return found


def kernel_cycles(
  counted: Costs, device_kind: str, head_dim: int | None
) -> float:
  """Return the estimated cycles of the Pallas kernels that state their cost.

  The matrix units and the memory work one after the other, at 1 / 1.15 of their
  peak rates, and a head takes whole registers. For the kernel of
  pallas_attention.py in B/16, L/16 and H/14 on v5e this is within 2% of the
  length of its schedules, see docs/tpu_cycles.md.

  Args:
    counted: costs of a program.
    device_kind: of the device that it is compiled for.
    head_dim: of the attention in the kernels; None: registers are full.
  """
  if not counted.kernel_flops or device_kind not in CHIPS:
    return 0.0
  chip, peak = CHIPS[device_kind], metrics.peak_flops(device_kind)
  assert peak is not None
  padding = lanes_per_head(head_dim) / head_dim if head_dim else 1.0
  seconds = counted.kernel_flops * padding / peak
  seconds += counted.kernel_bytes / chip.hbm_gb_s / 1e9
  return 1.15 * seconds * chip.clock_ghz * 1e9


def hbm_gib(device: Any) -> float | None:
  """Return the memory of a device in GiB, None if it is not known (a CPU)."""
  if device.platform == 'tpu':
    return CHIPS[device.device_kind].hbm_gib
  limit = (device.memory_stats() or {}).get('bytes_limit')
  return limit and limit / GIB


def _text(key, value):
  if value is None or value == {}:
    return '-'
  if isinstance(value, bool) and key == 'fits':
    return 'yes' if value else 'NO'
  if key == 'mfu':
    return f'{value:.0%}'
  if isinstance(value, dict):
    return ', '.join(f'{k} {_text(k, v)}' for k, v in value.items())
  if isinstance(value, float):
    return f'{value:,.0f}' if abs(value) >= 100 else f'{value:.3g}'
  return f'{value:,}' if key == 'parameters' else str(value)


def cells(row: dict[str, Any], columns: Collection[str]) -> list[str]:
  """Return the texts of the columns, which are keys of COLUMNS."""
  return [_text(key, row.get(key)) for key in columns]


def markdown(rows: Sequence[dict[str, Any]], columns: Collection[str]) -> str:
  """Return a Markdown table of the columns, which are keys of COLUMNS."""
  lines = [[COLUMNS[key] for key in columns], ['---'] * len(columns)]
  lines += [cells(row, columns) for row in rows]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines) + '\n'


def show(row: dict[str, Any], operations: int = 0) -> None:
  """Print a line per column, and the operations with the most cycles."""
  console = terminal.console()
  title = f'Per device, by the compiler ({row["device_kind"]})'
  lines = zip(COLUMNS.values(), cells(row, COLUMNS))
  console.print(terminal.table(title, ('', row['mesh']), lines))
  if 'error' in row:
    print(row['error'])
  if row.get('step_ms'):
    console.print(
      'Step time, images/s and MFU are estimates, from the cycles of the '
      'compiler and the stated cost of Pallas kernels, without the time on '
      'links between chips. "+ links" is that time at the data sheet\'s rate, '
      'if nothing overlaps.',
      highlight=False,
    )
  if count := row.get('unknown_kernels'):
    print(f'NOT COUNTED: {count} runs of Pallas kernels that state no cost.')
  if count := row.get('unknown_loops'):
    print(f'COUNTED ONCE: {count} loops of unknown length.')
  if ranked := row.get('operations', ())[:operations]:
    lines = [(f'{part}: {op}', f'{n / 1e6:,.2f}') for part, op, n in ranked]
    console.print(terminal.table('Operations', ('', 'Mcycles'), lines))
