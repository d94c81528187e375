"""Rows of a benchmark, for the terminal, CSV (timm's columns) and JSON."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.runs.files import PathLike
from vit_jax.tools import outputs
from vit_jax.tools.benchmark import cases

COLUMNS = (  # timm's first, in timm's units: ms, G, millions
  'model',
  'infer_samples_per_sec',
  'infer_step_time',
  'infer_batch_size',
  'infer_img_size',
  'infer_gmacs',
  'train_samples_per_sec',
  'train_step_time',
  'train_batch_size',
  'train_img_size',
  'param_count',
  'mfu',  # of the data sheet's dense bfloat16 peak, whatever the precision
  'mfu_measured',  # of a matrix product measured between the rounds
  'hbm_peak',  # GB of the device that uses most; on a CPU of the process
  'compile_s',
  'device_kind',
  'n_devices',
  'mode',
  'precision',
  'attention',
  'remat',
  'scan',
  'step_time_min',
  'step_time_max',
  'matrix_tflops',
  'input_samples_per_sec',
  'input_batch_size',
  'images',
  'augmentation',
  'num_examples',
  'num_workers',
  'num_threads',
  'cpu_ms',  # CPU time of an image in a batch
  'reading_ms',  # and of its parts, measured alone on one thread
  'decoding_ms',
  'transforming_ms',
  'overhead',  # cpu_ms / the sum of the parts - 1, median over rounds
  'peer',
  'peer_settings',
  'peer_samples_per_sec',
  'peer_step_time',
  'peer_hbm_peak',
  'ratio',  # our images per second / the peer's, median over pairs of rounds
  'ratio_min',
  'ratio_max',
  'ratio_of_best',  # the same from the fastest round of each
  'ratio_of_cpu_time',  # from CPU seconds per step, for a CPU that is shared
  'error',
)


def row(case: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
  """Return {column: value} of a case, without columns that do not apply.

  Args:
    case: of `cases.cases`.
    found: of `rounds.measure`.
  """
  mode, started = case['mode'], found.get('started', {})
  if mode == 'input':
    out = {'mode': mode, 'input_batch_size': case['batch_size']}
    out |= {name: case[name] for name in cases.INPUT}
  else:
    given = ('model', 'mode', 'precision', 'attention', 'remat', 'scan')
    out = {name: case[name] for name in given}
    out[f'{mode}_batch_size'] = case['batch_size']
    out[f'{mode}_img_size'] = case['image_size']
  kept = ('compile_s', 'hbm_peak', 'device_kind', 'n_devices')
  out |= {name: started[name] for name in kept if name in started}
  if 'param_count' in started:
    out['param_count'] = started['param_count'] / 1e6
    out['infer_gmacs'] = started['forward_flops'] / 2e9
  if found.get('times'):
    out |= _speed(case, found)
  if 'profile' in found:
    out |= _of_input(case, found)
  if found.get('peer_times'):
    out |= _against_peer(case, found)
  kept = ('peer', 'peer_settings', 'error')
  return out | {name: found[name] for name in kept if name in found}


def _speed(case, found):
  mode, started = case['mode'], found['started']
  times = found['times']
  step = statistics.median(times)
  out = {
    f'{mode}_samples_per_sec': case['batch_size'] / step,
    'step_time_min': 1e3 * min(times),
    'step_time_max': 1e3 * max(times),
  }
  if mode == 'input':
    return out
  out[f'{mode}_step_time'] = 1e3 * step
  passes = 3 if mode == 'train' else 1  # backward is twice the forward
  work = passes * case['batch_size'] * started['forward_flops']
  per_device = work / step / started['n_devices']
  if started.get('peak_flops'):
    out['mfu'] = per_device / started['peak_flops']
  if found.get('ceiling'):
    out['mfu_measured'] = per_device / found['ceiling']
    out['matrix_tflops'] = found['ceiling'] / 1e12
  return out


def _of_input(case, found):
  per_image = [1e3 * x / case['batch_size'] for x in found['cpu_times']]
  rounds = list(zip(per_image, found['profile']))
  parts = {
    f'{part}_ms': statistics.median(parts[part] for _, parts in rounds)
    for part in _INPUT_PARTS
  }
  overhead = statistics.median(x / sum(p.values()) - 1 for x, p in rounds)
  return {'cpu_ms': statistics.median(per_image), **parts, 'overhead': overhead}


def _against_peer(case, found):
  ours, theirs = found['times'], found['peer_times']
  step = statistics.median(theirs)
  ratios = [b / a for a, b in zip(ours, theirs)]
  out = {
    'peer_samples_per_sec': case['batch_size'] / step,
    'peer_step_time': 1e3 * step,
    'ratio': statistics.median(ratios),
    'ratio_min': min(ratios),
    'ratio_max': max(ratios),
    # Other programs on the machine can only make a round slower.
    'ratio_of_best': min(theirs) / min(ours),
  }
  if found['started']['device_kind'] == 'cpu':
    pairs = zip(found['cpu_times'], found['peer_cpu_times'])
    out['ratio_of_cpu_time'] = statistics.median(b / a for a, b in pairs)
  if found['peer_started'].get('hbm_peak') is not None:
    out['peer_hbm_peak'] = found['peer_started']['hbm_peak']
  return out


_INPUT_PARTS = ('reading', 'decoding', 'transforming')
_PARTS = {  # columns of a line in the terminal
  'samples_per_sec': '{:,.1f} img/s',
  'step_time': '{:.1f} ms ({step_time_min:.1f} to {step_time_max:.1f})',
  'mfu': 'MFU {:.1%}',
  'mfu_measured': 'of measured product {:.1%}',
  'cpu_ms': 'CPU {:.3f} ms per image (reading {reading_ms:.3f}, decoding '
  '{decoding_ms:.3f}, transforming {transforming_ms:.3f})',
  'overhead': 'overhead {:.1%}',
  'hbm_peak': 'memory {:.2f} GB',
  'compile_s': 'compiled in {:.1f} s',
}


def line(row: dict[str, Any]) -> str:
  """Return a row as one to three lines of text."""
  mode = row['mode']
  batch = row[f'{mode}_batch_size']
  parts = [f'{row.get("model", row.get("images"))} {mode}, batch {batch}']
  settings = ('precision', 'attention', 'remat')
  parts += [row[name] for name in settings if name in row]
  if mode == 'input':
    parts.append(
      '{augmentation}, {num_examples:,} examples, {num_workers} workers, '
      '{num_threads} threads'.format(**row)
    )
  for name, shown in _PARTS.items():
    if (value := row.get(name, row.get(f'{mode}_{name}'))) is not None:
      parts.append(shown.format(value, **row))
  text = ' | '.join(parts)
  if 'ratio' in row:
    text += (
      '\n  {peer}, {peer_settings} settings: {peer_samples_per_sec:,.1f} '
      'img/s; ours / theirs {ratio:.3f} ({ratio_min:.3f} to {ratio_max:.3f}), '
      'fastest rounds {ratio_of_best:.3f}'
    ).format(**row)
  if 'ratio_of_cpu_time' in row:
    text += f', CPU time {row["ratio_of_cpu_time"]:.3f}'
  if 'error' in row:
    text += f'\n  {row["error"]}'
  return text


def write_csv(path: PathLike, rows: Sequence[dict[str, Any]]) -> None:
  """Write all rows with every column; values that a row lacks are empty."""
  outputs.write_rows(path, rows, COLUMNS)
