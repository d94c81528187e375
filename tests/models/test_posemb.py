"""Position embeddings: kinds and places (table 8), and one of our own."""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest
from contract import IMAGES, apply, assert_scan_is_the_loop, random_params, tiny
from nightly import nightly
from tiny import quick_key

from vit_jax import tree
from vit_jax.models import posemb, resample
from vit_jax.models.pooling import ClassToken
from vit_jax.models.posemb import Layout, Learned, Learned2d, Relative, SinCos2d
from vit_jax.models.rotary import RotaryAxial, RotaryDino, RotaryMixed
from vit_jax.models.vit import Attention

GRID = 2, 6  # of IMAGES
RNG = np.random.default_rng(0)
REGISTER = ClassToken(num_registers=1)
by_kind = pytest.mark.parametrize('kind', [Learned, Learned2d])


def test_learned2d_is_a_grid_of_x_and_y():
  model = tiny(posemb=Learned2d())
  params = random_params(model)
  same = dict(params)
  x, y = same.pop('pos_embedding_x'), same.pop('pos_embedding_y')
  same['pos_embedding'] = np.stack(
    [
      np.concatenate([x[0, 0, column], y[0, row, 0]])
      for row in range(2)
      for column in range(6)
    ]
  ).reshape(1, 2, 6, 16)
  expected = apply(tiny(), same)
  np.testing.assert_allclose(apply(model, params), expected, atol=1e-6)
  table = model.posemb.table(params, GRID, 16)
  np.testing.assert_array_equal(table, same['pos_embedding'][0])
  found = Learned().table(same, GRID, 16)
  np.testing.assert_array_equal(found, same['pos_embedding'][0])
  assert Learned2d().table(same, GRID, 16) is None


@pytest.mark.parametrize('at', ['stem', 'layers'])
def test_positions_of_the_patches_only(at):
  """As a position of zeros of the class token."""
  with_prefix = tiny(posemb=Learned(at=at), pooling=REGISTER)
  params = random_params(with_prefix)
  for part in (params, params['block_0'], params['block_1']):
    if 'cls_pos_embedding' in part:
      part['cls_pos_embedding'] = np.zeros((1, 1, 16), np.float32)
  expected = apply(with_prefix, params)
  for part in (params, params['block_0'], params['block_1']):
    part.pop('cls_pos_embedding', None)
  without = with_prefix.clone(posemb=Learned(at=at, prefix=False))
  np.testing.assert_allclose(apply(without, params), expected, atol=1e-6)


@by_kind
def test_shared_positions_are_the_same_in_every_layer(kind):
  shared = tiny(posemb=kind(at='layers_shared'), pooling=REGISTER)
  own = tiny(posemb=kind(at='layers'), pooling=REGISTER)
  params = random_params(shared)
  spread = dict(params)
  tables = {k: spread.pop(k) for k in params if 'pos_embedding' in k}
  for i in range(2):
    spread[f'block_{i}'] = spread[f'block_{i}'] | tables
  expected = apply(own, spread)
  np.testing.assert_allclose(apply(shared, params), expected, atol=1e-6)
  # With one layer they are those of the stem.
  stem = tiny(pooling=REGISTER, depth=1)
  if kind is Learned:
    params = random_params(stem)
    one = apply(shared.clone(depth=1), params)
    np.testing.assert_allclose(one, apply(stem, params), atol=1e-6)


@pytest.mark.parametrize(
  'has_cls, registers', [(False, 0), (True, 0), (False, 1), (True, 2)]
)
def test_relative_attention(has_cls, registers):
  """Against loops over pairs of tokens."""
  layout = Layout((2, 3), has_cls, registers)
  prefix, width = layout.prefix, 8
  layer = Attention(num_heads=2, posemb=Relative(), layout=layout)
  x = RNG.standard_normal((2, prefix + 6, width)).astype('f')
  params = random_params(layer, (x, x))
  params['offset_embedding'] = RNG.standard_normal((4, 3, 2, 4)).astype('f')
  variables = {'params': params}
  run = jax.jit(lambda *args: layer.apply(*args, mutable='intermediates'))
  actual, recorded = run(variables, x, x)
  recorded = recorded['intermediates']
  q, k = (np.asarray(recorded[name][0]) for name in 'qk')
  table = params['offset_embedding'].reshape(12, 2, 4)
  number = [-1] * has_cls + [-2] * registers + [*range(6)]  # -2: nowhere
  out = 0
  for head in range(2):
    v = x @ params['value']['kernel'][:, head] + params['value']['bias'][head]
    weights = np.zeros((2, prefix + 6, prefix + 6))
    for i in range(prefix + 6):
      for j in range(prefix + 6):
        key = k[:, j, head]
        if min(number[i], number[j]) > -2:
          difference = number[j] - number[i]
          key = key + table[(6 + difference) % 12, head]
        weights[:, i, j] = np.exp((q[:, i, head] * key).sum(-1) / 2)
    weights /= weights.sum(-1, keepdims=True)
    out = out + weights @ v @ params['out']['kernel'][head]
  np.testing.assert_allclose(actual, out + params['out']['bias'], atol=1e-5)


