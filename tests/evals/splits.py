"""Features to read out, and meshes of one and of all devices."""

import functools

import jax
import numpy as np

from vit_jax.data.embedded.digits import Digits
from vit_jax.evals.frozen import Split
from vit_jax.parallel import sharding


@functools.cache
def digits(split):
  """Pixels of the digits in [-1, 1]: 1,029 or 768 of 64 features."""
  source = Digits(split=split)
  examples = [source[i] for i in range(len(source))]
  x = np.stack([e['image'].ravel() for e in examples]).astype(np.float32)
  return Split(x / 127.5 - 1, np.array([e['label'] for e in examples]))


def mesh_of(num_devices):
  if num_devices == 8:
    return sharding.make_mesh()
  auto = (jax.sharding.AxisType.Auto,)
  devices = jax.devices()[:1]
  return jax.make_mesh((1,), ('data',), devices=devices, axis_types=auto)
