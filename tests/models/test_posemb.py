"""Position embeddings: kinds and places (table 8), and one of our own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import (
  IMAGES,
  TINY_VIT,
  apply,
  assert_scan_is_the_loop,
  assert_trees_close,
  compare_to_bfloat16,
  logits_and_grads,
  random_params,
  stack_layers,
)

from vit_jax import tree
from vit_jax.models import posemb, resample
from vit_jax.models.layers import PatchEmbedding
from vit_jax.models.pooling import ClassToken, Map, Mean
from vit_jax.models.posemb import (
  Layout,
  Learned,
  Learned2d,
  PositionEmbedding,
  Relative,
  SinCos2d,
)
from vit_jax.models.resnet import Hybrid
from vit_jax.models.vit import Attention, Block, VisionTransformer

GRID = 2, 6  # of IMAGES
RNG = np.random.default_rng(0)
ALL = [
  Learned2d(),
  Relative(),
  Learned(at='layers'),
  Learned2d(at='layers'),
  Learned(at='layers_shared'),
  Learned2d(at='layers_shared'),
  Learned(prefix=False),
  Learned(at='layers', prefix=False),
]
REGISTER = ClassToken(num_registers=1)
by_kind = pytest.mark.parametrize('kind', [Learned, Learned2d])


def tiny(**fields):
  return VisionTransformer(**(TINY_VIT | fields))


def shapes(model, images=IMAGES):
  params = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  return {k: v.shape for k, v in tree.flatten(params).items()}


@pytest.mark.parametrize('positions', ALL, ids=str)
def test_parameters(positions):
  """The model without positions has the same parameters, except tables."""
  model = tiny(posemb=positions, pooling=REGISTER)
  plain = shapes(model.clone(posemb=None))
  found = shapes(model)
  own = {k: v for k, v in found.items() if k not in plain}
  assert {k: found[k] for k in plain} == plain
  if isinstance(positions, Relative):
    name = 'attn/offset_embedding'
    expected = {f'block_{i}/{name}': (4, 6, 2, 8) for i in range(2)}
  else:
    where = ('block_0/', 'block_1/') if positions.at == 'layers' else ('',)
    tables = {'pos_embedding': (1, 2, 6, 16)}
    if isinstance(positions, Learned2d):
      tables = {'pos_embedding_x': (1, 1, 6, 8)}
      tables['pos_embedding_y'] = 1, 2, 1, 8
    if positions.prefix:
      tables['cls_pos_embedding'] = 1, 1, 16
    expected = {f'{w}{k}': v for w in where for k, v in tables.items()}
  assert own == expected


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
def test_positions_of_every_layer(kind):
  """Each layer adds its own to its input; registers have none."""
  model = tiny(posemb=kind(at='layers'), pooling=REGISTER)
  params = random_params(model)
  outputs = apply(model, params, method='features')
  prefix = np.concatenate([params['cls'], params['registers']], axis=1)
  prefix = np.broadcast_to(prefix, (4, 2, 16))
  x = jnp.concatenate([prefix, outputs['patches']], axis=1)
  block = jax.jit(Block(num_heads=2, mlp_dim=24).apply)
  for i in range(2):
    layer = dict(params[f'block_{i}'])
    rows = layer.pop('cls_pos_embedding'), np.zeros((1, 1, 16))
    if kind is Learned:
      table = layer.pop('pos_embedding')
    else:
      table_x, table_y = (layer.pop(f'pos_embedding_{a}') for a in 'xy')
      table = np.concatenate(
        [table_x + np.zeros((1, 2, 1, 1)), table_y + np.zeros((1, 1, 6, 1))], -1
      )
    added = np.concatenate([*rows, table.reshape(1, 12, 16)], axis=1)
    x = block({'params': layer}, x + added.astype('f'))
    np.testing.assert_allclose(outputs[f'block_{i}'], x, atol=2e-5)


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


def test_sincos2d_is_the_formula_cell_by_cell():
  table = SinCos2d().table({}, (3, 5), 16)
  assert table.shape == (3, 5, 16) and table.dtype == np.float32
  for row in range(3):
    for col in range(5):
      waves = [10_000 ** -(i / 3) for i in range(4)]
      expected = [
        function(position * wave)
        for position in (col, row)
        for function in (np.sin, np.cos)
        for wave in waves
      ]
      np.testing.assert_allclose(table[row, col], expected, atol=1e-6)


@pytest.mark.parametrize('width', [4, 18])
def test_sincos2d_reports_an_invalid_width(width):
  with pytest.raises(ValueError, match=f'got width {width}.*multiple of 4'):
    SinCos2d().table({}, (2, 2), width)


# Contract.


@pytest.mark.parametrize(
  'positions', [Relative(), Learned2d(at='layers_shared')], ids=str
)
def test_scan_is_the_loop(positions):
  assert_scan_is_the_loop(tiny(posemb=positions))


@pytest.mark.slow
@pytest.mark.parametrize(
  'positions, pooling',
  [
    (Relative(), Mean(num_registers=1)),
    (Learned(at='layers'), Map(num_registers=1)),
    (Learned2d(at='layers_shared'), REGISTER),
  ],
)
def test_scan_remat_bfloat16_and_gradients(positions, pooling):
  model = tiny(posemb=positions, pooling=pooling)
  params = random_params(model)
  expected, grads = logits_and_grads(model, params)
  for name, grad in tree.flatten(grads).items():
    if not name.endswith('key/bias'):  # it changes no softmax
      assert np.abs(grad).max() > 1e-6, name
  scanned = model.clone(scan=True, remat='full')
  actual, scanned_grads = logits_and_grads(scanned, stack_layers(params))
  np.testing.assert_allclose(actual, expected, atol=1e-5)
  assert_trees_close(scanned_grads, stack_layers(grads), atol=1e-4, rtol=1e-3)
  errors = compare_to_bfloat16(model, params, (expected, grads))
  assert max(errors) < 0.1


@pytest.mark.parametrize('positions', ALL[:4], ids=str)
def test_hybrids_have_any_positions(positions):
  hybrid = Hybrid(1, stages=(1,))
  model = tiny(posemb=positions, embedding=hybrid, num_classes=None)
  images = jax.ShapeDtypeStruct((2, 16, 24, 3), jnp.float32)
  variables = jax.eval_shape(model.init, jax.random.key(0), images)
  assert jax.eval_shape(model.apply, variables, images).shape == (2, 16)


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'posemb': Learned2d(), 'width': 15, 'num_heads': 3}, 'is 15.*an even'),
    (
      {'posemb': Relative(), 'attention': 'xla'},
      "'xla' is fused.*Use 'einsum' or 'auto'",
    ),
  ],
)
def test_invalid_combinations(fields, message):
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(tiny(**fields).init, jax.random.key(0), IMAGES)


def test_places_are_checked():
  with pytest.raises(ValueError, match="at='everywhere' must be one of 'stem'"):
    Learned(at='everywhere')


# Resizing.


def resized(model, params, images):
  """Parameters for images of another size, each table by its own class."""
  fresh = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  params, out = tree.flatten(params), {}
  for path, want in tree.flatten(fresh).items():
    out[path] = params[path]
    if want.shape != params[path].shape:
      out[path] = resample.resize_parameter(
        model, path, params[path], want.shape
      )
    assert out[path].shape == want.shape, path
  return tree.unflatten(out)


@pytest.mark.parametrize('positions', ALL, ids=str)
def test_other_sizes_are_an_error_that_resizing_solves(positions):
  model = tiny(posemb=positions)
  params = random_params(model)
  larger = np.zeros((1, 16, 16, 3), 'f')
  with pytest.raises(ValueError, match=r'need a table .*embedding.* of .*x8'):
    jax.eval_shape(model.apply, {'params': params}, larger)
  for scan in (False, True):
    other = model.clone(scan=scan)
    params = stack_layers(params) if scan else params
    found = {'params': resized(other, params, larger)}
    assert jax.eval_shape(other.apply, found, larger).shape == (1, 5)


def test_what_is_no_table_or_differs_otherwise_is_not_resized():
  table = np.zeros((1, 2, 3, 8))
  for name, shape in (
    ('cls_pos_embedding', (1, 4, 4, 8)),
    ('pos_embedding', (1, 4, 4, 16)),
    ('pos_embedding', (4, 4, 8)),
  ):
    for positions in (*ALL, Learned(), SinCos2d(), PositionEmbedding()):
      assert positions.resize(name, table, shape) is None


def test_resizing_patches_and_channels():
  kernel = RNG.standard_normal((4, 2, 3, 16)).astype('f')
  patches = PatchEmbedding((4, 2))

  def resize(shape, path='embedding/kernel', **options):
    return patches.resize(path, kernel, shape, **options)

  assert resize((2, 2, 3, 16)) is None
  assert resize((4, 2, 1, 16), method='bilinear') is None
  assert resize((4, 2, 3, 8), method='bilinear') is None
  assert resize((2, 2, 3, 16), path='head/kernel', method='bilinear') is None
  grey = resize((2, 2, 1, 16), method='bilinear', adapt_channels=True)
  summed = resize((4, 2, 1, 16), adapt_channels=True)
  np.testing.assert_allclose(summed, kernel.sum(2, keepdims=True), rtol=1e-6)
  smaller = resample.resize_kernel(summed, (2, 2), 'bilinear')
  np.testing.assert_allclose(grey, smaller, rtol=1e-6)
  more = resize((4, 2, 5, 16), adapt_channels=True)
  np.testing.assert_allclose(more[:, :, 4], kernel[:, :, 1] * 3 / 5, rtol=1e-6)


def test_resizing_offsets():
  """Tables of rows and columns, in units of the last ones."""

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


# Adding one: a class, and nothing else.


@dataclasses.dataclass(frozen=True)
class Rotary(PositionEmbedding):
  """Rotation of queries and keys by their column, with learned frequencies."""

  in_layers = True

  def queries_and_keys(self, module, q, k, layout):
    speed = module.param('speed', jax.nn.initializers.ones, (q.shape[-1] // 2,))
    column = np.arange(layout.num_tokens) - layout.prefix
    column = np.where(column < 0, 0, column % layout.grid[1])
    angle = column[:, None, None] * speed.reshape(1, 1, -1)
    turn = jnp.cos(angle)[None], jnp.sin(angle)[None]

    def rotate(x):
      a, b = jnp.split(x, 2, axis=-1)
      cos, sin = turn
      return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    return rotate(q), rotate(k)


@dataclasses.dataclass(frozen=True)
class Rows(PositionEmbedding):
  """One learned embedding per row."""

  def add_to_patches(self, module, x, grid):
    rows = posemb.table_of_grid(
      module, 'rows', (1, grid[0], 1, x.shape[-1]), (1, 2), init_std=1.0
    )
    x = x.reshape(x.shape[0], *grid, -1) + rows
    return x.reshape(x.shape[0], -1, x.shape[-1])

  def resize(self, name, table, shape, method='paper'):
    if name != 'rows' or not posemb.same_but(table, shape, (-3,)):
      return None
    return resample.resize(table, shape[-3:-1], method)


def test_a_position_embedding_of_our_own_in_the_layers():
  model = tiny(posemb=Rotary())
  params = random_params(model)
  assert all('speed' in params[f'block_{i}']['attn'] for i in range(2))
  out = apply(model, params)
  scanned = apply(model.clone(scan=True), stack_layers(params))
  np.testing.assert_allclose(scanned, out, atol=1e-5)
  plain = tree.flatten(params)
  plain = {k: v for k, v in plain.items() if not k.endswith('speed')}
  plain = apply(model.clone(posemb=None), tree.unflatten(plain))
  assert np.abs(out - plain).max() > 1e-3


def test_a_position_embedding_of_our_own_at_the_stem_resizes_itself():
  model = tiny(posemb=Rows())
  params = random_params(model)
  assert params['rows'].shape == (1, 2, 1, 16)
  larger = np.zeros((1, 20, 12, 3), 'f')
  with pytest.raises(ValueError, match=r'need a table rows of 5x1 .* of 2x1'):
    jax.eval_shape(model.apply, {'params': params}, larger)
  found = resized(model, params, larger)
  assert apply(model, found, larger).shape == (1, 5)
  np.testing.assert_allclose(
    found['rows'][:, 2], params['rows'].mean(1), atol=1e-6
  )
