"""Optimizers for ViTs: recurrences in numpy, layouts of layers, and meshes.

Gradients are given. The bounds are a few roundings of float32 on values of
order one.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from vit_jax.optim.muon import MATRICES, _find, newton_schulz

from vit_jax import config, tree
from vit_jax.models import names
from vit_jax.optim import averages
from vit_jax.optim import optimizers as optim
from vit_jax.parallel import sharding

RULES = {
  'adafactor': functools.partial(optim.adafactor, min_dim_size_to_factor=2),
  'lamb': optim.lamb,
  'nadamw': optax.nadamw,
  'schedule_free': optim.schedule_free_adamw,
  # Two of five iterations, which compile faster; `test_muon` has all.
  'muon': functools.partial(optim.muon, ns_steps=2),
}
DECAYED = [name for name in RULES if name != 'lamb']
each_rule = pytest.mark.parametrize('name', RULES)
WIDTH, HEADS, HIDDEN = 8, 2, 16


# The default tests have Muon, and the others are slow.
muon_is_fast = pytest.mark.parametrize(
  'name',
  [
    name if name == 'muon' else pytest.param(name, marks=pytest.mark.slow)
    for name in RULES
  ],
)


def make_tree(seed=0, scan=False, depth=1, small=False):
  """Parameters like those of a ViT; a few of them if small."""
  rng = np.random.default_rng(seed)
  head_dim = WIDTH // HEADS
  shapes = {
    'embedding/kernel': (2, 2, 3, WIDTH),
    'pos_embedding': (1, 2, 2, WIDTH),
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


def make_tx(rule, params, **fields):
  return optim.Optimizer(rule, **fields)(params, rate)


def run(tx, num_steps=3, scale=1.0, **layout):
  """Return ({path: array}, {path: array} of the average or None)."""
  params = make_tree(**layout)

  @jax.jit
  def step(grads, params, state):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  state, average = jax.jit(tx.init)(params), None
  for i in range(num_steps):
    grads = jax.tree.map(lambda x: scale * x, make_tree(100 + i, **layout))
    params, state = step(grads, params, state)
  if averages.averages_itself(state):
    average = jax.jit(averages.of_optimizer)(state, params)
  return as_numpy(params), average and as_numpy(average)


def as_numpy(params):
  return {path: np.asarray(x) for path, x in tree.flatten(params).items()}


def assert_close(actual, expected, atol=3e-6):
  assert actual.keys() == expected.keys()
  for path in expected:
    np.testing.assert_allclose(
      actual[path], expected[path], rtol=0, atol=atol, err_msg=path
    )


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


@pytest.mark.parametrize(
  'dtype', [None, pytest.param('bfloat16', marks=pytest.mark.slow)]
)
def test_adafactor(dtype):
  def leaf_rule(path, p, g, lr, t, state):
    b2 = min(0.5, 1 - (t + 1) ** -0.8)
    square = g**2 + 1e-30
    large = [i for i in range(p.ndim) if p.shape[i] >= 2]
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
    m = 0.9 * state.get('m', 0) + 0.1 * u
    state['m'] = m if dtype is None else np.float64(jnp.asarray(m, dtype))
    return p - lr * (m + decay_of(path, 0.1) * p)

  rule = functools.partial(
    *(optim.adafactor,),
    **{'b2': 0.5, 'min_dim_size_to_factor': 2, 'mu_dtype': dtype},
    weight_decay=0.1,
  )
  layout = {'small': dtype is None}
  actual, _ = run(make_tx(rule, make_tree(**layout)), **layout)
  # Roundings to bfloat16 may differ where float32 and float64 do.
  atol = 3e-6 if dtype is None else 2e-4
  assert_close(actual, reference(leaf_rule, **layout), atol)


def test_adafactor_is_small_and_its_momentum_is_bfloat16():
  kernel = jax.ShapeDtypeStruct((48, 64, 256), jnp.float32)
  params = {'blocks': {'fc1': {'kernel': kernel}}}
  state = jax.eval_shape(optim.adafactor(0.1).init, params)
  sizes = {k: (x.shape, str(x.dtype)) for k, x in tree.flatten(state).items()}
  found = {k.split('/')[1]: v for k, v in sizes.items() if 'kernel' in k}
  assert found == {
    'v_row': ((48, 64), 'float32'),
    'v_col': ((48, 256), 'float32'),
    'v': ((48, 1), 'float32'),
    'ema': ((48, 64, 256), 'bfloat16'),
  }
  without = jax.eval_shape(optim.adafactor(0.1, b1=None).init, params)
  assert sum(x.size for x in jax.tree.leaves(without)) == 48 * 321 + 1


def adam(p, g, t, state, b2=0.999, eps=1e-8, nesterov=False):
  """Direction of Adam, with b1 of 0.9."""
  m = state['m'] = 0.9 * state.get('m', 0) + 0.1 * g
  v = state['v'] = b2 * state.get('v', 0) + (1 - b2) * g**2
  m = m / (1 - 0.9 ** (t + 1))
  if nesterov:
    m = state['m'] / (1 - 0.9 ** (t + 2))
    m = 0.9 * m + 0.1 * g / (1 - 0.9 ** (t + 1))
  return m / (np.sqrt(v / (1 - b2 ** (t + 1))) + eps)


def test_lamb_adapts_parameters_with_weight_decay():
  def leaf_rule(path, p, g, lr, t, state):
    u = adam(p, g, t, state, eps=1e-6) + decay_of(path, 0.1) * p
    if path.endswith('kernel'):
      u *= np.linalg.norm(p) / np.linalg.norm(u)
    return p - lr * u

  rule = functools.partial(optim.lamb, weight_decay=0.1)
  actual, _ = run(make_tx(rule, make_tree(small=True)), small=True)
  assert_close(actual, reference(leaf_rule, small=True))


@pytest.mark.slow
def test_lamb_without_a_mask_is_that_of_optax():
  params = {'w': make_tree()['head']['kernel'], 'b': np.zeros(3, np.float32)}
  grads = jax.tree.map(lambda x: 0.1 * x + 1, params)
  ours, theirs = (
    lamb(0.1, weight_decay=0.1) for lamb in (optim.lamb, optax.lamb)
  )
  actual, expected = (
    jax.jit(lambda tx=tx: tx.update(grads, tx.init(params), params)[0])()
    for tx in (ours, theirs)
  )
  assert_close(actual, expected, 1e-6)


def test_nadamw_by_its_name_in_a_config():
  def leaf_rule(path, p, g, lr, t, state):
    u = adam(p, g, t, state, nesterov=True)
    return p - lr * (u + decay_of(path, 0.1) * p)

  rule = config.resolve({'target': 'optax.nadamw', 'weight_decay': 0.1})
  actual, _ = run(make_tx(rule, make_tree(small=True)), small=True)
  assert_close(actual, reference(leaf_rule, small=True))


def test_schedule_free_and_its_average():
  """Gradients are given at y, which the params are; x is the average."""
  xs = {}

  def leaf_rule(path, y, g, lr, t, state):
    z, x = state.get('z', y), state.get('x', y)
    v = state['v'] = 0.999 * state.get('v', 0) + 0.001 * g**2
    u = g / (np.sqrt(v / (1 - 0.999 ** (t + 1))) + 1e-8)
    factor = 0.5 if path.startswith('head') else 1.0
    z = z - lr * factor * (u + decay_of(path, 0.1) * y)
    total = state['total'] = state.get('total', 0) + lr**2
    c = lr**2 / total
    x = (1 - c) * x + c * z
    state |= {'x': x, 'z': z}
    xs[path] = x
    return 0.8 * x + 0.2 * z

  rule = functools.partial(optim.schedule_free_adamw, b1=0.8, weight_decay=0.1)
  params = make_tree(small=True)
  tx = make_tx(rule, params, lr_multipliers=[('head/.*', 0.5)])
  params, average = run(tx, small=True)
  assert_close(params, reference(leaf_rule, small=True))
  assert_close(average, xs)


def test_schedule_free_starts_where_the_rate_is_zero():
  """A warm-up begins at a rate of 0: nothing moves, and nothing is NaN."""
  tx = optim.schedule_free_adamw(lambda step: 0.1 * step)
  params = {'w': jnp.ones(3)}
  state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
  updates, state = update({'w': jnp.ones(3)}, state, params)
  np.testing.assert_allclose(updates['w'], 0, atol=1e-7)
  params = optax.apply_updates(params, updates)
  _, state = update({'w': jnp.ones(3)}, state, params)
  assert np.isfinite(state.z['w']).all() and state.z['w'][0] < 0.95


def orthogonalized(matrix):
  """Newton-Schulz on the singular values of a matrix."""
  u, s, v = np.linalg.svd(matrix, full_matrices=False)
  s = s / np.linalg.norm(s)
  for _ in range(5):
    s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
  return (u * s) @ v


@pytest.mark.parametrize(
  'consistent_rms', [0.2, pytest.param(None, marks=pytest.mark.slow)]
)
def test_muon(consistent_rms):
  def leaf_rule(path, p, g, lr, t, state):
    if not path.endswith('kernel') or path.startswith('head'):
      u = adam(p, g, t, state)
    else:
      m = state['m'] = g + 0.95 * state.get('m', 0)
      is_input = re.search('query', path) is not None
      num_inputs = 1 if is_input else p.ndim - 1
      inputs = int(np.prod(p.shape[:num_inputs]))
      u = orthogonalized((g + 0.95 * m).reshape(inputs, -1))
      sides = u.shape
      u = u.reshape(p.shape) * (
        0.2 * np.sqrt(max(sides))
        if consistent_rms
        else np.sqrt(max(1, sides[1] / sides[0]))
      )
    return p - lr * (u + decay_of(path, 0.1) * p)

  rule = functools.partial(
    optim.muon, weight_decay=0.1, consistent_rms=consistent_rms
  )
  layout = {'small': consistent_rms is None}
  actual, _ = run(make_tx(rule, make_tree(**layout)), **layout)
  assert_close(actual, reference(leaf_rule, **layout), 2e-5)


@pytest.mark.parametrize('scan', [False, True])
def test_matrices_of_a_vit(scan):
  """{path: (matrices, inputs, outputs)} of a real model; AdamW has the rest."""
  model = names.create('ViT-mu/4', num_classes=7, scan=scan, depth=2)
  images = jax.ShapeDtypeStruct((1, 24, 24, 3), jnp.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  found = {
    path: dataclasses.astuple(view)
    for path, x in tree.flatten(params).items()
    if (view := _find(path, x, MATRICES))
  }
  layer = {
    **{f'attn/{x}/kernel': (32, 32) for x in ('query', 'key', 'value', 'out')},
    **{'mlp/fc1/kernel': (32, 128), 'mlp/fc2/kernel': (128, 32)},
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


@pytest.mark.slow
def test_muon_next_to_optax():
  """The first step on plain matrices, whose momentum differs by a factor."""
  params = {'a': {'kernel': make_tree()['block_0']['mlp']['fc1']['kernel']}}
  grads = jax.tree.map(lambda x: 0.1 * x + 1, params)
  ours = optim.muon(0.1, consistent_rms=None, weight_decay=0.1)
  theirs = optax.contrib.muon(0.1, weight_decay=0.1)
  actual, expected = (
    jax.jit(lambda tx=tx: tx.update(grads, tx.init(params), params)[0])()
    for tx in (ours, theirs)
  )
  assert_close(tree.flatten(actual), tree.flatten(expected), 2e-5)


def test_newton_schulz_makes_singular_values_nearly_one():
  x = np.random.default_rng(0).normal(size=(3, 6, 20)).astype(np.float32)
  values = np.linalg.svd(jax.jit(newton_schulz)(x * 1e-4), compute_uv=False)
  assert values.min() > 0.6 and values.max() < 1.3
  assert not jax.jit(newton_schulz)(jnp.zeros((3, 6, 20))).any()


def test_muon_refuses_what_is_no_matrix():
  tx = optim.muon(0.1, matrices=[('.*/bias', 1)])
  with pytest.raises(ValueError, match=r'blocks/a/bias of shape \(2, 3\), whi'):
    tx.init({'blocks': {'a': {'bias': jnp.ones((2, 3))}}})


# The same for every layout, on every mesh, and with everything of Optimizer.


@functools.cache
def everything(name, scan=False):
  """Return results of a rule with all that Optimizer has, on two layers."""
  layout = {'scan': scan, 'depth': 2}
  rule = functools.partial(RULES[name], weight_decay=0.1)
  tx = make_tx(rule, make_tree(**layout), **EVERYTHING)
  return run(tx, num_steps=2, **layout)


EVERYTHING = {
  'clip_norm': 1.0,
  'freeze': ['embedding/.*'],
  'lr_multipliers': [('.*/out/.*', 0.5)],
  'decay_multipliers': [('head/.*', 10.0)],
  'layer_decay': optim.LayerDecay(0.9),
}


@muon_is_fast
def test_scanned_and_unrolled_layers_are_updated_alike(name):
  unrolled, scanned = everything(name), everything(name, scan=True)
  for one, other in zip(unrolled, scanned):
    if one is not None:
      assert_close(tree.unstack_blocks(other), one, 2e-5)
  before = tree.flatten(make_tree(depth=2))
  for path, value in unrolled[0].items():
    moved = value != before[path]
    assert not moved.any() if path.startswith('embed') else moved.any(), path


MESHES = {
  'data': {'data': 8},
  'fsdp': {'fsdp': 8},
  'data x fsdp x model': {'data': 2, 'fsdp': 2, 'model': 2},
}


@functools.cache
def on_mesh(name, mesh, scan, **keywords):
  """Return (compiled step with EVERYTHING, params, state) on a mesh."""
  axes = MESHES[mesh]
  mesh = sharding.make_mesh(**axes)
  tensor = sharding.tensor_parallel() if 'model' in axes else ()
  rules = sharding.fsdp(min_elements=16, others=tensor)
  params = make_tree(scan=scan, depth=2)
  rule = functools.partial(RULES[name], weight_decay=0.1, **keywords)
  tx = make_tx(rule, params, **EVERYTHING)
  state = params, jax.jit(tx.init)(params)
  shardings = sharding.infer(state, rules if 'fsdp' in axes else (), mesh)

  def step(grads, params, opt_state):
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  step = jax.jit(
    step,
    in_shardings=(shardings[0], *shardings),
    out_shardings=shardings,
  )
  with jax.set_mesh(mesh):
    return step.lower(params, *state).compile(), *state


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'mesh', 'scan'),
  [
    ('muon', 'fsdp', True),
    ('muon', 'fsdp', False),
    ('muon', 'data', True),
    ('muon', 'data x fsdp x model', True),
    ('adafactor', 'fsdp', True),
    ('lamb', 'fsdp', True),
    ('schedule_free', 'fsdp', True),
  ],
)
def test_one_device_and_eight_give_the_same(name, mesh, scan):
  step, params, state = on_mesh(name, mesh, scan)
  for i in range(2):
    grads = make_tree(100 + i, scan, depth=2)
    placed = jax.device_put((grads, params, state), step.input_shardings[0])
    params, state = step(*placed)
  expected, _ = everything(name, scan)
  assert_close(as_numpy(params), expected, 2e-5)


COLLECTIVE = r' (all-[\w-]+|reduce-scatter|collective-\w+)\('


@pytest.mark.slow
@pytest.mark.parametrize('mesh', MESHES)
def test_muon_does_not_communicate_in_its_iterations(mesh):
  few, many = (
    on_mesh('muon', mesh, True, **keywords)[0].as_text()
    for keywords in ({}, {'ns_steps': 4})
  )
  found = re.findall(COLLECTIVE, many)
  assert 'all-to-all' in found
  assert sorted(found) == sorted(re.findall(COLLECTIVE, few))
  if 'fsdp' in mesh:
    # No device gathers all 8 matrices [8, 8] of attention, or all 8 of the MLP.
    gathered = re.findall(r'= f32\[([\d,]+)\]\S* all-gather\(', many)
    assert not {'8,8,8', '8,8,16'} & set(gathered)


@muon_is_fast
def test_clipping_comes_first_and_multipliers_last(name):
  params = make_tree(small=True)
  before = tree.flatten(params)
  rule = functools.partial(RULES[name], weight_decay=0.1)
  plain, _ = run(make_tx(rule, params), num_steps=1, scale=0.25, small=True)
  squares = [(x**2).sum() for x in jax.tree.leaves(make_tree(100, small=True))]
  tx = make_tx(
    rule,
    params,
    clip_norm=float(np.sqrt(sum(squares))) / 4,
    lr_multipliers=[('head/.*', 2.0), ('pos_embedding', 0.0)],
  )
  params, average = run(tx, num_steps=1, small=True)
  for path, value in params.items():
    factor = {'head/kernel': 2, 'pos_embedding': 0}.get(path, 1)
    expected = before[path] + factor * (plain[path] - before[path])
    np.testing.assert_allclose(value, expected, atol=2e-5, err_msg=path)
  if average is not None:
    np.testing.assert_allclose(
      average['pos_embedding'], before['pos_embedding'], atol=1e-6
    )


@each_rule
def test_frozen_parameters_take_no_memory(name):
  params = make_tree(scan=True)
  tx = make_tx(RULES[name], params, freeze=['blocks/.*', 'pos_embedding'])
  paths = tree.flatten(jax.eval_shape(tx.init, params))
  assert not [path for path in paths if 'blocks' in path or 'pos_em' in path]


# Not LAMB: its trust ratio makes such a step independent of the decay.
@pytest.mark.slow
@pytest.mark.parametrize('name', DECAYED)
def test_weight_decay_by_group(name):
  """Without a gradient, decoupled decay is all that moves a parameter."""
  params = make_tree(small=True)
  tx = make_tx(
    functools.partial(RULES[name], weight_decay=0.1),
    params,
    decay_multipliers=[('head/.*', 10.0), ('embedding/.*', 0.0)],
  )
  after, _ = run(tx, num_steps=1, scale=0.0, small=True)
  for path, value in after.items():
    group = path.split('/')[0]
    decay = {'head': 1.0, 'embedding': 0.0}.get(group, 0.1)
    decay *= path.endswith('kernel')
    expected = (1 - 0.025 * decay) * tree.flatten(params)[path]
    np.testing.assert_allclose(value, expected, atol=1e-6, err_msg=path)


@pytest.mark.parametrize(
  ('rule', 'fields', 'message'),
  [
    (
      optim.muon,
      {'decay_multipliers': [('head/.*', 10.0)]},
      r'multiply weight_decay=None',
    ),
    (
      functools.partial(optim.muon, weight_decay=0.1),
      {'decay_multipliers': [('heads/.*', 10.0)]},
      r'optimizer\.decay_multipliers: .*heads',
    ),
    (
      functools.partial(optim.muon, matrices=[('.*/weight', 1), *MATRICES]),
      {},
      r"optimizer\.matrices: \['\.\*/weight'\] match no parameter",
    ),
    (
      optax.contrib.schedule_free_adamw,
      {'layer_decay': optim.LayerDecay(0.9)},
      r'Use vit_jax\.optim\.schedule_free_adamw',
    ),
  ],
)
def test_mistakes(rule, fields, message):
  with pytest.raises(ValueError, match=message):
    make_tx(rule, make_tree(), **fields)


def test_default_matrices_need_not_match():
  """Not every model has attention; and rules count that match frozen ones."""
  params = {'head': {'kernel': jnp.ones((4, 3))}, 'mlp': {'kernel': jnp.eye(4)}}
  matrices = [('head/kernel', 1), *(list(each) for each in MATRICES)]
  rule = config.resolve(
    {'target': 'vit_jax.optim.optimizers.muon', 'matrices': matrices}
  )
  tx = make_tx(rule, params, freeze=['head/.*'])
  moments = tree.flatten(jax.eval_shape(tx.init, params))
  assert not [path for path in moments if 'head' in path or 'adamw/mu' in path]


@pytest.mark.parametrize(
  ('rule', 'arguments'),
  [
    (optim.adafactor, {'b1': 1.0}),
    (optim.lamb, {'eps': -1.0}),
    (optim.schedule_free_adamw, {'b1': 0.0}),
    (optim.muon, {'ns_steps': 0}),
    (optim.muon, {'matrices': [('.*', 0)]}),
  ],
)
def test_arguments_have_domains(rule, arguments):
  with pytest.raises(ValueError, match=f'{next(iter(arguments))}=.* must be'):
    rule(0.1, **arguments)
