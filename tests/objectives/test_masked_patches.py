"""Masked patch prediction: what is corrupted and predicted, what learns."""

import functools

import jax
import numpy as np
import pytest
import tiny
from nightly import nightly
from tiny import quick_key

from vit_jax import tree
from vit_jax.models.dense import Normalize
from vit_jax.models.pooling import ClassToken, NoPooling
from vit_jax.models.resnet import Hybrid
from vit_jax.models.vit import PatchEmbedding
from vit_jax.objectives import masked_patches
from vit_jax.objectives.masked_patches import MaskedPatches, Task
from vit_jax.science.tokens import FrozenTokens

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (8, 16, 24, 3), np.uint8)  # 2 x 3 patches of 8
OUTPUTS = {'mean_colour': 512, 'downsampled': 4 * 512, 'pixels': 192}


def make_model(**fields):
  settings = {
    'embedding': PatchEmbedding(8, mask_token=True),
    'pooling': NoPooling(class_token=True),
    'num_classes': 512,
  }
  return tiny.vit(**settings | fields)


@functools.cache
def make_params(num_classes=512, **fields):
  """Noisy, so that none is zero and every image matters."""
  model = make_model(num_classes=num_classes, **fields)
  params = tiny.normal_params(model, (16, 24, 3), 0.2, seed=1)
  return tree.unflatten(
    {path: x + path.endswith('scale') for path, x in params.items()}
  )


def loss_of(model, params, rng=0, images=IMAGES, **task):
  loss_fn = MaskedPatches(model, preprocess=Normalize(), task=Task(**task))
  return jax.jit(loss_fn)(params, {'image': images}, quick_key(rng))


# What is corrupted.


@pytest.mark.parametrize('ratio, count', [(0.5, 98), *nightly([(0.15, 29)])])
def test_shares(ratio, count):
  each = functools.partial(masked_patches.draw, num_patches=196, ratio=ratio)
  keys = jax.random.split(jax.random.key(0), 2000)
  corrupted, sources = jax.device_get(jax.jit(jax.vmap(each))(keys))
  own = np.arange(196)
  assert (corrupted.sum(axis=1) == count).all()
  assert (sources == own)[~corrupted].all()
  total = corrupted.sum()
  # Three standard deviations of the smallest total, 58,000, are 0.005.
  shares = [(sources == -1)[corrupted], (sources == own)[corrupted]]
  assert [x.mean() for x in shares] == pytest.approx([0.8, 0.1], abs=0.005)
  # Each patch as often; each other patch as often in its place.
  assert corrupted.mean(axis=0) == pytest.approx(ratio, abs=0.05)
  swapped = (sources >= 0) & (sources != own)
  assert swapped.sum() / total == pytest.approx(0.1, abs=0.005)
  steps = (sources - own)[swapped] % 196
  assert steps.min() == 1 and steps.max() == 195
  assert steps.mean() == pytest.approx(98, abs=3 * 56 / swapped.sum() ** 0.5)


# Targets, against their definitions in numpy.


def numpy_classes(image, patch, side):
  """[n, side^2] by loops: rows of patches, rows of cells."""
  found, cell = [], patch // side
  for y in range(0, image.shape[0], patch):
    for x in range(0, image.shape[1], patch):
      for i in range(y, y + patch, cell):
        for j in range(x, x + patch, cell):
          mean = image[i : i + cell, j : j + cell].mean(axis=(0, 1))
          bits = [f'{int(m):08b}'[:3] for m in mean]
          found.append(int(''.join(bits), 2))
  return np.array(found).reshape(-1, side**2)


@pytest.mark.parametrize('side', [1, 2, 4])
@pytest.mark.parametrize('channels', [1, 3])
def test_colours(side, channels):
  images = IMAGES[..., :channels].copy()
  images[0] = 32  # at the border of a level
  images[1] = 31
  images[2] = 255
  target = masked_patches.Colours(side)
  patches = masked_patches.cut(images, 8)
  classes = target.classes(patches)
  expected = np.stack([numpy_classes(x, 8, side) for x in images])
  np.testing.assert_array_equal(classes, expected)
  assert target.num_outputs((8, 8, channels)) == side**2 * 8**channels


