"""Poolings: which tokens they read, and one of our own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import IMAGES, apply, random_params, tiny
from flax import linen as nn
from options import all_set

from vit_jax import tree
from vit_jax.models.dense import BlockOptions, Gelu
from vit_jax.models.pooling import (
  ClassToken,
  DistillationToken,
  Head,
  Map,
  Mean,
  NoPooling,
  OrdinalHead,
)
from vit_jax.models.posemb import Relative
from vit_jax.models.rotary import RotaryAxial


def features(pooling):
  model = tiny(pooling=pooling)
  options = {'method': 'features', 'mutable': 'intermediates'}
  out, recorded = apply(model, random_params(model), **options)
  return out, recorded['intermediates']


@pytest.mark.parametrize(
  'pooling',
  [
    ClassToken(num_registers=2),
    DistillationToken(num_registers=2),
    Mean(num_registers=2),
    NoPooling(True),
  ],
  ids=str,
)
def test_weights_of_tokens_give_the_pooled_tokens(pooling):
  out, recorded = features(pooling)
  weights = pooling.token_weights(pooling.layout((2, 6)), recorded)
  weights = np.broadcast_to(weights, (4, *weights.shape[1:]))
  found = np.einsum('brn,bnd->brd', weights, out['tokens'])
  expected = out['pooled']
  if isinstance(pooling, NoPooling):
    expected = expected.mean(axis=1)
  np.testing.assert_allclose(found[:, 0], expected, atol=1e-5)


@pytest.mark.parametrize(
  'fields',
  [
    {'pooling': DistillationToken(num_registers=2), 'posemb': RotaryAxial()},
    {
      'posemb': Relative(),
      'block': BlockOptions(post_norm=True, gate=True, sub_norm=('attn',)),
    },
  ],
  ids=['distillation', 'relative'],
)
def test_without_tokens_the_last_layer_computes_only_what_is_pooled(fields):
  model = tiny(**fields)
  params, count = random_params(model), 1 + ('pooling' in fields)
  whole = apply(model, params, method='features')
  options = {'mutable': 'intermediates', 'capture_intermediates': True}
  logits, recorded = apply(model, params, **options)
  (last,) = recorded['intermediates']['block_1']['__call__']
  assert last.shape == (4, count, 16)
  np.testing.assert_allclose(last, whole['block_1'][:, :count], atol=1e-5)
  np.testing.assert_allclose(logits, whole['logits'], atol=1e-5)


@dataclasses.dataclass(frozen=True)
class WithPatches(ClassToken):
  """The class token and the mean of the others, without a `read` of its own."""

  def __call__(self, module, tokens, layout):
    return jnp.stack([tokens[:, 0], tokens[:, 1:].mean(axis=1)]).mean(axis=0)


def test_without_tokens_a_pooling_of_your_own_reads_all():
  model = tiny(pooling=WithPatches())
  params = random_params(model)
  whole = apply(model, params, method='features')
  np.testing.assert_allclose(apply(model, params), whole['logits'], atol=1e-6)


def test_weights_of_tokens_of_a_learned_query():
  pooling = Map(num_registers=2)
  _, recorded = features(pooling)
  found = np.asarray(pooling.token_weights(pooling.layout((2, 6)), recorded))
  assert found.shape == (4, 1, 14)
  np.testing.assert_array_equal(found[..., :2], 0)
  head = recorded['map_head']['attn']
  q, k = (np.asarray(head[name][0]) for name in 'qk')
  weights = np.exp(np.einsum('bqhd,bnhd->bhqn', q, k) / np.sqrt(8))
  weights /= weights.sum(-1, keepdims=True)
  np.testing.assert_allclose(found[..., 2:], weights.mean(1), atol=1e-6)


def test_all_options_arrive_in_the_layers_and_the_learned_query():
  options = {'attention_dropout': 0.1, 'layerscale_init': 0.5, 'qk_norm': True}
  options |= {'mlp': Gelu('exact'), 'norm_eps': 0.25, 'init_std': 0.5}
  options |= {'sub_norm': ('attn',), 'norm': 'rms', 'biases': ('out',)}
  options |= {'post_norm': True, 'gate': True}
  block = all_set(BlockOptions, **options)
  fields = {'mlp_dim': 40, 'num_heads': 4, 'dropout': 0.3, 'dtype': 'bfloat16'}
  model = tiny(pooling=Map(), block=block, attention='einsum', **fields)
  found = {}

  def note(function, args, kwargs, context):
    found['/'.join(context.module.path)] = context.module
    return function(*args, **kwargs)

  rngs = dict.fromkeys(('params', 'dropout'), jax.random.key(0))
  init = functools.partial(model.init, train=True)
  with nn.intercept_methods(note):
    shapes = jax.eval_shape(init, rngs, IMAGES)['params']
  for layer in ('block_0', 'block_1', 'map_head'):
    attn, mlp = found[f'{layer}/attn'], found[f'{layer}/mlp']
    assert attn.options == block and attn.implementation == 'einsum'
    assert (attn.num_heads, mlp.mlp_dim) == (4, 40)
    assert mlp.options == block
    added = {'query_norm', 'key_norm', 'norm', 'gate'}
    assert added < shapes[layer]['attn'].keys()
    biases = [x for x in tree.flatten(shapes[layer]) if x.endswith('/bias')]
    assert biases == ['attn/out/bias']
    in_layer = layer != 'map_head'
    assert ('ls1' in shapes[layer]) == ('ls2' in shapes[layer]) == in_layer
    assert attn.train == mlp.train == in_layer
    assert mlp.dropout == 0.3 * in_layer
  norms = [x for x in found.values() if isinstance(x, nn.RMSNorm)]
  assert len(norms) == 2 * 5 + 4 + 1 and {x.epsilon for x in norms} == {0.25}
  dtypes = {k: getattr(x, 'dtype', 'bfloat16') for k, x in found.items()}
  others = {k for k, dtype in dtypes.items() if dtype != 'bfloat16'}
  assert others == {'head'}  # logits are float32


def test_each_head_reads_its_own_token():
  """The tanh layers differ, too."""
  model = tiny(pooling=DistillationToken(), head=Head(representation_size=8))
  params = random_params(model)
  out = apply(model, params, method='features', per_layer=False)
  for i, (name, logits) in enumerate(
    (('cls', 'class_logits'), ('dist', 'distillation_logits'))
  ):
    x = out['tokens'][:, i]
    for layer in ('pre_logits', 'head'):
      x = x @ params[layer][name]['kernel'] + params[layer][name]['bias'][None]
      x = np.tanh(x) if layer == 'pre_logits' else x
    np.testing.assert_allclose(out[logits], x, atol=1e-5)
  mean = (out['class_logits'] + out['distillation_logits']) / 2
  np.testing.assert_allclose(out['logits'], mean, atol=1e-6)
  features = tiny(pooling=DistillationToken(), num_classes=None)
  kept = {k: v for k, v in params.items() if k not in ('head', 'pre_logits')}
  np.testing.assert_allclose(
    apply(features, kept), out['tokens'][:, :2].mean(axis=1), atol=1e-6
  )


def test_a_mean_is_normalised_with_the_epsilon_of_the_model():
  pooling, model = Mean(unit_norm=True), tiny(block=BlockOptions(norm_eps=0.1))
  tokens = IMAGES.reshape(4, 18, 16)[:, :12]
  mean = tokens.mean(axis=1)
  expected = mean - mean.mean(axis=1, keepdims=True)
  expected /= np.sqrt(mean.var(axis=1, keepdims=True) + 0.1)
  found = pooling(model, tokens, pooling.layout((2, 6)))
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_new_head_is_a_plain_one_with_the_same_options():
  fields = {'bias_init': -1.0, 'init_std': 0.5, 'bias': False}
  for kind in (Head, OrdinalHead):
    assert kind(8, **fields).new() == Head(**fields)