@pytest.mark.parametrize('options', [{}, {'temperature': 100.0}])
@pytest.mark.parametrize('endpoint', [True, False])
def test_sincos2d_is_the_formula_cell_by_cell(options, endpoint):
  table = SinCos2d(**options, endpoint=endpoint).table({}, (3, 5), 16)
  temperature = options.get('temperature', 10_000)
  assert table.shape == (3, 5, 16) and table.dtype == np.float32
  for row in range(3):
    for col in range(5):
      last = 3 if endpoint else 4
      waves = [temperature ** -(i / last) for i in range(4)]
      expected = [
        function(position * wave)
        for position in (col, row)
        for function in (np.sin, np.cos)
        for wave in waves
      ]
      np.testing.assert_allclose(table[row, col], expected, atol=1e-6)


@pytest.mark.parametrize('width', [4, 10])
def test_sincos2d_of_another_width(width):
  with pytest.raises(ValueError, match=f'got {width}'):
    SinCos2d().table({}, (3, 5), width)


def test_registers_turn_as_a_square_only():
  model = tiny(
    posemb=RotaryAxial(registers=100.0), pooling=ClassToken(num_registers=3)
  )
  with pytest.raises(ValueError, match='num_registers=3'):
    random_params(model)


@pytest.mark.parametrize('order', ['yx', 'xy'])
def test_registers_turn_in_the_order_of_patches(order):
  module = types.SimpleNamespace(width=16, num_heads=2)
  posemb = RotaryAxial(temperature=100.0, order=order, registers=100.0)
  found = posemb.shared(module, Layout((2, 2), True, num_registers=4), False)
  np.testing.assert_array_equal(found[:, 1:5], found[:, 5:])


# Contract.


IN_LAYERS = [
  Relative(),
  RotaryDino(),
  RotaryMixed(learned=Learned()),
  RotaryAxial(),
  Learned2d(at='layers_shared'),
  posemb.RelativeBias(),
]


@pytest.mark.parametrize(
  'positions', nightly(IN_LAYERS, but=IN_LAYERS[:3]), ids=str
)
def test_scan_is_the_loop(positions):
  assert_scan_is_the_loop(tiny(posemb=positions))


def test_positions_of_dinov3_are_rescaled_in_training_only():
  model = tiny(posemb=RotaryDino())
  variables = {'params': random_params(model)}
  images = RNG.normal(size=(1, 8, 24, 3)).astype('f')

  @functools.partial(jax.jit, static_argnums=0)
  def logits(train, seed):
    rngs = {'dropout': jax.random.key(seed)}
    return model.apply(variables, images, train=train, rngs=rngs)

  same = logits(False, 0)
  np.testing.assert_array_equal(logits(False, 1), same)
  first, second = logits(True, 0), logits(True, 1)
  for other in (same, second):
    assert np.abs(np.asarray(first) - other).max() > 1e-3


def fake(seed):
  key = jax.random.key(seed)
  return types.SimpleNamespace(width=16, num_heads=2, make_rng=lambda _: key)


def test_positions_move_together():
  """Shifts are uniform, and factors are uniform in their logarithm."""
  corners = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])

  def moved(**fields):
    fn = functools.partial(RotaryDino(**fields).moved, positions=corners)
    return np.asarray(
      jax.vmap(lambda i: fn(fake(i), train=True))(np.arange(400))
    )

  found = moved(shift=0.5, jitter=1.5, rescale=3.0)
  factors = found[:, 3] - found[:, 0]
  shift = found[:, 0] / factors
  expected = (corners + shift[:, None]) * factors[:, None]
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
  scale = np.log(moved(shift=0.0, jitter=1.0, rescale=3.0)[:, 3])
  np.testing.assert_array_equal(scale[:, 0], scale[:, 1])
  jitter = np.log(factors) - scale
  drawn = [*shift.T / 0.5, *jitter.T / np.log(1.5), scale[:, 0] / np.log(3)]
  for x in drawn:
    assert abs(np.sort(x) - np.linspace(-1, 1, 400)).max() < 0.2
  assert abs(np.corrcoef(drawn) - np.eye(5)).max() < 0.2


