"""Schedules against closed forms, optimizers against recurrences in numpy.

The bounds are a few roundings of float32 (eps 6e-8) on values of order one.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax import config, tree
from vit_jax.optim import optimizers as optim
from vit_jax.optim.durations import Timeline, steps


def schedule(*, total_steps, warmup_steps=None, cooldown_steps=None, **fields):
  """The learning rate over the steps of a run."""
  ramps = {
    name: steps(value)
    for name, value in (('warmup', warmup_steps), ('cooldown', cooldown_steps))
    if value is not None
  }
  timeline = Timeline(1, 1, total_steps)
  return optim.Schedule(**fields, **ramps)(timeline)


def make_optimizer(rule, params, learning_rate, **arguments):
  """An Optimizer from one flat dict of arguments, as a config has it."""
  own = {f.name for f in dataclasses.fields(optim.Optimizer)}
  fields = {k: arguments.pop(k) for k in own & arguments.keys()}
  rule = functools.partial(rule, **arguments)
  return optim.Optimizer(rule, **fields)(params, learning_rate)


def random_tree(seed, scan=False):
  rng = np.random.default_rng(seed)
  flat = {
    'embedding/kernel': rng.normal(size=(4, 3)),
    'pos_embedding': rng.normal(size=(1, 2, 2, 3)),
    'block_0/mlp/kernel': rng.normal(size=(3, 3)),
    'block_0/mlp/bias': rng.normal(size=3),
    'block_1/mlp/kernel': rng.normal(size=(3, 3)),
    'block_1/mlp/bias': rng.normal(size=3),
    'norm/scale': rng.normal(size=3),
    'head/kernel': rng.normal(size=(3, 2)),
  }
  flat = {k: v.astype(np.float32) for k, v in flat.items()}
  return tree.unflatten(tree.stack_blocks(flat) if scan else flat)


PARAMS = random_tree(0)


def run(tx, params=PARAMS, num_steps=3, scan=False):
  """{path: array} after some steps on given gradients."""
  state = tx.init(params)
  update = jax.jit(tx.update)
  for i in range(num_steps):
    updates, state = update(random_tree(100 + i, scan), state, params)
    params = optax.apply_updates(params, updates)
  return {k: np.asarray(v) for k, v in tree.flatten(params).items()}


def assert_close(actual, expected, atol, rtol=0):
  assert actual.keys() == expected.keys()
  for path in expected:
    np.testing.assert_allclose(
      actual[path], expected[path], rtol=rtol, atol=atol, err_msg=path
    )


# Schedules: paper Table 3 and 4, and what its released code does.


@pytest.mark.parametrize(
  ('arguments', 'expected'),
  [
    (  # ImageNet-21k: 10k of warm-up, linear to 0 at the end
      {'lr': 1e-3, 'decay': 'linear', 'total_steps': 312_000},
      {
        0: 0.0,
        1: 1e-7,
        5_000: 5e-4,
        10_000: 1e-3,
        161_000: 5e-4,
        312_000: 0.0,
      },
    ),
    (  # ImageNet: the same with a cosine
      {'lr': 3e-3, 'decay': 'cosine', 'total_steps': 90_000},
      {
        0: 0.0,
        10_000: 3e-3,
        30_000: 3e-3 * (1 + np.cos(np.pi / 4)) / 2,
        50_000: 1.5e-3,
        90_000: 0.0,
      },
    ),
    (  # the released code's linear decay ends at 1e-5
      {'lr': 1e-2, 'decay': 'linear', 'total_steps': 20_000, 'end_lr': 1e-5},
      {0: 0.0, 10_000: 1e-2, 15_000: 0.005005, 20_000: 1e-5},
    ),
    (  # "Scaling ViT": lr / sqrt(1 + (t - warmup) / timescale), cooldown
      {
        'lr': 8e-4,
        'decay': 'rsqrt',
        'total_steps': 200_000,
        'cooldown_steps': 50_000,
      },
      {
        0: 0.0,
        10_000: 8e-4,
        40_000: 4e-4,
        150_000: 8e-4 / np.sqrt(15),
        175_000: 4e-4 / np.sqrt(17.5),
        200_000: 0.0,
      },
    ),
    (  # BiT: 30, 60 and 80 of 90 epochs, here of 1000 steps
      {
        'lr': 0.48,
        'decay': 'step',
        'total_steps': 90_000,
        'milestones': (30 / 90, 60 / 90, 80 / 90),
      },
      {
        0: 0.0,
        5_000: 0.24,
        10_000: 0.48,
        29_999: 0.48,
        30_000: 0.048,
        59_999: 0.048,
        60_000: 0.0048,
        79_999: 0.0048,
        80_000: 0.00048,
        90_000: 0.00048,
      },
    ),
    (  # the first within warm-up; and 0.29 * 100_000 is not below 29_000
      {
        'lr': 0.8,
        'decay': 'step',
        'total_steps': 100_000,
        'milestones': [0.05, 0.29],
        'step_factor': 0.5,
      },
      {
        2_500: 0.2,
        5_000: 0.2,
        10_000: 0.4,
        28_999: 0.4,
        29_000: 0.2,
        100_000: 0.2,
      },
    ),
    (
      {'lr': 0.5, 'decay': 'constant', 'total_steps': 20_000},
      {0: 0.0, 2_500: 0.125, 10_000: 0.5, 20_000: 0.5},
    ),
  ],
)
def test_schedules(arguments, expected):
  rate = jax.jit(schedule(**arguments, warmup_steps=10_000))
  for step, value in expected.items():
    # At the end of a cosine 1 + cos(pi) leaves a rounding.
    np.testing.assert_allclose(rate(step), value, rtol=1e-5, atol=1e-9)
    assert rate(step).dtype == jnp.float32


def test_finetuning_cosine_without_warmup_starts_at_the_peak():
  rate = schedule(lr=0.03, total_steps=500)
  np.testing.assert_allclose(rate(0), 0.03, rtol=1e-6)


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'decay': 'cosinus'}, r"'cosinus' must be one of 'constant'"),
    ({'warmup_steps': 60, 'cooldown_steps': 50}, r'longer than .*100 steps'),
    ({'decay': 'rsqrt', 'end_lr': 0.1}, "no meaning for decay='rsqrt'"),
    (
      {'decay': 'step', 'milestones': (0.5,), 'end_lr': 0.1},
      "no meaning for decay='step'",
    ),
    ({'milestones': (0.5,)}, r"\(0.5,\).*no meaning for decay='cosine'"),
    (
      {'step_factor': 0.5},
      "=0.5 have no meaning for decay='cosine'",
    ),
    ({'decay': 'step'}, r'milestones=\(\) .*Expected increasing'),
    ({'decay': 'step', 'milestones': (0.0, 0.5)}, 'between 0 and 1'),
    ({'decay': 'step', 'milestones': (0.5, 1.0)}, 'between 0 and 1'),
    ({'decay': 'step', 'milestones': (30, 60)}, 'fractions of the whole'),
    ({'decay': 'step', 'milestones': (0.6, 0.3)}, 'increasing'),
    ({'decay': 'step', 'milestones': (0.3, 0.3)}, 'increasing'),
    (
      {'decay': 'step', 'milestones': (0.5,), 'step_factor': 10},
      'step_factor=10 must be between 0 and 1',
    ),
  ],
)
def test_schedule_mistakes(arguments, message):
  with pytest.raises(ValueError, match=message):
    schedule(lr=1.0, total_steps=100, **arguments)


# Optimizers.


def numpy_adam(params, *, lr, decay, b1=0.9, b2=0.999, eps=1e-8, num_steps=3):
  """Adam with decay as AdamW's (Loshchilov & Hutter, algorithm 2)."""
  p = {k: v.astype(np.float64) for k, v in tree.flatten(params).items()}
  m = {k: np.zeros_like(v) for k, v in p.items()}
  v = {k: np.zeros_like(x) for k, x in p.items()}
  for i in range(num_steps):
    for k, g in tree.flatten(random_tree(100 + i)).items():
      g = g.astype(np.float64)
      m[k] = b1 * m[k] + (1 - b1) * g
      v[k] = b2 * v[k] + (1 - b2) * g**2
      m_hat, v_hat = m[k] / (1 - b1 ** (i + 1)), v[k] / (1 - b2 ** (i + 1))
      wd = decay if k.endswith('kernel') else 0.0
      p[k] -= lr(i) * (m_hat / (np.sqrt(v_hat) + eps) + wd * p[k])
  return p


