"""ResNet in both of its published forms, against formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import tree
from vit_jax.models.pooling import Mean
from vit_jax.models.resnet import Hybrid, ResNet, Root, StdConv
from vit_jax.models.vit import VisionTransformer
from vit_jax.optim import optimizers as optim

IMAGES = np.random.default_rng(0).uniform(-1, 1, (2, 16, 24, 3)).astype('f')
FILL = {'zero': 0, 'lowest': -np.inf}  # paddings of the max pooling


@pytest.mark.parametrize(
  'form, size, stride, before',
  [
    ('preact', 3, 2, (1, 1)),
    ('postact', 3, 2, (0, 1)),
    ('preact', 7, 2, (3, 3)),
    ('postact', 7, 2, (2, 3)),
    ('postact', 3, 1, (1, 1)),
  ],
)
def test_convolution_pads_and_standardises(form, size, stride, before):
  rng = np.random.default_rng(0)
  images = rng.normal(size=(1, 8, 6, 2)).astype('f')
  # So small that the epsilon counts, and with a mean to be taken off.
  kernel = rng.normal(2, 1, size=(size, size, 2, 4)).astype('f') * 3e-5
  conv = StdConv(4, size, stride, form)
  actual = conv.apply({'params': {'kernel': kernel}}, images)
  w = kernel.astype(np.float64)
  w = w - w.mean((0, 1, 2))
  variance = (w**2).mean((0, 1, 2))
  if form == 'preact':
    w /= np.sqrt(variance + 1e-10)
  else:
    w /= np.sqrt(variance) + 1e-5
  x = np.pad(images, ((0, 0), before, before, (0, 0)))[0]
  rows = range(0, x.shape[0] - size + 1, stride)
  cols = range(0, x.shape[1] - size + 1, stride)
  expected = [
    [np.einsum('ijc,ijcf', x[r : r + size, c : c + size], w) for c in cols]
    for r in rows
  ]
  assert actual.shape == (1, 8 // stride, 6 // stride, 4)
  np.testing.assert_allclose(actual[0], expected, atol=2e-4)


@pytest.mark.parametrize('padding, fill', FILL.items())
def test_max_pooling_of_the_root_pads(padding, fill):
  root = Root(64, 'preact', pool_padding=padding)
  params = root.init(jax.random.key(0), IMAGES)
  convolve = StdConv(64, 7, 2, 'preact')
  x = convolve.apply({'params': params['params']['conv']}, IMAGES)
  x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=fill)
  out = root.apply(params, IMAGES)
  for i, j in np.ndindex(out.shape[1:3]):
    window = x[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3]
    np.testing.assert_array_equal(out[:, i, j], window.max((1, 2)))
  assert (out[:, 0] < 0).any() == (padding == 'lowest')


def test_a_constant_kernel_has_finite_gradients():
  for form in ('preact', 'postact'):
    conv = StdConv(4, 1, 1, form)
    params = {'params': {'kernel': np.full((1, 1, 3, 4), 0.5, np.float32)}}
    grads = jax.grad(lambda p, conv=conv: conv.apply(p, IMAGES).sum())(params)
    assert np.isfinite(grads['params']['kernel']).all()


def test_layer_decay_takes_the_resnet_of_a_hybrid_as_what_precedes_layers():
  model = VisionTransformer(
    16, 2, 24, 2, Hybrid(1, stages=(1,)), num_classes=5, pooling=Mean()
  )
  params = jax.eval_shape(model.init, jax.random.key(0), IMAGES)['params']
  factors = tree.flatten(optim.LayerDecay(0.5).factors(params))
  assert factors['resnet/stage1/unit1/conv1/kernel'] == 0.5**3
  assert factors['block_1/norm1/scale'] == 0.5


def test_the_padding_of_max_pooling_is_handed_on():
  images = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)
  key, models = jax.random.key(0), (ResNet((1,), pool_padding=x) for x in FILL)
  one, other = (str(jax.make_jaxpr(x.init)(key, images)) for x in models)
  assert one != other
