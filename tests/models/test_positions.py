"""Kinds and places of positions (table 8), and overlapping patches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import (
  IMAGES,
  TINY_VIT,
  assert_scan_is_the_loop,
  assert_trees_close,
  compare_to_bfloat16,
  logits_and_grads,
  random_params,
  stack_layers,
)

from vit_jax import tree
from vit_jax.models import posemb
from vit_jax.models.layers import Attention, Block
from vit_jax.models.positions import Positions
from vit_jax.models.vit import VisionTransformer
from vit_jax.weights import surgery as transfer

GRID = 2, 6  # of IMAGES
RNG = np.random.default_rng(0)
ALL = [
  ('learned2d', 'stem'),
  ('relative', 'stem'),
  ('learned', 'layers'),
  ('learned2d', 'layers'),
  ('learned', 'layers_shared'),
  ('learned2d', 'layers_shared'),
]


def tiny(**fields):
  return VisionTransformer(**(TINY_VIT | fields))


def logits(model, params, images=IMAGES):
  return model.apply({'params': params}, images)


def shapes(model, images=IMAGES):
  params = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  return {k: v.shape for k, v in tree.flatten(params).items()}


@pytest.mark.parametrize('kind, place', ALL)
def test_tables(kind, place):
  """What there is beside the parameters of a model without positions."""
  model = tiny(posemb=kind, posemb_at=place, num_registers=1)
  plain = shapes(model.clone(posemb='none', posemb_at='stem'))
  found = shapes(model)
  own = {k: v for k, v in found.items() if k not in plain}
  assert {k: found[k] for k in plain} == plain
  where = ('block_0/', 'block_1/') if place == 'layers' else ('',)
  if kind == 'relative':
    expected = {
      f'block_{i}/attn/offset_embedding': (4, 6, 2, 8) for i in range(2)
    }
  elif kind == 'learned':
    expected = {f'{w}pos_embedding': (1, 2, 6, 16) for w in where}
  else:
    expected = {f'{w}pos_embedding_x': (1, 1, 6, 8) for w in where}
    expected |= {f'{w}pos_embedding_y': (1, 2, 1, 8) for w in where}
  if kind != 'relative':
    expected |= {f'{w}cls_pos_embedding': (1, 1, 16) for w in where}
  assert own == expected


def test_learned2d_is_a_grid_of_x_beside_y():
  model = tiny(posemb='learned2d')
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
  expected = logits(tiny(), same)
  np.testing.assert_allclose(logits(model, params), expected, atol=1e-6)


@pytest.mark.parametrize('kind', ['learned', 'learned2d'])
def test_positions_of_every_layer(kind):
  """Each layer adds its own to what it gets; registers have none."""
  model = tiny(posemb=kind, posemb_at='layers', num_registers=1)
  params = random_params(model)
  outputs = model.apply({'params': params}, IMAGES, method='features')
  prefix = np.concatenate([params['cls'], params['registers']], axis=1)
  prefix = np.broadcast_to(prefix, (4, 2, 16))
  x = jnp.concatenate([prefix, outputs['patches']], axis=1)
  for i in range(2):
    layer = dict(params[f'block_{i}'])
    rows = layer.pop('cls_pos_embedding'), np.zeros((1, 1, 16))
    if kind == 'learned':
      table = layer.pop('pos_embedding')
    else:
      table_x, table_y = (layer.pop(f'pos_embedding_{a}') for a in 'xy')
      table = np.concatenate(
        [table_x + np.zeros((1, 2, 1, 1)), table_y + np.zeros((1, 1, 6, 1))], -1
      )
    added = np.concatenate([*rows, table.reshape(1, 12, 16)], axis=1)
    x = x + added.astype('f')
    x, _ = Block(num_heads=2, mlp_dim=24).apply({'params': layer}, x, None)
    np.testing.assert_allclose(outputs[f'block_{i}'], x, atol=2e-5)


@pytest.mark.parametrize('kind', ['learned', 'learned2d'])
def test_shared_positions_are_the_same_in_every_layer(kind):
  shared = tiny(posemb=kind, posemb_at='layers_shared', num_registers=1)
  own = tiny(posemb=kind, posemb_at='layers', num_registers=1)
  params = random_params(shared)
  spread = dict(params)
  tables = {k: spread.pop(k) for k in params if 'pos_embedding' in k}
  for i in range(2):
    spread[f'block_{i}'] = spread[f'block_{i}'] | tables
  expected = logits(own, spread)
  np.testing.assert_allclose(logits(shared, params), expected, atol=1e-6)
  # With one layer it is the stem's.
  shared, stem = (x.clone(depth=1) for x in (shared, tiny(num_registers=1)))
  if kind == 'learned':
    params = random_params(stem)
    np.testing.assert_array_equal(logits(shared, params), logits(stem, params))


@pytest.mark.parametrize(
  'has_cls, registers', [(False, 0), (True, 0), (False, 1), (True, 2)]
)
def test_relative_attention(has_cls, registers):
  """Against loops over pairs of tokens."""
  prefix, width = has_cls + registers, 8
  positions = Positions('relative', (2, 3), 0.02, has_cls, registers)
  layer = Attention(num_heads=2, positions=positions)
  x = RNG.standard_normal((2, prefix + 6, width)).astype('f')
  params = layer.init(jax.random.key(0), x, x)['params']
  params = jax.tree.map(np.asarray, dict(params))
  params['offset_embedding'] = RNG.standard_normal((4, 3, 2, 4)).astype('f')
  variables = {'params': params}
  actual, recorded = layer.apply(variables, x, x, mutable=['intermediates'])
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


# Contract.


@pytest.mark.parametrize(
  'kind, place', [('relative', 'stem'), ('learned2d', 'layers_shared')]
)
def test_scan_is_the_loop(kind, place):
  assert_scan_is_the_loop(tiny(posemb=kind, posemb_at=place))


@pytest.mark.slow
@pytest.mark.parametrize(
  'kind, place, pooling',
  [
    ('relative', 'stem', 'gap'),
    ('learned', 'layers', 'map'),
    ('learned2d', 'layers_shared', 'token'),
  ],
)
def test_scan_remat_bfloat16_and_gradients(kind, place, pooling):
  model = tiny(posemb=kind, posemb_at=place, pooling=pooling, num_registers=1)
  params = random_params(model)
  expected, grads = logits_and_grads(model, params)
  for name, grad in tree.flatten(grads).items():
    if not name.endswith('key/bias'):  # which no softmax heeds
      assert np.abs(grad).max() > 1e-6, name
  scanned = model.clone(scan=True, remat='full')
  actual, scanned_grads = logits_and_grads(scanned, stack_layers(params))
  np.testing.assert_allclose(actual, expected, atol=1e-5)
  assert_trees_close(scanned_grads, stack_layers(grads), atol=1e-4, rtol=1e-3)
  errors = compare_to_bfloat16(model, params, (expected, grads))
  assert max(errors) < 0.1


def test_hybrids_have_any_positions():
  for kind, place in ALL[:4]:
    model = tiny(
      posemb=kind,
      posemb_at=place,
      patch_size=1,
      resnet_stages=(1,),
      num_classes=None,
    )
    images = jax.ShapeDtypeStruct((2, 16, 24, 3), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    assert jax.eval_shape(model.apply, variables, images).shape == (2, 16)


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'posemb': 'learnt'}, "posemb is 'learnt'.*learned2d, relative"),
    ({'posemb_at': 'everywhere'}, 'posemb_at.*stem, layers, layers_shared'),
    (
      {'posemb': 'relative', 'posemb_at': 'layers'},
      "posemb_at is 'layers' with posemb 'relative'; expected 'stem'",
    ),
    ({'posemb': 'learned2d', 'width': 15, 'num_heads': 3}, 'is 15.*an even'),
    (
      {'posemb': 'relative', 'attention': 'xla'},
      "'xla' is fused.*use 'einsum' or 'auto'",
    ),
  ],
)
def test_what_makes_no_sense(fields, message):
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(tiny(**fields).init, jax.random.key(0), IMAGES)


@pytest.mark.parametrize('kind, place', ALL)
def test_other_sizes_are_an_error_that_resizing_solves(kind, place):
  model = tiny(posemb=kind, posemb_at=place)
  params = random_params(model)
  larger = np.zeros((1, 16, 16, 3), 'f')
  with pytest.raises(ValueError, match=r'has 4x8 patches but .*embedding'):
    jax.eval_shape(model.apply, {'params': params}, larger)
  for scan in (False, True):
    other = model.clone(scan=scan)
    fresh = jax.eval_shape(other.init, jax.random.key(0), larger)['params']
    adapted, report = transfer.adapt(
      tree.flatten(params), tree.flatten(fresh), head='keep'
    )
    assert 'embedding' in str(report)
    adapted = {'params': tree.unflatten(adapted)}
    assert jax.eval_shape(other.apply, adapted, larger).shape == (1, 5)


def test_resizing_offsets():
  """Of embeddings that are so many rows and columns: in units of the last."""

  def table(grid, rows, columns):
    offsets = np.arange(-grid[0] * grid[1], grid[0] * grid[1])
    dy = np.round(offsets / grid[1])
    dx = offsets - dy * grid[1]
    cells = np.stack([dy * rows, dx * columns], -1)
    return cells.reshape(2 * grid[0], grid[1], 1, 2)

  old = table((3, 5), 1 / 2, 1 / 4)
  random = RNG.standard_normal((2, 6, 5, 3, 4)).astype('f')
  same = posemb.resize_offsets(random, (3, 5))
  np.testing.assert_array_equal(same, random)
  new = posemb.resize_offsets(old, (7, 9))
  assert new.shape == (14, 9, 1, 2)
  expected = table((7, 9), 1 / 6, 1 / 8)
  # Towards the far ends there are no further embeddings, and columns wrap.
  rows, columns = new.reshape(-1, 2).T
  wanted_rows, wanted_columns = expected.reshape(-1, 2).T
  inside = (np.abs(wanted_rows) < 0.9) & (np.abs(wanted_columns) < 0.5)
  assert inside.sum() > 60
  np.testing.assert_allclose(rows[inside], wanted_rows[inside], atol=1e-9)
  np.testing.assert_allclose(columns[inside], wanted_columns[inside], atol=1e-9)
  line = np.arange(-5.0, 5).reshape(2, 5, 1, 1)
  new = posemb.resize_offsets(line, (1, 9)).ravel()
  np.testing.assert_allclose(new[1:], np.linspace(-4, 4, 17))


# Overlapping patches.


@pytest.mark.parametrize(
  'stride', [pytest.param((4, 1), marks=pytest.mark.slow), 2]
)
def test_overlapping_patches_are_a_strided_convolution(stride):
  model = tiny(patch_stride=stride, posemb='none')
  params = random_params(model)
  actual = model.apply({'params': params}, IMAGES, method='features')['patches']
  sy, sx = (stride, stride) if isinstance(stride, int) else stride
  convolved = jax.lax.conv_general_dilated(
    IMAGES,
    params['embedding']['kernel'],
    (sy, sx),
    'VALID',
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
  )
  grid = (8 - 4) // sy + 1, (12 - 2) // sx + 1
  assert convolved.shape[1:3] == grid
  convolved = (
    np.asarray(convolved).reshape(4, -1, 16) + params['embedding']['bias']
  )
  actual = np.asarray(actual)
  np.testing.assert_allclose(actual, convolved, atol=1e-5)
  tops = [(y, x) for y in range(0, 5, sy) for x in range(0, 11, sx)]
  for token, (y, x) in enumerate(tops):
    patch = IMAGES[0, y : y + 4, x : x + 2].ravel()
    expected = patch @ params['embedding']['kernel'].reshape(-1, 16)
    expected = expected + params['embedding']['bias']
    np.testing.assert_allclose(actual[0, token], expected, atol=1e-5)


def test_overlapping_patches_have_a_larger_grid_of_positions():
  assert shapes(tiny(patch_stride=2))['pos_embedding'] == (1, 3, 6, 16)
  side_by_side = tiny(patch_stride=(4, 2))
  assert shapes(side_by_side) == shapes(tiny())
  params = random_params(tiny())
  np.testing.assert_array_equal(
    logits(side_by_side, params), logits(tiny(), params)
  )


@pytest.mark.parametrize(
  'stride, message',
  [
    ((3, 2), '8x12.*4x2 every 3x2; the nearest image size .* is 7x12'),
    ((5, 2), 'patch_stride is 5x2 for patches of 4x2'),
    ((2, 0), 'patch_stride is 2x0'),
  ],
)
def test_strides_that_do_not_fit(stride, message):
  with pytest.raises(ValueError, match=message):
    shapes(tiny(patch_stride=stride))
