"""Resizing of position tables and patch kernels, against scipy and torch."""

import pathlib

import numpy as np
import pytest
import scipy.ndimage

from vit_jax.models import resample

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'torch_resize.npz'


def noise(*shape):
  return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
  'old, new',
  [
    ((14, 14), (24, 24)),
    ((16, 16), (37, 37)),
    ((7, 7), (9, 5)),
    ((24, 24), (14, 14)),
    ((5, 7), (9, 4)),
    ((4, 4), (1, 6)),
    ((1, 3), (4, 3)),
    ((7, 7), (7, 7)),
  ],
)
def test_paper_resize_equals_scipy_zoom(old, new):
  table = noise(*old, 6)
  zoom = (new[0] / old[0], new[1] / old[1], 1)
  expected = scipy.ndimage.zoom(table, zoom, order=1)
  actual = resample.resize(table, new)
  assert actual.dtype == np.float32
  np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_paper_resize_keeps_the_corners():
  table = noise(1, 5, 6, 8)
  resized = resample.resize(table, (11, 9))
  for corner in [(0, 0), (0, -1), (-1, 0), (-1, -1)]:
    index = (slice(None), *corner)
    np.testing.assert_allclose(resized[index], table[index], atol=1e-6)


@pytest.mark.parametrize('method', ['bilinear', 'bicubic_antialias'])
@pytest.mark.parametrize('case', ['up', 'down', 'mixed'])
def test_resize_equals_torch(method, case):
  golden = np.load(GOLDEN)
  expected = golden[f'{case}/{method}']
  actual = resample.resize(golden[f'{case}/table'], expected.shape[1:3], method)
  # float32 rounding of values up to about 3: 3e-7 measured.
  np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize('method', resample.METHODS)
def test_resize_to_the_same_size_changes_nothing(method):
  table = noise(2, 4, 5, 3)
  np.testing.assert_array_equal(resample.resize(table, (4, 5), method), table)


def test_resize_says_what_it_cannot_do():
  with pytest.raises(ValueError, match="'area' must be one of 'paper'"):
    resample.resize(noise(2, 2, 3), (4, 4), 'area')
  with pytest.raises(ValueError, match=r'shape \(4, 3\).*\[..., gh, gw, D\]'):
    resample.resize(noise(4, 3), (4, 4))
  with pytest.raises(ValueError, match='sizes of 1 or more'):
    resample.resize(noise(2, 2, 3), (0, 4))


@pytest.mark.parametrize('name', ['grow', 'shrink', 'mixed'])
def test_patch_kernels_are_resized_as_timm_does(name):
  golden = np.load(GOLDEN.with_name('timm_patch_resize.npz'))
  expected = golden[f'{name}/resized']
  actual = resample.resize_kernel(golden[f'{name}/kernel'], expected.shape[:2])
  # timm computes in float32; measured: 5e-6.
  np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize('method', resample.METHODS)
def test_larger_patches_get_the_embedding_of_the_smaller(method):
  kernel, patches = noise(4, 3, 2, 6), noise(10, 4, 3, 2)
  larger = resample.resize(patches, (7, 5), method)
  resized = resample.resize_kernel(kernel, (7, 5), method)
  np.testing.assert_allclose(
    np.einsum('bhwc,hwcd->bd', larger, resized),
    np.einsum('bhwc,hwcd->bd', patches, kernel),
    atol=2e-5,
  )
