"""Parameter trees, initial values and logits, as recorded before a redesign.

Checkpoints hold these trees. golden/models.json has the shapes of parameters,
for some models the mean absolute initial value of each, and the first logits
with parameters that `noisy` makes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import TINY_VIT
from contract import tiny as vit
from nightly import nightly
from tiny import recorded

from vit_jax import tree
from vit_jax.models.axial import AxialResNet, AxialViT
from vit_jax.models.dense import BlockOptions
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.pooling import ClassToken, Head, Map, Mean, NoPooling
from vit_jax.models.posemb import Learned, Learned2d, Relative
from vit_jax.models.resnet import Hybrid, ResNet
from vit_jax.models.vit import PatchEmbedding

EXPECTED = recorded('models')
ONE = {'pooling': ClassToken(num_registers=1)}
ALL = {
  'head': Head(representation_size=20),
  'block': BlockOptions(layerscale_init=0.5, qk_norm=True),
  'pooling': ClassToken(num_registers=2),
}


def axial(**fields):
  return AxialViT(**(TINY_VIT | fields))


def hybrid(size, stages, **fields):
  return vit(embedding=Hybrid(size, stages=stages), **fields)


MODELS = {
  'all': vit(**ALL),
  'all_scan': vit(**ALL, scan=True),
  'gap_after': vit(pooling=Mean(True, num_registers=1, norm='after')),
  'map_cls': vit(pooling=Map(class_token=True)),
  'mask': vit(
    pooling=NoPooling(class_token=True, num_registers=1),
    embedding=PatchEmbedding((4, 2), mask_token=True),
  ),
  'headless': vit(num_classes=None, head=Head(20)),
  'hybrid': hybrid(1, (1, 1)),
  'hybrid_root': hybrid(2, (), scan=True),
  'learned2d': vit(posemb=Learned2d(), **ONE),
  'relative': vit(posemb=Relative(), **ONE),
  'layers': vit(posemb=Learned(at='layers'), **ONE),
  'layers_scan': vit(posemb=Learned2d(at='layers'), scan=True),
  'shared': vit(posemb=Learned(at='layers_shared'), **ONE),
  'axial': axial(head=Head(12)),
  'axial_map_scan': axial(pooling=Map(), posemb=Learned2d(), scan=True),
  'axres': AxialResNet((1, 1), num_classes=5),
  'resnet': ResNet((1, 1), num_classes=5),
  'resnet_post': ResNet((1, 2), 2, form='postact', num_classes=5),
  'mixer_scan': MlpMixer(
    16, 2, 10, 24, PatchEmbedding(4), num_classes=5, scan=True
  ),
}


def images_of(name):
  size = (32, 48) if 'res' in name or 'hybrid' in name else (8, 12)
  images = np.random.default_rng(0).uniform(-1, 1, (2, *size, 3))
  return jnp.asarray(images, jnp.float32)


def noisy(params):
  rng = np.random.default_rng(1)
  return tree.unflatten(
    {
      path: value + 0.1 * rng.standard_normal(value.shape).astype('f')
      for path, value in sorted(tree.flatten(params).items())
    }
  )


@pytest.mark.parametrize('name', EXPECTED)
def test_parameter_trees(name):
  model = MODELS[name]
  init = jax.eval_shape(model.init, jax.random.key(0), images_of(name))
  found = {k: list(v.shape) for k, v in tree.flatten(init['params']).items()}
  assert found == EXPECTED[name]['params']


BY_DAY = """
all axial_map_scan hybrid_root layers_scan learned2d mixer_scan relative resnet
"""
VALUES = [name for name, found in EXPECTED.items() if len(found) > 1]


@pytest.mark.parametrize('name', nightly(VALUES, but=BY_DAY.split()))
def test_initial_values_and_logits(name):
  model, images, expected = MODELS[name], images_of(name), EXPECTED[name]
  model = model.clone(depth=1) if hasattr(model, 'depth') else model
  params = jax.jit(model.init)(jax.random.key(0), images)['params']
  params = jax.device_get(params)
  means = {
    path: np.abs(value).mean(dtype=np.float64)
    for path, value in tree.flatten(params).items()
  }
  means = {path: mean for path, mean in means.items() if mean not in (0, 1)}
  assert means == pytest.approx(expected.get('mean', means), rel=1e-5)
  if 'logits' in expected:
    logits = jax.jit(model.apply)({'params': noisy(params)}, images)
    found = np.ravel(logits)[:10]
    np.testing.assert_allclose(found, expected['logits'], rtol=1e-4, atol=1e-5)
