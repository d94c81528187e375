"""The convolutional stem: its grid, and its map against the formula."""

import jax
import numpy as np
import pytest
from contract import apply, random_params, tiny

from vit_jax.models.stem import ConvStem

MODEL = tiny(embedding=ConvStem(widths=(8, 16)))  # cells of 8x8 pixels
IMAGES = np.random.default_rng(0).normal(size=(1, 48, 64, 1)).astype('f')


def test_cells_are_as_many_as_the_grid_says():
  embedding = MODEL.embedding
  assert embedding.reduction == 8 and ConvStem().reduction == 32
  assert embedding.grid((48, 64)) == (6, 8)
  assert embedding.image_size((6, 8)) == (48, 64)
  out = jax.eval_shape(MODEL.init_with_output, jax.random.key(0), IMAGES)[0]
  assert out.shape == (1, 5)


def convolve(x, params, name, stride):
  """Return a standardised convolution, group norm and ReLU of x [H, W, C]."""
  kernel = params[name]['kernel'].astype(np.float64)
  kernel = (kernel - kernel.mean((0, 1, 2))) / kernel.std((0, 1, 2))
  size, (height, width, _) = len(kernel), x.shape
  x = np.pad(x, ((size // 2, size // 2), (size // 2, size // 2), (0, 0)))
  cells = np.lib.stride_tricks.sliding_window_view(x, (size, size), (0, 1))
  cells = cells[:height:stride, :width:stride]
  y = np.einsum('hwcij,ijcf->hwf', cells, kernel)
  groups = y.reshape(*y.shape[:2], 8, -1)
  mean = groups.mean((0, 1, 3), keepdims=True)
  variance = groups.var((0, 1, 3), keepdims=True)
  y = ((groups - mean) / np.sqrt(variance + 1e-6)).reshape(y.shape)
  norm = params[f'{name}_norm']
  return np.maximum(y * norm['scale'] + norm['bias'], 0)


def test_the_map_is_that_of_the_formula():
  params = random_params(MODEL, IMAGES)
  x = convolve(IMAGES[0].astype(np.float64), params['stem'], 'conv0', 4)
  x = convolve(x, params['stem'], 'conv1', 2)
  x = x + convolve(x, params['stem'], 'conv1_residual', 1)
  found = apply(MODEL, params, IMAGES, method='features')['feature_map']
  assert found.shape == (1, 6, 8, 16)
  np.testing.assert_allclose(found[0], x, atol=1e-5)


@pytest.mark.parametrize(
  ('rows', 'said'), [(40, 'cannot be cut'), (44, 'multiples of 8')]
)
def test_sides_must_be_multiples_of_a_cell(rows, said):
  init = tiny(embedding=ConvStem(2, widths=(8, 16))).init
  with pytest.raises(ValueError, match=said):
    jax.eval_shape(init, jax.random.key(0), IMAGES[:, :rows])
