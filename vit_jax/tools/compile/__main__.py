r"""Compile a config's train step for TPUs, GPUs, or the devices here.

  python -m vit_jax.tools.compile --config=FILE:ARGUMENT --topology=v5e:16x16
  python -m vit_jax.tools.compile --config=FILE:ARGUMENT --topology=h100:8
  python -m vit_jax.tools.compile --config=FILE:ARGUMENT --topology=local

It reports memory, time and collectives. No TPU or GPU is needed, only its
compiler: pip install -e '.[tpu]' or '.[cuda]'. No data is opened and nothing is
executed. As with vit_jax.main, any value of the config can be set:
--config.data.batch_size=4096 --config.model.remat=full.

A topology is FAMILY:SHAPE, with the shape in chips, or the number of GPUs;
v5e:16x16*4 is four TPU slices. collectives_mb is then within slices, and
network_mb between them. For TPUs, cycles are estimates of the compiler, and the
stated cost of Pallas kernels; step_ms, images_per_s and mfu follow from them,
without the time on links and networks. For GPUs, roofline_ms is a lower bound,
see roofline.py.
collectives_ms is the time on links at the data sheet's rate, if nothing
overlaps. Loops of unknown length count once, kernels of unknown cost as 0.
"""

from collections.abc import Sequence

import jax
from absl import app, flags, logging

from vit_jax import config
from vit_jax import main as program
from vit_jax.io import terminal
from vit_jax.io.files import write_json
from vit_jax.tools.compile import lowering, rows
from vit_jax.types import UserError

flags.declare_key_flag('config')  # of main, for --help
_TOPOLOGY = flags.DEFINE_string(
  'topology', 'local', f'Devices to compile for: {lowering.EXAMPLES}.'
)
_IMAGE_SHAPE = flags.DEFINE_list(
  'image_shape', None, 'Height,width,channels, if the transforms leave it open.'
)
_NUM_CLASSES = flags.DEFINE_integer(
  'num_classes', 1000, 'Classes of the data, if the config leaves them to it.'
)
_JSON = flags.DEFINE_string('json', None, 'File for the row, with operations.')
_OPERATIONS = flags.DEFINE_integer(
  'operations', 0, 'Number of operations to list, the longest first.'
)


@terminal.one_message()
def main(_: Sequence[str]) -> None:
  logging.set_verbosity(logging.WARNING)  # libraries log too much at INFO
  topology = _TOPOLOGY.value
  if not flags.FLAGS.config:
    raise UserError('--config=FILE is missing. Name the config of a training.')
  loaded = config.load(flags.FLAGS.config)
  config.override(loaded, program.assignments)
  if topology != 'local':
    jax.config.update('jax_platforms', 'cpu')  # TPUs are described, not used
  about = {
    'config': ' '.join([flags.FLAGS.config, *program.assignments]),
    'topology': topology,
    'jax': jax.__version__,
  }
  row = about | lowering.measure(
    loaded,
    lowering.find_devices(topology),
    image_shape=_IMAGE_SHAPE.value and tuple(map(int, _IMAGE_SHAPE.value)),
    num_classes=_NUM_CLASSES.value,
  )
  if _JSON.value:
    write_json(_JSON.value, row)
  rows.show(row, _OPERATIONS.value)


if __name__ == '__main__':
  app.run(main, flags_parser=program.parse_flags)
