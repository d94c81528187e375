"""The tables of docs/compile.md: the paper's models on TPU slices.

Each line is compiled in a process of its own and kept in a JSON file next to
the page, so that an interrupted command can continue. The text of the page
before the first model is written by hand, and kept.
"""

import dataclasses
import itertools
import json
import pathlib
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from vit_jax.runs.files import write_atomically
from vit_jax.tools import outputs
from vit_jax.tools.compile import report

_BIT = 'configs/pretrain_bit.py'
_JFT = 'configs/pretrain_jft.py'
_SCALING = 'configs/pretrain_scaling_vit.py'


@dataclasses.dataclass(frozen=True)
class Entry:
  """A model of the table.

  Attributes:
    arguments: of the command.
    options: values of the config, compiled in this order until one fits.
  """

  arguments: tuple[str, ...]
  options: tuple[tuple[str, ...], ...]


_ATTENTION = 'model.attention=pallas'
# A loop over layers needs more cycles, but compiles 48 of them in minutes.
_VIT = (
  (_ATTENTION, 'model.scan=False', 'model.remat=none'),
  (_ATTENTION, 'model.scan=True', 'model.remat=dots'),
  (_ATTENTION, 'model.scan=True', 'model.remat=full'),
)
_RESNET = (('model.remat=none',), ('model.remat=full',))
MODELS = {
  'B/16': Entry((f'--config={_JFT}:B/16',), _VIT),
  'L/16': Entry((f'--config={_JFT}:L/16',), _VIT),
  'H/14': Entry((f'--config={_JFT}:H/14,fsdp',), _VIT),
  'G/14': Entry(
    (
      f'--config={_SCALING}:G/14,fsdp,classes=18291',
      '--config.mesh.data=2',  # its width of 1664 divides by at most 128
      '--config.data.batch_size=4096',
      # Adam, like the other models; docs/training.md has Adafactor.
      '--config.optimizer.target=optax.adamw',
      '--config.optimizer.mu_dtype=bfloat16',
      '--config.optimizer.decay_multipliers=()',
    ),
    _VIT,
  ),
  'R50x1': Entry((f'--config={_JFT}:R50x1',), _RESNET),
  'R152x4': Entry((f'--config={_BIT}:imagenet21k,R152x4',), _RESNET),
}
# The attention kernel does not compute in bfloat16 on v3.
SLICES = {  # topology: description
  'v5e:16x16': '256 chips',
  'v6e:16x16': '256 chips',
  'v5p:4x4x4': '64 chips, v5p-128',
  'v4:4x4x4': '64 chips, v4-128',
}
_LEFT_OUT = ('config', 'batch_size', 'accessed_gb', 'grad_dtype')
COLUMNS = [c for c in report.COLUMNS if c not in _LEFT_OUT]


def write(page: Any) -> None:
  """Compile the lines that page.json lacks, and write the page after each."""
  data = page.with_suffix('.json')
  rows = json.loads(data.read_text()) if data.exists() else []
  page.parent.mkdir(parents=True, exist_ok=True)
  for (model, entry), topology in itertools.product(MODELS.items(), SLICES):
    for options in entry.options:
      line = {'model': model, 'topology': topology, 'options': list(options)}
      row = report.find(rows, line)
      if row is None:
        print(f'{model} on {topology}, {" ".join(options)}: ', end='')
        sys.stdout.flush()
        given = [f'--config.{option}' for option in options]
        row = line | compile_one(topology, [*entry.arguments, *given])
        rows.append(row)
        outputs.write_values(data, rows)
        write_atomically(page, text(rows, page))
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


def _place(row):
  """Key of a line's place: by slice, then lines of older options last."""
  return list(SLICES).index(row['topology']), 'options' not in row


def text(rows: Sequence[dict[str, Any]], page: pathlib.Path) -> str:
  """Return the page, with a table for each model."""
  intro = page.read_text().partition('\n## ')[0] if page.exists() else ''
  sections = [intro]
  for model, entry in MODELS.items():
    if of_model := [row for row in rows if row['model'] == model]:
      of_model.sort(key=_place)
      size = of_model[0]['parameters'] / 1e6
      about = f'{size:,.1f}M parameters; `{shlex.join(entry.arguments)}`'
      sections.append(
        f'## {model}\n\n{about}\n\n' + report.markdown(of_model, COLUMNS)
      )
  packages = ('jax', 'libtpu')
  versions = {f'{k} {row[k]}' for row in rows for k in packages if k in row}
  slices = [f'`{name}`: {about}.' for name, about in SLICES.items()]
  versions = f'Versions: {", ".join(sorted(versions))}.'
  sections.append(' '.join(['Slices:', *slices, versions]) + '\n')
  return '\n'.join(sections)
