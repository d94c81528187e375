"""Optimizers: recurrences in numpy, timm's, layouts of layers, and meshes.

Gradients are given. The bounds are a few roundings of float32 on values of
order one.
"""

import re
from functools import cache, partial
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from nightly import nightly
from options import all_set

from vit_jax import tree
from vit_jax.durations import Timeline, steps
from vit_jax.models.dense import BlockOptions, SwiGlu
from vit_jax.optim import optimizers as optim
from vit_jax.optim.optimizers import LayerDecay, Optimizer
from vit_jax.optim.schedules import Schedule
from vit_jax.parallel import sharding
from vit_jax.zoo import names

RULES = {
  'adafactor': partial(optim.adafactor, min_dim_size_to_factor=2),
  'lamb': optim.lamb,
  'nadamw': optax.nadamw,
  # Two of five iterations, which compile faster.
  'muon': partial(optim.muon, ns_steps=2),
}
WIDTH, HEADS, HIDDEN = 8, 2, 16

# The default tests have Muon, and the others are slow.
muon_is_fast = pytest.mark.parametrize('name', nightly(RULES, but=['muon']))


def make_tree(seed=0, scan=False, depth=1, small=False):
  """Return parameters like those of a ViT; a few of them if small."""
  rng = np.random.default_rng(seed)
  head_dim = WIDTH // HEADS
  shapes = {
    'embedding/kernel': (2, 2, 3, WIDTH),
    'pos_embedding': (1, 2, 2, WIDTH),
    'norm/scale': (WIDTH,),
    'head/kernel': (WIDTH, 5),
  }
  for i in range(depth):
    shapes[f'block_{i}/attn/query/kernel'] = (WIDTH, HEADS, head_dim)
    shapes[f'block_{i}/attn/out/kernel'] = (HEADS, head_dim, WIDTH)
    shapes[f'block_{i}/mlp/fc1/kernel'] = (WIDTH, HIDDEN)
    shapes[f'block_{i}/mlp/fc1/bias'] = (HIDDEN,)
    shapes[f'block_{i}/mlp/fc2/kernel'] = (HIDDEN, WIDTH)
  if small:
    kept = 'pos_embedding', 'head/kernel', 'embedding/kernel', 'block_0/mlp/fc1'
    shapes = {k: v for k, v in shapes.items() if k.startswith(kept)}
  flat = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
  return tree.unflatten(tree.stack_blocks(flat) if scan else flat)


def rate(step):
  return 0.1 * (jnp.asarray(step, jnp.float32) + 1) / 4


def make_tx(rule, params, learning_rate=rate, **fields):
  return Optimizer(rule, **fields)(params, learning_rate)


def run(tx, num_steps=3, scale=1.0, params=None, grads=(), **layout):
  """Return {path: array} after some steps on gradients, which take turns."""
  params = params or make_tree(**layout)
  grads = grads or [make_tree(100 + i, **layout) for i in range(num_steps)]

  @jax.jit
  def step(grads, params, state):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  state = jax.jit(tx.init)(params)
  for i in range(num_steps):
    scaled = jax.tree.map(lambda x: scale * x, grads[i % len(grads)])
    params, state = step(scaled, params, state)
  return as_numpy(params)


def as_numpy(params):
  return {path: np.asarray(x) for path, x in tree.flatten(params).items()}


def assert_close(actual, expected, atol=3e-6):
  tiny.assert_trees_close(actual, expected, atol=atol)


def reference(leaf_rule, num_steps=3, **layout):
  """Return {path: array} after steps of (path, p, g, lr, t, state) -> p."""
  flat = tree.flatten(make_tree(**layout)).items()
  flat = {path: x.astype(np.float64) for path, x in flat}
  states = {path: {} for path in flat}
  for t in range(num_steps):
    for path, g in tree.flatten(make_tree(100 + t, **layout)).items():
      lr = 0.1 * (t + 1) / 4
      g = g.astype(np.float64)
      flat[path] = leaf_rule(path, flat[path], g, lr, t, states[path])
  return flat


def decay_of(path, weight_decay):
  return weight_decay * path.endswith('kernel')


# Recurrences.


def make_rule(rule, options, learning_rate=rate, **layout):
  """Return the transformation with no options, or with all of them."""
  params = make_tree(**layout)
  if not options:
    return make_tx(rule, params, learning_rate)
  mask = tree.mask(optim.KERNELS, params)
  return all_set(rule, learning_rate=learning_rate, mask=mask, **options)


