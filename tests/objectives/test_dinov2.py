"""DINOv2: recorded numbers in float64, masks, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import record_dinov2 as recorder
import recorded_dinov2 as recorded
import tiny
from nightly import nightly

from vit_jax.durations import Timeline
from vit_jax.models.pooling import Mean, NoPooling
from vit_jax.models.resnet import Hybrid, ResNet
from vit_jax.objectives.block_masks import BlockMasks
from vit_jax.objectives.dino import Centre, SinkhornKnopp
from vit_jax.objectives.dinov2 import DinoV2
from vit_jax.objectives.terms import Koleo, koleo
from vit_jax.step import Context, Seen
from vit_jax.types import UserError

KEY = jax.random.key(0)
IMAGES = jax.ShapeDtypeStruct((1, 16, 16, 3), jnp.float32)


# With an anchor is the sum of both.
@pytest.mark.parametrize('name', ['anchor', *nightly(['dinov2'])])
def test_losses_and_gradients_are_those_of_float64(name):
  first, gradient, all_steps = recorded.compare(name)
  assert first < 1e-6 and gradient < 1e-6 and all_steps < 1e-5


def test_targets_are_balanced_for_outputs_of_any_size():
  rng = np.random.default_rng(0)
  outputs = rng.normal(size=(6, 2, 5)).astype(np.float32)

  def balance(outputs, temperature, **fields):
    run = jax.jit(lambda *args: SinkhornKnopp(**fields)(*args)[0])
    return np.asarray(run(outputs, temperature))

  found = balance(outputs, 0.1)
  expected = recorder.sinkhorn(outputs.reshape(12, 5), 0.1)
  np.testing.assert_allclose(found.reshape(12, 5), expected, 1e-4, 1e-6)
  many = balance(outputs, 2.0, iterations=10)
  np.testing.assert_allclose(many.sum((0, 1)), 12 / 5, rtol=1e-3)
  once = balance(outputs, 2.0, iterations=1)
  shares = np.exp(outputs / 2) / np.exp(outputs / 2).sum((0, 1))
  np.testing.assert_allclose(once, shares / shares.sum(-1, keepdims=True), 1e-5)
  large = balance(1000 * outputs, 0.1)
  np.testing.assert_allclose(large.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize('grid', [(14, 14), (3, 8), (1, 1)])
def test_masks_are_blocks_and_evenly_spread(grid):
  masks, n = BlockMasks(), grid[0] * grid[1]
  hidden = np.asarray(jax.jit(masks, static_argnums=(1, 2))(KEY, 200, grid))
  counts = hidden.sum(axis=1)
  expected = np.linspace(0.1, 0.5, 201)[1::2] * n
  assert sorted(counts) == [0] * 100 + [
    max(1, int(round(x, 6))) for x in expected
  ]
  np.testing.assert_array_equal(np.sort(counts), masks.counts(200, n))
  if n == 196:
    # Of all neighbours of hidden patches, more are hidden than by chance.
    views = hidden.reshape(200, *grid)[counts > 0]
    below, beside = (
      (views & np.roll(views, -1, axis)).sum((1, 2)) for axis in (1, 2)
    )
    assert below.sum() > 0.55 * views.sum()
    # As many blocks are wide, with more neighbours in a row, as are tall.
    wide = beside - below
    assert abs(wide.mean()) < 1 and wide.std() > 4
    assert len({x.tobytes() for x in hidden}) == 101
    # The order of masks in the batch is random.
    assert 35 < (counts[:100] > 0).sum() < 65


@pytest.mark.parametrize('of_first', [1, 0])
def test_koleo_of_equal_images_has_a_gradient(of_first):
  x = np.ones((4, 2, 3), np.float32)
  x[0] = of_first  # without a length if 0
  x[1, 0, 1] = 2
  run = jax.jit(jax.value_and_grad(koleo))
  value, gradient = run(x)
  assert np.isfinite(value) and np.isfinite(gradient).all()
  assert np.any(gradient)
  # In a tetrahedron all others are at more than 90 degrees.
  x = np.float32([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])
  value, _ = run(np.stack([x, 2 * x], axis=1))
  np.testing.assert_allclose(value, -np.log(8 / 3), rtol=1e-6)


def make(model=recorded.MODEL, **fields):
  return DinoV2(model, **recorded.FIELDS | fields)


def test_a_shared_head_is_that_of_class_tokens():
  """Also in the weights of the terms, and in what centres carry."""
  fields = {'centre': Centre(), 'patch_weight': 0.6, 'koleo_weight': 0.3}
  apart, shared = make(**fields), make(patch_head=None, **fields)
  params, batch = recorded.parameters(), recorder.crops(0)
  head = {k: x for k, x in params['objective'].items() if k != 'patches'}
  both = params | {'objective': head | {'patches': head}}
  inits = (functools.partial(x.init, KEY, IMAGES) for x in (apart, shared))
  two, one = (jax.eval_shape(init) for init in inits)
  assert two.keys() - one.keys() == {'patches'}
  batch |= {x: np.float32(batch[x]) for x in ('image', 'local')}
  zeros = jax.tree.map(np.asarray, apart.carried())
  ones = jax.tree.map(np.ones_like, zeros)

  @functools.partial(jax.jit, static_argnums=0)
  def call(fn, params, centres):
    return fn(params, batch, KEY, Context(0, params, centres))

  found = [call(apart, both, zeros), call(apart, both, ones)]
  found.insert(1, call(shared, params | {'objective': head}, zeros))
  found = jax.device_get(found)
  pair = (dict(enumerate(x)) for x in found[:2])
  tiny.assert_trees_close(*pair, rtol=1e-5, atol=1e-8)
  (loss, metrics, centres), _, (*_, later) = found
  terms = [metrics[x] for x in ('class_loss', 'patch_loss', 'koleo')]
  np.testing.assert_allclose(loss, np.dot([1, 0.6, 0.3], terms), rtol=1e-6)
  for name, x in centres.items():
    np.testing.assert_allclose(later[name], x + 0.9, rtol=1e-5)


def test_patch_loss_counts_the_hidden_patches_of_its_masks():
  """Each has the loss log K where the outputs are 0."""
  masks, params = BlockMasks(views=1.0, most=0.8), recorded.parameters()
  params['objective']['patches']['last']['length'] *= 0
  tokens = {'tokens': np.ones((4, 2, 17, recorder.WIDTH), np.float32)}
  hidden = jax.jit(masks, static_argnums=(1, 2))(KEY, 8, (4, 4))
  batch = {'hidden': np.asarray(hidden).reshape(4, 2, 16)}
  features = {'image': tokens, 'teacher': tokens}
  seen = Seen(params, batch, KEY, Context(0, params), features)
  loss, _ = jax.jit(make(masks=masks).patch_loss)(seen, None)
  np.testing.assert_allclose(loss, np.log(recorder.OUTPUTS), rtol=1e-6)


def test_what_does_not_fit_is_refused_before_the_first_step():
  with pytest.raises(UserError, match=r'batch_size=1.*koleo_weight=0'):
    make().of_run(Timeline(1, 8, 10), IMAGES)
  make(koleo_weight=0.0).of_run(Timeline(1, 8, 10), IMAGES)
  one = {'image': {'pre_logits': np.ones((1, 2, 3))}}
  with pytest.raises(UserError, match=r'batch_size=1.*leave the term out'):
    Koleo()(Seen({}, {}, KEY, Context(), one))
  assert make(centre=Centre()).whole_batch  # so that accum_steps is refused
  for model in (
    tiny.vit(num_classes=0),
    recorded.MODEL.clone(pooling=NoPooling()),
    recorded.MODEL.clone(embedding=Hybrid(1, True, stages=(1,))),
    ResNet(stages=(1,), num_classes=0),
  ):
    with pytest.raises(UserError, match='mask_token=True'):
      make(model)
  model = recorded.MODEL.clone(pooling=Mean())
  assert make(model).init(KEY, IMAGES)
