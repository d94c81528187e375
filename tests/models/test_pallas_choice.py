"""The measured choice of attention, on a CPU with a clock of its own."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import short_run
from contract import TINY_VIT

from vit_jax.config import Provenance
from vit_jax.durations import steps
from vit_jax.models.attention import BOUNDS, attention, check
from vit_jax.models.dense import BlockOptions
from vit_jax.models.pallas import attention as pallas_attention
from vit_jax.models.pallas import choice
from vit_jax.models.pallas.choice import Chooser, compile_layer, implementations
from vit_jax.models.posemb import Relative
from vit_jax.models.rotary import RotaryAxial
from vit_jax.models.vit import PatchEmbedding, VisionTransformer
from vit_jax.objectives.distillation import Distillation, Teacher

MODEL = VisionTransformer(**TINY_VIT)
IMAGES = jax.ShapeDtypeStruct((1, 8, 12, 3), jnp.float32)
CASE = '13 tokens, 2 heads of 8, float32, forward and backward, cpu'


@pytest.fixture
def chooser(monkeypatch):
  """Function that returns a Chooser of these candidates, and its reports."""

  def make(*names, seconds=(), **fields):
    reports, clock = [], iter(seconds)
    candidates = {'cpu': implementations(*names)}
    monkeypatch.setattr(choice, 'CANDIDATES', candidates)
    monkeypatch.setattr(choice, 'seconds_per_call', lambda *_: next(clock))
    mesh = jax.make_mesh((2,), ('data',), devices=jax.devices()[:2])
    return Chooser(4, mesh, report=reports.append, **fields), reports

  return make


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


def test_the_fastest_right_candidate_is_chosen_and_recorded(chooser):
  choose, reports = chooser('xla', 'cudnn', 'einsum', seconds=[3e-3, 2e-3])
  model = choose(MODEL, IMAGES)
  assert model == MODEL.clone(attention='einsum')
  assert choose.record == {CASE: 'einsum'}
  text = '\n'.join(reports)
  assert 'xla 3 ms' in text and 'einsum 2 ms' in text
  assert 'cudnn is left out' in text and f'einsum for {CASE}' in text
  # A resumed run measures nothing.
  record = {CASE: 'xla', CASE.replace(' and backward', ''): 'einsum'}
  resumed, _ = chooser('xla', 'einsum', record=record)
  assert resumed(MODEL, IMAGES).attention == 'xla'
  assert resumed(MODEL, IMAGES, backward=False).attention == 'einsum'


@pytest.mark.parametrize('name', WRONG)
def test_wrong_candidates_are_left_out(name, chooser, monkeypatch):
  def wrong(q, k, v, lengths):
    return WRONG[name](q, k, v)

  monkeypatch.setattr(pallas_attention, 'attend', wrong)
  choose, reports = chooser('pallas')
  assert choose(MODEL, IMAGES) is MODEL and not choose.record
  assert 'pallas is left out, ArithmeticError: error' in reports[0]


@pytest.mark.parametrize('more', [{'attention': 'xla'}, {'posemb': Relative()}])
def test_models_without_a_choice_stay_as_they_are(more, chooser):
  mesh = jax.make_mesh((2,), ('data',), devices=jax.devices()[:2])
  assert Chooser(4, mesh)(MODEL, IMAGES) is MODEL  # on a CPU
  choose, _ = chooser('xla')
  model = MODEL.clone(**more)
  assert choose(model, IMAGES) is model


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_right_implementations_are_far_below_the_bound(dtype):
  for name in ('xla', 'einsum', 'pallas'):
    found = check(name, (2, 13, 2, 8), dtype, jax.devices()[0])
    exact = 1e-4 if dtype == 'float32' else 0.05
    assert found < exact < BOUNDS[dtype], name


def test_a_layer_is_compiled_as_in_a_step():
  """The measured program has gradients of parameters and input."""
  model = MODEL.clone(
    attention='einsum',
    remat='full',
    posemb=RotaryAxial(),
    dropout=0.1,
    block=BlockOptions(attention_dropout=0.1),
  )
  device = jax.devices()[0]
  trained = compile_layer(model, IMAGES, 3, device)
  (params, tokens), _ = trained.in_avals
  assert tokens.shape == (3, 13, 16)
  assert params['block_0']['mlp']['fc1']['kernel'].shape == (16, 24)
  out = jax.tree.map(lambda x: x.shape, trained.out_info)
  assert out == jax.tree.map(np.shape, (params, tokens))
  evaluated = compile_layer(model, IMAGES, 3, device, backward=False)
  assert evaluated.out_info.shape == (3, 13, 16)
  assert 'rng' not in evaluated.as_text()  # no dropout


def test_each_device_has_its_part_of_the_batch(chooser, monkeypatch):
  found = []

  def watch(model, images, batch, device, backward):
    found.append((batch, model.attention, backward))
    raise ValueError('no kernel')

  monkeypatch.setattr(choice, 'compile_layer', watch)
  choose, _ = chooser('einsum')
  choose(MODEL, IMAGES, backward=False)
  assert found == [(2, 'einsum', False)]


def test_calls_are_timed():
  calls = []

  def fn(x):
    calls.append(x)
    return jnp.zeros(())

  assert 0 < choice.seconds_per_call(fn, 1) < 1
  assert len(calls) >= 1 + 5


@pytest.mark.slow
def test_a_run_records_its_choices_and_resumes_with_them(tmp_path, monkeypatch):
  """Choices of the model, forward and backward, and of the teacher."""
  monkeypatch.setattr(
    choice, 'CANDIDATES', {'cpu': implementations('xla', 'einsum')}
  )
  small = MODEL.clone(
    embedding=PatchEmbedding(4), num_classes=None, depth=1, num_heads=4
  )

  def run(workdir, seconds, model=small, total=1, **options):
    clock = iter(seconds)
    monkeypatch.setattr(choice, 'seconds_per_call', lambda *_: next(clock))
    short_run.run(
      workdir,
      model=model,
      total=steps(total),
      provenance=Provenance(allow_changes=('total_steps',)),
      **options,
    )
    file = workdir / 'attention.json'
    return json.loads(file.read_text()) if file.exists() else {}

  assert not run(tmp_path / 'named', [], small.clone(attention='xla'))
  run(tmp_path / 'teacher', [1, 2])
  teacher = functools.partial(
    Distillation, teacher=Teacher(str(tmp_path / 'teacher'), same_classes=True)
  )
  student = small.clone(num_heads=2)
  chosen = run(tmp_path / 'run', [2, 1, 1, 2], student, objective=teacher)
  case = '5 tokens, {} heads of {}, float32, {}, cpu'
  expected = {
    case.format(2, 8, 'forward and backward'): 'einsum',
    case.format(4, 4, 'forward'): 'xla',
  }
  assert chosen == expected
  # No more times are left to be measured. The model is described as configured.
  resumed = run(tmp_path / 'run', [], student, total=2, objective=teacher)
  assert resumed == expected
  described = json.loads((tmp_path / 'run' / 'model.json').read_text())
  assert described['model'].get('attention', 'auto') == 'auto'
