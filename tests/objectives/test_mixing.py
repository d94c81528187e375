"""Mixup and CutMix: by hand, by distribution, and the same on any layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
import tiny
from nightly import nightly

from configs import common
from vit_jax import config
from vit_jax.models.dense import Normalize
from vit_jax.objectives.classification import sigmoid_loss
from vit_jax.objectives.mixing import Blend, Choice, Cutmix, Mixed, Mixup
from vit_jax.parallel import sharding

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (16, 4, 6, 3), np.uint8)
LABELS = RNG.integers(0, 5, 16).astype(np.int32)
BATCH = {'image': IMAGES, 'label': LABELS}
BOTH = Choice((Mixup(0.8), Cutmix(1.0)), (0.4, 0.4))


class Linear:
  """Enough of a model: flat images times a kernel."""

  num_classes = 5

  def apply(self, variables, images, *, train, rngs):
    flat = images.reshape(len(images), -1)
    return flat @ variables['params']['kernel']


def kernel():
  values = np.random.default_rng(1).normal(size=(72, 5)) / 72
  return {'kernel': values.astype(np.float32)}


def seen(model, *, preprocess):
  """An objective that returns what it is given in place of a loss."""

  def loss_fn(params, batch, rng):
    assert set(batch) == {'image', 'label'}
    return batch['image'], batch['label']

  return loss_fn


def wrap(objective=seen, mixer=BOTH, **options):
  return Mixed(
    Linear(),
    preprocess=Normalize(),
    objective=objective,
    mixer=mixer,
    **options,
  )


def one_hot(labels):
  return np.eye(5, dtype=np.float32)[labels]


# By hand.


def fixed(share, weight, box):
  return lambda rng, size: Blend(
    jnp.float32(share), jnp.float32(weight), jnp.array(box, jnp.int32)
  )


@pytest.mark.parametrize('count', [2, 5, 6])
def test_pixels_and_labels_of_a_known_blend(count):
  """Vectors of labels are mixed as they are."""
  loss_fn = jax.jit(wrap(mixer=fixed(0.75, 0.25, [1, 2, 3, 6])))
  partner = (np.arange(count) + count // 2) % count
  whole, inside = IMAGES[:count], np.s_[:, 1:3, 2:6]
  expected = whole.astype(np.float32)
  expected[inside] = 0.25 * expected[inside] + 0.75 * whole[partner][inside]
  numbers, several = LABELS[:count], RNG.integers(0, 2, (count, 5))
  for given, rows in (
    (numbers, one_hot(numbers)),
    (several.astype(np.float32), several),
  ):
    batch = {'image': whole, 'label': given}
    images, labels = loss_fn(None, batch, jax.random.key(0))
    np.testing.assert_array_equal(images, expected)
    np.testing.assert_array_equal(labels, 0.75 * rows + 0.25 * rows[partner])


def test_both_classes_of_a_mixed_image_are_targets():
  mine, other = one_hot(LABELS), one_hot(np.roll(LABELS, 8))
  objective = config.resolve(common.bce())
  loss_fn = wrap(objective, fixed(0.75, 1.0, [0, 0, 4, 6]))
  found, _ = jax.jit(loss_fn)(kernel(), BATCH, jax.random.key(0))
  images = np.asarray(Normalize()(IMAGES)).reshape(16, -1)
  targets = np.maximum(mine, other)
  expected = jax.jit(sigmoid_loss)(images @ kernel()['kernel'], targets)
  expected = np.mean(expected) / 5
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert loss_fn.activation == 'sigmoid'


# Draws.


def blends(mixer, size=(8, 12), count=20_000):
  rngs = jax.random.split(jax.random.key(4), count)
  blend = jax.jit(jax.vmap(lambda rng: mixer(rng, size)))(rngs)
  return jax.tree.map(np.asarray, blend)


@pytest.mark.parametrize('alpha', [0.2, *nightly([1e-3, 0.8, 1e3])])
def test_weights_of_mixup_have_a_beta_distribution(alpha):
  share, weight, box = blends(Mixup(alpha))
  np.testing.assert_array_equal(share, weight)
  assert np.all(box == [0, 0, 8, 12])
  assert share.min() >= 0 and share.max() <= 1
  quantiles = np.linspace(0.05, 0.95, 19)
  beta = scipy.stats.beta(alpha, alpha)
  for at in beta.ppf(quantiles):
    if 1e-6 < at < 1 - 1e-6:  # float32 has no numbers as near to 1
      assert abs(np.mean(share <= at) - beta.cdf(at)) < 0.02
  np.testing.assert_allclose(share.mean(), 0.5, atol=0.02)
  np.testing.assert_allclose(share.var(), beta.var(), rtol=0.05)


def test_labels_of_cutmix_have_the_shares_of_the_pixels():
  share, weight, box = blends(Cutmix(1.0))
  top, left, bottom, right = box.T
  assert np.all(weight == 0)
  assert np.all((top >= 0) & (top <= bottom) & (bottom <= 8))
  assert np.all((left >= 0) & (left <= right) & (right <= 12))
  area = (bottom - top) * (right - left)
  np.testing.assert_allclose(share, 1 - area / 96, rtol=1e-6)
  # Uncut boxes keep the aspect ratio, up to whole pixels on each side.
  uncut = (top > 0) & (left > 0) & (bottom < 8) & (right < 12) & (area > 0)
  height, width = (bottom - top)[uncut], (right - left)[uncut]
  assert uncut.sum() > 1000
  assert np.all(abs(height / 8 - width / 12) < 0.25)


@pytest.mark.slow
def test_boxes_of_cutmix_have_the_distribution_of_the_paper():
  rng, height, width, shares = np.random.default_rng(0), 12, 20, []
  for _ in range(20_000):
    side = np.sqrt(1 - rng.beta(0.5, 0.5))
    h, w = int(height * side) // 2, int(width * side) // 2
    y, x = rng.integers(height), rng.integers(width)
    rows = min(y + h, height) - max(y - h, 0)
    columns = min(x + w, width) - max(x - w, 0)
    shares.append(1 - rows * columns / (height * width))
  found = blends(Cutmix(0.5), (height, width)).share
  test = scipy.stats.ks_2samp(
    found.astype(np.float64).round(5), np.round(shares, 5)
  )
  assert test.pvalue > 1e-3


def test_choice_has_its_probabilities():
  a, b = (fixed(x, x, [0, 0, 8, 12]) for x in (0.25, 0.5))

  def counts(*each):
    share = blends(Choice((a, b), each)).share
    return [np.mean(share == x) for x in (0.25, 0.5, 1.0)]

  np.testing.assert_allclose(counts(0.1, 0.6), [0.1, 0.6, 0.3], atol=0.02)
  assert counts(0.0, 1.0) == [0, 1, 0]
  assert counts(0.0, 0.0) == [0, 0, 1]


def test_a_batch_shares_a_draw():
  white = np.zeros((16, 1, 1, 3), np.uint8)
  white[:8] = 255
  batch = {'image': white, 'label': LABELS}
  loss_fn = jax.jit(wrap(mixer=Mixup(1.0)))
  found = [
    np.asarray(loss_fn(None, batch, jax.random.key(seed))[0])[..., 0].ravel()
    for seed in range(2)
  ]
  weights = [np.where(np.arange(16) < 8, x, 255 - x) for x in found]
  assert [len(np.unique(x.round(2))) for x in weights] == [1, 1]
  assert abs(weights[0] - weights[1]).min() > 1e-3


# The same on any layout.


@functools.cache
def of_one_device():
  return jax.jit(wrap())(None, BATCH, jax.random.key(3))


ALL = {'data': 2, 'fsdp': 2, 'model': 2}


@pytest.mark.parametrize(
  'axes', [ALL, *nightly([{'data': 8}, {'fsdp': 8}])], ids=str
)
def test_mixed_batches_are_equal_on_all_meshes(axes):
  mesh = sharding.make_mesh(**axes)
  with jax.set_mesh(mesh):
    arguments = None, sharding.put_batch(BATCH, mesh), jax.random.key(3)
    program = jax.jit(wrap()).lower(*arguments).compile()
    found = program(*arguments)
    for one, other in zip(found, of_one_device()):
      np.testing.assert_array_equal(one, other)
  program = program.as_text()
  # Shards are exchanged, not gathered.
  assert 'collective-permute' in program
  assert 'all-gather' not in program and 'all-reduce' not in program


def test_micro_batches_have_the_mixtures_of_the_whole_batch():
  """The metrics are the mixed arrays; each example is added to zeros."""

  def spy(model, *, preprocess):
    def loss_fn(params, batch, rng):
      def placed(x):
        return jnp.zeros((16, *x.shape[1:])).at[batch['place']].set(x)

      metrics = {name: placed(batch[name]) for name in ('image', 'label')}
      return params['w'] * 0.0, metrics

    return loss_fn

  loss_fn = wrap(spy, Choice((Mixup(0.8), Cutmix(1.0)), (0.5, 0.5)))
  params, tx = {'w': jnp.ones(())}, optax.sgd(1.0)
  step_fns = [tiny.compiled_step(loss_fn, tx, accum_steps=n) for n in (1, 4)]
  images, batch = set(), BATCH | {'place': np.arange(16)}
  for step in range(5):
    state = tiny.first_state(params, tx, step)
    whole, parts = (fn(state, batch)[1] for fn in step_fns)
    images.add(np.asarray(whole['image']).tobytes())
    for name in ('image', 'label'):  # the metrics are means over micro-batches
      np.testing.assert_array_equal(whole[name], 4 * np.asarray(parts[name]))
  assert len(images) >= 4  # the box of a CutMix may be empty


def test_each_mixer_has_a_probability():
  for mixers, probabilities in ((1, (0.5, 0.5)), (2, (0.5, 0.6))):
    with pytest.raises(ValueError, match=f'{mixers} mixers'):
      Choice((Mixup(1.0),) * mixers, probabilities)
