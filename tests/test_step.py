"""One step of training, and the same steps however they are laid out.

Losses are compared between layouts of devices and micro-batches, whose sums
float32 rounds in different orders.
"""

import contextlib
import dataclasses
import functools
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import short_run
import tiny
from synthetic import Synthetic
from tiny import assert_trees_close

from vit_jax import tree
from vit_jax.data.pipeline import Data
from vit_jax.durations import Timeline, steps
from vit_jax.models.dense import Normalize
from vit_jax.objectives.classification import softmax_xent
from vit_jax.optim.optimizers import Optimizer
from vit_jax.optim.schedules import Schedule
from vit_jax.parallel import sharding
from vit_jax.runs.records import read_records
from vit_jax.step import TrainState, init_state, train_step

SOURCE = functools.partial(
  Synthetic, image_size=8, num_classes=4, num_examples=64, learnable=True
)
ADAMW = Optimizer(
  functools.partial(optax.adamw, weight_decay=0.1), clip_norm=1.0
)
WARMUP = Schedule(lr=0.01, warmup=steps(1))
# Rules hold for parameters, EMA and the optimizer's state alike.
TENSOR = [  # FSDP on one dimension; the heads or hidden units on another
  ('.*/(query|key|value)/kernel', ('data', 'model')),
  ('.*/fc1/kernel', ('data', 'model')),
  ('.*/fc2/kernel', ('model', 'data')),
]


def make_batch():
  with contextlib.closing(Data(SOURCE(), 16).train_batches()) as batches:
    return next(batches)


@functools.cache
def compiled_init():
  model = tiny.vit(num_classes=4)
  images = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)
  init = functools.partial(
    init_state, model=model, images=images, tx=sgd(), ema=True
  )
  return jax.jit(init)


def setup(make_tx, *, dropout=0.0, seed=0):
  """A fresh state, and arguments of train_step."""
  state = compiled_init()(jax.random.key(seed))
  tx = make_tx(state.params)
  model = tiny.vit(num_classes=4, dropout=dropout)
  loss_fn = softmax_xent(model, preprocess=Normalize())
  state = dataclasses.replace(state, opt_state=tx.init(state.params), ema=None)
  return state, {'loss_fn': loss_fn, 'tx': tx}


def sgd(lr=0.1):
  return lambda params: optax.sgd(lr)


# The golden curve.


def test_loss_curve_is_the_recorded_one():
  module = runpy.run_path(str(tiny.GOLDEN / 'record_loss_curve.py'))
  recorded = tiny.recorded('loss_curve')
  curve = module['losses']()
  if recorded['build'] == module['build_id']():
    assert curve == recorded['loss_and_grad_norm']
  else:
    np.testing.assert_allclose(curve, recorded['loss_and_grad_norm'], rtol=1e-4)


# Layouts of devices.


@functools.cache
def one_device_losses():
  """Five steps of `train` below, on one device, by hand."""
  rate = WARMUP(Timeline(16, 64, total_steps=5))
  make_tx = functools.partial(ADAMW, learning_rate=rate)
  state, arguments = setup(make_tx, dropout=0.2, seed=3)
  step_fn = jax.jit(functools.partial(train_step, **arguments))
  batches = Data(SOURCE(), batch_size=16).train_batches(seed=3)
  losses = []
  for _ in range(5):
    state, metrics = step_fn(state, next(batches))
    losses.append([float(metrics['loss']), float(metrics['grad_norm'])])
  batches.close()
  assert {len(x.devices()) for x in jax.tree.leaves(state)} == {1}
  return np.array(losses)


@pytest.mark.parametrize(
  ('mesh', 'rules', 'query_shards', 'fc1_shards'),
  [
    pytest.param({'data': 8}, [], (16, 2, 8), (16, 32), marks=pytest.mark.slow),
    ({'data': 4, 'model': 2}, TENSOR, (4, 1, 8), (4, 16)),
  ],
)
def test_losses_of_one_device(
  mesh, rules, query_shards, fc1_shards, tmp_path, monkeypatch
):
  if 'model' in mesh:  # on two slices
    monkeypatch.setattr(sharding, 'slice_of', lambda device: device.id % 2)
  state = short_run.run(
    tmp_path,
    model=tiny.vit(num_classes=None, dropout=0.2),
    data=Data(SOURCE(), batch_size=16),
    optimizer=ADAMW,
    schedule=WARMUP,
    total=steps(5),
    seed=3,
    mesh=sharding.MeshSizes(**mesh),
    sharding=rules,
  )
  records = [r for r in read_records(tmp_path) if 'train/loss' in r]
  losses = [[r['train/loss'], r['train/grad_norm']] for r in records]
  expected = one_device_losses()
  assert expected[-1, 0] < expected[0, 0]
  # Measured: 2e-6.
  np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)

  def shards(x):
    return {s.data.shape for s in x.addressable_shards}

  block = state.params['block_0']
  fc1 = block['mlp']['fc1']['kernel']
  assert shards(block['attn']['query']['kernel']) == {query_shards}
  assert shards(fc1) == {fc1_shards}
  # The optimizer's state is laid out as the parameters are.
  for path, leaf in tree.flatten(state.opt_state).items():
    if path.endswith('block_0/mlp/fc1/kernel'):
      assert leaf.sharding == fc1.sharding
  assert state.step.sharding.is_fully_replicated


