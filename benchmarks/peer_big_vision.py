"""The train step of a ViT of big_vision, for `compile --peer_script`.

  PYTHONPATH=~/big_vision python -m vit_jax.tools.compile ... \\
      --peer_script=benchmarks/peer_big_vision.py:B/16

~/big_vision is a clone of github.com/google-research/big_vision. Only its model
is used, so TensorFlow need not be installed. As in its configs/vit_i1k.py: a
class token, a head with a tanh layer, sigmoid loss, Adam with a bfloat16 first
moment, clipping at 1, and decoupled weight decay of the kernels; images are
float32 in [-1, 1] and labels are one-hot. Matrix products are bfloat16
(`dtype_mm`). Metrics, such as norms of gradients, are left out.
"""

import jax
import jax.numpy as jnp
import optax

from vit_jax.tools.compile import peer

URL = 'https://github.com/google-research/big_vision'
UNUSED = (
  *('big_vision', 'big_vision.utils'),
  *('big_vision.models', 'big_vision.models.common'),
)


def make_step(variant='B/16', *, batch_size, image_shape, num_classes, mesh):
  """Return the step and the shapes of its arguments, see peer.py."""
  del mesh  # the state is replicated, and the batch sharded
  vit = peer.load('big_vision/models/vit.py', URL, unused=UNUSED)
  model = vit.Model(
    num_classes,
    variant=variant,
    rep_size=True,
    pool_type='tok',
    dtype_mm='bfloat16',
  )

  def init():
    images = jnp.zeros((1, *image_shape))
    return model.init(jax.random.key(0), images)['params']

  def loss(params, images, labels):
    logits, _ = model.apply({'params': params}, images, train=True)
    found = optax.sigmoid_binary_cross_entropy(logits, labels)
    return found.sum(axis=-1).mean()

  def kernels(params):
    return jax.tree.map_with_path(
      lambda path, _: path[-1].key == 'kernel', params
    )

  tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.scale_by_adam(mu_dtype='bfloat16'),
    optax.scale(1e-3),
    optax.add_decayed_weights(1e-4, kernels),
    optax.scale_by_schedule(optax.warmup_cosine_decay_schedule(0, 1, 1e4, 1e5)),
    optax.scale(-1.0),
  )
  batch = (
    jax.ShapeDtypeStruct((batch_size, *image_shape), jnp.float32),
    jax.ShapeDtypeStruct((batch_size, num_classes), jnp.float32),
  )
  return peer.supervised(init, loss, tx, batch)
