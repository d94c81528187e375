"""LeJEPA: the losses of lightly and stable-pretraining, any mesh, collapse."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import on_mesh
import optax
import pytest
import record_lejepa
import seeded
import tiny
from synthetic import Synthetic

from vit_jax import tree
from vit_jax.data.pipeline import Data
from vit_jax.data.transforms import MultiCrop
from vit_jax.durations import steps
from vit_jax.models.layers import Normalize
from vit_jax.objectives import lejepa
from vit_jax.objectives.colours import Colour, Views
from vit_jax.objectives.lejepa import LeJepa, Projector, Sigreg, Visreg
from vit_jax.optim.optimizers import Optimizer
from vit_jax.parallel import sharding
from vit_jax.step import TrainState, train_step
from vit_jax.train import train
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


def under(arrays, folder):
  """Return {name: array} of FOLDERname."""
  found = {k: x for k, x in arrays.items() if k.startswith(folder)}
  return {k.removeprefix(folder): x for k, x in found.items()}


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
  weights = timm.read(under(arrays, 'backbone.'), config)
  parts = under(arrays, 'projector.')
  added = {'bias': parts['1.8.bias']}
  for i, name in enumerate(('0', '1.0', '1.4', '1.8')):
    added[f'layer_{i}'] = {'kernel': parts[f'{name}.weight'].T}
  for i, name in enumerate(('1.1', '1.5'), 1):
    norm = {'scale': parts[f'{name}.weight'], 'bias': parts[f'{name}.bias']}
    added[f'norm_{i}'] = norm
  params = tree.unflatten(weights.params) | {'objective': added}
  return weights.model, jax.tree.map(jnp.asarray, params)


def test_ten_steps_are_those_of_pytorch(monkeypatch):
  """With views of two sizes, stable-pretraining's model, and lightly's loss."""
  last = under(GOLDEN, 'last/')
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
  step = jax.jit(functools.partial(train_step, loss_fn=loss_fn, tx=tx))
  state, losses = TrainState(jnp.int32(0), params, tx.init(params), KEY), []
  for i, slices in enumerate(GOLDEN['step_slices']):
    state, metrics = step(state, batch_of(i) | {'slices': slices})
    names = 'loss', 'invariance', 'regularization'
    losses.append([metrics[name] for name in names])
    if i == 0:  # AdamW's first moment is a tenth of the gradient
      expected = tree.flatten(from_timm(under(GOLDEN, 'grad/'))[1])
      largest = max(abs(x).max() for x in expected.values())
      for path, x in tree.flatten(state.opt_state[0].mu).items():
        error = abs(10 * x - expected[path]).max()
        assert error < 1e-5 * largest, path
  np.testing.assert_allclose(losses, GOLDEN['losses'], rtol=1e-4)
  # Softmax and batch norm remove these; AdamW moves them by rounding errors.
  removed = ['norm/bias', *(f'block_{i}/attn/key/bias' for i in range(2))]
  found = tree.flatten(state.params)
  for path, x in tree.flatten(from_timm(last)[1]).items():
    if path not in removed:
      np.testing.assert_allclose(found[path], x, atol=1e-4, err_msg=path)


@pytest.mark.parametrize('points', [9, 17])
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
    z = jax.random.normal(jax.random.key(n), (n, 16, 16))
    np.testing.assert_allclose(regularize(z, slices), normal, rtol=0.2)
    found = regularize(0 * z, slices)
    np.testing.assert_allclose(found, n * equal, rtol=1e-5)
    assert regularize(0 * z + 0.3, slices) > found


def test_visreg_moves_collapsed_images_apart():
  z = 1e-9 * jax.random.normal(KEY, (32, 2, 4))
  slices = lejepa.draw(jax.random.key(1), 4, 64)
  gradient = jax.jit(jax.grad(Visreg()))
  assert jnp.isfinite(gradient(0 * z, slices)).all()
  assert jnp.vdot(gradient(z, slices), z) < 0


def step_of(objective, tx, **axes):
  """Return (initial state, function (state, batch) -> (state, metrics))."""
  given = objective.model, objective, (16, 16, 3), lambda params: tx, axes
  return on_mesh.start(*given, rules=sharding.fsdp(min_elements=64))


@pytest.mark.parametrize(
  'regularizer',
  [Sigreg(), pytest.param(Visreg(slices=64), marks=pytest.mark.slow)],
)
def test_any_mesh_gives_the_same_losses(regularizer):
  """Batch norm, characteristic functions and sorting see the global batch."""
  model = MODEL.clone(dropout=0.5)
  objective, losses = make(model, regularizer=regularizer), []
  for axes in ({'data': 1, 'fsdp': 1}, {'data': 2, 'fsdp': 2}):
    state, step = step_of(objective, optax.adam(0.01), **axes)
    for i in range(3):
      batch = jax.tree.map(lambda x: x[:4], batch_of(i))
      state, metrics = step(state, batch)
      losses.append(float(metrics['loss']))
  np.testing.assert_allclose(losses[3:], losses[:3], rtol=2e-5)
  assert len(set(losses[:3])) == 3
  weight = regularizer.weight
  loss = weight * metrics['regularization']
  loss += (1 - weight) * metrics['invariance']
  np.testing.assert_allclose(metrics['loss'], loss, rtol=1e-6)


def test_each_step_has_its_slices_colours_and_dropout():
  """With the same parameters and batch, here without local views."""
  batch = {'image': batch_of(0)['image']}
  flip = dataclasses.replace(PLAIN, flip=0.5)
  for model, views, changes in (
    (MODEL, make(MODEL).views, False),
    (MODEL, Views((flip,), flip), True),
    (MODEL.clone(dropout=0.5), make(MODEL).views, True),
  ):
    objective = make(model, views=views, regularizer=Sigreg(slices=8))
    first, step = step_of(objective, optax.sgd(0.0), data=1, fsdp=1)
    found = []
    for number in (0, 0, 1):
      state = jax.tree.map(jnp.copy, first)
      state = dataclasses.replace(state, step=jnp.int32(number))
      found.append(step(state, batch)[1])
    one, same, other = (x['regularization'] for x in found)
    assert one == same != other
    one, same, other = (x['invariance'] for x in found)
    assert one == same and (one != other) == changes


def test_training_refuses_micro_batches(tmp_path):
  source = Synthetic(image_size=20, num_classes=4, num_examples=32)
  crop = MultiCrop(16, local_size=8, local_count=3)
  run = functools.partial(
    train,
    model=MODEL,
    data=Data(source, 16, transforms=(crop,), labels=False),
    objective=make,
    preprocess=Normalize(),
    optimizer=Optimizer(optax.adamw),
    schedule=lambda timeline: lambda step: 1e-3,
    total=steps(2),
  )
  with pytest.raises(ValueError, match='accum_steps=2'):
    run(tmp_path, accum_steps=2)
  state = run(tmp_path)
  assert state.params['objective']['layer_3']['kernel'].shape == (10, 4)