def test_adam_is_adamw_on_kernels():
  rate = schedule(lr=0.1, total_steps=3, decay='linear')
  actual = run(make_optimizer(optax.adamw, PARAMS, rate, weight_decay=0.3))
  expected = numpy_adam(PARAMS, lr=lambda i: 0.1 * (1 - i / 3), decay=0.3)
  assert_close(actual, expected, atol=5e-6)
  mask = tree.mask(['.*/kernel'], PARAMS)
  adamw = optax.adamw(rate, weight_decay=0.3, mask=mask)
  assert_close(actual, run(adamw), atol=1e-6)


def test_any_optax_optimizer_by_its_path():
  rate = schedule(lr=0.1, total_steps=9, decay='constant')
  actual = run(make_optimizer(optax.lion, PARAMS, rate, weight_decay=0.3))
  mask = tree.mask(['.*/kernel'], PARAMS)
  assert_close(
    actual, run(optax.lion(0.1, weight_decay=0.3, mask=mask)), atol=1e-6
  )
  make_optimizer(optax.sgd, PARAMS, rate, momentum=0.9)  # takes no mask


def test_weight_decay_is_big_visions_times_the_learning_rate():
  """big_vision: p -= relative_schedule * (lr * adam(g) + wd * p), kernels only.

  Its 1e-4 at a peak rate of 1e-3 is 0.1 here.
  """
  lr, wd = 1e-3, 1e-4
  rate = schedule(lr=lr, total_steps=4)
  actual = run(make_optimizer(optax.adamw, PARAMS, rate, weight_decay=0.1))
  adam = optax.scale_by_adam()
  params, state, update = PARAMS, adam.init(PARAMS), jax.jit(adam.update)
  for i in range(3):
    shape = (1 + np.cos(np.pi * i / 4)) / 2
    scaled, state = update(random_tree(100 + i), state, params)

    def apply(path, p, u, shape=shape):
      decay = wd if path.endswith('/kernel') else 0.0
      return p - np.float32(shape) * (lr * u + decay * p)

    params = tree.map_with_path(apply, params, scaled)
  assert_close(actual, tree.flatten(params), atol=5e-7)