def test_the_step_makes_no_implicit_transfer():
  state, arguments = setup(sgd())
  mesh = sharding.make_mesh()
  state = jax.device_put(state, sharding.replicated(mesh))
  step_fn = jax.jit(functools.partial(train_step, **arguments))
  with jax.transfer_guard('disallow'):
    for _ in range(2):
      state, _ = step_fn(state, sharding.put_batch(make_batch(), mesh))
    with pytest.raises(Exception, match=r'[Dd]isallowed'):
      step_fn(state, make_batch())  # the guard does guard
  assert int(state.step) == 2


# Micro-batches.


def test_micro_batches_give_the_gradient_of_the_big_batch():
  state, arguments = setup(sgd(1.0))
  # Away from the zero head, through which no gradient passes.
  noise = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: x + noise.normal(0, 0.1, x.shape).astype(x.dtype),
    jax.device_get(state.params),
  )
  state = TrainState(state.step, params, state.opt_state, state.rng)
  results = []
  for accum_steps in (1, 4):
    step = functools.partial(train_step, accum_steps=accum_steps, **arguments)
    results.append(jax.jit(step)(state, make_batch()))
  (whole, metrics), (parts, summed) = results
  after = jax.device_get(whole.params)
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after, params)
  assert max(jax.tree.leaves(moved)) > 0.1
  # Measured: 1.2e-7, one rounding.
  assert_trees_close(parts.params, whole.params, atol=1e-6)
  assert_trees_close(summed, metrics, atol=1e-6)


def test_micro_batches_draw_anew_and_see_each_example_once():
  def loss_fn(params, batch, rng):
    draw = jax.random.uniform(rng)
    return params['w'] * draw, {
      'draw': draw,
      'square': draw**2,
      'examples': jnp.sum(batch['bits']),
    }

  batch = {'bits': 2.0 ** np.arange(8, dtype=np.float32)}
  params = {'w': jnp.ones(())}
  tx = optax.sgd(0.5)
  state = TrainState(jnp.int32(0), params, tx.init(params), jax.random.key(0))
  draws = []
  for _ in range(2):
    before = state.params['w']
    state, out = train_step(state, batch, loss_fn=loss_fn, tx=tx, accum_steps=4)
    assert 4 * out['examples'] == 255
    variance = out['square'] - out['draw'] ** 2
    assert variance > 1e-3  # of one key for all micro-batches it would be 0
    # The gradient is the mean draw, and the update half of it.
    np.testing.assert_allclose(
      before - state.params['w'], out['draw'] / 2, rtol=1e-6
    )
    np.testing.assert_allclose(out['grad_norm'], out['draw'], rtol=1e-6)
    draws.append(float(out['draw']))
  assert draws[0] != draws[1]


def test_frozen_parameters_have_no_backward_pass():
  """Only the products with the head's kernel are in the backward pass."""
  state, arguments = setup(sgd())
  batch = make_batch()

  def products(**options):
    step = functools.partial(train_step, **arguments, **options)
    return str(jax.make_jaxpr(step)(state, batch)).count('dot_general')

  loss = jax.make_jaxpr(arguments['loss_fn'])
  forward = str(loss(state.params, batch, state.rng)).count('dot_general')
  frozen = tree.mask(['(?!head/).*'], state.params)
  assert products(frozen=frozen) == forward + 1
  assert products() > 2 * forward


def test_initialisation_depends_on_the_seed_only():
  init = compiled_init()
  one, again, other = (init(jax.random.key(seed)) for seed in (1, 1, 2))
  assert_trees_close(one.params, again.params, atol=0)
  assert_trees_close(one.ema, one.params, atol=0)
  kernels = [s.params['embedding']['kernel'] for s in (one, other)]
  assert jnp.abs(kernels[0] - kernels[1]).max() > 0.01
  # Training does not draw from the key that initialisation drew from.
  assert one.rng != jax.random.key(1)
  without = dataclasses.replace(one, ema=None)
  assert one.eval_params is one.ema and without.eval_params is one.params
