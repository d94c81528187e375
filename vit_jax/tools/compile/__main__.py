r"""Compiles a config's train step for TPUs, or the devices here; reports on it.

  python -m vit_jax.tools.compile --config=FILE:ARGUMENT --topology=v5e:16x16
  python -m vit_jax.tools.compile --config=FILE:ARGUMENT --topology=local

No TPU is needed, only its compiler: pip install -e '.[tpu]'. No data is opened
and nothing runs. As with vit_jax.main, any value of the config can be changed:
--config.data.batch_size=4096 --config.model.remat=full.

A topology is FAMILY:SHAPE, the shape in chips: v2:4x4, v3:4x8, v4:2x2x2,
v5e:16x16, v5p:4x4x4, v6e:16x16.

--search finds the largest batch that fits, and the cheapest remat policy for
it. With --json=FILE it keeps what it compiles there, and the same command goes
on where it was stopped. --table=docs/compile.md writes the table of the paper's
models; what docs/compile.json has is not compiled again.

Cycles, and what follows from them, are the compiler's estimates.
"""

import functools
import pathlib

import jax
from absl import app, flags, logging

from vit_jax import main as program
from vit_jax import terminal
from vit_jax.tools.compile import report, table
from vit_jax.tools.compile.search import Tries, batch_sizes, search
from vit_jax.tools.compile.step import (
  EXAMPLES,
  find_devices,
  measure,
  smallest_batch,
  versions,
)

_TOPOLOGY = flags.DEFINE_string(
  'topology', None, f'Devices to compile for: {", ".join(EXAMPLES)}.'
)
_IMAGE_SIZE = flags.DEFINE_string(
  'image_size', None, "N, HxW or HxWxC, if the config's transforms do not tell."
)
_NUM_CLASSES = flags.DEFINE_integer(
  'num_classes', None, 'Classes of the data, if the config leaves them open.'
)
_SEARCH = flags.DEFINE_bool(
  'search', False, 'Find the largest batch and the cheapest remat that fit.'
)
_MAX_BATCH = flags.DEFINE_integer(
  'max_batch', 65_536, 'Of --search: the largest global batch to try.'
)
_CSV = flags.DEFINE_string('csv', None, 'File for the rows.')
_JSON = flags.DEFINE_string('json', None, 'File for the rows, with operations.')
_OPERATIONS = flags.DEFINE_integer(
  'operations', 0, 'How many kinds of operations to list, by their cycles.'
)
_TABLE = flags.DEFINE_string(
  'table', None, 'Markdown file to write the table of the paper to.'
)


def image_shape(text):
  """(H, W, C) of 'N', 'HxW' or 'HxWxC'; None of None."""
  if text is None:
    return None
  sides = [int(s) if s.isdecimal() else 0 for s in text.split('x')]
  if len(sides) > 3 or min(sides) < 1:
    raise ValueError(
      f'--image_size={text}: expected N, HxW or HxWxC, as in 224 or 224x192x1.'
    )
  if len(sides) == 1:
    sides *= 2
  return tuple(sides if len(sides) == 3 else [*sides, 3])


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {argv[1:]}')
  logging.set_verbosity(logging.WARNING)  # libraries tell too much
  with terminal.one_message():
    if _TABLE.value:
      table.write(pathlib.Path(_TABLE.value))
      return
    config = flags.FLAGS.config
    if config is None or _TOPOLOGY.value is None:
      raise ValueError(
        'Give --config=FILE:ARGUMENT and --topology=v5e:16x16 (or another), '
        'or --table=FILE.'
      )
    _run(config, _TOPOLOGY.value)


def _run(config, topology):
  if topology != 'local':
    jax.config.update('jax_platforms', 'cpu')  # TPUs are described, not used
  devices = find_devices(topology)
  about = {'config': _config_name(), 'topology': topology} | versions(topology)
  compile_one = functools.partial(
    measure,
    devices=devices,
    image_shape=image_shape(_IMAGE_SIZE.value),
    num_classes=_NUM_CLASSES.value,
  )
  if _SEARCH.value:
    rows = _search(config, devices, about, compile_one)
  else:
    rows = [about | compile_one(config)]
    _print(rows[0])
    if _JSON.value:
      report.write_json(pathlib.Path(_JSON.value), rows)
  if _CSV.value:
    report.write_csv(pathlib.Path(_CSV.value), rows)


def _search(config, devices, about, compile_one):
  """All rows, those of earlier searches in the same file included."""
  if 'remat' not in config.model:
    raise ValueError('--search: the model of this config has no remat.')
  smallest = smallest_batch(config, devices)
  sizes = batch_sizes(smallest, _MAX_BATCH.value)
  if not sizes:
    raise ValueError(
      f'--max_batch={_MAX_BATCH.value}: the smallest batch is {smallest}, one '
      'example for each device and micro-batch.'
    )
  tries = Tries(_JSON.value, about, config, compile_one, len(sizes))
  best = search(tries.fits, sizes)
  if best is None:
    _print(tries.last)
    raise ValueError(
      f'--search: nothing fits, not even a batch of {smallest} under remat '
      'full. Split parameters and optimizer state (config.mesh and .sharding), '
      'or take more devices.'
    )
  size, remat = best
  _print(tries.find(size, remat))
  terminal.console().print(
    f'Best: --config.data.batch_size={size} --config.model.remat={remat}',
    highlight=False,
  )
  return tries.rows


def _config_name():
  """The config and what the command line changes, in a few words."""
  flag = flags.FLAGS['config']
  path, colon, argument = flag.config_filename.partition(':')
  changes = flag.override_values | {
    name: flags.FLAGS[name].value for name in ('image_size', 'num_classes')
  }
  changes = [f'{k}={v}' for k, v in changes.items() if v is not None]
  return ' '.join([pathlib.Path(path).name + colon + argument, *changes])


def _print(row):
  """One line for each number of a row."""
  console = terminal.console()
  lines = zip(report.COLUMNS.values(), report.cells(row))
  title = f'Of one device, by the compiler ({row["device_kind"]})'
  console.print(terminal.table(title, ('', row['mesh']), lines))
  if row.get('step_ms'):
    console.print(
      'Step time, images/s and MFU are estimates: they follow from what the '
      'compiler takes its cycles to be, without the time on links between '
      'chips ("+ links": that at the data sheet\'s rate, if none overlaps).',
      highlight=False,
    )
  for sentence in report.left_out(row):
    console.print(sentence, style='bold')
  if ranked := row.get('operations', ())[: _OPERATIONS.value]:
    lines = [
      (f'{where}: {op}', f'{cycles / 1e6:,.2f}') for where, op, cycles in ranked
    ]
    console.print(terminal.table('Operations', ('', 'Mcycles'), lines))


if __name__ == '__main__':
  app.run(main, flags_parser=program.parse_flags)
