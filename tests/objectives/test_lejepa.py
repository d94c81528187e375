"""LeJEPA: the losses of lightly and stable-pretraining, and collapse."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import record_lejepa
import seeded
import tiny
from nightly import nightly

from vit_jax import tree
from vit_jax.models.dense import Normalize
from vit_jax.objectives import lejepa
from vit_jax.objectives.colours import Colour, Views
from vit_jax.objectives.lejepa import LeJepa, Projector, Sigreg, Visreg
from vit_jax.step import TrainState, train_step
from vit_jax.weights import timm

KEY = jax.random.key(0)
MODEL = tiny.vit(num_classes=0)
PLAIN = Colour(flip=0.0, jitter_probability=0.0, grey=0.0, blur=0.0)
CROPS = record_lejepa.crops()
GOLDEN = tiny.golden('lejepa')
make = functools.partial(
  LeJepa,
  preprocess=Normalize(),
  views=Views((PLAIN,), PLAIN),
  projector=Projector(8, (12, 10), 4),
)


def batch_of(step):
  return {name: x[step] for name, x in CROPS.items()}


@pytest.mark.parametrize('name', ['sigreg', 'sigreg_of_a_set', 'visreg'])
def test_regularizers_are_those_of_others(name):
  regularize = Visreg() if name == 'visreg' else Sigreg()

  def of_views_first(z):
    as_set = name == 'sigreg_of_a_set'
    z = z.reshape(-1, 1, z.shape[-1]) if as_set else z.swapaxes(0, 1)
    return regularize(z, GOLDEN['slices'])

  found = jax.jit(jax.value_and_grad(of_views_first))(GOLDEN['z'])
  np.testing.assert_allclose(found[0], GOLDEN[name], rtol=1e-5)
  expected = GOLDEN[f'{name}_grad']
  assert abs(found[1] - expected).max() < 1e-5 * abs(expected).max()


def from_timm(arrays):
  """Return (model, params) of {name: array} of timm and of the projector."""
  config = {'num_heads': 2, 'pretrained_cfg': {'input_size': (3, 16, 16)}}
  weights = timm.read(tiny.under(arrays, 'backbone.'), config)
  parts = tiny.under(arrays, 'projector.')
  added = {'bias': parts['1.8.bias']}
  for i, name in enumerate(('0', '1.0', '1.4', '1.8')):
    added[f'layer_{i}'] = {'kernel': parts[f'{name}.weight'].T}
  for i, name in enumerate(('1.1', '1.5'), 1):
    norm = {'scale': parts[f'{name}.weight'], 'bias': parts[f'{name}.bias']}
    added[f'norm_{i}'] = norm
  params = tree.unflatten(weights.params) | {'objective': added}
  return weights.model, params


def test_ten_steps_are_those_of_pytorch(monkeypatch):
  """With views of two sizes, stable-pretraining's model, and lightly's loss."""
  last = tiny.under(GOLDEN, 'last/')
  shapes = {name: x.shape for name, x in last.items()}
  model, params = from_timm(seeded.weights(shapes))
  width, *hidden = record_lejepa.HIDDEN
  projector = Projector(width, tuple(hidden), record_lejepa.OUTPUTS)
  shape = GOLDEN['step_slices'].shape[1:]
  regularizer = Sigreg(slices=shape[1])
  objective = make(model, projector=projector, regularizer=regularizer)

  def loss_fn(params, batch, rng):
    drawn = {shape: batch['slices']}
    monkeypatch.setattr(lejepa, 'draw', lambda rng, *shape: drawn[shape])
    return objective(params, batch, rng)

  options = dict(record_lejepa.ADAMW)
  tx = optax.adamw(options.pop('lr'), **options)
  step = tiny.compiled_step(loss_fn, tx)
  state, losses = tiny.first_state(params, tx), []
  for i, slices in enumerate(GOLDEN['step_slices']):
    state, metrics = step(state, batch_of(i) | {'slices': slices})
    names = 'loss', 'invariance', 'regularization'
    losses.append([metrics[name] for name in names])
    if i == 0:  # AdamW's first moment is a tenth of the gradient
      expected = tree.flatten(from_timm(tiny.under(GOLDEN, 'grad/'))[1])
      largest = max(abs(x).max() for x in expected.values())
      moments = jax.device_get(state.opt_state[0].mu)
      for path, x in tree.flatten(moments).items():
        error = abs(10 * x - expected[path]).max()
        assert error < 1e-5 * largest, path
  np.testing.assert_allclose(losses, GOLDEN['losses'], rtol=1e-4)
  # Softmax and batch norm remove these; AdamW moves them by rounding errors.
  options = {'rtol': 1e-7, 'atol': 1e-4, 'without': 'norm/bias|.*/key/bias'}
  tiny.assert_trees_close(state.params, from_timm(last)[1], **options)


@pytest.mark.parametrize('points', [17, *nightly([9])])
def test_expected_values_of_sigreg(points):
  """The integrals for normal z, for any N, and for equal z."""
  t = np.linspace(-3, 3, 2 * points - 1)
  window = np.exp(-(t**2) / 2)
  normal = np.trapezoid((1 - window**2) * window, t)
  equal = np.trapezoid((1 - window) ** 2 * window, t)
  np.testing.assert_allclose([normal, equal], [1.05, 0.4], atol=0.01)
  regularize = jax.jit(Sigreg(points=points))
  slices = lejepa.draw(jax.random.key(1), 16, 64)
  for n in (32, 512):
    z = np.random.default_rng(n).standard_normal((n, 16, 16), np.float32)
    np.testing.assert_allclose(regularize(z, slices), normal, rtol=0.2)
    found = regularize(0 * z, slices)
    np.testing.assert_allclose(found, n * equal, rtol=1e-5)
    assert regularize(0 * z + 0.3, slices) > found


def test_visreg_moves_collapsed_images_apart():
  z = 1e-9 * np.random.default_rng(0).standard_normal((32, 2, 4), np.float32)
  slices = lejepa.draw(jax.random.key(1), 4, 64)
  gradient = jax.jit(jax.grad(Visreg()))
  assert np.isfinite(gradient(0 * z, slices)).all()
  assert np.vdot(gradient(z, slices), z) < 0


def test_each_step_has_its_slices_colours_and_dropout():
  """With the same parameters and batch, here without local views."""
  batch, tx = {'image': batch_of(0)['image']}, optax.sgd(0.0)
  images = jax.ShapeDtypeStruct((1, 16, 16, 3), jnp.float32)
  params = tree.unflatten(tiny.normal_params(MODEL, images.shape[1:], 0.3))
  flip = dataclasses.replace(PLAIN, flip=0.5)
  for model, views, changes in (
    (MODEL, make(MODEL).views, False),
    (MODEL, Views((flip,), flip), True),
    (MODEL.clone(dropout=0.5), make(MODEL).views, True),
  ):
    objective = make(model, views=views, regularizer=Sigreg(slices=8))
    init = functools.partial(objective.init, images=images)
    params['objective'] = jax.jit(init)(KEY)

    @jax.jit
    def metrics(i, loss_fn=objective):
      state = TrainState(i, params, tx.init(params), KEY)
      return train_step(state, batch, loss_fn=loss_fn, tx=tx)[1]

    found = [metrics(np.int32(i)) for i in (0, 0, 1)]
    one, same, other = (x['regularization'] for x in found)
    assert one == same != other
    one, same, other = (x['invariance'] for x in found)
    assert one == same and (one != other) == changes
