"""The transforms of test images of several code bases."""

import numpy as np
import pytest

from vit_jax import config
from vit_jax.data import transforms
from vit_jax.data.transforms import CentralCrop, Resize, ResizeSmall


def test_the_transforms_of_the_original_code_resize_to_a_square():
  assert transforms.evaluation('original', 384) == (Resize(384),)
  with pytest.raises(ValueError, match=r"'original' has no crop=0\.9"):
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