@pytest.mark.parametrize('accumulator', [None, 'bfloat16'])
def test_sgd(accumulator):
  rate = schedule(lr=0.1, total_steps=9, decay='constant')
  tx = make_optimizer(
    optim.sgd, PARAMS, rate, momentum=0.9, accumulator_dtype=accumulator
  )
  traces = [x for x in jax.tree.leaves(tx.init(PARAMS)) if x.ndim]
  assert {str(x.dtype) for x in traces} == {accumulator or 'float32'}

  p, trace = dict(tree.flatten(PARAMS)), {}
  for i in range(3):
    for k, g in tree.flatten(random_tree(100 + i)).items():
      trace[k] = g + np.float32(0.9) * trace.get(k, np.float32(0))
      p[k] = p[k] - np.float32(0.1) * trace[k]
      if accumulator:  # what is kept until the next step
        trace[k] = trace[k].astype(jnp.bfloat16).astype(np.float32)
  assert_close(run(tx), p, atol=2e-6)


def test_sgd_decay_is_l2():
  rate = schedule(lr=0.1, total_steps=9, decay='constant')
  tx = make_optimizer(optim.sgd, PARAMS, rate, weight_decay=0.5)
  p, g = tree.flatten(PARAMS), tree.flatten(random_tree(100))
  expected = {
    k: p[k] - 0.1 * (g[k] + (0.5 * p[k] if k.endswith('kernel') else 0))
    for k in p
  }
  assert_close(run(tx, num_steps=1), expected, atol=1e-6)


def test_frozen_leaves_stay_and_do_not_count_in_the_norm():
  tx = make_optimizer(
    optim.sgd,
    PARAMS,
    schedule(lr=1.0, total_steps=9, decay='constant'),
    clip_norm=0.1,
    freeze=['embedding/.*', 'block_0/.*'],
  )
  before, after = tree.flatten(PARAMS), run(tx, num_steps=1)
  grads = tree.flatten(random_tree(100))
  frozen = {k for k in grads if k.startswith(('embedding', 'block_0'))}
  norm = np.sqrt(sum((g**2).sum() for k, g in grads.items() if k not in frozen))
  expected = {
    k: before[k] if k in frozen else before[k] - grads[k] * 0.1 / norm
    for k in before
  }
  assert_close(after, expected, atol=5e-7)
  for path in frozen:
    np.testing.assert_array_equal(after[path], before[path])
  # ... and they take no memory.
  adam = make_optimizer(
    optax.adamw,
    PARAMS,
    schedule(lr=1.0, total_steps=9),
    freeze=['(?!head/).*'],
    weight_decay=0.1,
  )
  kept = sum(x.size for x in jax.tree.leaves(adam.init(PARAMS)) if x.ndim)
  assert kept == 2 * PARAMS['head']['kernel'].size