@pytest.mark.parametrize(
  ('kind', 'place'),
  [
    (RotaryAxial, lambda x: x),
    (RotaryDino, lambda x: 2 * (x + 0.5) / np.array(GRID) - 1),
    (RotaryMixed, lambda x: x),
  ],
)
def test_angles_are_those_of_moved_positions(kind, place):
  rotary = kind(shift=0.3, jitter=1.2, rescale=2.0)
  places, layout = place(np.indices(GRID).reshape(2, -1).T), Layout(GRID)
  for train in (False, True):
    moved = np.float64(rotary.moved(fake(1), places, train))
    assert train == (abs(moved - places).max() > 0.1)
    if kind is RotaryMixed:
      found, angles = rotary.shared(fake(1), layout, train)[0], moved
    else:
      found = rotary.angles(fake(1), layout, train)
      turn = 2 * np.pi if kind is RotaryDino else 1
      bands = turn * rotary.temperature ** -(np.arange(2) / 2)
      angles = (moved[..., None] * bands).reshape(len(places), -1)
    np.testing.assert_allclose(found, angles, rtol=1e-6, atol=1e-6)


def test_initial_frequencies_of_rope_mixed():
  """Two directions at right angles, random in each head."""
  model = tiny(posemb=RotaryMixed(temperature=81.0), num_heads=1)

  @jax.jit
  def initial(key):
    return model.init(key, IMAGES)['params']['block_0']['attn']['frequencies']

  found = np.asarray(initial(quick_key(0)))[:, 0].reshape(2, 2, 4)
  lengths = 81.0 ** -(np.arange(4) / 4)
  np.testing.assert_allclose(np.hypot(*found), [lengths] * 2, rtol=1e-5)
  products = found[:, 0] * found[:, 1]
  np.testing.assert_allclose(products.sum(0), 0, atol=1e-6)


@pytest.mark.parametrize(
  'kind', [Learned, Learned2d, Relative, posemb.RelativeBias]
)
def test_initial_deviation_of_positions(kind):
  model = tiny(posemb=kind(init_std=0.5), width=64, num_heads=4, depth=1)
  images = np.zeros((1, 32, 32, 3), 'f')
  ends = '_embedding', '_x', '_y', '_bias'

  @jax.jit
  def initial(key):
    flat = tree.flatten(model.init(key, images)['params'])
    return {k: x for k, x in flat.items() if k.endswith(ends)}

  flat = jax.device_get(initial(quick_key(0)))
  assert flat
  for path, x in flat.items():
    np.testing.assert_allclose(x.std(), 0.5, rtol=0.4, err_msg=path)


@pytest.mark.parametrize('positions', [Learned(), Learned2d()], ids=str)
@pytest.mark.parametrize('scan', [False, True])
def test_tables_are_resized_to_other_images(positions, scan):
  """Each by its own class, in the stem and in stacked layers."""
  model = tiny(
    posemb=dataclasses.replace(positions, at='layers' if scan else 'stem'),
    scan=scan,
  )
  params = random_params(model)
  larger = np.zeros((1, 16, 16, 3), 'f')
  fresh = jax.eval_shape(model.init, jax.random.key(0), larger)['params']
  flat, out = tree.flatten(params), {}
  for path, want in tree.flatten(fresh).items():
    out[path] = flat[path]
    if want.shape != flat[path].shape:
      out[path] = resample.resize_parameter(model, path, flat[path], want.shape)
      expected = resample.resize(flat[path], want.shape[-3:-1], 'paper')
      np.testing.assert_array_equal(out[path], expected)
  variables = {'params': tree.unflatten(out)}
  assert jax.eval_shape(model.apply, variables, larger).shape == (1, 5)


@pytest.mark.parametrize(
  'name, shape',
  [
    ('cls_pos_embedding', (1, 4, 4, 8)),
    ('pos_embedding', (1, 4, 4, 16)),
    ('pos_embedding', (4, 4, 8)),
  ],
)
def test_other_differences_are_not_resized(name, shape):
  for positions in (Learned(), Learned2d(), Relative(), SinCos2d()):
    assert positions.resize(name, np.zeros((1, 2, 3, 8)), shape) is None


@dataclasses.dataclass(frozen=True)
class Double(posemb.PositionEmbedding):
  """Twice the queries, half the keys: the same scores, by other factors."""

  in_layers = True

  def queries_and_keys(self, module, q, k, layout, shared):
    assert layout.num_tokens == q.shape[1]
    return 2 * q, k / 2


def test_a_position_embedding_of_our_own_changes_queries_and_keys():
  options = {'method': 'features', 'mutable': 'intermediates'}
  params = random_params(tiny(posemb=None))
  out, recorded = apply(tiny(posemb=Double()), params, **options)
  expected, plain = apply(tiny(posemb=None), params, **options)
  np.testing.assert_allclose(out['logits'], expected['logits'], atol=1e-5)
  for name, factor in (('q', 2), ('k', 0.5)):
    found, before = (
      x['intermediates']['block_0']['attn'][name][0] for x in (recorded, plain)
    )
    np.testing.assert_allclose(found, factor * before, rtol=1e-6)
