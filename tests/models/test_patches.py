"""Patch embeddings: overlapping patches, grids, sizes."""

import jax
import numpy as np
import pytest
from contract import IMAGES, TINY_VIT, random_params

from vit_jax.models.layers import PatchEmbedding
from vit_jax.models.resnet import Hybrid
from vit_jax.models.vit import VisionTransformer


def tiny(**fields):
  return VisionTransformer(**(TINY_VIT | fields))


@pytest.mark.parametrize('stride', [(4, 1), 2])
def test_overlapping_patches_are_a_strided_convolution(stride):
  model = tiny(embedding=PatchEmbedding((4, 2), stride), posemb=None, depth=1)
  params = random_params(model)
  actual = model.apply({'params': params}, IMAGES, method='features')['patches']
  sy, sx = (stride, stride) if isinstance(stride, int) else stride
  grid = (8 - 4) // sy + 1, (12 - 2) // sx + 1
  assert model.embedding.grid(IMAGES.shape[1:]) == grid
  assert model.embedding.image_size(grid) == (8, 12)
  kernel, bias = params['embedding']['kernel'], params['embedding']['bias']
  tops = [(y, x) for y in range(0, 5, sy) for x in range(0, 11, sx)]
  assert len(tops) == actual.shape[1] == grid[0] * grid[1]
  for token, (y, x) in enumerate(tops):
    patch = IMAGES[:, y : y + 4, x : x + 2].reshape(4, -1)
    expected = patch @ kernel.reshape(-1, 16) + bias
    np.testing.assert_allclose(actual[:, token], expected, atol=1e-5)


def test_overlapping_patches_have_a_larger_grid_of_positions():
  def table(**fields):
    shapes = jax.eval_shape(tiny(**fields).init, jax.random.key(0), IMAGES)
    return shapes['params']['pos_embedding'].shape

  assert table(embedding=PatchEmbedding((4, 2), 2)) == (1, 3, 6, 16)
  assert table(embedding=PatchEmbedding((4, 2), (4, 2))) == (1, 2, 6, 16)
  side_by_side = PatchEmbedding((4, 2), (4, 2)).cut(IMAGES)
  np.testing.assert_array_equal(
    side_by_side, PatchEmbedding((4, 2)).cut(IMAGES)
  )


@pytest.mark.parametrize('size', [16, (16, 16), [16, 16]])
def test_sizes_are_numbers_or_pairs(size):
  assert PatchEmbedding(size, size) == PatchEmbedding((16, 16), (16, 16))


@pytest.mark.parametrize(
  'stages, reduction', [((), 4), ((1,), 4), ((1, 1), 8), ([3, 4, 9], 16)]
)
def test_hybrids_reduce_images(stages, reduction):
  hybrid = Hybrid(2, stages=stages)
  assert hybrid.reduction == reduction
  assert hybrid.pixels_per_token == (2 * reduction, 2 * reduction)
  side = 6 * reduction
  assert hybrid.grid((side, 2 * side, 3)) == (3, 6)
  assert hybrid.image_size((3, 6)) == (side, 2 * side)


@pytest.mark.parametrize(
  'stride, message',
  [
    ((5, 2), r'stride=\(5, 2\) with patch_size=\(4, 2\) must be at least 1'),
    ((2, 0), r'stride=\(2, 0\)'),
  ],
)
def test_invalid_strides(stride, message):
  with pytest.raises(ValueError, match=message):
    PatchEmbedding((4, 2), stride)


def test_strides_that_do_not_fit_the_image():
  message = '8x12.*4x2 every 3x2; the nearest image size .* is 7x12'
  with pytest.raises(ValueError, match=message):
    PatchEmbedding((4, 2), (3, 2)).cut(IMAGES)