def test_clipping_leaves_small_gradients_alone():
  rate = schedule(lr=0.1, total_steps=9)
  clipped = make_optimizer(optim.sgd, PARAMS, rate, clip_norm=1e3)
  plain = run(make_optimizer(optim.sgd, PARAMS, rate))
  assert_close(run(clipped), plain, atol=1e-6, rtol=1e-6)


def test_every_parameter_moves_unless_frozen():
  tx = make_optimizer(
    optax.adamw,
    PARAMS,
    schedule(lr=0.1, total_steps=9),
    lr_multipliers=[('.*/bias', 2.0)],
    layer_decay=optim.LayerDecay(0.5),
    freeze=['head/.*'],
    clip_norm=1.0,
    weight_decay=0.1,
  )
  before = tree.flatten(PARAMS)
  for path, value in run(tx, num_steps=1).items():
    moved = value != before[path]
    assert not moved.any() if path == 'head/kernel' else moved.all(), path


def updates_of(params, scan=False, **kwargs):
  """{path: update} of one SGD step of rate 1, i.e. minus scaled gradients."""
  rate = schedule(lr=1.0, total_steps=9, decay='constant')
  tx = make_optimizer(optim.sgd, params, rate, momentum=0.0, **kwargs)
  updates, _ = tx.update(random_tree(100, scan), tx.init(params), params)
  return tree.flatten(updates)


def test_lr_multipliers_first_match_counts():
  updates = updates_of(
    PARAMS, lr_multipliers=[('head/.*', 10.0), ('.*/kernel', 0.0)]
  )
  for path, grad in tree.flatten(random_tree(100)).items():
    factor = 10 if path == 'head/kernel' else 1 - path.endswith('kernel')
    np.testing.assert_allclose(updates[path], -factor * grad, rtol=1e-6)


def test_layer_decay_is_the_same_scanned_and_unrolled():
  layer_decay = optim.LayerDecay(0.5)
  unrolled = updates_of(PARAMS, layer_decay=layer_decay)
  distance = {'embedding': 3, 'pos_embedding': 3, 'block_0': 2, 'block_1': 1}
  for path, grad in tree.flatten(random_tree(100)).items():
    factor = 0.5 ** distance.get(path.split('/')[0], 0)
    np.testing.assert_allclose(unrolled[path], -factor * grad, rtol=1e-6)
  scanned = updates_of(
    random_tree(0, scan=True), scan=True, layer_decay=layer_decay
  )
  assert_close(tree.unstack_blocks(scanned), unrolled, atol=0)


@pytest.mark.parametrize(
  ('rule', 'arguments', 'message'),
  [
    (optax.adamw, {'freeze': ['heads/.*']}, r'optimizer\.freeze: .*heads'),
    (optax.adamw, {'decay_mask': ['kernel']}, r'optimizer\.decay_mask'),
    (optax.adamw, {'lr_multipliers': [('x', 2.0)]}, r'optimizer\.lr_multipl'),
    (optax.sgd, {'weight_decay': 0.1}, r'no parameter `mask`'),
  ],
)
def test_optimizer_mistakes(rule, arguments, message):
  rate = schedule(lr=1.0, total_steps=9)
  with pytest.raises(ValueError, match=message):
    make_optimizer(rule, PARAMS, rate, **arguments)


def test_layer_decay_needs_layers():
  with pytest.raises(ValueError, match=r'layer_decay: no parameter path match'):
    optim.LayerDecay(0.5).factors({'head': {'kernel': np.ones(1)}})


def test_an_optimizer_can_wrap_an_optimizer():
  """A rule that takes another rule gets it as a partial from the config."""
  built = config.resolve(
    {
      'target': f'{__name__}.every_other_sign',
      'optimizer': {'target': 'vit_jax.optim.optimizers.sgd', 'momentum': 0.0},
    }
  )
  tx = optim.Optimizer(built)(PARAMS, 1.0)
  updates, _ = tx.update(random_tree(100), tx.init(PARAMS), PARAMS)
  for path, grad in tree.flatten(random_tree(100)).items():
    np.testing.assert_allclose(tree.flatten(updates)[path], grad, rtol=1e-6)


def every_other_sign(learning_rate, *, optimizer, mask=None):
  return optax.chain(optimizer(learning_rate, mask=mask), optax.scale(-1.0))
