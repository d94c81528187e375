r"""Compile a config's train step for TPUs, or for the devices here, and report.

  python -m vit_jax.tools.compile --config=FILE:ARGUMENT --topology=v5e:16x16
  python -m vit_jax.tools.compile --config=FILE:ARGUMENT --topology=local

No TPU is needed, only its compiler: pip install -e '.[tpu]'. No data is opened
and nothing is executed. As with vit_jax.main, any value of the config can be
set: --config.data.batch_size=4096 --config.model.remat=full.

A topology is FAMILY:SHAPE, with the shape in chips. The number of classes of a
named data set, such as ImageNet, is known; for others give --num_classes.

--peer_script=benchmarks/plain_linen_vit.py:B/16 compiles another train step for
the same devices and the same batch, and prints both with the ratio of their
cycles. peer.py says what such a script defines.

--search finds the largest batch that fits and the cheapest remat policy for
it. With --json=FILE it keeps all results there; rerun an interrupted command to
continue. --table=docs/compile.md writes the table of the paper's models, and
compiles only what docs/compile.json does not have.

Cycles, and everything that follows from them, are the compiler's estimates.
"""

import functools
import importlib.metadata
import pathlib
from collections.abc import Sequence

import jax
from absl import app, flags, logging

from vit_jax import main as program
from vit_jax.runs import terminal
from vit_jax.tools import outputs
from vit_jax.tools.compile import peer, report, search, step, table

flags.declare_key_flag('config')  # of main, for --help
_TOPOLOGY = flags.DEFINE_string(
  'topology', None, f'Devices to compile for: {step.EXAMPLES}.'
)
_IMAGE_SIZE = flags.DEFINE_string(
  'image_size', None, 'N, HxW or HxWxC, if the transforms leave it open.'
)
_NUM_CLASSES = flags.DEFINE_integer(
  'num_classes', None, 'Classes of the data, if neither config nor name say it.'
)
_PEER_SCRIPT = flags.DEFINE_string(
  'peer_script', None, 'FILE.py[:ARGUMENT] with a train step to compare with.'
)
_SEARCH = flags.DEFINE_bool(
  'search', False, 'Find the largest batch and the cheapest remat that fit.'
)
_MAX_BATCH = flags.DEFINE_integer(
  'max_batch', 65_536, 'Largest global batch that --search tries.'
)
_CSV = flags.DEFINE_string('csv', None, 'File for the rows.')
_JSON = flags.DEFINE_string('json', None, 'File for the rows, with operations.')
_OPERATIONS = flags.DEFINE_integer(
  'operations', 0, 'Number of operations to list, those with most cycles first.'
)
_TABLE = flags.DEFINE_string(
  'table', None, 'Markdown file for the table of the paper.'
)


def main(argv: Sequence[str]) -> None:
  del argv
  logging.set_verbosity(logging.WARNING)  # libraries log too much at INFO
  with terminal.one_message():
    if _TABLE.value:
      table.write(pathlib.Path(_TABLE.value))
    elif _SEARCH.value and _PEER_SCRIPT.value:
      raise ValueError(
        '--peer_script compares one program. Use it without --search, with the '
        'batch size that the search has found.'
      )
    elif flags.FLAGS.config is None or _TOPOLOGY.value is None:
      raise ValueError(
        'Use --config=FILE:ARGUMENT with --topology=v5e:16x16 (or another), '
        'or --table=FILE.'
      )
    else:
      config, _ = program.load_config(flags.FLAGS.config)
      _run(config, _TOPOLOGY.value)


def _run(config, topology):
  if topology != 'local':
    jax.config.update('jax_platforms', 'cpu')  # TPUs are described, not used
  devices = step.find_devices(topology)
  about = {'config': _config_name(), 'topology': topology}
  about['jax'] = jax.__version__
  if topology != 'local':
    about['libtpu'] = importlib.metadata.version('libtpu')
  options = {
    'image_shape': step.read_image_shape(_IMAGE_SIZE.value),
    'num_classes': _NUM_CLASSES.value,
  }
  if _SEARCH.value:
    measure = functools.partial(step.measure, config, devices, **options)
    smallest = step.smallest_batch(config, devices)
    largest, file = _MAX_BATCH.value, _JSON.value
    loops = config.get('model', {}).get('scan')
    policies = search.POLICIES_OF_LOOPS if loops else search.POLICIES
    row, rows = search.run(measure, about, smallest, largest, file, policies)
  else:
    rows = _measure(config, devices, about, options)
    row = rows[0]
    if _JSON.value:
      outputs.write_values(_JSON.value, rows)
  report.show(row, _OPERATIONS.value)
  if _PEER_SCRIPT.value:
    report.show(rows[1], _OPERATIONS.value)
    report.show_ratio(*rows)
  if _CSV.value:
    report.write_csv(_CSV.value, rows)


def _measure(config, devices, about, options):
  """Return the row of the config's step, and that of the peer if there is one.

  A peer that cannot be loaded is found before a long compilation.
  """
  script = _PEER_SCRIPT.value
  if not script:
    return [about | step.measure(config, devices, **options)]
  lowered, row = step.lower(config, devices, **options)
  row = about | row
  theirs = peer.lower(script, row, step.make_mesh(config, devices))
  rows = [step.compile_row(*both) for both in ((lowered, row), theirs)]
  rows[0]['peer_ratio'] = peer.ratio(*rows)
  return rows


def _config_name():
  """Return the config file with its argument, and the changed values."""
  path, colon, argument = flags.FLAGS.config.partition(':')
  words = [pathlib.Path(path).name + colon + argument, *program.assignments]
  for flag in (_IMAGE_SIZE, _NUM_CLASSES):
    if flag.value is not None:
      words.append(f'{flag.name}={flag.value}')
  return ' '.join(words)


if __name__ == '__main__':
  app.run(main, flags_parser=program.parse_flags)
