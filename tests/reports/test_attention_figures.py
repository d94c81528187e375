"""Figures of attention, checked by their pixels."""

import numpy as np
import PIL.Image

from vit_jax.reports import attention_figures as figures
from vit_jax.reports import pictures


def test_overlay_is_bright_where_the_model_attends():
  picture = np.full((40, 60, 3), 200, np.uint8)
  weights = np.zeros((2, 3))
  weights[0, 2] = 0.3
  found = figures.overlay(picture, weights)
  assert found.shape == (40, 60, 3) and found.dtype == np.uint8
  np.testing.assert_array_equal(found[0, 59], 200)  # the middle and beyond
  assert not found[30:].any() and not found[:, :30].any()
  across = found[5, 30:50, 0].astype(int)  # from one centre to the next
  assert np.all(np.diff(across) > 0)
  one = np.full((20, 30), 0.01)  # far more attention than elsewhere
  one[0, 0] = 5
  found = figures.overlay(picture, one)
  assert found[0, 0, 0] == 200 and found[39, 59, 0] == 200 * 0.01 / (5 / 50)
  uniform = figures.overlay(picture[..., :1], np.full((2, 3), 0.1))
  np.testing.assert_array_equal(uniform, picture)
  heat = figures.overlay(picture, weights, style='heat')
  assert heat[0, 59].astype(int).sum() > heat[39, 0].astype(int).sum()


def test_mosaic_has_each_map_in_its_place():
  values = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5) / 120
  axes = pictures.canvas(3, 2).subplots()
  shown = pictures.mosaic(axes, values, vmin=0, vmax=1)
  drawn = np.ma.filled(shown.get_array(), np.nan)
  assert drawn.shape == (2 * 5 - 1, 3 * 6 - 1)
  for i, j in np.ndindex(2, 3):
    tile = drawn[i * 5 : i * 5 + 4, j * 6 : j * 6 + 5]
    np.testing.assert_array_equal(tile, values[i, j])
  assert np.isnan(drawn[4]).all() and np.isnan(drawn[:, 5]).all()
  assert list(axes.get_xticks()) == [2, 8, 14]


def test_sheet_has_the_images_side_by_side(tmp_path):
  black = np.zeros((30, 30, 1), np.uint8)
  cyan = np.full((30, 30, 3), [0, 255, 255], np.uint8)
  drawn = np.full((30, 30, 3), 90, np.uint8)
  pairs = [(black, drawn), (cyan, drawn), (cyan, drawn)]
  figures.sheet(pairs, tmp_path / 'a.png', names=['a', 'b', 'c'])
  image = np.asarray(PIL.Image.open(tmp_path / 'a.png').convert('RGB'))
  colours = [0, 0, 0], [0, 255, 255], [90, 90, 90]
  shares = [(image == colour).all(-1).mean() for colour in colours]
  assert shares[2] > 0.25
  expected = shares[2] * np.array([1, 2, 3]) / 3
  np.testing.assert_allclose(shares, expected, rtol=0.05)
  figures.sheet([(black, drawn, cyan)], tmp_path / 'b.png', title='Three')
  image = np.asarray(PIL.Image.open(tmp_path / 'b.png').convert('RGB'))
  shares = [(image == colour).all(-1).mean() for colour in colours]
  np.testing.assert_allclose(shares, shares[0], rtol=0.1)
