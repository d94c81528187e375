"""A config's train step, lowered for devices that need not be there."""

import copy
import dataclasses
import functools
import importlib.metadata
import math
import os
import pathlib
import re
import tempfile
import time
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from vit_jax import config as configs
from vit_jax import sharding
from vit_jax.analysis import flops
from vit_jax.durations import Timeline
from vit_jax.preprocess import Normalize
from vit_jax.step import make_step
from vit_jax.tools.compile import report
from vit_jax.train import with_num_classes

TOPOLOGIES = (  # examples
  'v2:4x4',
  'v3:4x8',
  'v4:4x4x4',
  'v5e:16x16',
  'v5p:4x4x4',
  'v6e:16x16',
  'local',
)


@dataclasses.dataclass
class Step:
  """A train step, lowered for some devices.

  Attributes:
    lowered: of jax.jit.
    about: what it is, as the first columns of a row.
    device: one of the devices.
    devices: how many there are.
    model_flops: 3 x forward, of the global batch.
    arguments: bytes of state and batch on a device.
  """

  lowered: Any
  about: dict
  device: Any
  devices: int
  model_flops: int
  arguments: int


def measure(config, devices, batch_size=None, remat=None, **options):
  """Return the row of a config's train step; see report.py.

  Args:
    config: of a training.
    devices: to compile for, present or described.
    batch_size, remat: instead of the config's.
    **options: of `lower`.
  """
  changes = {'data.batch_size': batch_size, 'model.remat': remat}
  changes = {k: v for k, v in changes.items() if v is not None}
  config = copy.deepcopy(config)
  config.update_from_flattened_dict(changes)
  step = lower(config, devices, **options)
  start = time.perf_counter()
  try:
    compiled = step.lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    found = report.too_large(step, error)
  else:
    found = report.row(step, compiled, read_hlo(step.lowered, compiled))
  return found | {'compile_s': time.perf_counter() - start}


def read_hlo(lowered, compiled):
  """Return the optimized HLO as text.

  jaxlib 0.10.2 cannot print some programs of libtpu: a copy that ends in a
  later iteration of a loop than it starts in (H/14 with fsdp on v6e). The
  compiler can write its own printout, if asked to when it compiles.
  """
  try:
    return compiled.as_text()
  except jax.errors.JaxRuntimeError:
    with tempfile.TemporaryDirectory() as folder:
      options = {'xla_dump_to': folder, 'xla_dump_hlo_as_text': True}
      lowered.compile(compiler_options=options)
      (printout,) = pathlib.Path(folder).glob('*.after_codegen.txt')
      return printout.read_text()


def lower(config, devices, *, image_shape=None, num_classes=None):
  """The Step of a config, made as train() does, but of shapes alone.

  Args:
    config: of a training.
    devices: see `measure`.
    image_shape: (H, W, C); by default the size of the last transform, RGB.
    num_classes: of the data; needed where the config has None.
  """
  if config.get('run') != 'vit_jax.train.train':
    raise ValueError(
      f'This config runs {config.get("run")}; only vit_jax.train.train has a '
      'train step. Of a study, take the config of one training.'
    )
  image_shape = image_shape or find_image_shape(config)
  given = _arguments(config)
  mesh = given.get('mesh', sharding.MeshSizes()).make(devices)
  batch_size = config.data.batch_size
  accum_steps = given.get('accum_steps', 1)
  sharding.check_batch_size(batch_size, mesh, parts=accum_steps)
  model = _model(given['model'], num_classes, devices[0])
  images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
  # The length of a run changes none of its steps: any number will do.
  timeline = Timeline(batch_size, 100_000 * batch_size)
  total_steps = timeline.steps(given['total'])
  timeline = dataclasses.replace(timeline, total_steps=total_steps)
  learning_rate = given['schedule'](timeline)
  preprocess = given.get('preprocess', Normalize())
  _, state, step_fn = make_step(
    model,
    images=images,
    loss_fn=given['objective'](model, preprocess=preprocess),
    make_tx=functools.partial(given['optimizer'], learning_rate=learning_rate),
    mesh=mesh,
    rules=given.get('sharding'),
    accum_steps=accum_steps,
    ema_decay=given.get('ema_decay'),
  )
  batch = _batch(batch_size, image_shape, sharding.batch_sharding(mesh))
  with jax.set_mesh(mesh):
    lowered = step_fn.lower(state, batch)
  return Step(
    lowered,
    _about(model, state, mesh, batch_size, accum_steps, image_shape),
    devices[0],
    len(devices),
    3 * batch_size * flops.forward(model, images),
    sum(_bytes_on_a_device(x) for x in jax.tree.leaves((state, batch))),
  )


def smallest_batch(config, devices):
  """One example for each device and micro-batch."""
  given = _arguments(config)
  mesh = given.get('mesh', sharding.MeshSizes()).make(devices)
  (axes,) = sharding.batch_sharding(mesh).spec
  return sharding.axis_size(mesh, axes) * given.get('accum_steps', 1)