@pytest.mark.parametrize(
  'options',
  [{}, {'momentum': 0.8, 'accumulator_dtype': 'bfloat16', 'weight_decay': 0.1}],
)
def test_sgd(options):
  """The decay is L2: it is part of the momentum."""
  paper = {'momentum': 0.9, 'accumulator_dtype': None, 'weight_decay': 0.0}
  momentum, dtype, decay = (paper | options).values()

  def leaf_rule(path, p, g, lr, t, state):
    m = g + decay_of(path, decay) * p + momentum * state.get('m', 0)
    state['m'] = m if dtype is None else np.float64(jnp.asarray(m, dtype))
    return p - lr * m

  tx = make_rule(optim.sgd, options, small=True)
  traces = jax.eval_shape(tx.init, make_tree(small=True))
  kinds = {str(x.dtype) for x in jax.tree.leaves(traces) if x.ndim}
  assert kinds == {dtype or 'float32'}
  # Roundings to bfloat16 may differ where float32 and float64 do.
  atol = 2e-6 if dtype is None else 2e-3
  assert_close(run(tx, small=True), reference(leaf_rule, small=True), atol)


ADAFACTOR = {'b1': 0.8, 'b2': 0.5, 'min_dim_size_to_factor': 2}
ADAFACTOR |= {'mu_dtype': None, 'weight_decay': 0.1}


@pytest.mark.parametrize('options', [{}, ADAFACTOR])
def test_adafactor(options):
  """Without options, it is that of "Scaling ViT"."""
  scaling_vit = dict(zip(ADAFACTOR, (0.9, 0.999, 32, 'bfloat16', 0.0)))
  b1, bound, least, dtype, decay = (scaling_vit | options).values()
  start = 0 if options else 9_999  # 0.999 is reached after 5,600 steps

  def leaf_rule(path, p, g, _, t, state):
    b2 = min(bound, 1 - (start + t + 1) ** -0.8)
    square = g**2 + 1e-30
    large = [i for i in range(p.ndim) if p.shape[i] >= least]
    if len(large) >= 2:
      # The two largest dimensions of one layer.
      *_, d1, d0 = np.argsort(p.shape, kind='stable')
      row, column = square.mean(d0, keepdims=True), square.mean(d1, keepdims=1)
      state['row'] = b2 * state.get('row', 0) + (1 - b2) * row
      state['col'] = b2 * state.get('col', 0) + (1 - b2) * column
      mean = state['row'].mean(d1, keepdims=True)
      u = g / np.sqrt(state['row'] / mean * state['col'])
    else:
      state['v'] = b2 * state.get('v', 0) + (1 - b2) * square
      u = g / np.sqrt(state['v'])
    m = b1 * state.get('m', 0) + (1 - b1) * u
    state['m'] = m if dtype is None else np.float64(jnp.asarray(m, dtype))
    return p - 0.01 * (m + decay_of(path, decay) * p)

  layout = {'small': not options}
  tx = make_rule(optim.adafactor, options, 0.01, **layout)
  init = lambda params: optax.tree.set(tx.init(params), count=start)  # noqa: E731
  actual = run(optax.GradientTransformation(init, tx.update), **layout)
  # Roundings to bfloat16 may differ where float32 and float64 do.
  atol = 3e-6 if dtype is None else 2e-4
  assert_close(actual, reference(leaf_rule, **layout), atol)


def test_adafactor_is_small_and_its_momentum_is_bfloat16():
  kernel = jax.ShapeDtypeStruct((48, 32, 256), jnp.float32)
  params = {'blocks': {'fc1': {'kernel': kernel}}}
  state = jax.eval_shape(optim.adafactor(0.1).init, params)
  sizes = {k: (x.shape, str(x.dtype)) for k, x in tree.flatten(state).items()}
  found = {k.split('/blocks')[0]: v for k, v in sizes.items() if 'kernel' in k}
  scanned = '0/inner_states/scanned/inner_state/'
  assert found == {
    f'{scanned}v_row': ((48, 32), 'float32'),
    f'{scanned}v_col': ((48, 256), 'float32'),
    f'{scanned}v': ((48, 1), 'float32'),
    '1/ema': ((48, 32, 256), 'bfloat16'),
  }


