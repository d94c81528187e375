"""The train step of a ViT of vision_transformer, for `compile --peer_script`.

  PYTHONPATH=~/vision_transformer python -m vit_jax.tools.compile ... \\
      --peer_script=benchmarks/peer_vision_transformer.py:B/16

~/vision_transformer is a clone of
github.com/google-research/vision_transformer. Its package is called vit_jax
too, so two of its files are loaded by their paths. As in its train.py: softmax
cross-entropy, SGD with a bfloat16 momentum, and clipping at 1; images are
float32 in [-1, 1] and labels are one-hot. The model computes in float32, as it
has no option for another dtype.
"""

import jax
import jax.numpy as jnp
import optax

from vit_jax.config.checks import one_of
from vit_jax.tools.compile import peer

URL = 'https://github.com/google-research/vision_transformer'


def make_step(variant='B/16', *, batch_size, image_shape, num_classes, mesh):
  """Return the step and the shapes of its arguments, see peer.py."""
  del mesh  # the state is replicated, and the batch sharded
  configs = peer.load('vit_jax/configs/models.py', URL).MODEL_CONFIGS
  names = {
    name.removeprefix('ViT-').replace('_', '/'): name for name in configs
  }
  one_of('variant', variant, names)
  vit = peer.load(
    'vit_jax/models_vit.py', URL, unused=['vit_jax.models_resnet']
  )
  model = vit.VisionTransformer(num_classes, **configs[names[variant]])

  def init():
    images = jnp.zeros((1, *image_shape))
    return model.init(jax.random.key(0), images, train=False)['params']

  def loss(params, images, labels):
    rngs = {'dropout': jax.random.key(0)}  # used from L/16 on
    logits = model.apply({'params': params}, images, train=True, rngs=rngs)
    return optax.softmax_cross_entropy(logits, labels).mean()

  tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.sgd(0.03, momentum=0.9, accumulator_dtype='bfloat16'),
  )
  batch = (
    jax.ShapeDtypeStruct((batch_size, *image_shape), jnp.float32),
    jax.ShapeDtypeStruct((batch_size, num_classes), jnp.float32),
  )
  return peer.supervised(init, loss, tx, batch)
