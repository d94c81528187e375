"""Images that a model cannot take are a clear error, before any compute."""

import jax
import jax.numpy as jnp
import pytest

from vit_jax.models import names
from vit_jax.models.axial import AxialResNet, AxialViT
from vit_jax.models.layers import PatchEmbedding
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.resnet import Hybrid, ResNet
from vit_jax.models.vit import VisionTransformer

TINY = {'width': 8, 'depth': 1, 'mlp_dim': 8, 'num_heads': 2, 'num_classes': 5}
MODELS = {
  'vit': names.create('ViT-mu/4', num_classes=5),
  'scan': names.create('ViT-mu/4', num_classes=5, scan=True, dtype='bfloat16'),
  'hybrid': VisionTransformer(**TINY, embedding=Hybrid(1, stages=(1,))),
  'axial': AxialViT(**TINY, embedding=PatchEmbedding(8)),
  'mixer': MlpMixer(
    width=8,
    depth=1,
    tokens_mlp_dim=8,
    channels_mlp_dim=8,
    embedding=PatchEmbedding(8),
    num_classes=5,
  ),
  'resnet': ResNet(stages=(1,), num_classes=5),
  'bit': ResNet(stages=(1,), form='preact', num_classes=5),
  'axial_resnet': AxialResNet(stages=(1,), num_classes=5),
}
SHAPE = (2, 32, 32, 3)


@pytest.mark.parametrize(
  'name, method',
  [*((name, 'features') for name in MODELS), ('vit', '__call__')],
)
def test_images(name, method):
  model = MODELS[name]
  good = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
  variables = jax.eval_shape(model.init, jax.random.key(0), good)

  def apply(shape, dtype):
    images = jax.ShapeDtypeStruct(shape, dtype)
    return jax.eval_shape(
      lambda v, x: model.apply(v, x, method=method), variables, images
    )

  assert apply(SHAPE, jnp.bfloat16)
  for shape, dtype, message in (
    (
      SHAPE[1:],
      'float32',
      r'shape \(32, 32, 3\).*\[B, H, W, C\].*images\[None',
    ),
    (SHAPE[1:], 'uint8', r'images\[None\]'),
    ((1, *SHAPE), 'float32', r'shape \(1, 2, 32, 32, 3\)\. Expected a batch'),
    (SHAPE, 'uint8', r'images are uint8\. Expected floats.*Normalize\(\)'),
    (SHAPE, 'int32', r'images are int32\. Expected floats'),
    ((2, 32, 32, 1), 'float32', r'1 channels.*kernel expects \[B, H, W, 3\]'),
    ((2, 3, 32, 32), 'float32', r'32 channels.*images.transpose\(0, 2, 3, 1'),
  ):
    with pytest.raises(ValueError, match=message):
      apply(shape, dtype)
