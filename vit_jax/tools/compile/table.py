"""The page of the paper's models on TPU slices: its lines, and how they come.

Each line is compiled by a process of its own and kept in a JSON file beside the
page, so that the command goes on where it was stopped.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from vit_jax.tools.compile import report

_JFT = 'configs/pretrain_jft.py'
_SCAN = '--config.model.scan=True'
_BIT = 'configs/pretrain_bit.py'

MODELS = {  # name: arguments
  'B/16': (f'--config={_JFT}:B/16', _SCAN),
  'L/16': (f'--config={_JFT}:L/16', _SCAN),
  'H/14': (f'--config={_JFT}:H/14,fsdp', _SCAN),
  # Its width of 1664 cannot be split more than 128-fold.
  'G/14': (
    *(f'--config={_JFT}:G/14,fsdp', _SCAN),
    *('--config.mesh.data=2', '--config.data.batch_size=4096'),
  ),
  'R50x1': (f'--config={_JFT}:R50x1',),
  'R152x4': (f'--config={_BIT}:imagenet21k,R152x4',),
}
SLICES = {  # topology: what it is
  'v5e:16x16': '256 chips',
  'v4:4x4x4': '64 chips, v4-128',
  'v3:4x8': '32 chips, 64 cores, v3-64',
  'v6e:16x16': '256 chips',
  'v5p:4x4x4': '64 chips, v5p-128',
}
# What is tried until one fits.
POLICIES = ('none', 'full')
_COLUMNS = ('topology', 'mesh', 'remat', 'arguments_gib', 'temporaries_gib')
_COLUMNS += ('total_gib', 'fits', 'model_tflop', 'compiler_tflop')
_COLUMNS += ('accessed_gb', 'collectives_mb', 'megacycles', 'step_ms')
_COLUMNS += ('collectives_ms', 'images_per_s', 'mfu')

_INTRO = """\
# The paper's models on TPU slices

Their real train steps at batch 4096 (224 px, bfloat16 on float32 parameters),
compiled by the TPU compiler on a machine without a TPU. Nothing ran: memory is
what the compiler allots; step time, images/s and MFU are *estimates*.

```bash
pip install -e '.[tpu]' && {command}
```

made this page; it takes minutes for each line, goes on where it was stopped,
and keeps all numbers in [{data}]({data}). Versions: {versions}.

- All numbers but images/s are of one device: a chip, or of a v3 one of a chip's
  two cores. `args` are parameters, optimizer state and the batch; `temp` is all
  else that the step needs; the outputs take the place of the arguments.
- `Mcycles` is the sum of the cycles that the compiler writes beside its
  instructions, loops counted as often as they run. Step time is that by the
  clock (v3 0.94, v4 1.05, v5e 1.5, v5p and v6e 1.75 GHz: data sheets, from
  memory). For one large matrix product the compiler's cycles at these clocks
  come to 84% of the data sheet's peak on v4, 92% on v3, 97% on v5e and v5p.
- Copies beside the arithmetic and collectives have no cycles: `+ links` is what
  collectives take at the data sheet's rate of all links of a chip, if none of
  it overlaps.
- MFU is 3 x forward over the data sheet's peak. `compiled TFLOP` is the
  compiler's own count, with what it recomputes.
- `accessed` counts on-chip memory, too.
- Parameters that `fsdp` splits are gathered as the compiler likes: by
  all-gathers, all-reduces of parts in zeros, or collective-permutes beside the
  products.
- ViTs have `scan=True`, which compiles one layer for all of them; unrolled they
  compile longer and need fewer copies. ResNets are unrolled.
- Where `remat=none` does not fit, the line after it has `full`.
- `mesh`: `data` replicates parameters and optimizer state, `fsdp` splits them.
- The compiler knows slices by generation and shape; v2 and v3 too, as cores.
"""


def write(page):
  """Compiles what is not there yet; writes page.json and the page each time."""
  os.nice(10)  # it takes hours, of a machine that may be in use
  data = page.with_suffix('.json')
  rows = json.loads(data.read_text()) if data.exists() else []
  page.parent.mkdir(parents=True, exist_ok=True)
  for model, arguments in MODELS.items():
    for topology in SLICES:
      for remat in POLICIES:
        row = find(rows, model, topology, remat)
        if row is None:
          print(f'{model} on {topology}, remat={remat}: ', end='', flush=True)
          arguments_of_row = (*arguments, f'--config.model.remat={remat}')
          row = {'model': model} | compile_one(topology, arguments_of_row)
          rows.append(row)
          report.write_json(data, rows)
          page.write_text(text(rows, page))
          print(f'{report.fits(row)} ({row["compile_s"]:.0f} s)')
        if row.get('fits'):
          break
  page.write_text(text(rows, page))  # its words may be newer than its rows


def find(rows, model, topology, remat):
  """The row of a line, or None."""
  wanted = {'model': model, 'topology': topology, 'remat': remat}
  return next((row for row in rows if wanted.items() <= row.items()), None)


def compile_one(topology, arguments):
  """The row that `python -m vit_jax.tools.compile` has for the arguments."""
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / 'row.json'
    subprocess.run(
      [
        *(sys.executable, '-m', 'vit_jax.tools.compile', f'--json={file}'),
        *(f'--topology={topology}', *arguments),
      ],
      stdout=subprocess.DEVNULL,
      check=True,
    )
    (row,) = json.loads(file.read_text())
  row['operations'] = row.get('operations', [])[:20]
  return row


def text(rows, page):
  """The page: a table for each model."""
  versions = {f'{k} {row[k]}' for row in rows for k in _PACKAGES if k in row}
  sections = [
    _INTRO.format(
      command=f'python -m vit_jax.tools.compile --table=docs/{page.name}',
      data=page.with_suffix('.json').name,
      versions=', '.join(sorted(versions)),
    )
  ]
  for model, arguments in MODELS.items():
    if of_model := [row for row in rows if row['model'] == model]:
      of_model.sort(key=lambda row: list(SLICES).index(row['topology']))
      size = of_model[0]['parameters'] / 1e6
      sections.append(
        f'## {model}\n\n{size:,.1f}M parameters; `{" ".join(arguments)}`\n\n'
        + report.markdown(of_model, _COLUMNS)
      )
  slices = (f'`{name}`: {about}.' for name, about in SLICES.items())
  sections.append(' '.join(['Slices:', *slices]) + '\n')
  return '\n'.join(sections)


_PACKAGES = ('jax', 'libtpu')
