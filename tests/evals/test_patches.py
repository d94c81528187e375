"""Readouts of patches: shares, mIoU of all pixels, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from listed import Listed
from sklearn.metrics import confusion_matrix, jaccard_score

from vit_jax.data.pipeline import Data
from vit_jax.data.sources.masks import VOID, Masked
from vit_jax.data.transforms import Resize
from vit_jax.evals import patches
from vit_jax.evals.patch_readouts import Linear, Neighbours
from vit_jax.evals.patches import Patches
from vit_jax.parallel import sharding

NAMES = 'sky', 'tree', 'road'
COLOURS = np.array([(30, 40, 200), (20, 160, 30), (90, 90, 90)])


class Means:
  """A model whose features are the mean colours of patches of 8 x 8."""

  def apply(self, variables, images, *, method, maps, per_layer):
    assert (method, per_layer) == ('features', False)
    x = images.reshape(len(images), 4, 8, 4, 8, 3).mean(axis=(2, 4))
    return {f'map_{i}': variables['params'] * x for i in maps} | {'logits': x}


def scenes(count, seed, masks=None):
  """Images of random sizes, in the colours of masks of 4 x 4 blocks."""
  rng = np.random.default_rng(seed)
  images, found = [], []
  for _ in range(count):
    small = rng.integers(0, 3, (4, 4))
    mask = small.repeat(rng.integers(7, 12), 0).repeat(rng.integers(7, 12), 1)
    noise = rng.normal(0, 4, (*mask.shape, 3))
    images.append(np.clip(COLOURS[mask] + noise, 0, 255).astype(np.uint8))
    mask[0, 0] = 255
    found.append(mask.astype(np.uint8)[..., None])
  masks = Listed(found if masks is None else masks)
  return Masked(Listed(images), masks, NAMES)


def make(readouts, num_devices=1, train=None, **options):
  sources = {'train': train or scenes(12, 0), 'test': scenes(7, 1)}
  transforms = options.pop('transforms', [Resize(32)])
  mesh = sharding.make_mesh(jax.devices()[:num_devices])
  made = Patches(
    Means(),
    preprocess=lambda x: x.astype(jnp.float32) / 255,
    mesh=mesh,
    data={k: Data(x, 8, transforms) for k, x in sources.items()},
    readouts=readouts,
  )
  return made, jax.device_put(np.float32(1), sharding.replicated(mesh))


def test_readouts_learn_the_classes_of_patches():
  near = {
    'near': Neighbours(k=3),
    'both': Neighbours(features=('map_2', 'pixels')),
  }
  evaluator, params = make({'linear': Linear(C=(1.0, 100.0)), **near}, 8)
  evaluator.check(params)
  found = evaluator.run(params)
  kinds = evaluator.metrics
  for name in ('linear', 'near', 'both'):
    # Scores are bilinear, so the corners of blocks are rounded.
    assert found[f'{name}/miou'] > 0.8
    assert found[f'{name}/pixel_accuracy'] > 0.9
    assert kinds[f'{name}/miou'].main
  assert found['linear/C'] in (1, 100) and found['linear/converged'] == 1
  ious = [found[f'linear/iou_{x}'] for x in NAMES]
  assert found['linear/miou'] == pytest.approx(np.mean(ious))
  assert np.isnan(evaluator.run(params * np.nan)['near/miou'])


def test_some_patches_are_the_same_in_each_evaluation(monkeypatch):
  monkeypatch.setattr(patches, '_MOST', 60)  # 5 of 16 of each image
  seen = []

  class Spy:
    features = ('map_-1',)

    def __call__(self, train):
      seen.append(train)
      return lambda x: np.zeros((*x.shape[:-1], 3)), {}

  for devices in (1, 8):
    evaluator, params = make({'spy': Spy()}, devices)
    evaluator.run(params)
  first, second = seen
  assert len(first.x) == 60 == len(np.unique(first.x, axis=0))
  np.testing.assert_array_equal(first.image, np.repeat(np.arange(12), 5))
  np.testing.assert_array_equal(first.y, second.y)
  np.testing.assert_allclose(first.x, second.x, rtol=1e-6)
  # Each patch has the colour of its class.
  distance = np.abs(255 * first.x[:, None] - COLOURS).sum(axis=-1)
  pure = first.y.max(axis=1) > 0.99
  assert pure.sum() > 20
  np.testing.assert_array_equal(
    distance.argmin(axis=1)[pure], first.y.argmax(axis=1)[pure]
  )


def test_shares_are_areas():
  mask = np.random.default_rng(0).integers(VOID, 3, (7, 10))
  fine = mask.repeat(3, 0).repeat(2, 1)  # 21 x 20 tiles of 7 x 5
  expected = [
    [[np.mean(x == k) for k in range(3)] for x in np.split(row, 4, axis=1)]
    for row in np.split(fine, 3)
  ]
  found = patches.shares(mask, (3, 4), 3)
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_miou_counts_each_pixel_once():
  rng = np.random.default_rng(0)
  mask, scores = rng.integers(VOID, 3, (31, 22)), rng.normal(size=(4, 5, 4))
  rows, columns = (
    np.array(
      [
        np.interp((np.arange(n) + 0.5) * m / n - 0.5, range(m), x)
        for x in np.eye(m)
      ]
    )
    for n, m in zip(mask.shape, scores.shape)
  )  # bilinear, of centres of pixels
  large = np.einsum('ijk,iy,jx->yxk', scores, rows, columns)
  known = mask != VOID
  true, predicted = mask[known], large.argmax(axis=-1)[known]
  counts = patches.confusion(mask, scores)
  np.testing.assert_array_equal(
    counts, confusion_matrix(true, predicted, labels=range(4))
  )
  found = patches.metrics(counts, (*NAMES, 'never true'))
  expected = jaccard_score(true, predicted, average='macro')
  assert found['miou'] == pytest.approx(expected, abs=1e-12)
  assert found['pixel_accuracy'] == np.mean(true == predicted)
  absent = patches.metrics(np.diag([3, 0, 4]), NAMES)
  assert absent == {
    'miou': 1.0,
    'pixel_accuracy': 1.0,
    'iou_sky': 1.0,
    'iou_road': 1.0,
  }


def test_mistakes():
  with pytest.raises(ValueError, match='train: no masks'):
    make({}, train=scenes(2, 0).source)
  with pytest.raises(ValueError, match='must be one Resize'):
    make({}, transforms=[])
  other = Masked(scenes(1, 0).source, Listed([0]), ['sky', 'sea'])
  with pytest.raises(ValueError, match=r"test has \['sky', .*train .*'sea'\]"):
    make({}, train=other)
  evaluator, params = make({'near': Neighbours(features=('map_2', 'pooled'))})
  with pytest.raises(ValueError, match=r"features='pooled' is no map"):
    evaluator.check(params)
  blank = [np.full_like(x, 0) for x in scenes(2, 0)._masks.images]
  blank[0][1] = 255
  evaluator, params = make({'near': Neighbours()}, train=scenes(2, 0, blank))
  with pytest.raises(ValueError, match=r'sky 9.*tree 0\.0%.* is a class, set'):
    evaluator.check(params)
