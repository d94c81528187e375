"""Every implementation of attention against the formula in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import IMAGES, formula, random_params, tiny

from vit_jax.models import dense
from vit_jax.models.attention import (
  Attention,
  attention,
  checked_cudnn,
  default,
)
from vit_jax.models.dense import BlockOptions
from vit_jax.models.pooling import Map
from vit_jax.models.rotary import RotaryAxial

RUNS_ANYWHERE = ('auto', 'xla', 'einsum')


def run(implementation):
  return jax.jit(functools.partial(attention, implementation=implementation))


def random_qkv(dtype=jnp.float32, queries=5, tokens=7, scale=1.0):
  rng = np.random.default_rng(0)
  shapes = [(2, queries, 3, 8), (2, tokens, 3, 8), (2, tokens, 3, 8)]
  return [(scale * rng.standard_normal(s)).astype(dtype) for s in shapes]


# bfloat16 rounds weights and the output to 8 bits, relative to |v| <= 3.
@pytest.mark.parametrize('implementation', RUNS_ANYWHERE)
@pytest.mark.parametrize(
  'options, rtol, atol',
  [
    ({'queries': 1}, 1e-7, 2e-6),
    ({'queries': 5}, 1e-7, 2e-6),
    ({'dtype': jnp.bfloat16}, 1e-7, 3 * 2**-7),
    ({'scale': 100.0}, 1e-4, 1e-2),  # huge scores do not overflow
  ],
)
def test_equals_the_formula(implementation, options, rtol, atol):
  qkv = random_qkv(**options)
  out = run(implementation)(*qkv)
  assert out.dtype == options.get('dtype', jnp.float32)
  out, (expected, *_) = np.asarray(out, np.float32), formula(*qkv)
  np.testing.assert_allclose(out, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize('queries', [1, 2])
def test_one_or_two_queries_need_no_kernel(queries):
  qkv = random_qkv(queries=queries)
  expected, *_ = formula(*qkv)
  np.testing.assert_allclose(run('pallas')(*qkv), expected, atol=2e-6)


@pytest.mark.parametrize('implementation', RUNS_ANYWHERE)
def test_softmax_is_float32_under_bfloat16(implementation):
  lowered = run(implementation).lower(*random_qkv(jnp.bfloat16))
  exponentials = re.findall(r'exponential .*xi?(\w+)>', lowered.as_text())
  assert set(exponentials) == {'f32'}


def test_dropout_drops_single_weights_and_keeps_their_mean():
  q, k, _ = random_qkv(queries=64, tokens=32)
  ones = np.ones((2, 32, 3, 8), np.float32)
  # With values of 1 the output is the sum of the weights: 1 without dropout.
  drop = jax.jit(functools.partial(attention, dropout_rate=0.25))
  out = drop(q, k, ones, dropout_rng=jax.random.key(0))
  sums = np.asarray(out[..., 0])
  assert abs(sums.mean() - 1) < 0.02
  assert len(np.unique(sums.round(5))) > 0.9 * sums.size  # nothing is shared
  np.testing.assert_allclose(run('auto')(q, k, ones), 1, atol=1e-6)


def test_what_cannot_be_done_is_an_error():
  qkv, key = random_qkv(), jax.random.key(0)
  with pytest.raises(ValueError):
    attention(*qkv, implementation='flash')
  logits = jnp.zeros((2, 3, 5, 7))
  for name in ('xla', 'cudnn', 'pallas'):
    for options in (
      {'dropout_rate': 0.1, 'dropout_rng': key},
      {'position_logits': logits},
    ):
      with pytest.raises(ValueError, match=f"attention='{name}'.*'einsum'"):
        attention(*qkv, implementation=name, **options)


@pytest.mark.skipif(jax.default_backend() != 'gpu', reason='needs CUDA')
@pytest.mark.parametrize('implementation', ['cudnn', 'auto'])
def test_cudnn_stays_near_the_formula(implementation):
  options = {'dtype': jnp.bfloat16}
  test_equals_the_formula(implementation, options, 1e-7, 3 * 2**-7)


def on(platform, kind='any'):
  """Context of a mesh of such devices, which need not be here."""
  device = jax.sharding.AbstractDevice(
    device_kind=kind, num_cores=1, platform=platform
  )
  return jax.sharding.use_abstract_mesh(
    jax.sharding.AbstractMesh((1,), ('data',), abstract_device=device)
  )


@pytest.mark.parametrize(
  ('platform', 'expected'), [('tpu', 'xla'), ('cpu', 'einsum')]
)
def test_auto_follows_the_devices_of_the_mesh(platform, expected):
  qkv = random_qkv()

  def traced(implementation):
    with on(platform):
      return str(jax.make_jaxpr(run(implementation))(*qkv))

  assert traced('auto') == traced(expected)
  assert traced('einsum') != traced('xla')


@pytest.mark.parametrize(
  ('head_dim', 'dtype', 'expected'),
  [
    (64, 'bfloat16', 'cudnn'),
    (128, 'float16', 'cudnn'),
    (64, 'float32', 'einsum'),
    (60, 'bfloat16', 'einsum'),
    (136, 'bfloat16', 'einsum'),
  ],
)
def test_default_on_gpus_that_are_only_described(head_dim, dtype, expected):
  with on('gpu'):
    assert default(head_dim, dtype) == expected


@pytest.fixture
def cudnn(monkeypatch):
  """Give cuDNN's attention a stand-in; returns the shapes of its calls.

  Like cuDNN in JAX, it trains on even numbers of tokens only. What it computes
  for tokens of padding is NaN.
  """
  calls, real = [], jax.nn.dot_product_attention

  def mark(x, lengths):
    rows = jnp.arange(x.shape[1])[None] < lengths[:, None]
    return jnp.where(rows[..., None, None], x, jnp.nan)

  @jax.custom_vjp
  def attend(q, k, v, queries, keys):
    return forward(q, k, v, queries, keys)[0]

  def forward(q, k, v, queries, keys):
    options = {'query_seq_lengths': queries, 'key_value_seq_lengths': keys}
    out, pull = jax.vjp(lambda *qkv: real(*qkv, **options), q, k, v)
    return mark(out, queries), (pull, queries, keys)

  def backward(saved, gradient):
    pull, queries, keys = saved
    q, k, v = pull(gradient)
    return mark(q, queries), mark(k, keys), mark(v, keys), None, None

  attend.defvjp(forward, backward)

  def stand_in(q, k, v, *, implementation, query_seq_lengths=None, **more):
    if implementation != 'cudnn':
      return real(q, k, v, implementation=implementation)
    assert q.shape[1] % 2 == k.shape[1] % 2 == 0
    calls.append((q.shape, k.shape))
    all_of = [jnp.full(len(x), x.shape[1], jnp.int32) for x in (q, k)]
    queries = all_of[0] if query_seq_lengths is None else query_seq_lengths
    keys = more.get('key_value_seq_lengths', all_of[1])
    return attend(q, k, v, queries, keys)

  monkeypatch.setattr(jax.nn, 'dot_product_attention', stand_in)
  return calls


@pytest.mark.parametrize(
  ('queries', 'tokens'), [(5, 7), (6, 7), (5, 8), (6, 8), (7, 7)]
)
def test_padding_for_cudnn_changes_nothing(queries, tokens, cudnn):
  qkv = random_qkv(queries=queries, tokens=tokens)
  do = np.random.default_rng(1).standard_normal(qkv[0].shape, np.float32)

  @functools.partial(jax.jit, static_argnums=2)
  def run(qkv, do, name, lengths=None):
    fn = functools.partial(attention, implementation=name, lengths=lengths)
    out, pull = jax.vjp(fn, *qkv)
    return out, *pull(do)

  found = run(qkv, do, 'cudnn')
  for x, expected in zip(found, formula(*qkv, do), strict=True):
    np.testing.assert_allclose(x, expected, atol=5e-6)
  assert len(cudnn) == 1
  lengths = np.int32([3, tokens])
  found, expected = (run(qkv, do, x, lengths) for x in ('cudnn', 'einsum'))
  np.testing.assert_allclose(found[0], expected[0], atol=5e-6)


@pytest.mark.parametrize(
  'fields',
  [
    {'remat': 'dots', 'scan': True},  # 13 tokens
    {
      **{'posemb': RotaryAxial(), 'pooling': Map(), 'depth': 1},
      'block': BlockOptions(qk_norm=True, sub_norm=('attn', 'mlp')),
    },
  ],
  ids=['scan', 'rope, map and norms'],
)
def test_a_model_with_fused_attention_is_that_with_einsum(fields, cudnn):
  """Features of all layers, maps, recorded q and k, and gradients."""
  model = tiny(**fields, attention='einsum')
  params = random_params(model)

  def features(params, attention):
    out, recorded = model.clone(attention=attention).apply(
      {'params': params},
      IMAGES,
      maps=(0, -1),
      method='features',
      mutable='intermediates',
    )
    return out['logits'].sum(), (out, recorded)

  run = functools.partial(jax.jit, static_argnums=1)
  run = run(jax.value_and_grad(features, has_aux=True))
  expected, found = run(params, 'einsum'), run(params, 'cudnn')
  assert cudnn
  assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, expected)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5),
    *(found, expected),
  )


def test_a_gate_multiplies_the_output_of_attention():
  """As timm's Attention(gated=True, scale_norm=True) does, by its formula."""
  options = BlockOptions(gate=True, sub_norm=('attn',))
  module = Attention(3, options, implementation='einsum')
  x = np.random.default_rng(0).standard_normal((2, 5, 24), np.float32)
  params = random_params(module, (x, x))
  assert params['gate'].keys() == {'kernel'}
  out = jax.jit(module.apply)({'params': params}, x, x)
  bare = Attention(3, BlockOptions(sub_norm=('attn',)), implementation='einsum')
  # Of an output layer that is the identity, and so of what the gate multiplies.
  eye = np.eye(24, dtype='f').reshape(3, 8, 24)
  inner = {k: v for k, v in params.items() if k != 'gate'}
  inner['out'] = {'kernel': eye, 'bias': np.zeros(24, 'f')}
  inner = np.asarray(jax.jit(bare.apply)({'params': inner}, x, x))
  gate = params['gate']['kernel'].reshape(24, 24)
  gated = inner / (1 + np.exp(-(x @ gate)))
  expected = gated @ params['out']['kernel'].reshape(24, 24)
  expected += params['out']['bias']
  np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize('works', [True, False])
def test_the_first_use_on_a_gpu_is_checked(works, cudnn, monkeypatch, capsys):
  """Models of a user's own code, inside of jit and with gradients."""
  monkeypatch.setattr(dense, 'platform', lambda: 'gpu')
  if not works:
    fused = jax.nn.dot_product_attention
    wrong = lambda q, k, v, **more: fused(1.3 * q, k, v, **more)  # noqa: E731
    monkeypatch.setattr(jax.nn, 'dot_product_attention', wrong)
  qkv = random_qkv(jnp.bfloat16)
  checked_cudnn.cache_clear()
  with jax.set_mesh(jax.make_mesh((2,), ('data',), devices=jax.devices()[:2])):
    for _ in range(2):
      jax.jit(jax.grad(lambda *x: attention(*x).sum().astype('f')))(*qkv)
  checked_cudnn.cache_clear()
  said = capsys.readouterr().out
  expected = 'cudnn, ' if works else 'einsum, because of cudnn: ArithmeticError'
  assert said.count('attention: ') == 1
  assert f'attention: {expected}' in said
  assert ((2, 6, 3, 8), (2, 8, 3, 8)) in cudnn or not works
