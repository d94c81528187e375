"""What was measured as rows: for the terminal, timm's CSV columns, and JSON."""

import csv
import json
import pathlib

from vit_jax.tools.benchmark import timing

COLUMNS = (  # those of timm's benchmark first, in its units: ms, G, millions
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
  'mfu',  # of the data sheet's dense bfloat16 FLOP/s, whatever the precision
  'mfu_measured',  # of a matrix product measured between the rounds
  'hbm_peak',  # GB of the fullest device; on a CPU, of the process
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
  'peer',
  'peer_settings',  # of its process: its own, or ours (environment.py)
  'peer_samples_per_sec',
  'peer_step_time',
  'peer_hbm_peak',
  'ratio',  # ours / peer's images per second, median over pairs of rounds
  'ratio_min',
  'ratio_max',
  'ratio_of_best',  # the same, of each one's fastest round
  'ratio_of_cpu_time',  # of CPU seconds a step, for a CPU that others use, too
  'error',
)


def row(case, found):
  """{column: number or text} of a case; columns that say nothing are left out.

  Args:
    case: 'model', 'mode', 'batch_size', 'image_size', 'precision', ... .
    found: 'started', 'times' (seconds a step of each round), 'ceiling'
      (FLOP/s); 'peer_started', 'peer_times' where there is a peer; 'error'.
  """
  mode, started = case['mode'], found.get('started', {})
  out = {'model': case['model'], 'mode': mode}
  if mode == 'input':
    out = {'mode': mode, 'input_batch_size': case['batch_size']}
  else:
    out |= {k: case[k] for k in ('precision', 'attention', 'remat', 'scan')}
    out[f'{mode}_batch_size'] = case['batch_size']
    out[f'{mode}_img_size'] = case['image_size']
  for name in ('compile_s', 'hbm_peak', 'device_kind', 'n_devices'):
    if name in started:
      out[name] = started[name]
  if 'param_count' in started:
    out['param_count'] = started['param_count'] / 1e6
    out['infer_gmacs'] = started['forward_flops'] / 2e9
  if found.get('times'):
    out |= _speed(case, found)
  if found.get('peer_times'):
    out |= _peer(case, found)
  return out | {
    name: found[name]
    for name in ('peer', 'peer_settings', 'error')
    if name in found
  }


def _speed(case, found):
  mode, started = case['mode'], found['started']
  step = timing.Spread.of(found['times'])
  out = {
    f'{mode}_samples_per_sec': case['batch_size'] / step.median,
    'step_time_min': 1e3 * step.min,
    'step_time_max': 1e3 * step.max,
  }
  if mode == 'input':
    return out
  out[f'{mode}_step_time'] = 1e3 * step.median
  passes = 3 if mode == 'train' else 1  # backward is twice the forward
  work = passes * case['batch_size'] * started['forward_flops']
  per_device = work / step.median / started['n_devices']
  if started.get('peak_flops'):
    out['mfu'] = per_device / started['peak_flops']
  if found.get('ceiling'):
    out['mfu_measured'] = per_device / found['ceiling']
    out['matrix_tflops'] = found['ceiling'] / 1e12
  return out


def _peer(case, found):
  step = timing.Spread.of(found['peer_times'])
  ratio = timing.ratio(found['times'], found['peer_times'])
  out = {
    'peer_samples_per_sec': case['batch_size'] / step.median,
    'peer_step_time': 1e3 * step.median,
    'ratio': ratio.median,
    'ratio_min': ratio.min,
    'ratio_max': ratio.max,
    'ratio_of_best': timing.ratio_of_best(found['times'], found['peer_times']),
  }
  if found['started']['device_kind'] == 'cpu':
    cpu = timing.ratio(found['cpu_times'], found['peer_cpu_times'])
    out['ratio_of_cpu_time'] = cpu.median
  if found['peer_started'].get('hbm_peak') is not None:
    out['peer_hbm_peak'] = found['peer_started']['hbm_peak']
  return out


def line(row):
  """A row in a line or two for people."""
  mode = row['mode']
  size = row.get(f'{mode}_batch_size')
  parts = [f'{row.get("model", "JPEGs")} {mode}, batch {size}']
  parts += [
    str(row[k]) for k in ('precision', 'attention', 'remat') if k in row
  ]
  speed = row.get(f'{mode}_samples_per_sec')
  if speed is not None:
    parts.append(f'{speed:,.1f} img/s')
  if f'{mode}_step_time' in row:
    parts.append(
      f'{row[f"{mode}_step_time"]:.1f} ms ({row["step_time_min"]:.1f} to '
      f'{row["step_time_max"]:.1f})'
    )
  for name, heading, form in (
    ('mfu', 'MFU', '{:.1%}'),
    ('mfu_measured', 'of measured product', '{:.1%}'),
    ('hbm_peak', 'memory', '{:.2f} GB'),
    ('compile_s', 'compiled in', '{:.1f} s'),
  ):
    if name in row:
      parts.append(f'{heading} {form.format(row[name])}')
  text = ' | '.join(parts)
  if 'ratio' in row:
    text += (
      f'\n  {row["peer"]}, {row["peer_settings"]} settings: '
      f'{row["peer_samples_per_sec"]:,.1f} img/s; ours / '
      f'theirs {row["ratio"]:.3f} ({row["ratio_min"]:.3f} to '
      f'{row["ratio_max"]:.3f}), of the fastest rounds '
      f'{row["ratio_of_best"]:.3f}'
    )
  if 'ratio_of_cpu_time' in row:
    text += f', of CPU time {row["ratio_of_cpu_time"]:.3f}'
  if 'error' in row:
    text += f'\n  {row["error"]}'
  return text


def write_csv(path, rows):
  """All rows, with every column; what a row lacks is empty."""
  with pathlib.Path(path).expanduser().open('w', newline='') as file:
    writer = csv.DictWriter(file, COLUMNS, lineterminator='\n')
    writer.writeheader()
    for row in rows:
      writer.writerow({k: _text(v) for k, v in row.items()})


def write_json(path, records):
  """All that was measured: settings, rows, and the time of every round."""
  text = json.dumps(records, indent=1)
  pathlib.Path(path).expanduser().write_text(text + '\n')


def _text(value):
  return f'{value:.6g}' if isinstance(value, float) else value
