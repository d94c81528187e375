"""What a compiled train step needs and may reach on a chip, in numbers.

Rows are flat dicts, one for a program: GiB and counts of one device (a chip; of
TPU v2 and v3 a core, two to a chip). What the compiler does not tell is None.
"""

import csv
import dataclasses
import json
import re

import jax

from vit_jax import metrics
from vit_jax.tools.compile import costs

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """A device: its memory, its clock, and what its links carry in all."""

  hbm_gib: float
  clock_ghz: float
  links_gb_s: float


# By device_kind. Memory is what libtpu 0.0.51 says there is for programs; the
# rest is of data sheets, from memory. Clocks are those at which the matrix
# units make the peak FLOP/s, which are in metrics.py.
CHIPS = {
  'TPU v2': Chip(7.48, 0.7, 124),
  'TPU v3': Chip(15.48, 0.94, 164),
  'TPU v4': Chip(30.75, 1.05, 300),
  'TPU v5 lite': Chip(15.75, 1.5, 200),
  'TPU v5': Chip(95.73, 1.75, 600),
  'TPU v6 lite': Chip(31.24, 1.75, 448),
}

COLUMNS = {  # key of a row: heading
  'config': 'config',
  'topology': 'topology',
  'mesh': 'mesh',
  'batch_size': 'batch',
  'remat': 'remat',
  'arguments_gib': 'args GiB',
  'temporaries_gib': 'temp GiB',
  'total_gib': 'total GiB',
  'fits': 'fits',
  'model_tflop': 'model TFLOP',
  'compiler_tflop': 'compiled TFLOP',
  'accessed_gb': 'accessed GB',
  'collectives_mb': 'collectives MB',
  'megacycles': 'Mcycles',
  'step_ms': 'step ms',
  'collectives_ms': '+ links ms',
  'images_per_s': 'images/s',
  'mfu': 'MFU',
}


def row(step, compiled, hlo):
  """A row of numbers.

  Args:
    step: Step of step.py; its `about` begins the row.
    compiled: of its `lowered.compile()`.
    hlo: its text, optimized.
  """
  found = step.about | _memory(compiled, hbm_gib(step.device))
  counted = costs.costs(hlo)
  analysis = compiled.cost_analysis() or {}
  flops = analysis.get('flops', 0) + counted.repeated_flops
  accessed = analysis.get('bytes accessed', 0) + counted.repeated_bytes
  found |= {
    'model_tflop': step.model_flops / step.devices / 1e12,
    'compiler_tflop': flops / 1e12 or None,
    'accessed_gb': accessed / 1e9 or None,
    'collectives_mb': {k: v / 1e6 for k, v in counted.collectives.items()},
    'megacycles': counted.cycles / 1e6 or None,
    'unknown_loops': counted.unknown_loops,
    'uncounted_kernels': counted.uncounted_kernels,
  }
  chip = CHIPS.get(step.device.device_kind)
  if chip and counted.cycles:
    found |= _estimates(step, counted, chip)
  ranked = counted.operations.most_common()
  found['operations'] = [[*name, cycles] for name, cycles in ranked]
  return found


def _estimates(step, costs, chip):
  """Times and rates that follow from the compiler's cycles."""
  seconds = costs.cycles / chip.clock_ghz / 1e9
  peak = step.devices * metrics.peak_flops(step.device.device_kind)
  return {
    'step_ms': seconds * 1e3,
    'collectives_ms': _sent(costs.collectives) / chip.links_gb_s / 1e6,
    'images_per_s': step.about['batch_size'] / seconds,
    'mfu': step.model_flops / seconds / peak,
  }


