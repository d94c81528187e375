"""The TPU kernel, interpreted: against the formula in float64, and on meshes.

No test here can show that a TPU runs it. Tests show that the compiler accepts
it, and that in a simulation of a TPU's memory it has no race and stays within
its blocks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import formula, logits_and_grads, random_params, tiny
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec
from processes import needs_libtpu, with_libtpu

from vit_jax.models.attention import attention
from vit_jax.models.pallas import attention as pallas_attention
from vit_jax.parallel.sharding import make_mesh

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
SHAPES = {  # name: tokens, heads, width of a head
  'one token': (1, 2, 64),
  'few': (5, 3, 64),
  'B/16': (197, 2, 64),
  'heads across registers': (21, 3, 80),
  'narrow heads': (9, 8, 32),
}


def draw(tokens, heads, width, dtype, batch=2):
  """q, k, v and the gradient of the output."""
  rng = np.random.default_rng(0)
  shape = (4, batch, tokens, heads, width)
  return jnp.asarray(1.5 * rng.standard_normal(shape), dtype)


def output_and_gradients(q, k, v, do, lengths=None, implementation='pallas'):
  def attend(*qkv):
    if implementation == 'pallas':
      return pallas_attention.attend(*qkv, lengths)
    return attention(*qkv, implementation=implementation)

  out, vjp = jax.vjp(attend, q, k, v)
  return out, *vjp(do)


@pytest.mark.parametrize('name', SHAPES)
def test_equals_the_formula(name, shapes=SHAPES):
  arrays = draw(*shapes[name], jnp.float32)
  # A new function, of which nothing has been compiled with another plan.
  found = jax.jit(lambda *arrays: output_and_gradients(*arrays))(*arrays)
  for x, expected in zip(found, formula(*arrays), strict=True):
    atol = 2e-6 * max(1, abs(expected).max())
    np.testing.assert_allclose(x, expected, rtol=0, atol=atol)


def test_bfloat16_is_as_near_the_formula_as_xla():
  arrays = draw(*SHAPES['heads across registers'], jnp.bfloat16)
  expected = formula(*arrays)

  def errors(implementation):
    fn = functools.partial(output_and_gradients, implementation=implementation)
    found = jax.jit(fn)(*arrays)
    assert {x.dtype for x in found} == {jnp.dtype(jnp.bfloat16)}
    pairs = zip(found, expected, strict=True)
    return [abs(np.asarray(x, np.float64) - y).mean() for x, y in pairs]

  pairs = zip(errors('pallas'), errors('xla'), strict=True)
  assert all(ours <= 1.1 * theirs for ours, theirs in pairs)


def test_heads_that_do_not_fit_are_padded(monkeypatch):
  monkeypatch.setattr(pallas_attention, '_BUDGET', 1.3 * 2**20)
  assert pallas_attention._plan(40, 8, 80, 'float32').width == 128
  test_equals_the_formula('padded', {'padded': (40, 8, 80)})


def test_huge_scores_do_not_overflow():
  arrays = draw(5, 2, 64, jnp.float32) * 100
  found = pallas_attention.attend(*arrays[:3])
  np.testing.assert_allclose(found, formula(*arrays)[0], rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
  'axes', [{'data': 8}, {'data': 2, 'fsdp': 2, 'model': 2}]
)
def test_examples_and_heads_are_split_over_a_mesh(axes):
  mesh = make_mesh(**axes)
  of_batch = tuple(name for name in axes if name != 'model')
  of_heads = 'model' if 'model' in axes else None
  sharding = NamedSharding(mesh, PartitionSpec(of_batch, None, of_heads))
  arrays = draw(5, 4, 64, jnp.float32, batch=8)
  lengths = np.arange(8, dtype=np.int32) % 5 + 1
  with jax.set_mesh(mesh):
    split = [jax.device_put(x, sharding) for x in arrays]
    compiled = jax.jit(output_and_gradients).lower(*split, lengths).compile()
    assert 'all-gather' not in compiled.as_text()
    on_mesh = compiled(*split, lengths)
  for x, expected in zip(on_mesh, formula(*arrays, lengths), strict=True):
    assert x.sharding.is_equivalent_to(sharding, x.ndim)
    np.testing.assert_allclose(x, expected, atol=1e-5)


def test_what_does_not_divide_is_not_split():
  mesh = make_mesh(data=4, model=2)
  arrays = draw(5, 3, 64, jnp.float32, batch=1)
  with jax.set_mesh(mesh):
    found = jax.jit(pallas_attention.attend)(*arrays[:3])
  np.testing.assert_allclose(found, formula(*arrays)[0], atol=1e-5)


@pytest.mark.parametrize(
  ('tokens', 'heads', 'width', 'dtype'),
  [
    (197, 12, 64, jnp.bfloat16),  # B/16
    (577, 16, 64, jnp.bfloat16),  # L/16 at 384 px
    (257, 16, 80, jnp.bfloat16),  # H/14
    (256, 16, 104, jnp.bfloat16),  # G/14
  ],
)
def test_lowers_for_tpus(tokens, heads, width, dtype):
  like = jax.ShapeDtypeStruct((2, tokens, heads, width), dtype)
  traced = jax.jit(output_and_gradients).trace(*[like] * 4)
  text = traced.lower(lowering_platforms=('tpu',)).as_text()
  assert text.count('@tpu_custom_call') == 2
  # The scores, [.., tokens, tokens], are in no memory but the kernel's.
  assert f'{tokens}x{tokens}x' not in text


def test_a_model_has_the_gradients_of_einsum():
  model = tiny(attention='einsum')
  params = random_params(model, scale=0.1)
  expected = logits_and_grads(model, params)
  found = logits_and_grads(model.clone(attention='pallas'), params)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.fixture
def simulated(monkeypatch, capfd):
  """Simulate the memory of a TPU with two cores, which share the grid.

  Memory is full of NaN until it is written. Reads and writes outside of a block
  raise. Races between the programs of the grid, and between these and the
  copies of blocks, are looked for.
  """
  params = pltpu.InterpretParams(
    detect_races=True,
    out_of_bounds_reads='raise',
    uninitialized_memory='nan',
    num_cores_or_threads=2,
    random_seed=0,
  )
  monkeypatch.setattr(pallas_attention, 'INTERPRET', params)
  yield params
  pltpu.reset_tpu_interpret_mode_state()
  assert 'RACE DETECTED' not in capfd.readouterr().out


@pytest.mark.parametrize(
  ('tokens', 'heads', 'width', 'dtype'),
  [
    (21, 3, 80, 'float32'),
    slow(21, 3, 80, 'bfloat16'),
    # Tokens and head dimensions of published models, fewer heads.
    slow(197, 12, 64, 'bfloat16'),  # B/16
    slow(257, 2, 80, 'bfloat16'),  # H/14
    slow(577, 2, 64, 'bfloat16'),  # B/16 at 384 px
  ],
)
def test_simulated(simulated, tokens, heads, width, dtype):
  arrays = draw(tokens, heads, width, dtype)
  # A new function, of which nothing has been compiled without the simulation.
  found = jax.jit(lambda *arrays: output_and_gradients(*arrays))(*arrays)
  for x, expected in zip(found, formula(*arrays), strict=True):
    # bfloat16 has 8 bits; weights, slopes and results are rounded.
    bound = 5e-6 if dtype == 'float32' else 2**-6
    bound *= max(1, abs(expected).max())
    x = np.asarray(x, np.float64)
    np.testing.assert_allclose(x, expected, rtol=0, atol=bound)


# Tokens of models with patches of 32, 16 and 14 px and images of 224 and 384
# px, with and without a class token.
TOKENS = (49, 50, 144, 145, 196, 197, 256, 257, 261, 576, 577, 729, 730)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('width', [64, 72, 80, 88, 104, 128])
def test_takes_published_shapes(width, dtype):
  for tokens in TOKENS if dtype == 'bfloat16' else TOKENS[:-2]:
    for heads in (1, 3, 6, 12, 16, 24):
      q = jax.ShapeDtypeStruct((8, tokens, heads, width), dtype)
      assert pallas_attention.obstacle(q, q, q) is None, q


@pytest.mark.slow
@needs_libtpu
def test_compiles_for_tpus():
  code = """
