"""Histograms of oriented gradients as images."""

import numpy as np

from vit_jax.science.hog import Hog


def histograms(image):
  return Hog()(np.asarray(image, np.uint8), np.random.default_rng(0))


def test_edges_are_in_the_histogram_of_their_orientation():
  ramp = np.tile(np.arange(40) * 6, (40, 1))
  across, down = histograms(ramp[..., None]), histograms(ramp.T[..., None])
  assert across.shape == (3, 3, 36) and across.dtype == np.uint8
  of_orientation = across.reshape(3, 3, 4, 9).sum((0, 1, 2))
  assert of_orientation.argmax() == 0 and not of_orientation[1:].any()
  of_orientation = down.reshape(3, 3, 4, 9).sum((0, 1, 2))
  assert of_orientation.argmax() == 4 and (of_orientation > 0).sum() == 1
  assert across.max() == 255  # 0.5 for each of four equal cells


def test_colour_counts_where_its_gradient_is_largest():
  ramp = np.tile(np.arange(40) * 6, (40, 1))
  colour = np.stack([0 * ramp, ramp, ramp // 4], axis=-1)
  np.testing.assert_array_equal(histograms(colour), histograms(ramp[..., None]))
  assert not histograms(np.full((40, 40, 1), 7)).any()
