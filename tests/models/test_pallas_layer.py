"""Layers of the encoder as TPU kernels, interpreted: against plain layers.

No test here can show that a TPU runs them, see test_pallas_attention.py.
"""

import functools

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec
from processes import needs_libtpu, with_libtpu

from vit_jax.analysis import flops
from vit_jax.models import dense
from vit_jax.models.axial import AxialViT
from vit_jax.models.pallas import attention as pallas_attention
from vit_jax.models.pallas import choice
from vit_jax.models.pallas import layer as pallas_layer
from vit_jax.models.pallas.layer import KernelBlock, KernelLayers
from vit_jax.models.posemb import Layout, Relative
from vit_jax.models.vit import Block, Layers, PatchEmbedding, VisionTransformer
from vit_jax.parallel import sharding

B, N, D, M = 8, 13, 128, 256


def block(cls=KernelBlock, **fields):
  free = {'options': dense.BlockOptions(norm_eps=0.1, attention_dropout=0.1)}
  return cls(2, M, attention='einsum', **free | fields)


@functools.cache
def inputs():
  """Parameters, tokens, and a gradient of the result."""
  rng = np.random.default_rng(0)
  x, gradient = rng.standard_normal((2, B, N, D), np.float32)
  shapes = jax.eval_shape(block(Block).init, jax.random.key(0), x)
  params = jax.tree.map(
    lambda a: 0.1 * rng.standard_normal(a.shape, np.float32), shapes
  )
  return params, x, gradient


def output_and_gradients(params, x, gradient, cls=KernelBlock):
  out, pull = jax.vjp(block(cls).apply, params, x)
  return out, pull(gradient)


@functools.cache
def expected():
  return jax.jit(output_and_gradients, static_argnums=3)(*inputs(), Block)


def assert_expected(found):
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected())):
    atol = 5e-6 * max(1, np.abs(y).max())  # gradients of key biases are 0
    np.testing.assert_allclose(x, y, rtol=0, atol=atol)


def run(*arrays):
  """Run a new function, of which nothing has been compiled before."""
  return jax.jit(lambda *arrays: output_and_gradients(*arrays))(*arrays)


@pytest.mark.parametrize('rows', [104, 40, 16])
def test_a_layer_equals_a_plain_one(rows, monkeypatch):
  """All tokens in one program; in three, with 16 tokens that do not exist."""
  monkeypatch.setattr(pallas_layer, '_rows', lambda *args: rows)
  monkeypatch.setattr(pallas_layer, '_CHUNK', 128)
  assert_expected(run(*inputs()))


@pytest.mark.parametrize('axes', [{'data': 8}, {'data': 2, 'fsdp': 4}])
def test_examples_are_split_over_a_mesh(axes):
  mesh = sharding.make_mesh(**axes)
  split = NamedSharding(mesh, PartitionSpec(tuple(axes)))
  params, *arrays = inputs()
  params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
  with jax.set_mesh(mesh):
    assert_expected(run(params, *jax.device_put(arrays, split)))


def test_kernels_state_their_flops():
  kernels, scores = B * N * (4 * D * D + 2 * D * M), B * N * N * D
  params, x, _ = inputs()
  assert flops.count(block().apply, params, x) == 2 * kernels + 4 * scores
  found = flops.count(output_and_gradients, *inputs())
  assert found == (2 + 4) * kernels + (4 + 10) * scores


def test_simulated(monkeypatch, capfd):
  """Memory is full of NaN until it is written, as in the tests of attention."""
  simulated = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory='nan', num_cores_or_threads=2
  )
  monkeypatch.setattr(pallas_attention, 'INTERPRET', simulated)
  monkeypatch.setattr(pallas_layer, '_rows', lambda *args: 40)
  assert_expected(run(*inputs()))
  pltpu.reset_tpu_interpret_mode_state()
  assert 'RACE DETECTED' not in capfd.readouterr().out


def model(layers=KernelLayers(), **fields):
  fields |= {'num_classes': 3, 'attention': 'einsum', 'layers': layers}
  return VisionTransformer(D, 2, M, 2, PatchEmbedding(2), **fields)