import jax
from vit_jax.models.pallas import choice
from vit_jax.models.vit import PatchEmbedding
from vit_jax.models.vit import VisionTransformer
from vit_jax.tools.compile import lowering

CASES = [  # side of images in patches, heads, head dimension, dtype
  (14, 12, 64, 'bfloat16'),
  (14, 3, 64, 'float32'),
  (16, 16, 80, 'bfloat16'),
  (27, 16, 72, 'bfloat16'),  # padded heads
]
for topology in ('v4:2x2x1', 'v5e:2x2', 'v5p:2x2x1', 'v6e:2x2'):
  device = lowering.find_devices(topology)[0]
  for side, heads, head_dim, dtype in CASES:
    model = VisionTransformer(
      heads * head_dim, 1, 64, heads, PatchEmbedding(2), dtype=dtype,
      attention='pallas',
    )
    images = jax.ShapeDtypeStruct((1, 2 * side, 2 * side, 3), 'float32')
    layer = choice.compile_layer(model, images, 2, device)
    text = layer.as_text()
    assert text.count('"tpu_custom_call"') == 2, (topology, side)
    print(topology, side)
"""
  assert len(with_libtpu(code).splitlines()) == 16


def test_one_query_is_left_to_xla():
  q, k, v, _ = draw(5, 2, 8, jnp.float32)
  out = attention(q[:, :1], k, v, implementation='pallas')
  expected = attention(q[:, :1], k, v, implementation='xla')
  np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda q, k, v: (q[:, :3], k, v), r'\(2, 3, 2, 64\)'),
    (lambda q, k, v: [x.astype('float16') for x in (q, k, v)], 'float16'),
    (
      lambda q, k, v: [jnp.zeros((1, 5000, 2, 64), q.dtype)] * 3,
      'fewer tokens, got 5000',
    ),
  ],
)
def test_mistakes(change, message):
  qkv = draw(5, 2, 64, jnp.bfloat16)[:3]
  with pytest.raises(ValueError, match=f"'pallas' needs .*{message}"):
    attention(*change(*qkv), implementation='pallas')
