"""Checks of each kind of operation that models are trained with, in real sizes.

Sizes are those of ViTs at 224 px: 197 tokens; widths 192 (Ti), 384 (S) and
768 (B). A layer is checked with its gradients, for a random gradient of its
output.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from vit_jax import tree
from vit_jax.models import common, names
from vit_jax.models.attention import attention
from vit_jax.objectives.classification import softmax_loss, softmax_xent
from vit_jax.optim import optimizers as optim
from vit_jax.preprocess import Normalize
from vit_jax.runs import canary
from vit_jax.runs.canary import Check, normal
from vit_jax.step import TrainState, train_step
from vit_jax.tools.doctor import reference

DTYPES = ('float32', 'bfloat16')
# So large that updates exceed parameters: their difference is then precise.
_RATE = 1000.0


def all_checks() -> list[Any]:
  """Return all Checks that the local devices allow."""
  checks = [*canary.QUICK, *_reductions(), *_layers()]
  if len(jax.local_devices()) > 1:
    checks.append(_collectives())
  return [*checks, _adamw(), *_train_steps()]


def with_gradients(
  function: Callable[..., Any], dtype: str = 'float32'
) -> Callable[..., Any]:
  """Return (*arguments, gradient of the output) -> (output, gradients)."""

  def compute(*arguments):
    *arguments, dy = arguments
    y, back = jax.vjp(function, *arguments)
    return y, back(dy.astype(y.dtype))

  return compute


def by_hand(function: Callable[..., Any]) -> Callable[..., Any]:
  """Return the same of a function of reference.py."""

  def compute(*arguments):
    *arguments, dy = arguments
    y, back = function(*arguments)
    return y, back(dy)

  return compute


def _reductions():
  def statistics(np):
    def compute(x):
      found = {f'sum over {axis}': np.sum(x, axis) for axis in range(3)}
      found |= {f'max over {axis}': np.max(x, axis) for axis in range(3)}
      found |= {'squares': np.sum(x * x), 'mean': np.mean(x * x, (0, 1))}
      return found | {'argmax': np.argmax(x, -1), 'min': np.min(x, (1, 2))}

    return compute

  yield Check(
    'sum, mean, max, argmax of 64 x 197 x 768',
    inputs=normal((64, 197, 768)),
    compute=statistics(jnp),
    reference=statistics(np),
  )


def _layers():
  """Checks of single layers, in both dtypes."""
  # 'name': (shapes of the arguments and of the output, layer, reference).
  for dtype in DTYPES:
    for name, tokens, width, hidden in (
      ('B/16 MLP, 394 x 768 -> 3072', 394, 768, 3072),
      ('Ti/16 dense, 50,432 x 192 -> 192', 256 * 197, 192, 192),
      ('head, 64 x 768 -> 21,843', 64, 768, 21_843),
    ):
      yield _layer(
        name,
        [(tokens, width), (width, hidden), (hidden,), (tokens, hidden)],
        functools.partial(_affine, dtype=dtype),
        reference.affine,
        products=True,
        dtype=dtype,
      )
    for name, shape in (
      ('attention, 2 x 197 tokens x 12 heads', (2, 197, 12, 64)),
      ('attention, 1 x 577 tokens x 12 heads', (1, 577, 12, 64)),
    ):
      yield _layer(
        name,
        [shape] * 4,
        functools.partial(_attention, dtype=dtype),
        reference.attention,
        products=True,
        dtype=dtype,
      )
    yield _layer(
      'LayerNorm, 50,432 x 192',
      [(256 * 197, 192), (192,), (192,), (256 * 197, 192)],
      functools.partial(_layer_norm, dtype=dtype),
      reference.layer_norm,
      dtype=dtype,
    )
    for name, x, kernel, stride, padding in (
      ('convolution 16 x 16 / 16', (4, 224, 224, 3), (16, 16, 3, 768), 16, 0),
      ('convolution 7 x 7 / 2', (1, 224, 224, 3), (7, 7, 3, 64), 2, 3),
      ('convolution 3 x 3', (2, 56, 56, 64), (3, 3, 64, 64), 1, 1),
      ('convolution 1 x 1 / 2', (2, 56, 56, 256), (1, 1, 256, 512), 2, 0),
    ):
      options = {'stride': stride, 'padding': padding}
      side = (x[1] + 2 * padding - kernel[0]) // stride + 1
      yield _layer(
        name,
        [x, kernel, (x[0], side, side, kernel[-1])],
        functools.partial(_convolution, dtype=dtype, **options),
        functools.partial(reference.convolution, **options),
        products=True,
        dtype=dtype,
      )
  yield _layer(
    'softmax, 4,728 x 197',
    [(4728, 197)] * 2,
    jax.nn.softmax,
    reference.softmax,
  )
  yield _layer(
    'GELU, 394 x 3072',
    [(394, 3072)] * 2,
    common.GELU['tanh'],
    reference.gelu,
  )
  labels = np.random.default_rng(1).integers(0, 21_843, 64)
  yield _layer(
    'cross-entropy, 64 x 21,843',
    [(64, 21_843), ()],
    lambda x: jnp.mean(softmax_loss(x, jax.nn.one_hot(labels, x.shape[1]))),
    lambda x: reference.cross_entropy(x, labels),
  )


def _layer(name, shapes, layer, by_numpy, *, products=False, dtype='float32'):
  def inputs(rng):
    found = normal(*shapes)(rng)
    return tuple(np.asarray(x, np.float32) for x in found)

  return Check(
    name,
    inputs=inputs,
    compute=with_gradients(layer),
    reference=by_hand(by_numpy),
    products=products,
    dtype=dtype,
  )


def _affine(x, kernel, bias, *, dtype):
  module = common.Affine(
    x.shape[-1:], bias.shape, common.INIT['mlp'], dtype=dtype
  )
  return module.apply({'params': {'kernel': kernel, 'bias': bias}}, x)


def _layer_norm(x, scale, bias, *, dtype):
  module = common.LayerNorm(dtype=dtype)
  return module.apply({'params': {'scale': scale, 'bias': bias}}, x)


def _attention(q, k, v, *, dtype):
  return attention(*(x.astype(dtype) for x in (q, k, v)))


def _convolution(x, kernel, *, stride, padding, dtype):
  return jax.lax.conv_general_dilated(
    x.astype(dtype),
    kernel.astype(dtype),
    (stride, stride),
    [(padding, padding)] * 2,
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
  )


def _collectives():
  """Check of what local devices exchange: [n devices, n, 32, 384]."""
  devices = jax.local_devices()
  n = len(devices)
  lax, axis = jax.lax, 'device'

  def of_device(x):
    found = {
      'sum': lax.psum(x[0], axis),
      'max': lax.pmax(x[0], axis),
      'gathered': lax.all_gather(x[0, 0], axis),
      'scattered sum': lax.psum_scatter(x[0], axis),
      'next': lax.ppermute(x[0], axis, [(i, (i + 1) % n) for i in range(n)]),
      'all to all': lax.all_to_all(x[0], axis, 0, 0),
    }
    return jax.tree.map(lambda y: y[None], found)

  def by_numpy(x):
    return {
      'sum': np.broadcast_to(x.sum(0), x.shape),
      'max': np.broadcast_to(x.max(0), x.shape),
      'gathered': np.broadcast_to(x[:, 0], x.shape),
      'scattered sum': x.sum(0),
      'next': np.roll(x, 1, 0),
      'all to all': x.swapaxes(0, 1),
    }

  return Check(
    f'collectives of {n} devices',
    inputs=normal((n, n, 32, 384)),
    compute=jax.shard_map(
      of_device,
      mesh=Mesh(np.array(devices), (axis,)),
      in_specs=PartitionSpec(axis),
      out_specs=PartitionSpec(axis),
    ),
    reference=by_numpy,
  )


def _adamw():
  """Check of three updates of AdamW, where the square roots are."""
  rates = {'b1': 0.9, 'b2': 0.999, 'eps': 1e-8}
  tx = optax.adamw(0.1, weight_decay=0.1, **rates)

  def compute(params, *gradients):
    state, before = tx.init(params), params
    for gradient in gradients:
      updates, state = tx.update(gradient, state, params)
      params = optax.apply_updates(params, updates)
    return params - before

  def by_numpy(params, *gradients):
    m = v = 0
    before = params
    for t, g in enumerate(gradients, 1):
      m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
      m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.999**t)
      step = m_hat / (np.sqrt(v_hat) + 1e-8) + 0.1 * params
      params = params - 0.1 * step
    return params - before

  return Check(
    'three steps of AdamW, 768 x 3072',
    inputs=normal(*[(768, 3072)] * 4),
    compute=compute,
    reference=by_numpy,
  )


def _train_steps():
  """Checks of a whole step: loss, norm and update of each parameter."""
  for dtype in DTYPES:
    model = names.create('ViT-S/16', num_classes=10, dtype=dtype)
    model = model.clone(depth=4)  # A third of the time; the same operations.
    yield Check(
      'training step, 4 layers of S/16, 2 x 224 px',
      inputs=functools.partial(_parameters_and_batch, model),
      compute=functools.partial(_step, model),
      reference=_step_by_numpy,
      products=True,
      dtype=dtype,
      slack=4,  # Errors add up over layers.
    )


def _parameters_and_batch(model, rng):
  """Draw parameters, since heads are initialised with zeros, and a batch."""
  images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)['params']

  def draw(path, leaf):
    scale = 0.05 if leaf.ndim > 1 else 0.1
    values = scale * rng.standard_normal(leaf.shape, np.float32)
    return values + np.float32(path[-1].key == 'scale')

  params = jax.tree_util.tree_map_with_path(draw, shapes)
  batch = rng.integers(0, 256, (2, 224, 224, 3), np.uint8)
  return params, batch, np.array([3, 1])


def _step(model, params, images, labels):
  loss_fn = softmax_xent(model, preprocess=Normalize())
  tx = optim.Optimizer(optim.sgd, clip_norm=1.0)(params, learning_rate=_RATE)
  step, rng = jnp.zeros((), jnp.int32), jax.random.key(0)
  state = TrainState(step, params, tx.init(params), rng)
  after, metrics = train_step(
    state, {'image': images, 'label': labels}, loss_fn=loss_fn, tx=tx
  )
  updates = jax.tree.map(jnp.subtract, params, after.params)
  return _without_key_biases(metrics['loss'], metrics['grad_norm'], updates)


def _step_by_numpy(params, images, labels):
  loss, gradients = reference.vit_loss(params, images / 127.5 - 1, labels)
  norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradients)))
  scale = _RATE * min(1, 1 / norm)
  updates = jax.tree.map(lambda g: g * scale, gradients)
  return _without_key_biases(loss, norm, updates)


def _without_key_biases(loss, norm, updates):
  """Leave out the biases of keys, whose gradient is only rounding errors."""
  found = tree.flatten(updates) | {'loss': loss, 'grad_norm': norm}
  return {k: v for k, v in found.items() if not k.endswith('key/bias')}
