"""The measured choice of attention, on a CPU with a clock of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import TINY_VIT

from vit_jax.models import attention_choice, pallas_attention
from vit_jax.models.attention import attention
from vit_jax.models.attention_choice import Chooser, compile_layer, error
from vit_jax.models.layers import BlockOptions
from vit_jax.models.posemb import Relative
from vit_jax.models.vit import VisionTransformer

MODEL = VisionTransformer(**TINY_VIT)
IMAGES = jax.ShapeDtypeStruct((1, 8, 12, 3), jnp.float32)
CASE = '13 tokens, 2 heads of 8, float32, forward and backward, cpu'


def chooser(*names, seconds=(), **fields):
  """Return a Chooser whose layers take the given seconds, and its reports."""
  reports, clock = [], iter(seconds)
  mesh = jax.make_mesh((2,), ('data',), devices=jax.devices()[:2])
  made = Chooser(
    4,
    mesh,
    report=reports.append,
    candidates={'cpu': names},
    timer=lambda *_: next(clock),
    **fields,
  )
  return made, reports


def einsum(*qkv):
  return attention(*qkv, implementation='einsum')


@jax.custom_vjp
def wrong_gradient(q, k, v):
  return einsum(q, k, v)


wrong_gradient.defvjp(
  lambda *qkv: (einsum(*qkv), qkv),
  lambda qkv, g: tuple(1.3 * x for x in jax.vjp(einsum, *qkv)[1](g)),
)


def one_key_too_many(q, k, v):
  k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (k, v))
  return einsum(q, k, v)


WRONG = {
  'a key too many': one_key_too_many,
  'a gradient': wrong_gradient,
  'NaN': lambda q, k, v: einsum(q, k, v) * jnp.nan,
  'the scale': lambda q, k, v: einsum(q * 1.2, k, v),
}


def test_the_fastest_right_candidate_is_chosen_and_recorded():
  choose, reports = chooser('xla', 'cudnn', 'einsum', seconds=[3e-3, 2e-3])
  model = choose(MODEL, IMAGES)
  assert model == MODEL.clone(attention='einsum')
  assert choose.record == {CASE: 'einsum'}
  text = '\n'.join(reports)
  assert 'xla 3 ms' in text and 'einsum 2 ms' in text
  assert 'cudnn is left out' in text and f'einsum for {CASE}' in text
  # A resumed run measures nothing.
  resumed, _ = chooser('xla', 'einsum', record={CASE: 'xla'})
  assert resumed(MODEL, IMAGES).attention == 'xla'


@pytest.mark.parametrize('name', WRONG)
def test_wrong_candidates_are_left_out(name, monkeypatch):
  monkeypatch.setattr(pallas_attention, 'attend', WRONG[name])
  choose, reports = chooser('pallas')
  assert choose(MODEL, IMAGES) is MODEL and not choose.record
  assert 'pallas is left out, wrong: error' in reports[0]


@pytest.mark.parametrize(
  'fields', [{'attention': 'xla'}, {'posemb': Relative()}]
)
def test_models_without_a_choice_stay_as_they_are(fields):
  choose, _ = chooser('xla')
  model = MODEL.clone(**fields)
  assert choose(model, IMAGES) is model
  assert Chooser(4, choose.mesh)(MODEL, IMAGES) is MODEL  # on a CPU


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_right_implementations_are_far_below_the_bound(dtype):
  model = MODEL.clone(dtype=dtype)
  for name in ('xla', 'einsum', 'pallas'):
    found = error(name, model, IMAGES, jax.devices()[0])
    exact = 1e-4 if dtype == 'float32' else 0.05
    assert found < exact < attention_choice.BOUNDS[dtype], name


def test_a_layer_is_compiled_as_in_a_step():
  """It has the gradients of the layer's parameters and of its input."""
  model = MODEL.clone(
    attention='einsum',
    remat='full',
    dropout=0.1,
    block=BlockOptions(attention_dropout=0.1),
  )
  device = jax.devices()[0]
  trained = compile_layer(model, IMAGES, 3, device)
  (params, tokens), _ = trained.in_avals
  assert tokens.shape == (3, 13, 16)
  assert params['mlp']['fc1']['kernel'].shape == (16, 24)
  out = jax.tree.map(lambda x: x.shape, trained.out_info)
  assert out == jax.tree.map(np.shape, (params, tokens))
  evaluated = compile_layer(model, IMAGES, 3, device, backward=False)
  assert evaluated.out_info.shape == (3, 13, 16)
  assert 'rng' not in evaluated.as_text()  # no dropout


def test_each_device_has_its_part_of_the_batch(monkeypatch):
  found = []

  def watch(model, images, batch, device, backward):
    found.append((batch, model.attention, backward))
    raise ValueError('no kernel')

  monkeypatch.setattr(attention_choice, 'compile_layer', watch)
  choose, _ = chooser('einsum')
  choose(MODEL, IMAGES, backward=False)
  assert found == [(2, 'einsum', False)]


def test_calls_are_timed():
  calls = []

  def fn(x):
    calls.append(x)
    return jnp.zeros(())

  assert 0 < attention_choice.seconds_per_call(fn, 1) < 1
  assert len(calls) >= 1 + 5
