"""VisionTransformer: what is dropped, replaced and handed on."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import IMAGES, TINY_VIT, apply, random_params, tiny
from flax import linen as nn
from nightly import nightly
from tiny import quick_key

from vit_jax import tree
from vit_jax.analysis import flops
from vit_jax.models import attention
from vit_jax.models.axial import AxialViT
from vit_jax.models.dense import BlockOptions
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.pooling import ClassToken, Head, Map, Mean
from vit_jax.models.posemb import Learned, Learned2d, Relative
from vit_jax.models.resnet import Hybrid, ResNet
from vit_jax.models.vit import Block, PatchEmbedding

# Rematerialisation, dropout, stochastic depth.


def test_dots_repeat_no_product_with_a_parameter():
  model = tiny(scan=True, dtype='bfloat16', head=Head(), attention='einsum')
  shapes = jax.eval_shape(model.init, quick_key(0), IMAGES)
  counts = {}
  for remat in ('none', 'dots', 'full'):

    def loss(variables, model=model.clone(remat=remat)):
      return model.apply(variables, IMAGES).sum()

    counts[remat] = flops.count(jax.grad(loss), shapes)
  examples, tokens = len(IMAGES), 2 * 6 + 1
  scores = model.depth * 2 * examples * tokens**2 * model.width
  assert counts['dots'] == counts['none'] + scores
  assert counts['full'] > counts['dots'] + scores


def layers_that_add_one(scan, **fields):
  """What each layer adds to each token, when its MLP outputs 1s."""
  fields = {'posemb': None, 'pooling': Mean()} | fields
  model = tiny(depth=3, scan=scan, **fields)
  images = np.zeros((256, 8, 4, 3), np.float32)
  params = tree.map_with_path(
    lambda path, x: np.full_like(x, path.endswith('mlp/fc2/bias')),
    random_params(model, images),
  )
  features = functools.partial(model.apply, train=True, method='features')
  out = jax.jit(features)(
    {'params': params}, images, rngs={'dropout': quick_key(0)}
  )
  x = np.stack(
    [np.zeros_like(out['block_0'])] + [out[f'block_{i}'] for i in range(3)]
  )
  return np.diff(x, axis=0)  # [L, B, N, D]


@pytest.mark.parametrize('scan', [False, True])
def test_each_layer_draws_its_own_dropout(scan):
  added = layers_that_add_one(scan, dropout=0.25)
  np.testing.assert_allclose(np.unique(added.round(3)), [0, 1.333])
  assert abs((added == 0).mean() - 0.25) < 0.01
  for a, b in [(0, 1), (1, 2), (0, 2)]:
    both = ((added[a] == 0) & (added[b] == 0)).mean()
    assert abs(both - 0.25**2) < 0.01


@pytest.mark.parametrize(
  ('scan', 'stochastic_depth', 'rates'),
  [
    (False, 0.5, (0, 0.25, 0.5)),
    (True, (0.4, 0.2), (0.4, 0.3, 0.2)),
    *nightly([(True, 0.5, (0, 0.25, 0.5)), (False, (0.5, 0.5), (0.5,) * 3)]),
  ],
)
def test_stochastic_depth_is_linear_and_skips_whole_examples(
  scan, stochastic_depth, rates
):
  added = layers_that_add_one(scan, stochastic_depth=stochastic_depth)
  per_example = added[:, :, :1, :1]
  np.testing.assert_allclose(added - per_example, 0, atol=1e-5)
  for layer, rate in enumerate(rates):
    skipped = np.abs(per_example[layer]) < 1e-5
    # 256 examples: the standard error is 0.03 at most.
    assert abs(skipped.mean() - rate) <= 0.1 * (rate > 0)
    kept = per_example[layer][~skipped]
    np.testing.assert_allclose(kept, 1 / (1 - rate), rtol=1e-5)


def test_dropout_acts_in_training_only_and_depends_on_its_key_alone():
  options = BlockOptions(attention_dropout=0.5)
  plain = tiny(depth=1)
  model = plain.clone(dropout=0.5, block=options, stochastic_depth=(0.5, 0.5))
  params = random_params(model)
  np.testing.assert_array_equal(apply(model, params), apply(plain, params))

  @functools.partial(jax.jit, static_argnums=0)
  def run(model, seed):
    rngs = {'dropout': quick_key(seed)}
    return model.apply({'params': params}, IMAGES, train=True, rngs=rngs)

  np.testing.assert_array_equal(run(model, 0), run(model, 0))
  assert np.abs(run(model, 0) - run(model, 1)).max() > 1e-2
  # Rematerialisation draws the same numbers.
  again = run(model.clone(remat='full'), 0)
  np.testing.assert_allclose(again, run(model, 0), atol=1e-5)
  for alone in ({'block': options}, {'dropout': 0.5}):
    found = run(plain.clone(**alone), 0)
    assert np.abs(found - apply(plain, params)).max() > 1e-2


@pytest.mark.parametrize(
  'fields, images, message',
  [
    ({'embedding': PatchEmbedding(5)}, IMAGES, '8x12 .*of 5x5'),
    ({'embedding': Hybrid(8, stages=(1,))}, IMAGES, '2x3 .*of 8x8'),
    ({'num_heads': 3}, IMAGES, 'width=16 .*num_heads=3'),
    ({'posemb': Relative(), 'attention': 'xla'}, IMAGES, "attention='xla'"),
    ({}, IMAGES[0], r'float32 \(8, 12, 3\)'),
    ({}, IMAGES.astype(np.uint8), 'uint8'),
  ],
)
def test_mistakes(fields, images, message):
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(tiny(**fields).init, jax.random.key(0), images)


@pytest.mark.parametrize('posemb', [Learned(), Learned2d(), Relative()])
def test_another_image_size_is_an_error(posemb):
  model = tiny(posemb=posemb)
  params = {'params': random_params(model)}
  with pytest.raises(ValueError, match=r'position embeddings .*image_size='):
    jax.eval_shape(model.apply, params, np.zeros((1, 16, 12, 3), np.float32))


def test_patches_are_replaced_by_others_or_by_the_mask():
  model = tiny(
    embedding=PatchEmbedding((4, 2), mask_token=True), posemb=None, depth=1
  )
  params = random_params(model)
  sources = np.tile(np.arange(12), (4, 1))
  sources[1, 3], sources[2, 5] = 7, -1
  options = {'method': 'features', 'patch_sources': jnp.asarray(sources)}
  layer_in = _inputs_of_the_first_layer(model, params, **options)
  patches = apply(model, params, method='features')['patches']
  expected = np.array(patches)
  expected[1, 3], expected[2, 5] = patches[1, 7], params['mask'][0, 0]
  np.testing.assert_allclose(layer_in[:, 1:], expected, atol=1e-6)


def test_only_visible_patches_are_encoded():
  model = tiny(pooling=ClassToken(num_registers=2))
  params = random_params(model)
  visible = np.random.default_rng(0).permuted(
    np.tile(np.arange(12, dtype=np.int32), (4, 1)), axis=1
  )
  some = _inputs_of_the_first_layer(model, params, visible=visible[:, :5])
  whole = _inputs_of_the_first_layer(model, params)
  rows = np.insert(3 + visible[:, :5], 0, [[0], [1], [2]], axis=1)
  expected = np.take_along_axis(np.asarray(whole), rows[..., None], axis=1)
  np.testing.assert_array_equal(some, expected)
  # Without positions in the layers, the order of all patches does not matter.
  run = jax.jit(model.apply)
  shuffled = run({'params': params}, IMAGES, visible=visible)
  np.testing.assert_allclose(shuffled, apply(model, params), atol=1e-5)
  with pytest.raises(ValueError, match=r'Relative.* needs all patches'):
    jax.eval_shape(
      functools.partial(tiny(posemb=Relative()).init, visible=visible),
      *(jax.random.key(0), IMAGES),
    )


def _inputs_of_the_first_layer(model, params, **options):
  method = options.pop('method', None)

  @jax.jit
  def run(params, options):
    found = []

    def watch(call, args, kwargs, context):
      if isinstance(context.module, Block):
        found.append(args[0])
      return call(*args, **kwargs)

    with nn.intercept_methods(watch):
      model.apply({'params': params}, IMAGES, method=method, **options)
    return found[0]

  return run(params, options)


AXIAL = AxialViT(**(TINY_VIT | {'depth': 1}))
MIXER = MlpMixer(16, 2, 10, 24, PatchEmbedding((4, 2)), num_classes=5)
EACH, TWICE = (4, 1, 1), [0.1, 0.1]
DROPOUT, OF_SCORES = {'dropout': 0.1}, BlockOptions(attention_dropout=0.2)


@pytest.mark.parametrize(
  'model, fields, expected',  # {shape: rates}
  [
    # After the positions; in a layer after attention and both MLP layers.
    (tiny(), DROPOUT, {(4, 13, 16): [0.1] * 5, (4, 13, 24): TWICE}),
    (tiny(), {'block': OF_SCORES}, {(4, 2, 13, 13): [0.2, 0.2]}),
    (tiny(), {'stochastic_depth': 0.3}, {EACH: [0, 0, 0.3, 0.3]}),
    # A layer has a block of 8 rows of 6, and one of 24 columns of 2.
    (
      *(AXIAL, DROPOUT),
      {(4, 12, 16): [0.1], (8, 6, 16): TWICE, (24, 2, 16): TWICE}
      | {(8, 6, 24): [0.1], (24, 2, 24): [0.1]},
    ),
    (AXIAL, {'block': OF_SCORES}, {(8, 2, 6, 6): [0.2], (24, 2, 2, 2): [0.2]}),
    (
      *(AXIAL, {'stochastic_depth': (0.3, 0.3)}),
      {(8, 1, 1): [0.3, 0.3], (24, 1, 1): [0.3, 0.3]},
    ),
    (MIXER, {'stochastic_depth': (0.3, 0.1)}, {EACH: [0.3, 0.3, *TWICE]}),
  ],
  ids=[*['ViT'] * 3, *['axial'] * 3, 'mixer'],
)
def test_what_is_dropped_where(model, fields, expected, monkeypatch):
  drawn, bernoulli = [], jax.random.bernoulli

  def draw(key, p, shape):
    drawn.append((1 - p, tuple(shape)))
    return bernoulli(key, p, shape)

  monkeypatch.setattr(jax.random, 'bernoulli', draw)
  model = model.clone(**fields)
  params = {'params': random_params(model)}
  rngs = {'dropout': quick_key(0)}
  jax.eval_shape(model.apply, params, IMAGES)  # needs no rng
  assert not drawn

  @jax.jit
  def rates(params):
    model.apply(params, IMAGES, train=True, rngs=rngs)
    return [rate for rate, _ in drawn]

  found = collections.defaultdict(list)
  for rate, (_, shape) in zip(rates(params), drawn):
    found[shape].append(pytest.approx(float(rate), abs=1e-6))
  assert found == expected


@pytest.mark.parametrize(
  'model',
  [
    tiny(),
    tiny(scan=True),
    AXIAL,
    MIXER,
    ResNet((1,), num_classes=5),
    tiny(embedding=Hybrid(1, stages=(1,)), depth=0),
  ],
  ids=lambda model: type(model).__name__,
)
def test_remat_is_handed_on(model):
  for remat in ('none', 'full'):
    fn = functools.partial(model.clone(remat=remat).init, quick_key(0))
    assert ('remat' in str(jax.make_jaxpr(fn)(IMAGES))) == (remat == 'full')


@pytest.mark.parametrize('pooling', [ClassToken(), Map()])
def test_attention_is_handed_on(pooling, monkeypatch):
  found = []

  def attend(q, k, v, **options):
    found.append((q.shape[1], options['implementation']))
    return v[:, : q.shape[1]]

  monkeypatch.setattr(attention, 'attention', attend)
  model = tiny(pooling=pooling, attention='xla', depth=1)
  jax.eval_shape(model.init, quick_key(0), IMAGES)
  patches = [(12, 'xla')] if pooling == Map() else []
  assert found == [*patches, (1, 'xla')]