# Inputs and outputs of the matrices of a small tree.
AXES = {'embedding/kernel': ((0, 1, 2), (3,))}
AXES |= {'block_0/mlp/fc1/kernel': ((0,), (1,))}


def by_hand(
  name, path, *, b1, b2, eps, mu_dtype, weight_decay, kernels=(), **muon
):
  """Return LAMB or Muon for one parameter, of parts of optax."""
  if name == 'muon' and path in AXES:
    axes = optax.contrib.MuonDimensionNumbers(*AXES[path])
    return optax.contrib.muon(
      rate,
      beta=muon.pop('momentum'),
      muon_weight_dimension_numbers=lambda x: jax.tree.map(lambda _: axes, x),
      **{'eps': eps, 'mu_dtype': mu_dtype, 'weight_decay': weight_decay},
      **muon,
    )
  parts = [optax.scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype)]
  parts.append(optax.add_decayed_weights(decay_of(path, weight_decay)))
  if name == 'lamb' and path.endswith('kernel'):
    parts.append(optax.scale_by_trust_ratio())
  return optax.chain(*parts, optax.scale_by_learning_rate(rate))


@pytest.mark.parametrize('is_default', [True, False])
@pytest.mark.parametrize(
  ('name', 'published', 'others'),
  [
    ('lamb', {'eps': 1e-6}, {}),  # as timm trains DeiT III
    (
      'muon',  # Jordan et al. (2024), with the RMS of Moonlight and AdamW's eps
      {'eps': 1e-8, 'momentum': 0.95, 'ns_steps': 5, 'consistent_rms': 0.2},
      {'momentum': 0.8, 'ns_steps': 2, 'consistent_rms': None, 'kernels': []},
    ),
  ],
)
def test_each_parameter_gets_all_options(name, published, others, is_default):
  """Without options, these are the published constants."""
  adam = {'b1': 0.9, 'b2': 0.999, 'mu_dtype': None, 'weight_decay': 0.0}
  options = {'b1': 0.8, 'b2': 0.95, 'mu_dtype': 'bfloat16', 'eps': 0.1}
  options |= {'weight_decay': 0.1, **others}
  actual = make_rule(
    getattr(optim, name), {} if is_default else options, small=True
  )
  used = adam | published if is_default else options
  flat = tree.flatten(make_tree(small=True))
  labels = tree.unflatten({path: path for path in flat})
  parts = {path: by_hand(name, path, **used) for path in flat}
  scale = 1e-6 if is_default else 1.0  # such gradients show a small eps
  expected = run(optax.partition(parts, labels), scale=scale, small=True)
  assert_close(run(actual, scale=scale, small=True), expected, 1e-5)


@pytest.mark.parametrize(
  ('name', 'rule', 'num_steps', 'fields'),
  [
    (
      'lamb',
      partial(optim.lamb, b1=0.8, b2=0.95, eps=1e-3),
      3,
      {'clip_norm': 1.0},
    ),
    # After the first steps, where optax corrects the bias of the momentum.
    ('muon', optim.muon, 300, {}),
    ('muon_original', partial(optim.muon, consistent_rms=None), 300, {}),
  ],
)
def test_updates_are_timms(timm_training, name, rule, num_steps, fields):
  given = tree.unflatten(tiny.under(timm_training, 'given/'))
  params, *grads = (jax.tree.map(itemgetter(i), given) for i in range(4))
  rule = partial(rule, weight_decay=0.1)
  lr = lambda step: 0.1 * (step >= num_steps - 3)  # noqa: E731
  tx = make_tx(rule, params, lr, **fields)
  actual = run(tx, num_steps, grads=grads, params=params)
  # 0.999 ** 300 is rounded otherwise.
  assert_close(actual, tiny.under(timm_training, f'{name}/'), 5e-5)


def test_a_kernel_with_other_axes_than_its_name_says():
  params = {'block_0': {'attn': {'query': {'kernel': jnp.ones((8, 2, 2, 4))}}}}
  with pytest.raises(ValueError, match=r"4 axes.*'in', 'heads', 'head_dim'"):
    optim.muon(1.0).init(params)
  rows = [('.*/query', ['in'], ['pair', 'heads', 'head_dim'])]
  optim.muon(1.0, kernels=rows).init(params)


