"""Components with a known answer, and the cosines of sines."""

import numpy as np
import pytest

from vit_jax.analysis import embeddings
from vit_jax.models.posemb import SinCos2d


@pytest.mark.parametrize('channels', [1, 2, 3, 5])
def test_filters_are_eigenvectors_of_the_covariance(channels):
  rng = np.random.default_rng(0)
  kernel = rng.normal(size=(3, 2, channels, 40)) * rng.uniform(
    0.1, 2, size=(3, 2, channels, 1)
  )
  components, shares = embeddings.filters(kernel, 4)
  assert components.shape == (4, 3, 2, channels)
  values, vectors = np.linalg.eigh(np.cov(kernel.reshape(-1, 40)))
  np.testing.assert_allclose(shares, values[::-1][:4] / values.sum(), rtol=1e-5)
  for found, vector in zip(components.reshape(4, -1), vectors.T[::-1]):
    np.testing.assert_allclose(abs(found @ vector), 1, atol=1e-5)
    assert found[np.abs(found).argmax()] > 0


def test_there_are_no_more_filters_than_there_can_be():
  rng = np.random.default_rng(0)
  assert len(embeddings.filters(rng.normal(size=(2, 2, 1, 50)))[0]) == 4
  assert len(embeddings.filters(rng.normal(size=(4, 4, 3, 6)))[0]) == 5
  assert len(embeddings.filters(rng.normal(size=(4, 4, 3, 60)))[0]) == 28


def test_tiles():
  rng = np.random.default_rng(0)
  for channels, shape in [(1, (2, 3)), (3, (2, 3)), (4, (8, 3))]:
    components = rng.normal(size=(5, 2, 3, channels))
    found = embeddings.tiles(components)
    assert found.shape == (5, *shape, 3)
    assert found.min() >= 0 and found.max() <= 1
    # One end is reached, and zero is grey.
    at = np.maximum(found.max((1, 2, 3)), 1 - found.min((1, 2, 3)))
    np.testing.assert_allclose(at, 1)
  np.testing.assert_array_equal(embeddings.tiles(np.zeros((1, 2, 2, 3))), 0.5)
  np.testing.assert_allclose(  # the last channel is the lowest picture
    found[:, 6:, :, 0] - 0.5,
    components[..., 3]
    / (2 * np.abs(components).max((1, 2, 3), keepdims=True)[..., 0]),
  )


def test_components_of_patches_are_eigenvectors():
  rng = np.random.default_rng(0)
  maps = 5 + rng.normal(size=(3, 2, 4, 6)) * np.arange(1, 7)
  found, shares = embeddings.patch_components(maps, 2)
  points = maps.reshape(-1, 6)
  values, vectors = np.linalg.eigh(np.cov(points.T))
  np.testing.assert_allclose(shares, values[:3:-1] / values.sum(), rtol=1e-5)
  for i, vector in enumerate(vectors.T[:3:-1]):
    vector = vector * np.sign(vector[np.abs(vector).argmax()])
    wanted = (points - points.mean(axis=0)) @ vector
    np.testing.assert_allclose(found[..., i].ravel(), wanted, atol=1e-5)


def test_colours_leave_out_one_percent_at_each_end():
  ramps = np.arange(101)[:, None] * np.array([1, -2, 5])
  found = embeddings.colours(ramps)[[0, 1, 2, 50, 98, 99, 100]]
  up = [0, 0, 2, 127, 252, 255, 255]
  np.testing.assert_array_equal(found.T, [up, up[::-1], up])
  large = embeddings.enlarge(np.array([[1, 2]]), (2, 6, 3))
  np.testing.assert_array_equal(large, [[1, 1, 1, 2, 2, 2]] * 2)


def test_similarity_of_sincos2d():
  """cos a cos b + sin a sin b = cos(a - b): only the offset counts."""
  width, grid = 32, (3, 5)
  found = embeddings.similarity(SinCos2d().table({}, grid, width))
  assert found.shape == (3, 5, 3, 5)
  omega = 10_000.0 ** -(np.arange(8) / 7)
  for i, j, m, n in np.ndindex(*found.shape):
    waves = np.cos((i - m) * omega).sum() + np.cos((j - n) * omega).sum()
    np.testing.assert_allclose(found[i, j, m, n], waves / 16, atol=1e-6)


def test_representatives_are_of_the_largest_groups_first():
  groups = np.array([[1, 0, 0, 2], [0, 1, 0, 1], [0, 0, 3, 1]])
  found = embeddings.similarity(np.eye(4)[groups])
  found = embeddings.representatives(found, 4)
  assert groups[tuple(found.T)].tolist() == [0, 1, 2, 3]
  np.testing.assert_array_equal(found[0], [0, 1])  # the first of equals


def test_similarity_of_any_table():
  rng = np.random.default_rng(0)
  table = rng.normal(size=(2, 3, 7))
  table[1, 1] = 0
  found = embeddings.similarity(table)
  a, b = table[0, 2], table[1, 0]
  wanted = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
  np.testing.assert_allclose(found[0, 2, 1, 0], wanted, atol=1e-6)
  np.testing.assert_array_equal(found[1, 1], 0)
  np.testing.assert_allclose(found[0, 0, 0, 0], 1, atol=1e-6)
