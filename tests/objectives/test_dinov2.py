"""DINOv2: recorded numbers in float64, masks, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import record_dinov2 as recorder
import recorded_dinov2 as recorded
import scipy.special
import tiny

from vit_jax.durations import Timeline
from vit_jax.models.pooling import Mean, NoPooling
from vit_jax.models.resnet import Hybrid, ResNet
from vit_jax.objectives.block_masks import BlockMasks
from vit_jax.objectives.colours import Seen
from vit_jax.objectives.dino import Centre, SinkhornKnopp
from vit_jax.objectives.dinov2 import DinoV2, koleo
from vit_jax.step import Context
from vit_jax.types import UserError

KEY = jax.random.key(0)
IMAGES = jax.ShapeDtypeStruct((1, 16, 16, 3), jnp.float32)


def test_losses_and_gradients_are_those_of_float64():
  first, gradient, all_steps = recorded.compare(tiny.golden('dinov2'))
  assert first < 1e-6 and gradient < 1e-6 and all_steps < 1e-5


def test_targets_are_balanced_for_outputs_of_any_size():
  rng = np.random.default_rng(0)
  outputs = rng.normal(size=(6, 2, 5)).astype(np.float32)
  balance = jax.jit(SinkhornKnopp())
  found, _ = balance(outputs, 0.1)
  expected = recorder.sinkhorn(outputs.reshape(12, 5), 0.1)
  np.testing.assert_allclose(found.reshape(12, 5), expected, 1e-4, 1e-6)
  many, _ = jax.jit(SinkhornKnopp(iterations=10))(outputs, 2.0)
  np.testing.assert_allclose(many.sum((0, 1)), 12 / 5, rtol=1e-3)
  once, _ = jax.jit(SinkhornKnopp(iterations=1))(outputs, 2.0)
  expected = np.exp(outputs / 2)
  expected /= expected.sum((0, 1))
  np.testing.assert_allclose(
    once, expected / expected.sum(-1, keepdims=True), 1e-5
  )
  large, _ = balance(1000 * outputs, 0.1)
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


def test_koleo_of_equal_images_has_a_gradient():
  x = jnp.ones((4, 2, 3)).at[0, 0, 1].set(2.0)
  value, gradient = jax.jit(jax.value_and_grad(koleo))(x)
  assert jnp.isfinite(value) and jnp.isfinite(gradient).all()
  assert jnp.any(gradient != 0)


def make(model=recorded.MODEL, **fields):
  return DinoV2(model, **recorded.FIELDS | fields)


def test_a_shared_head_is_that_of_class_tokens():
  fields = {'centre': Centre(), 'patch_weight': 0.6, 'koleo_weight': 0.3}
  apart, shared = make(**fields), make(patch_head=None, **fields)
  params, batch = recorded.parameters(), recorder.crops(0)
  heads = params['objective']
  heads['patches'] = {k: x for k, x in heads.items() if k != 'patches'}
  same = {'objective': {k: heads[k] for k in heads if k != 'patches'}}
  shapes = [x.init(KEY, IMAGES).keys() for x in (apart, shared)]
  assert shapes[0] - shapes[1] == {'patches'}
  batch |= {x: jnp.float32(batch[x]) for x in ('image', 'local')}

  def losses(params, same, batch):
    both = (apart, params), (shared, params | same)
    return [f(p, batch, KEY, Context(0, p, f.carried())) for f, p in both]

  found, other = jax.jit(losses)(params, same, batch)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, 1e-6), found, other
  )
  loss, metrics, centres = found
  terms = [metrics[x] for x in ('class_loss', 'patch_loss', 'koleo')]
  np.testing.assert_allclose(loss, np.dot([1, 0.6, 0.3], terms), rtol=1e-6)
  assert centres.keys() == {'class', 'patches'} and np.all(
    centres['class'] != 0
  )


def test_patch_loss_of_other_masks_and_targets():
  masks = BlockMasks(views=1.0, most=0.8)
  loss_fn, params = make(masks=masks, centre=Centre()), recorded.parameters()
  tokens = np.random.default_rng(0).normal(size=(2, 4, 2, 17, recorder.WIDTH))
  centre = np.full((1, 1, recorder.OUTPUTS), 0.3).cumsum(-1)

  def call(tokens, centre):
    hidden = masks(KEY, 8, (4, 4)).reshape(4, 2, 16)
    features = dict(zip(('image', 'teacher'), ({'tokens': x} for x in tokens)))
    context = Context(0, params)
    seen = Seen(params, {'hidden': hidden}, KEY, context, features)
    head, patches = params['objective']['patches'], tokens[:, :, :, 1:]
    outputs = recorded.HEAD(head, patches.reshape(2, -1, recorder.WIDTH))
    return hidden, outputs, loss_fn.patch_loss(seen, centre)

  given = np.float32(tokens), np.float32(centre)
  hidden, outputs, (loss, after) = jax.jit(call)(*given)
  student, teacher = np.float64(outputs)
  targets = scipy.special.softmax((teacher - centre[0]) / 0.1, axis=-1)
  logs = scipy.special.log_softmax(student / recorder.STUDENT, axis=-1)
  losses = -(targets * logs).sum(-1).reshape(8, 16)
  hidden = np.asarray(hidden).reshape(8, 16)
  expected = np.mean(losses, axis=1, where=hidden).mean()
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  mean = teacher[hidden.ravel()].mean(0)
  np.testing.assert_allclose(after[0, 0], 0.9 * centre[0, 0] + 0.1 * mean, 1e-5)


def test_what_does_not_fit_is_refused_before_the_first_step():
  timeline = Timeline(1, 8, 10)
  with pytest.raises(UserError, match=r'batch_size=1.*koleo_weight=0'):
    make().of_run(timeline, IMAGES)
  make(koleo_weight=0.0).of_run(timeline, IMAGES)
  assert make().whole_batch  # so that accum_steps is refused
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