@pytest.mark.parametrize('predict', OUTPUTS)
def test_loss_and_accuracy(predict):
  """Means over corrupted patches only, kept ones among them."""
  outputs = OUTPUTS[predict]
  model, params = make_model(num_classes=outputs), make_params(outputs)
  task = Task(predict, downsampled_to=2)
  loss_fn = MaskedPatches(model, preprocess=Normalize(), task=task)
  keys = jax.random.split(quick_key(0), len(IMAGES))
  found = jax.device_get(jax.jit(loss_fn.predict)(params, IMAGES, keys))
  assert (found['corrupted'].sum(axis=1) == 3).all()
  losses, hits = [], []
  for b, n in zip(*np.nonzero(found['corrupted'])):
    z = found['outputs'][b, n].astype(np.float64)
    y, x = divmod(n, 3)
    patch = IMAGES[b, 8 * y : 8 * y + 8, 8 * x : 8 * x + 8]
    if predict == 'pixels':
      losses.append(np.mean((z - (patch.ravel() / 127.5 - 1)) ** 2))
      continue
    classes = numpy_classes(patch, 8, 2 if predict == 'downsampled' else 1)
    for logits, k in zip(z.reshape(-1, 512), classes[0]):
      losses.append(np.log(np.exp(logits).sum()) - logits[k])
      hits.append(logits.argmax() == k)
  metrics = found['metrics']
  assert metrics['loss'].mean() == pytest.approx(np.mean(losses), rel=1e-5)
  assert ('accuracy' in metrics) == bool(hits)
  if hits:
    assert metrics['accuracy'].mean() == pytest.approx(np.mean(hits))


# What learns, and from what.


def test_the_model_replaces_patches():
  model, params = make_model(), make_params()
  images = Normalize()(IMAGES)
  sources = np.tile(np.arange(6), (8, 1))
  sources[0] = [3, 1, 2, 5, 4, 4]
  moved = np.array(images)
  for n, source in enumerate(sources[0]):
    (y, x), (v, u) = divmod(n, 3), divmod(source, 3)
    moved[0, 8 * y : 8 * y + 8, 8 * x : 8 * x + 8] = images[
      0, 8 * v : 8 * v + 8, 8 * u : 8 * u + 8
    ]
  apply = jax.jit(model.apply)
  found = apply({'params': params}, images, patch_sources=sources)
  np.testing.assert_allclose(found, apply({'params': params}, moved), atol=1e-5)
  assert found.shape == (8, 6, 512)


def test_labels_are_not_needed_and_the_draw_is_of_the_rng():
  model, params = make_model(), make_params()
  loss_fn = jax.jit(MaskedPatches(model, preprocess=Normalize()))
  batch = {'image': IMAGES}
  one, two, same = (loss_fn(params, batch, quick_key(i))[0] for i in (0, 1, 0))
  assert one == same and one != two and one.shape == ()


# Errors.


@pytest.mark.parametrize(
  ('fields', 'task', 'named'),
  [
    ({}, {'predict': 'pixels'}, 'num_classes=192'),
    ({}, {'predict': 'downsampled', 'downsampled_to': 3}, '8x8'),
    ({'embedding': PatchEmbedding(8)}, {}, 'mask_token=True'),
    ({'pooling': ClassToken()}, {}, 'pooling=ClassToken'),
    ({'embedding': Hybrid(2, mask_token=True, stages=(1,))}, {}, 'embedding='),
  ],
)
def test_errors(fields, task, named):
  with pytest.raises(ValueError, match=named):
    loss_of(make_model(**fields), make_params(), **task)


def test_tokens_are_predicted_and_their_vectors_frozen():
  model = make_model(
    embedding=FrozenTokens(mask_token=True, vocabulary=6),
    pooling=NoPooling(),
    num_classes=6,
  )
  images = np.random.default_rng(0).integers(6, size=(4, 3, 5, 1), dtype='u1')
  params = jax.jit(model.init)(quick_key(0), np.float32(images))['params']
  assert 'embedding' not in params
  task = Task(predict='tokens', ratio=0.2)
  loss_fn = MaskedPatches(model, preprocess=Normalize(0.0, 1.0), task=task)
  keys = jax.random.split(jax.random.key(1), 4)
  found = jax.device_get(jax.jit(loss_fn.predict)(params, images, keys))
  assert found['corrupted'].sum(axis=1).tolist() == [3] * 4
  logits = np.asarray(found['outputs'])
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  rows = images.reshape(4, -1)
  picked = np.take_along_axis(log_p, rows[..., None].astype(int), -1)[..., 0]
  expected = [-x[m].mean() for x, m in zip(picked, found['corrupted'])]
  np.testing.assert_allclose(found['metrics']['loss'], expected, rtol=1e-5)
