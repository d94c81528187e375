"""Tiny models, parameters, recorded arrays, and encoded images."""

import functools
import io
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from vit_jax import tree
from vit_jax.models.vit import PatchEmbedding, VisionTransformer
from vit_jax.parallel import sharding
from vit_jax.step import TrainState, train_step
from vit_jax.weights.bundle import Weights

GOLDEN = pathlib.Path(__file__).with_name('golden')
VIT = {'width': 16, 'depth': 1, 'mlp_dim': 32, 'num_heads': 2}
VIT |= {'embedding': PatchEmbedding(4)}


def vit(**fields):
  """Return a ViT with one layer of width 16 and patches of 4 pixels."""
  return VisionTransformer(**VIT | fields)


def normal_params(model, image_shape, scale=1.0, seed=0):
  """Return {path: array} of normal numbers in place of initial parameters."""
  images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  rng = np.random.default_rng(seed)
  return {
    path: scale * rng.standard_normal(x.shape, np.float32)
    for path, x in tree.flatten(shapes).items()
  }


def weights(model, image_shape, scale=0.3, seed=0, **attributes):
  """Return Weights of `normal_params`."""
  params = normal_params(model, image_shape, scale, seed)
  params = tree.unstack_blocks(params)
  return Weights(model, params, image_shape, **attributes)


def first_state(params, tx, step=0, **fields):
  """Return the TrainState of parameters that an optimizer has not changed."""
  opt_state, key = jax.jit(tx.init)(params), jax.random.key(0)
  return TrainState(np.int32(step), params, opt_state, key, **fields)


def compiled_step(loss_fn, tx, **options):
  """Return the function (state, batch) -> (state, metrics) of training."""
  step = functools.partial(train_step, loss_fn=loss_fn, tx=tx, **options)
  return jax.jit(step)


def save_run(workdir, weights, *, ema=None, step=1):
  """Write a workdir as training does."""
  from vit_jax.runs.checkpoint import Checkpointer  # slow to import
  from vit_jax.weights import formats

  params = jax.tree.map(jnp.asarray, tree.unflatten(weights.params))
  state = TrainState(jnp.int32(step), params, (), jax.random.key(0), ema)
  checkpointer = Checkpointer(workdir)
  checkpointer.save(step, state, {})
  checkpointer.close()
  about = formats.describe_use(weights)
  (workdir / 'model.json').write_text(json.dumps(about))


def assert_trees_close(actual, expected, *, rtol=0, atol=0, without='(?!)'):
  """Check that pytrees have the same paths, and arrays near each other.

  Arrays of paths that `without` matches may differ: rounding, scaled by Adam.
  """
  actual, expected = tree.flatten(actual), tree.flatten(expected)
  assert actual.keys() == expected.keys()
  for path in expected:
    if not re.fullmatch(without, path):
      np.testing.assert_allclose(
        actual[path], expected[path], rtol=rtol, atol=atol, err_msg=path
      )


def recorded(name):
  """Return the value of golden/NAME.json."""
  return json.loads((GOLDEN / f'{name}.json').read_text())


def golden(name):
  """Return {key: array} of golden/NAME.npz."""
  with np.load(GOLDEN / f'{name}.npz') as file:
    return dict(file)


def under(arrays, start):
  """Return {rest: array} of the names that begin with `start`."""
  return {k[len(start) :]: x for k, x in arrays.items() if k.startswith(start)}


def quick_key(seed):
  """Return a key for random numbers that compile fast."""
  return jax.random.key(seed, impl='rbg')


def frozen(objective):
  """Return the parameters of the teachers of an objective, on one device."""
  mesh = sharding.make_mesh(jax.devices()[:1])
  return {name: x.load(mesh) for name, x in objective.teachers.items()}


def noise(height=30, width=40, channels=3):
  """Return a uint8 image, the same for each call."""
  rng = np.random.default_rng(0)
  return rng.integers(0, 256, (height, width, channels), dtype=np.uint8)


def encode(image, kind='PNG', **options):
  """Return the bytes of a file with this image, an array or of Pillow."""
  file = io.BytesIO()
  if isinstance(image, np.ndarray):
    image = Image.fromarray(image.squeeze())
  image.save(file, kind, **options)
  return file.getvalue()