@pytest.mark.parametrize('scan', [False, True])
def test_matrices_of_a_vit(scan):
  """{path: number of inputs} of a real model; AdamW has the rest."""
  block = BlockOptions(gate=True, mlp=SwiGlu())
  fields = {'num_classes': 7, 'scan': scan, 'depth': 2, 'block': block}
  model = names.create('ViT-mu/4', **fields)
  images = jax.ShapeDtypeStruct((1, 24, 24, 3), jnp.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  found = {}
  for path, x in tree.flatten(params).items():
    if axes := optim._matrix_axes(path, x):
      inputs, outputs = (int(np.prod([x.shape[i] for i in s])) for s in axes)
      found[path] = x.size // inputs // outputs, inputs, outputs
  layer = {
    **{
      f'attn/{x}/kernel': (32, 32)
      for x in ('query', 'key', 'value', 'gate', 'out')
    },
    **{f'mlp/{x}/kernel': (32, 128) for x in ('fc1', 'gate')},
    'mlp/fc2/kernel': (128, 32),
  }
  prefixes = {'blocks': 2} if scan else {'block_0': 1, 'block_1': 1}
  assert found == {
    'embedding/kernel': (1, 4 * 4 * 3, 32),
    **{
      f'{prefix}/{path}': (count, *sides)
      for prefix, count in prefixes.items()
      for path, sides in layer.items()
    },
  }


def test_matrices_of_an_axial_resnet():
  x = jax.ShapeDtypeStruct((8, 2, 4), 'float32')
  assert optim._matrix_axes('unit1/conv2/row/key/kernel', x) == ((0,), (1, 2))


# Optimizer: clipping, decay, frozen parameters, multipliers.


def sgd_updates(params, grads, lr=1.0, **fields):
  """Return {path: update} of one SGD step: minus the gradients by default."""
  rule = partial(optim.sgd, momentum=0.0)
  tx = make_tx(rule, params, lr, **fields)
  updates, _ = tx.update(grads, tx.init(params), params)
  return as_numpy(updates)


def test_an_optimizer_of_optax_without_a_mask():
  params = make_tree(small=True)
  actual = run(make_tx(optax.sgd, params), small=True)
  assert_close(actual, run(optax.sgd(rate), small=True), 1e-6)


def test_frozen_leaves_stay_and_do_not_count_in_the_norm():
  params, grads = make_tree(), tree.flatten(make_tree(100))
  frozen = {k for k in grads if k.startswith(('embedding', 'block_0'))}
  updates = sgd_updates(
    params,
    tree.unflatten(grads),
    lr=2.0,
    clip_norm=0.1,
    freeze=['embedding/.*', 'block_0/.*'],
  )
  norm = np.sqrt(sum((g**2).sum() for k, g in grads.items() if k not in frozen))
  for path, update in updates.items():
    # Gradients are clipped, not updates.
    factor = 0 if path in frozen else -2.0 * 0.1 / norm
    expected = factor * grads[path]
    np.testing.assert_allclose(update, expected, atol=5e-7)


def test_thawed_parameters_have_no_update_before():
  """All other updates are those of an optimizer that freezes nothing."""
  params, updates = make_tree(small=True), {}
  rule = partial(optax.adamw, weight_decay=0.1)
  fields = {'clip_norm': 0.5, 'final_weight_decay': 0.3}
  frozen = {'freeze': ['(?!head/).*'], 'thaw': steps(2)}
  for name, more in {'late': frozen, 'all': {}}.items():
    timeline = Timeline(1, 4, total_steps=4)
    tx = Optimizer(rule, **fields, **more)(params, rate, timeline)
    state, updates[name] = jax.jit(tx.init)(params), []
    update = jax.jit(tx.update)
    for i in range(4):
      found, state = update(make_tree(100 + i, small=True), state, params)
      updates[name].append(tree.flatten(found))
  for i, (late, wanted) in enumerate(zip(updates['late'], updates['all'])):
    for path, update in wanted.items():
      waits = i < 2 and not path.startswith('head/')
      update = 0 * np.asarray(update) if waits else update
      np.testing.assert_allclose(late[path], update, rtol=1e-6)


@pytest.mark.parametrize('name', RULES)
def test_frozen_parameters_take_no_memory(name):
  params = make_tree(scan=True)
  tx = make_tx(RULES[name], params, freeze=['blocks/.*', 'pos_embedding'])
  paths = tree.flatten(jax.eval_shape(tx.init, params))
  assert not [path for path in paths if 'blocks' in path or 'pos_em' in path]


def test_layer_decay_and_decay_mask_are_timms(timm_training):
  ours = ['map_head/probe', 'pre_logits/kernel', 'objective/fc1/kernel']
  paths = [*timm_training['path'], *ours]
  params = tree.unflatten(dict.fromkeys(paths, np.zeros(1)))
  factors = tree.flatten(LayerDecay(0.75).factors(params))
  assert [factors[path] for path in ours] == [1, 1, 1]
  mask = tree.flatten(tree.mask(optim.KERNELS, params))
  for i, path in enumerate(timm_training['path']):
    factor = 1 if path.startswith('norm/') else timm_training['factor'][i]
    assert factors[path] == factor, path
    assert mask[path] == (timm_training['decay'][i] > 0), path


@muon_is_fast
def test_clipping_comes_first_and_multipliers_last(name):
  params = make_tree(small=True)
  before = tree.flatten(params)
  rule = partial(RULES[name], weight_decay=0.1)
  plain = run(make_tx(rule, params), num_steps=1, scale=0.25, small=True)
  squares = [(x**2).sum() for x in jax.tree.leaves(make_tree(100, small=True))]
  tx = make_tx(
    rule,
    params,
    clip_norm=float(np.sqrt(sum(squares))) / 4,
    # The first rule that matches counts.
    lr_multipliers=[('head/.*', 2.0), ('pos_embedding|head/.*', 0.0)],
  )
  for path, value in run(tx, num_steps=1, small=True).items():
    factor = {'head/kernel': 2, 'pos_embedding': 0}.get(path, 1)
    expected = before[path] + factor * (plain[path] - before[path])
    np.testing.assert_allclose(value, expected, atol=2e-5, err_msg=path)


# Not LAMB: its trust ratio makes such a step independent of the decay.
@pytest.mark.parametrize('name', ['nadamw', *nightly(['muon'])])
def test_weight_decay_by_group(name):
  """Without a gradient, decoupled decay is all that moves a parameter."""
  params = make_tree(small=True)
  tx = make_tx(
    partial(RULES[name], weight_decay=0.1),
    params,
    decay_mask=['.*/kernel', '.*/bias'],
    decay_multipliers=[('head/.*', 10.0), ('embedding/.*', 0.0)],
  )
  for path, value in run(tx, num_steps=1, scale=0.0, small=True).items():
    group = path.split('/')[0]
    decay = {'head': 1.0, 'embedding': 0.0}.get(group, 0.1)
    decay *= path.endswith(('kernel', 'bias'))
    expected = (1 - 0.025 * decay) * tree.flatten(params)[path]
    np.testing.assert_allclose(value, expected, atol=1e-6, err_msg=path)


def decays(rule, learning_rate, num_steps, **fields):
  """Yield {path: update / parameter} of steps without gradients."""
  params, timeline = make_tree(small=True), Timeline(8, 80, total_steps=10)
  tx = Optimizer(rule, **fields)(params, learning_rate(timeline), timeline)
  state, update = tx.init(params), jax.jit(tx.update)
  before, zeros = tree.flatten(params), jax.tree.map(np.zeros_like, params)
  for _ in range(num_steps):
    updates, state = update(zeros, state, params)
    yield {path: x / before[path] for path, x in as_numpy(updates).items()}


@pytest.mark.parametrize(
  ('rule', 'corrected'),
  [
    (partial(optim.sgd, momentum=0.0), False),
    (optax.adamw, False),
    (optax.adamw, True),
    (optim.muon, True),
  ],
)
def test_weight_decay_follows_a_cosine(rule, corrected):
  """Corrected, it is also multiplied by the rate over its peak."""
  rule = partial(rule, weight_decay=0.04)
  lr = Schedule(0.1, decay='linear', warmup=steps(3))
  fields = {'decay_multipliers': [('head/.*', 3.0)], 'final_weight_decay': 0.4}
  fields['corrected_weight_decay'] = corrected
  for step, found in enumerate(decays(rule, lr, 10, **fields)):
    rate = 0.1 * min(step / 3, (10 - step) / 7)
    decay = 0.4 + 0.5 * (0.04 - 0.4) * (1 + np.cos(np.pi * step / 10))
    decay *= rate / 0.1 if corrected else 1.0
    for path, x in found.items():
      factor = path.endswith('kernel') * (3.0 if 'head' in path else 1.0)
      expected = -rate * factor * decay
      np.testing.assert_allclose(x, expected, rtol=2e-5, atol=1e-8)


def test_options_of_weight_decay_use_the_default_of_the_rule():
  """That of optax.adamw is 1e-4; half of the rate's peak halves it."""
  lr = Schedule(0.1, decay='linear')
  fields = {'decay_multipliers': [('head/.*', 3.0)]}
  fields['corrected_weight_decay'] = True
  *_, found = decays(optax.adamw, lr, 6, **fields)  # at half of the peak
  expected = -0.05 * 0.5 * 3e-4
  np.testing.assert_allclose(found['head/kernel'], expected, rtol=2e-5)


ADAMW = partial(optax.adamw, weight_decay=0.1)


@pytest.mark.parametrize(
  ('rule', 'fields', 'named'),
  [
    (ADAMW, {'freeze': ['heads/.*']}, 'optimizer.freeze'),
    (ADAMW, {'freeze': ['.*']}, 'optimizer.freeze'),
    (ADAMW, {'thaw': steps(1)}, 'optimizer.freeze'),
    (ADAMW, {'decay_mask': ['kernel']}, 'optimizer.decay_mask'),
    (ADAMW, {'lr_multipliers': [('x', 2.0)]}, 'optimizer.lr_multipliers'),
    (ADAMW, {'decay_multipliers': [('x', 2.0)]}, 'optimizer.decay_multipliers'),
    (partial(optax.adagrad, weight_decay=0.1), {}, 'mask'),
    (ADAMW, {'layer_decay': LayerDecay(0.5)}, 'layer_decay'),  # no layers
  ],
)
def test_mistakes(rule, fields, named):
  with pytest.raises(ValueError, match=re.escape(named)):
    make_tx(rule, make_tree(depth=0), **fields)


# The same for every layout, on every mesh, and with everything of Optimizer.

EVERYTHING = {
  'clip_norm': 1.0,
  'freeze': ['embedding/.*'],
  'lr_multipliers': [('.*/out/.*', 0.5)],
  'decay_multipliers': [('head/.*', 10.0)],
  'layer_decay': LayerDecay(0.9),
}


@cache
def everything(name, scan=False):
  """Return results of a rule with all that Optimizer has, on two layers."""
  layout = {'scan': scan, 'depth': 2}
  rule = partial(RULES[name], weight_decay=0.1)
  tx = make_tx(rule, make_tree(**layout), **EVERYTHING)
  return run(tx, num_steps=2, **layout)


@muon_is_fast
def test_scanned_and_unrolled_layers_are_updated_alike(name):
  unrolled = everything(name)
  scanned = tree.unstack_blocks(everything(name, scan=True))
  assert_close(scanned, unrolled, 2e-5)
  before = tree.flatten(make_tree(depth=2))
  for path, value in unrolled.items():
    moved = value != before[path]
    assert not moved.any() if path.startswith('embed') else moved.any(), path


@pytest.mark.slow
@pytest.mark.parametrize('name', ['muon', 'adafactor', 'lamb'])
def test_one_device_and_eight_give_the_same(name):
  mesh = sharding.make_mesh(data=2, fsdp=2, model=2)
  rules = sharding.fsdp(min_elements=16, others=sharding.tensor_parallel())
  params = make_tree(scan=True, depth=2)
  rule = partial(RULES[name], weight_decay=0.1)
  tx = make_tx(rule, params, **EVERYTHING)
  state = params, jax.jit(tx.init)(params)
  shardings = sharding.infer(state, rules, mesh)

  @partial(jax.jit, out_shardings=shardings)
  def step(grads, params, opt_state):
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  with jax.set_mesh(mesh):
    params, opt_state = jax.device_put(state, shardings)
    for i in range(2):
      grads = make_tree(100 + i, scan=True, depth=2)
      grads = jax.device_put(grads, shardings[0])
      params, opt_state = step(grads, params, opt_state)
  assert_close(as_numpy(params), everything(name, scan=True), 2e-5)
