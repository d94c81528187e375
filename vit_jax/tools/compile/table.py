"""The tables of docs/compile.md: the paper's models on TPU slices.

Each line is compiled in a process of its own and kept in a JSON file next to
the page, so that an interrupted command can continue. The text of the page
before the first model is written by hand, and kept.
"""

import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from vit_jax.files import write_atomically
from vit_jax.tools import outputs
from vit_jax.tools.compile import report

_JFT = 'configs/pretrain_jft.py'
_SCALING = 'configs/pretrain_scaling_vit.py'
_SCAN = '--config.model.scan=True'
_BIT = 'configs/pretrain_bit.py'

MODELS = {  # name: arguments
  'B/16': [f'--config={_JFT}:B/16', _SCAN],
  'L/16': [f'--config={_JFT}:L/16', _SCAN],
  'H/14': [f'--config={_JFT}:H/14,fsdp', _SCAN],
  'G/14': [
    f'--config={_SCALING}:G/14,fsdp,classes=18291',
    _SCAN,
    '--config.mesh.data=2',  # its width of 1664 divides by at most 128
    '--config.data.batch_size=4096',
    # Adam, like the other models; docs/training.md has Adafactor.
    '--config.optimizer.target=optax.adamw',
    '--config.optimizer.mu_dtype=bfloat16',
    '--config.optimizer.decay_multipliers=()',
  ],
  'R50x1': [f'--config={_JFT}:R50x1'],
  'R152x4': [f'--config={_BIT}:imagenet21k,R152x4'],
}
SLICES = {  # topology: description
  'v5e:16x16': '256 chips',
  'v4:4x4x4': '64 chips, v4-128',
  'v3:4x8': '32 chips, 64 cores, v3-64',
  'v6e:16x16': '256 chips',
  'v5p:4x4x4': '64 chips, v5p-128',
}
POLICIES = ('none', 'full')  # compiled in this order until one fits
_LEFT_OUT = ('config', 'batch_size', 'kernel_megacycles', 'attention', 'scan')
_LEFT_OUT += ('grad_dtype', 'compile_cpu_s')
COLUMNS = [c for c in report.COLUMNS if c not in _LEFT_OUT]


def write(page: Any) -> None:
  """Compile the lines that page.json lacks, and write the page at the end."""
  os.nice(10)  # hours of work, on a machine that others may use
  data = page.with_suffix('.json')
  rows = json.loads(data.read_text()) if data.exists() else []
  page.parent.mkdir(parents=True, exist_ok=True)
  for model, arguments in MODELS.items():
    for topology in SLICES:
      for remat in POLICIES:
        line = {'model': model, 'topology': topology, 'remat': remat}
        row = report.find(rows, line)
        if row is None:
          print(f'{model} on {topology}, remat={remat}: ', end='', flush=True)
          with_remat = [*arguments, f'--config.model.remat={remat}']
          row = {'model': model} | compile_one(topology, with_remat)
          rows.append(row)
          outputs.write_values(data, rows)
          print(f'{report.fits(row)} ({row["compile_s"]:.0f} s)')
        if row.get('fits'):
          break
  write_atomically(page, text(rows, page))


def compile_one(topology: str, arguments: Sequence[str]) -> dict[str, Any]:
  """Return the row of `python -m vit_jax.tools.compile` in a new process."""
  command = [sys.executable, '-m', 'vit_jax.tools.compile', *arguments]
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / 'row.json'
    command += [f'--topology={topology}', f'--json={file}']
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    (row,) = json.loads(file.read_text())
  row['operations'] = row.get('operations', [])[:20]
  return row


def text(rows: Sequence[dict[str, Any]], page: pathlib.Path) -> str:
  """Return the page, with a table for each model."""
  intro = page.read_text().partition('\n## ')[0] if page.exists() else ''
  sections = [intro]
  for model, arguments in MODELS.items():
    if of_model := [row for row in rows if row['model'] == model]:
      of_model.sort(key=lambda row: list(SLICES).index(row['topology']))
      size = of_model[0]['parameters'] / 1e6
      sections.append(
        f'## {model}\n\n{size:,.1f}M parameters; `{shlex.join(arguments)}`\n\n'
        + report.markdown(of_model, COLUMNS)
      )
  packages = ('jax', 'libtpu')
  versions = {f'{k} {row[k]}' for row in rows for k in packages if k in row}
  slices = [f'`{name}`: {about}.' for name, about in SLICES.items()]
  versions = f'Versions: {", ".join(sorted(versions))}.'
  sections.append(' '.join(['Slices:', *slices, versions]) + '\n')
  return '\n'.join(sections)