def too_large(step, error):
  """The row of a step for which the compiler ran out of memory.

  Of the memory it wanted the compiler tells one sum: of temporaries or of all.
  """
  size = r'([\d.]+)([KMGT])'
  found = step.about | {
    'fits': False,
    'arguments_gib': step.arguments / GIB,
    'model_tflop': step.model_flops / step.devices / 1e12,
  }
  text = str(error)
  match = re.search(rf'Used {size} of {size}', text)
  match = match or re.search(rf'\({size}\) exceeds [^(]*\({size}\)', text)
  if not match:
    return found | {'error': text.splitlines()[0][:300]}
  wanted, available = (_gib(*match.groups()[i : i + 2]) for i in (0, 2))
  if 'temporaries' in text:
    found['temporaries_gib'] = wanted
    wanted += found['arguments_gib']
  return found | {
    'total_gib': wanted,
    'hbm_gib': available,
    'spare_gib': available - wanted,
  }


def hbm_gib(device):
  """Memory of a device in GiB, or None where that is not known (a CPU)."""
  if device.device_kind in CHIPS:
    return CHIPS[device.device_kind].hbm_gib
  try:
    limit = (device.memory_stats() or {}).get('bytes_limit')
  except jax.errors.JaxRuntimeError:  # a device that is described, not there
    limit = None
  return limit and limit / GIB


def left_out(row):
  """What a row's cycles lack, and times that follow from them: sentences."""
  found = []
  if count := row.get('uncounted_kernels'):
    found.append(
      f'NOT COUNTED: {count} runs of kernels of ours, of which the compiler '
      'has no cycles. The step takes longer than is told here.'
    )
  if count := row.get('unknown_loops'):
    found.append(
      f'NOT COUNTED: further rounds of {count} loops, whose number could not '
      'be told. FLOPs, bytes and time are more than is told here.'
    )
  return found


def text(value, key=''):
  """How a value of a row is shown."""
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


def fits(row):
  """'yes' or 'NO', and by how much."""
  shown = text(row.get('fits'), 'fits')
  if (spare := row.get('spare_gib')) is not None:
    words = f'{spare:.1f} left' if spare >= 0 else f'{-spare:.1f} too much'
    shown += f', {words}'
  return shown


def cells(row):
  """Texts of COLUMNS."""
  shown = {key: text(row.get(key), key) for key in COLUMNS}
  return list((shown | {'fits': fits(row)}).values())


def markdown(rows, columns):
  """A table of some COLUMNS."""
  picked = [list(COLUMNS).index(key) for key in columns]
  lines = [[COLUMNS[key] for key in columns], ['---'] * len(columns)]
  for row in rows:
    shown = cells(row)
    lines.append([shown[i] for i in picked])
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines) + '\n'


def write_json(path, rows):
  path.write_text(json.dumps(rows, indent=2) + '\n')


def write_csv(path, rows):
  """One line for each row; bytes of collectives in a column for each kind."""
  flat = []
  for row in rows:
    kinds = row.get('collectives_mb') or {}
    plain = {k: v for k, v in row.items() if not isinstance(v, dict | list)}
    flat.append(plain | {f'{k}_mb': v for k, v in kinds.items()})
  names = list(dict.fromkeys(key for line in flat for key in line))
  with path.open('w', newline='') as file:
    writer = csv.DictWriter(file, names, lineterminator='\n')
    writer.writeheader()
    writer.writerows(flat)


def _memory(compiled, hbm):
  stats = compiled.memory_analysis()
  if stats is None:
    return {'fits': None}
  parts = {
    'arguments': stats.argument_size_in_bytes,
    'output': stats.output_size_in_bytes,
    'alias': stats.alias_size_in_bytes,
    'temporaries': stats.temp_size_in_bytes,
    'code': stats.generated_code_size_in_bytes,
  }
  # Outputs that take the place of donated arguments are counted in both.
  parts['total'] = sum(parts.values()) - 2 * parts['alias']
  found = {f'{name}_gib': size / GIB for name, size in parts.items()}
  spare = hbm and hbm - found['total_gib']
  return found | {
    'hbm_gib': hbm,
    'spare_gib': spare,
    'fits': None if spare is None else spare >= 0,
  }


def _sent(collectives):
  """Bytes that a device sends at least; a sum goes around twice."""
  return sum(
    size * (2 if kind == 'all-reduce' else 1)
    for kind, size in collectives.items()
  )


def _gib(number, unit):
  return float(number) * 1024.0 ** ('KMGT'.index(unit) - 2)
