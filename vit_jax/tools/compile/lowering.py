"""The train step of a config, lowered for devices that need not be there."""

import dataclasses
import functools
import os
import pathlib
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from vit_jax import config as configs
from vit_jax import setup
from vit_jax.analysis import flops
from vit_jax.config import Call
from vit_jax.data.transforms import apply
from vit_jax.models import attention
from vit_jax.models.pallas.choice import implementations
from vit_jax.models.pallas.layer import with_kernels
from vit_jax.parallel.sharding import slice_of
from vit_jax.runs.compiled import gib_on_a_device
from vit_jax.tools.compile import roofline, rows
from vit_jax.types import Shape, UserError

EXAMPLES = (
  'v2:4x4, v3:4x8, v4:4x4x4, v5e:16x16, v5e:16x16*4, v5p:4x4x4, v6e:16x16, '
  'h100:8, h200:8, a100:8, l4:1, local'
)
_GPUS = pathlib.Path(__file__).parent / 'gpus'  # what the compiler must know

# libtpu then neither looks for a TPU nor waits for a process that has one.
_NO_TPU = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}


def measure(
  config: Any, devices: Sequence[Any], **options: Any
) -> dict[str, Any]:
  """Return the row of a config's train step, see rows.py, as of `lower`."""
  lowered, row = lower(config, devices, **options)
  cpu = time.process_time()
  try:
    compiled = compile_for(devices[0], lowered)
    row |= rows.numbers(row, compiled, compiled.as_text())
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    row |= {'fits': False, 'error': str(error).splitlines()[0]}
  return row | {'compile_cpu_s': time.process_time() - cpu}


def compile_for(device: Any, lowered: Any) -> Any:
  """Compile a program so that rows.py can read its costs."""
  is_gpu = device.platform == 'gpu'
  return lowered.compile(roofline.COMPILER_OPTIONS if is_gpu else None)


def lower(
  config: Any,
  devices: Sequence[Any],
  *,
  image_shape: Shape | None = None,
  num_classes: int = 1000,
) -> tuple[Any, dict[str, Any]]:
  """Lower the train step of a config, made as in train(), but from shapes.

  The devices are present, or described. Images [H, W, C] are by default what
  the transforms make of RGB images; `num_classes` is for a model without a
  number. Of a run with variants, it is the step of the model itself. Returns
  jax.stages.Lowered, and the part of its row that needs no compilation.
  """
  training = _training_of(config)
  model, data = training.model, training.data
  batch_size = data.batch_size
  example = {'image': np.zeros(image_shape or (), np.uint8)}
  if image_shape is None:
    example = _example(data.transforms)
  mesh = training.mesh.make(devices)
  given = getattr(model, 'num_classes', None)  # 0: no head
  examples = setup.Examples(
    batch_size=batch_size,
    count=100_000 * batch_size,  # not known; a queue is that of many images
    first={**example, 'label': np.int32(0)},
    num_classes=num_classes if given is None else None,
  )
  choose = functools.partial(_with_attention, mesh=mesh)
  ready = setup.make(training, examples, mesh, choose)
  model, layers = ready.model, getattr(ready.model, 'layers', None)
  variants = training.variants and ', '.join(training.variants.changes)
  with jax.set_mesh(mesh):
    lowered = ready.step.lower(**ready.shapes)
    step_flop = flops.count(ready.step, **ready.shapes)
  axes = [f'{name} {size}' for name, size in mesh.shape.items() if size > 1]
  return lowered, {
    'device_kind': devices[0].device_kind,
    'mesh': ', '.join(axes) or '1 device',
    'slices': len({*map(slice_of, devices)}),
    'batch_size': batch_size,
    'image_shape': 'x'.join(map(str, ready.images.shape[1:])),
    **({'variants_not_counted': variants} if variants else {}),
    'num_classes': model.num_classes,
    **{k: getattr(model, k, None) for k in ('remat', 'scan', 'attention')},
    'layers': layers and type(layers).__name__,
    'parameters': ready.num_params,
    'arguments_gib': gib_on_a_device(ready.shapes),
    'model_tflop': ready.flops_per_step() / mesh.size / 1e12,
    'step_tflop': step_flop / mesh.size / 1e12,
  }


