"""uint8 images to what models take."""

import jax
import numpy as np

from vit_jax.preprocess import Normalize

IMAGES = np.arange(256, dtype=np.uint8).reshape(2, 8, 16, 1).repeat(3, axis=-1)


def test_default_is_minus_one_to_one():
  out = jax.jit(Normalize())(IMAGES)
  assert out.dtype == np.float32 and out.shape == IMAGES.shape
  assert (out.min(), out.max()) == (-1, 1)
  expected = (IMAGES.astype(np.float64) - 127.5) / 127.5
  np.testing.assert_allclose(out, expected, rtol=0, atol=1e-7)


def test_mean_and_std_per_channel():
  mean, std = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
  out = Normalize(mean=mean, std=std)(IMAGES)
  expected = (IMAGES.astype(np.float64) - mean) / std
  np.testing.assert_allclose(out, expected, atol=1e-6)
  # One image without a batch dimension is fine, too.
  np.testing.assert_array_equal(
    Normalize(mean=mean, std=std)(IMAGES[0]), out[0]
  )
