"""Rows of numbers on a compiled train step, and how they are shown.

A row is a flat dict for one program. Its numbers are those of one device: a
chip, or of TPU v2 and v3 a core, two to a chip. What is not known is None.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from vit_jax.models.pallas_attention import lanes_per_head
from vit_jax.runs import metrics, terminal
from vit_jax.runs.device_memory import GIB
from vit_jax.runs.files import PathLike
from vit_jax.tools import outputs
from vit_jax.tools.compile.costs import Costs, costs


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
  'attention': 'attention',
  'scan': 'scan',
  'remat': 'remat',
  'grad_dtype': 'gradients',
  'arguments_gib': 'args GiB',
  'temporaries_gib': 'temp GiB',
  'total_gib': 'total GiB',
  'fits': 'fits',
  'model_tflop': 'model TFLOP',
  'compiler_tflop': 'compiled TFLOP',
  'accessed_gb': 'accessed GB',
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
  counted = costs(hlo)
  analysis = compiled.cost_analysis() or {}
  flops = analysis.get('flops', 0) + counted.repeated_flops
  accessed = analysis.get('bytes accessed', 0) + counted.repeated_bytes
  kind, head_dim = row['device_kind'], row.get('head_dim')
  kernels = kernel_cycles(counted, kind, head_dim)
  cycles = counted.cycles and counted.cycles + kernels
  found = _memory(compiled.memory_analysis(), row['hbm_gib']) | {
    'compiler_tflop': flops / 1e12 or None,
    'accessed_gb': accessed / 1e9 or None,
    'collectives_mb': {k: v / 1e6 for k, v in counted.collectives.items()},
    'megacycles': cycles / 1e6 or None,
    'kernel_megacycles': kernels / 1e6 or None,
    'unknown_loops': counted.unknown_loops,
    'uncounted_kernels': counted.unknown_kernels,
  }
  if (chip := CHIPS.get(row['device_kind'])) and cycles:
    seconds = cycles / chip.clock_ghz / 1e9
    peak = metrics.peak_flops(row['device_kind'])
    # A device sends each byte at least once, of a sum twice.
    sent = counted.collectives.total() + counted.collectives['all-reduce']
    found |= {
      'step_ms': seconds * 1e3,
      'collectives_ms': sent / chip.links_gb_s / 1e6,
      'images_per_s': row['batch_size'] / seconds,
      'mfu': row['model_tflop'] * 1e12 / seconds / peak,
    }
  ranked = counted.operations.most_common()
  return found | {'operations': [[*name, cycles] for name, cycles in ranked]}


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


def _memory(stats, hbm):
  if stats is None:
    return {'fits': None}
  found = {
    'arguments_gib': stats.argument_size_in_bytes / GIB,
    'output_gib': stats.output_size_in_bytes / GIB,
    'alias_gib': stats.alias_size_in_bytes / GIB,
    'temporaries_gib': stats.temp_size_in_bytes / GIB,
    'code_gib': stats.generated_code_size_in_bytes / GIB,
  }
  # Outputs that reuse the memory of donated arguments are part of both.
  return found | _room(hbm, sum(found.values()) - 2 * found['alias_gib'])


def _room(hbm, total):
  """Return the columns that compare the memory of a device and a step."""
  spare = hbm and hbm - total
  fits = None if spare is None else spare >= 0
  return {'total_gib': total, 'hbm_gib': hbm, 'spare_gib': spare, 'fits': fits}


def too_large(row: dict[str, Any], error: BaseException) -> dict[str, Any]:
  """Return what a step adds to its row if it does not fit.

  The compiler's message has one number: the temporaries, or the total.
  """
  text, size = str(error), r'([\d.]+)([KMGT])'
  match = re.search(rf'Used {size} of {size}', text)
  match = match or re.search(rf'\({size}\) exceeds [^(]*\({size}\)', text)
  if not match:
    return {'fits': False, 'error': text.splitlines()[0][:300]}
  number, unit, limit, limit_unit = match.groups()
  wanted, limit = _gib(number, unit), _gib(limit, limit_unit)
  found = {}
  if 'temporaries' in text:
    found['temporaries_gib'] = wanted
    wanted += row['arguments_gib']
  return found | _room(limit, wanted)


def _gib(number, unit):
  return float(number) * 1024.0 ** ('KMGT'.index(unit) - 2)


def hbm_gib(device: Any) -> float | None:
  """Return the memory of a device in GiB, None if it is not known (a CPU)."""
  if device.device_kind in CHIPS:
    return CHIPS[device.device_kind].hbm_gib
  try:
    limit = (device.memory_stats() or {}).get('bytes_limit')
  except jax.errors.JaxRuntimeError:  # a described device, which is not there
    limit = None
  return limit and limit / GIB


_WARNINGS = {  # key of a row: what its numbers do not include
  'uncounted_kernels': 'NOT COUNTED: {} runs of Pallas kernels, for which the '
  'compiler has no estimate, and which state no cost. The real step takes '
  'longer.',
  'unknown_loops': 'NOT COUNTED: all but the first iteration of {} loops of '
  'unknown length. FLOPs, bytes and step time are too low.',
}


def warnings(row: dict[str, Any]) -> list[str]:
  """Return sentences on what the numbers of a row do not include."""
  return [t.format(row[key]) for key, t in _WARNINGS.items() if row.get(key)]


def text(value: Any, key: str = '') -> str:
  """Return a value of a row as it is shown."""
  if value is None or value == {}:
    return '-'
  if key == 'fits':
    return 'yes' if value else 'NO'
  if key == 'mfu':
    return f'{value:.0%}'
  if isinstance(value, dict):
    return ', '.join(f'{k} {text(v)}' for k, v in value.items())
  if isinstance(value, float):
    return f'{value:,.0f}' if abs(value) >= 100 else f'{value:.3g}'
  return str(value)


def fits(row: dict[str, Any]) -> str:
  """Return 'yes' or 'NO', and by how much."""
  shown, spare = text(row.get('fits'), 'fits'), row.get('spare_gib')
  if spare is None:
    return shown
  words = f'{spare:.1f} left' if spare >= 0 else f'{-spare:.1f} too much'
  return f'{shown}, {words}'


def show(row: dict[str, Any], operations: int = 0) -> None:
  """Print a line per column, and the operations with the most cycles."""
  console = terminal.console()
  lines = zip(COLUMNS.values(), cells(row))
  title = f'Per device, by the compiler ({row["device_kind"]})'
  console.print(terminal.table(title, ('', row['mesh']), lines))
  if row.get('step_ms'):
    console.print(
      "Step time, images/s and MFU are estimates, from the compiler's cycles, "
      'without the time on links between chips. "+ links" is that time at the '
      "data sheet's rate, if nothing overlaps. The compiler has no estimate "
      'for Pallas kernels; theirs is made from the cost that they state.',
      highlight=False,
    )
  for words in row.get('attention_estimates', ()):
    console.print(
      f"attention='auto' is {row['attention']}, chosen by estimates, because "
      'no such device is here; a run measures. Forward and backward, '
      f'{words}.',
      highlight=False,
    )
  for sentence in warnings(row):
    console.print(sentence, style='bold')
  if ranked := row.get('operations', ())[:operations]:
    lines = [(f'{part}: {op}', f'{n / 1e6:,.2f}') for part, op, n in ranked]
    console.print(terminal.table('Operations', ('', 'Mcycles'), lines))


def show_ratio(row: dict[str, Any], peer: dict[str, Any]) -> None:
  """Print a peer's cycles over ours."""
  if (ratio := row['peer_ratio']) is None:
    sentence = (
      'No ratio: there are no cycles of a step that does not fit, nor of any '
      'step on devices other than TPUs.'
    )
  else:
    sentence = (
      f"The peer's step takes {ratio:.2f} times our cycles: "
      f'{text(peer["megacycles"])} to {text(row["megacycles"])} Mcycles.'
    )
  terminal.console().print(sentence, style='bold', highlight=False)


def cells(row: dict[str, Any], columns: Iterable[str] = COLUMNS) -> list[str]:
  """Return the texts of the columns, which are keys of COLUMNS."""
  return [
    fits(row) if key == 'fits' else text(row.get(key), key) for key in columns
  ]


def markdown(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
  """Return a Markdown table of the columns, which are keys of COLUMNS."""
  lines = [[COLUMNS[key] for key in columns], ['---'] * len(columns)]
  lines += [cells(row, columns) for row in rows]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines) + '\n'


def find(
  rows: Sequence[dict[str, Any]], wanted: Mapping[str, Any]
) -> dict[str, Any] | None:
  """Return the first row with these items, or None."""
  return next((row for row in rows if wanted.items() <= row.items()), None)


def write_csv(path: PathLike, rows: Sequence[dict[str, Any]]) -> None:
  """Write a line per row, with a column per kind of collective."""
  flat = []
  for row in rows:
    kinds = row.get('collectives_mb') or {}
    plain = {k: v for k, v in row.items() if not isinstance(v, dict | list)}
    flat.append(plain | {f'{k}_mb': v for k, v in kinds.items()})
  outputs.write_rows(path, flat)