def _with_attention(model, images, *, mesh, backward=True):
  """Return the model with the implementation that attention='auto' stands for.

  A run measures what 'auto' is, see models/pallas/choice.py. By the estimates
  in docs/compile.md, TPUs are fastest with the kernels; GPUs get the default.
  """
  device = mesh.devices.flat[0]
  if getattr(model, 'attention', None) != 'auto' or device.platform == 'cpu':
    return model
  rngs = {name: jax.random.key(0) for name in ('params', 'dropout')}
  with jax.set_mesh(mesh):
    name = 'pallas'
    if device.platform == 'gpu':
      name = attention.default(model.width // model.num_heads, model.dtype)
    changes = [*implementations(name).values()]
    if device.device_kind == 'TPU v6 lite':
      changes.insert(0, with_kernels)
    for change in changes:
      try:
        candidate = change(model)
        jax.eval_shape(functools.partial(_run, candidate), rngs, images)
      except ValueError:  # it does not support the model
        continue
      return candidate
  return model


def _run(model, rngs, images):
  params = model.init(rngs, images, train=True)
  return model.apply(params, images, train=True, rngs=rngs)


def _training_of(config):
  """Return a config's Training, without its data, evaluators and weights."""
  if config.get('run') != 'vit_jax.train.train':
    raise UserError(
      f'This config runs {config.get("run")}, and only vit_jax.train.train has '
      'a train step. For a study, use the config of one training.'
    )
  call = configs.plan_run(config)
  data, unused = call.kwargs['data'], ('evals', 'checkpoints', 'init_from')
  without = {'source': None, 'labels': True}
  data = dataclasses.replace(data, kwargs=data.kwargs | without)
  kept = {k: v for k, v in call.kwargs.items() if k not in unused}
  made = configs.make(Call(call.fn, kept | {'data': data}))
  source = call.kwargs['data'].kwargs['source']
  return made.supplied({}, functools.partial(configs.make, source))


def _example(transforms):
  """Return the arrays that the transforms make of every RGB image."""
  found = [
    apply(transforms, {'image': np.zeros(x, 'u1')}, np.random.default_rng(0))
    for x in ((768, 1024, 3), (1024, 768, 3))
  ]
  one, other = (jax.tree.map(np.shape, x) for x in found)
  if one != other:
    raise UserError(
      'The transforms do not determine the image size, and no data is opened. '
      'Add --image_shape=HEIGHT,WIDTH,CHANNELS.'
    )
  return found[0]


def find_devices(topology: str) -> Sequence[Any]:
  """Return the devices of a topology, described by its compiler, or 'local'."""
  if topology == 'local':
    return jax.devices()
  family, _, shape = topology.partition(':')
  file, options = _GPUS / f'{family}.txtpb', dict[str, Any]()
  if file.is_file():
    jax.devices()  # finds the plug-in of the GPUs
    platform, name = 'cuda', ''
    options['target_config'] = file.read_text()
    options['topology'] = f'1x1x{shape}'  # one machine
  else:
    platform, (name, _, slices) = 'tpu', topology.partition('*')
    options['num_slices'] = int(slices or 1)
    shape = shape.partition('*')[0]
    for variable, value in _NO_TPU.items():
      os.environ.setdefault(variable, value)
    if family == 'v4':  # the two cores of a chip are one device
      options['chip_config_name'] = 'megacore'
    if re.fullmatch(r'1(x1)*', shape):  # else hosts have 2x2 chips
      options['chips_per_host_bounds'] = [1, 1, 1]
  try:
    return topologies.get_topology_desc(
      platform=platform, topology_name=name, **options
    ).devices
  except (RuntimeError, ValueError) as error:
    raise UserError(
      f'--topology={topology}: {str(error).splitlines()[0]}. If the compiler '
      f"is missing, pip install -e '.[{platform}]'. If another process uses "
      'libtpu, wait; if none does, remove /tmp/libtpu_lockfile. '
      f'Topologies: {EXAMPLES}.'
    ) from error