def test_tokens_of_a_model_are_padded_to_whole_registers():
  """And layers may be scanned and computed again."""
  rng = np.random.default_rng(0)
  images = rng.standard_normal((2, 6, 6, 3), np.float32)  # 10 tokens
  looped = functools.partial(model, scan=True, remat='dots')
  shapes = jax.eval_shape(looped().init, jax.random.key(0), images)
  params = jax.tree.map(
    lambda a: 0.1 * rng.standard_normal(a.shape, np.float32), shapes
  )

  @functools.partial(jax.jit, static_argnums=0)
  def gradients(layers, params):
    def loss(params):
      out = looped(layers).apply(params, images, method='features')
      return (out['logits'] ** 2).sum(), (out['block_0'], out['tokens'])

    return jax.grad(loss, has_aux=True)(params)

  found, expected = (
    jax.tree.leaves(gradients(layers, params))
    for layers in (KernelLayers(), Layers())
  )
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, y, 0, 5e-6 * max(1, np.abs(y).max()))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_check_before_a_run(dtype, monkeypatch):
  device = jax.devices()[0]
  check = functools.partial(choice.check_layer, device=device)
  error = check(model(dtype=dtype))
  assert error < (1e-5 if dtype == 'float32' else 0.1), error
  monkeypatch.setattr(pallas_layer, '_chunks', lambda hidden: [slice(0, 128)])
  with pytest.raises(ArithmeticError, match='is allowed'):
    check(model(dtype=dtype))


def test_tensor_parallelism_is_refused():
  params, x, _ = inputs()
  mesh, refused = sharding.make_mesh(data=4, model=2), 'whole layers on each'
  with jax.set_mesh(mesh), pytest.raises(ValueError, match=refused):
    jax.eval_shape(block().apply, params, x)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'train': True}, 'a model without dropout'),  # of attention
    (
      {'train': True, 'dropout': 0.1, 'options': dense.BlockOptions()},
      'a model without dropout',
    ),
    (
      {'options': dense.BlockOptions(layerscale_init=1.0)},
      'layers of the paper',
    ),
    (
      {'options': dense.BlockOptions(mlp=dense.SwiGlu())},
      'layers of the paper',
    ),
    ({'options': dense.BlockOptions(norm='rms')}, 'layers of the paper'),
    ({'options': dense.BlockOptions(post_norm=True)}, 'layers of the paper'),
    ({'posemb': Relative(), 'layout': Layout((1, N))}, 'layers of the paper'),
  ],
)
def test_other_layers_are_refused(fields, message):
  _, x, _ = inputs()
  rngs = {'dropout': jax.random.key(0)}
  init = block(Block, **fields).init
  params = jax.eval_shape(init, {'params': rngs['dropout'], **rngs}, x)
  with pytest.raises(ValueError, match=f'KernelLayers need {message}'):
    jax.eval_shape(block(**fields).apply, params, x, rngs=rngs)


def test_layers_of_other_kinds_are_refused():
  with pytest.raises(ValueError, match='one after the other, got Layers'):
    pallas_layer.with_kernels(model(Layers()))
  axial = AxialViT(D, 2, M, 2, PatchEmbedding(2), layers=KernelLayers())
  images = jax.ShapeDtypeStruct((1, 6, 6, 3), 'float32')
  with pytest.raises(ValueError, match='of the paper, got AxialBlock'):
    jax.eval_shape(axial.init, jax.random.key(0), images)


@pytest.mark.parametrize(
  ('width', 'hidden', 'dtype', 'fits'),
  [
    (384, 1536, 'bfloat16', True),  # S/16
    (768, 3072, 'bfloat16', True),  # B/16
    (768, 3072, 'float32', True),
    (384, 1536, 'float16', False),
    (1024, 4096, 'bfloat16', True),  # L/16
    (1280, 5120, 'bfloat16', False),  # H/14
    (192, 768, 'bfloat16', False),  # Ti/16
  ],
)
def test_which_widths_fit(width, hidden, dtype, fits):
  x = jax.ShapeDtypeStruct((8, 197, width), dtype)
  assert (pallas_layer.obstacle(x, hidden) is None) == fits


@pytest.mark.slow
@needs_libtpu
def test_compiles_for_tpus():
  code = """
from vit_jax import config
from vit_jax.tools.compile import lowering

training = config.load('configs/pretrain_paper.py:imagenet,B/16')
config.override(training, ['model.dropout=0.0', 'model.depth=1'])
row = lowering.measure(training, lowering.find_devices('v6e:2x2'))
assert row['layers'] == 'KernelLayers' and row['kernels_not_counted'] == 0
"""
  with_libtpu(code)