def _arguments(config):
  """Arguments of train() that need no data: {name: object}."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.data.source = {'target': 'types.SimpleNamespace'}
    config.evals, config.init_from = {}, None
  call, _ = configs.plan_run(config)
  names = ('model', 'objective', 'optimizer', 'schedule', 'total', 'mesh')
  names += ('preprocess', 'sharding', 'accum_steps', 'ema_decay')
  kwargs = {k: v for k, v in call.kwargs.items() if k in names}
  return configs.make(kwargs)


def read_image_shape(text):
  """Return (H, W, C) from 'N', 'HxW' or 'HxWxC', and None from None."""
  if text is None:
    return None
  found = re.fullmatch(r'([1-9]\d*)(?:x([1-9]\d*))?(?:x([1-9]\d*))?', text)
  if not found:
    raise ValueError(
      f'--image_size={text}: expected N, HxW or HxWxC, as in 224 or 224x192x1.'
    )
  height, width, channels = found.groups()
  return int(height), int(width or height), int(channels or 3)


def find_image_shape(config):
  """(H, W, 3), of the last transform that sets a size."""
  for transform in reversed(config.data.get('transforms') or ()):
    if (size := transform.get('size')) is not None:
      height, width = (size, size) if isinstance(size, int) else size
      return int(height), int(width), 3
  raise ValueError(
    "No transform in data.transforms has a size, and the images' is not known. "
    'Give it: --image_size=N, or HxWxC.'
  )


def find_devices(topology):
  """Devices of a topology's name, described by the TPU compiler, or 'local'.

  Raises:
    ValueError: no such topology, or no compiler.
  """
  if topology == 'local':
    return jax.devices()
  # No TPU is used: neither look for one, nor wait for who has one.
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v5litepod-1')
  os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
  # Of a v4, both cores of a chip are one device, as on Cloud TPUs.
  options = {}
  if topology.startswith('v4:'):
    options['chip_config_name'] = 'megacore'
  try:
    return topologies.get_topology_desc(
      platform='tpu', topology_name=topology, **options
    ).devices
  except (RuntimeError, ValueError) as error:
    if 'lockfile' in str(error) or 'already in use' in str(error):
      raise ValueError(
        'Another process uses libtpu, and only one can. Wait for it to end; '
        'if there is none, remove /tmp/libtpu_lockfile.'
      ) from error
    if 'not installed' in str(error):
      raise ValueError(
        f'--topology={topology} needs the TPU compiler, libtpu: '
        "pip install -e '.[tpu]'"
      ) from error
    raise ValueError(
      f'--topology={topology} is none the TPU compiler knows '
      f'({str(error).splitlines()[0]}). Examples: {", ".join(TOPOLOGIES)}.'
    ) from error


def versions(topology):
  """{package: version} of what compiles."""
  packages = ('jax',) if topology == 'local' else ('jax', 'libtpu')
  return {name: importlib.metadata.version(name) for name in packages}


def _model(model, num_classes, device):
  """The model; `attention` is what 'auto' would be on the device."""
  if getattr(model, 'num_classes', None) is None and num_classes is None:
    raise ValueError(
      'The config leaves model.num_classes to the data, which is not opened '
      'here. Give it: --num_classes=1000.'
    )
  source = types.SimpleNamespace(num_classes=num_classes)
  model = with_num_classes(model, source)
  # 'auto' asks for the devices of this machine.
  elsewhere = device.platform == 'tpu' and jax.default_backend() != 'tpu'
  if elsewhere and getattr(model, 'attention', None) == 'auto':
    implementation = 'einsum' if model.attention_dropout else 'xla'
    model = model.clone(attention=implementation)
  return model


def _batch(batch_size, image_shape, split):
  images, labels = (batch_size, *image_shape), (batch_size,)
  return {
    'image': jax.ShapeDtypeStruct(images, jnp.uint8, sharding=split),
    'label': jax.ShapeDtypeStruct(labels, jnp.int32, sharding=split),
  }


def _bytes_on_a_device(x):
  return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _about(model, state, mesh, batch_size, accum_steps, image_shape):
  device = mesh.devices.flat[0]
  leaves = jax.tree.leaves(state.params)
  return {
    'device_kind': device.device_kind,
    'devices': mesh.size,
    'mesh': ', '.join(
      f'{name} {size}' for name, size in mesh.shape.items() if size > 1
    )
    or '1 device',
    'batch_size': batch_size,
    'accum_steps': accum_steps,
    'image_shape': 'x'.join(map(str, image_shape)),
    'remat': getattr(model, 'remat', None),
    'scan': getattr(model, 'scan', None),
    'attention': getattr(model, 'attention', None),
    'parameters': sum(leaf.size for leaf in leaves),
  }
