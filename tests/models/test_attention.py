"""Every implementation of attention against the formula in float64."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import formula

from vit_jax.models.attention import attention, default

RUNS_ANYWHERE = ('auto', 'xla', 'einsum')


def random_qkv(dtype=jnp.float32, queries=5, tokens=7, scale=1.0):
  rng = np.random.default_rng(0)
  shapes = [(2, queries, 3, 8), (2, tokens, 3, 8), (2, tokens, 3, 8)]
  return [jnp.asarray(scale * rng.standard_normal(s), dtype) for s in shapes]


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
  out = attention(*qkv, implementation=implementation)
  assert out.dtype == options.get('dtype', jnp.float32)
  out, (expected, *_) = np.asarray(out, np.float32), formula(*qkv)
  np.testing.assert_allclose(out, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize('implementation', RUNS_ANYWHERE)
def test_softmax_is_float32_under_bfloat16(implementation):
  lowered = jax.jit(
    lambda *qkv: attention(*qkv, implementation=implementation)
  ).lower(*random_qkv(jnp.bfloat16))
  exponentials = re.findall(r'exponential .*xi?(\w+)>', lowered.as_text())
  assert set(exponentials) == {'f32'}


def test_dropout_drops_single_weights_and_keeps_their_mean():
  q, k, _ = random_qkv(queries=64, tokens=32)
  ones = jnp.ones((2, 32, 3, 1))
  ones = jnp.tile(ones, (1, 1, 1, 8))
  # With values of 1 the output is the sum of the weights: 1 without dropout.
  out = attention(q, k, ones, dropout_rate=0.25, dropout_rng=jax.random.key(0))
  sums = np.asarray(out[..., 0])
  assert abs(sums.mean() - 1) < 0.02
  assert len(np.unique(sums.round(5))) > 0.9 * sums.size  # nothing is shared
  np.testing.assert_allclose(attention(q, k, ones), 1, atol=1e-6)


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


@pytest.mark.skipif(
  jax.default_backend() != 'gpu', reason='needs an NVIDIA GPU'
)
@pytest.mark.parametrize('implementation', ['cudnn', 'auto'])
def test_cudnn_stays_near_the_formula(implementation):
  options = {'dtype': jnp.bfloat16}
  test_equals_the_formula(implementation, options, 1e-7, 3 * 2**-7)


def on(platform):
  """Context of a mesh of such devices, which need not be here."""
  device = jax.sharding.AbstractDevice(
    device_kind='any', num_cores=1, platform=platform
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
      return str(
        jax.make_jaxpr(
          lambda *qkv: attention(*qkv, implementation=implementation)
        )(*qkv)
      )

  assert traced('auto') == traced(expected)
  assert traced('einsum') != traced('xla')


@pytest.mark.parametrize(
  'shape, dtype, capability, expected',
  [
    ((2, 197, 12, 64), 'bfloat16', '8.0', 'cudnn'),
    ((2, 197, 12, 128), 'float16', '9.0', 'cudnn'),
    ((2, 197, 12, 64), 'float32', '8.0', 'xla'),
    ((2, 1, 12, 64), 'bfloat16', '8.0', 'xla'),
    ((2, 197, 12, 60), 'bfloat16', '8.0', 'xla'),
    ((2, 197, 12, 136), 'bfloat16', '8.0', 'xla'),
    ((2, 197, 12, 64), 'bfloat16', '7.5', 'xla'),
    ((2, 197, 12, 64), 'bfloat16', 'gfx90a', 'xla'),
  ],
)
def test_default_on_gpus(shape, dtype, capability, expected, monkeypatch):
  device = types.SimpleNamespace(compute_capability=capability)
  monkeypatch.setattr(jax, 'devices', lambda: [device])
  with on('gpu'):
    assert default(jax.ShapeDtypeStruct(shape, dtype)) == expected
