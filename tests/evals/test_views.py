"""Predictions that are averaged over views, and transforms of test images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import splits

from vit_jax import config
from vit_jax.data import transforms
from vit_jax.data.embedded.digits import Synthetic
from vit_jax.data.pipeline import Data
from vit_jax.data.transforms import CentralCrop, Resize, ResizeSmall
from vit_jax.evals.classification import Classification
from vit_jax.evals.multilabel import MultiLabel
from vit_jax.evals.views import FiveCrop, Flip, average
from vit_jax.parallel import sharding

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 5, 8, 3), np.uint8)


def test_flip_and_crops():
  same, mirrored = Flip()(IMAGES)
  np.testing.assert_array_equal(same, IMAGES)
  np.testing.assert_array_equal(mirrored, IMAGES[:, :, ::-1])
  crops = FiveCrop((4, 3))(IMAGES)
  starts = (0, 0), (0, 5), (1, 0), (1, 5), (0, 2)
  for crop, (y, x) in zip(crops, starts, strict=True):
    np.testing.assert_array_equal(crop, IMAGES[:, y : y + 4, x : x + 3])
  with pytest.raises(ValueError, match='6x6 do not fit into images of 5x8'):
    FiveCrop(6)(IMAGES)
  with pytest.raises(ValueError, match='size=0 must be'):
    FiveCrop(0)


def predict(images):
  x = images.astype(jnp.float32).reshape(len(images), -1) / 255
  kernel = np.random.default_rng(1).normal(size=(x.shape[1], 4))
  return 5 * x @ kernel.astype(np.float32)


@pytest.mark.parametrize(
  ('activation', 'to_probabilities'),
  [
    ('softmax', lambda z: scipy.special.softmax(z, -1)),
    ('sigmoid', scipy.special.expit),
  ],
)
def test_probabilities_are_averaged(activation, to_probabilities):
  views = FiveCrop(4), Flip()
  found = average(predict, IMAGES, views, activation)
  ten = [view for crop in FiveCrop(4)(IMAGES) for view in Flip()(crop)]
  expected = np.mean([to_probabilities(predict(x)) for x in ten], axis=0)
  np.testing.assert_allclose(to_probabilities(found), expected, rtol=1e-5)
  one = average(predict, IMAGES, (), activation)
  np.testing.assert_array_equal(one, predict(IMAGES))


class Model:
  num_classes = 4

  def apply(self, variables, images):
    return predict(images) + variables['params']


@pytest.mark.parametrize(
  'loss', ['softmax', pytest.param('sigmoid', marks=pytest.mark.slow)]
)
def test_an_evaluator_with_views(loss):
  source = Synthetic(image_size=6, num_classes=4, num_examples=21)
  mesh = splits.mesh_of(8)
  evaluator = Classification(
    Model(),
    preprocess=lambda x: x,
    mesh=mesh,
    data=Data(source, 16),
    loss=loss,
    views=(FiveCrop(4), Flip()),
    calibration_bins=None,
  )
  params = jax.device_put(np.float32(0), sharding.replicated(mesh))
  found = evaluator.run(params)
  images = np.stack([source[i]['image'] for i in range(21)])
  labels = np.array([source[i]['label'] for i in range(21)])
  ten = [view for crop in FiveCrop(4)(images) for view in Flip()(crop)]
  one_hot = np.eye(4)[labels]
  if loss == 'softmax':
    p = np.mean([scipy.special.softmax(predict(x), -1) for x in ten], axis=0)
    losses = -np.log(p[one_hot > 0])
  else:
    p = np.mean([scipy.special.expit(predict(x)) for x in ten], axis=0)
    losses = -(one_hot * np.log(p) + (1 - one_hot) * np.log1p(-p)).sum(-1)
  assert found['accuracy'] == pytest.approx(np.mean(p.argmax(-1) == labels))
  assert found['loss'] == pytest.approx(losses.mean(), rel=1e-4)
  too_large = Classification(
    Model(),
    preprocess=lambda x: x,
    mesh=mesh,
    data=Data(source, 16),
    views=(FiveCrop(8),),
  )
  with pytest.raises(ValueError, match='8x8 do not fit into images of 6x6'):
    too_large.check(params)


def test_several_labels_are_sigmoids():
  assert MultiLabel.activation == 'sigmoid'


# Transforms of test images.


def test_the_transforms_of_the_original_code_resize_to_a_square():
  assert transforms.evaluation('original', 384) == (Resize(384),)
  with pytest.raises(ValueError, match=r"crop=0\.9 with 'original'"):
    transforms.evaluation('original', 384, crop=0.9)


@pytest.mark.parametrize(('size', 'small'), [(224, 256), (384, 448), (28, 32)])
def test_the_transforms_of_big_vision(size, small):
  found = transforms.evaluation('big_vision', size)
  assert found == (ResizeSmall(small, 'area'), CentralCrop(size))


@pytest.mark.parametrize(
  ('size', 'crop', 'small'),
  [(224, None, 248), (384, None, 384), (224, 0.875, 256), (288, 0.95, 303)],
)
def test_the_transforms_of_timm(size, crop, small):
  resize, central = transforms.evaluation('timm', size, crop=crop)
  assert (resize.size, resize.interpolation) == (small, 'bicubic')
  assert resize.antialias and central.size == (size, size)
  # 1 pixel less in the larger side, and the crop starts at an even pixel.
  rng = np.random.default_rng(0)
  image = np.arange(5 * 8 * 3, dtype=np.uint8).reshape(5, 8, 3)
  small = ResizeSmall(4, 'bicubic', antialias=True, rounding='down')
  assert small(image, rng).shape == (4, 6, 3)  # 6.4
  assert small(image[:, :7], rng).shape == (4, 5, 3)  # 5.6
  assert ResizeSmall(4)(image[:, :7], rng).shape == (4, 6, 3)
  for room, even, down in ((1, 0, 0), (3, 2, 1), (2, 1, 1), (5, 2, 2)):
    row = image[:2, : 2 + room]
    for rounding, start in (('even', even), ('down', down)):
      np.testing.assert_array_equal(
        CentralCrop(2, rounding=rounding)(row, rng), row[:, start : start + 2]
      )


def test_a_convention_in_a_config():
  data = config.resolve(
    {
      'target': 'vit_jax.data.pipeline.Data',
      'source': {'target': 'vit_jax.data.embedded.glyphs.Glyphs'},
      'batch_size': 8,
      'transforms': {
        'target': 'vit_jax.data.transforms.evaluation',
        'convention': 'timm',
        'size': 224,
      },
    }
  )
  assert data.transforms == transforms.evaluation('timm', 224)
  with pytest.raises(ValueError, match=r"convention='tim' must be .*'timm'"):
    transforms.evaluation('tim', 224)
