"""Resizing of position tables and patch kernels, against scipy and torch."""

import numpy as np
import pytest
import scipy.ndimage
from tiny import golden

from vit_jax.models import resample

TORCH, TIMM = golden('torch_resize'), golden('timm_patch_resize')


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


@pytest.mark.parametrize(
  'method', [x for x in resample.METHODS if x not in ('paper', 'geometric')]
)
@pytest.mark.parametrize('case', ['up', 'down', 'mixed'])
def test_resize_equals_torch(method, case):
  expected = TORCH[f'{case}/{method}']
  actual = resample.resize(TORCH[f'{case}/table'], expected.shape[1:3], method)
  # Weights and torch's results are float32: 1.2e-6 measured.
  np.testing.assert_allclose(actual, expected, atol=4e-6)


@pytest.mark.parametrize('method', resample.METHODS)
def test_resize_to_the_same_size_changes_nothing(method):
  table = noise(2, 4, 5, 3)
  np.testing.assert_array_equal(resample.resize(table, (4, 5), method), table)


@pytest.mark.parametrize('name', ['grow', 'shrink', 'mixed'])
def test_patch_kernels_are_resized_as_timm_does(name):
  expected = TIMM[f'{name}/resized']
  actual = resample.resize_kernel(TIMM[f'{name}/kernel'], expected.shape[:2])
  # timm computes in float32; measured: 5e-6.
  np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize(
  'method',
  # '_square' crops, 'geometric' is for tables of an odd size.
  [x for x in resample.METHODS if '_square' not in x and x != 'geometric'],
)
def test_larger_patches_get_the_embedding_of_the_smaller(method):
  kernel, patches = noise(4, 3, 2, 6), noise(10, 4, 3, 2)
  larger = resample.resize(patches, (7, 5), method)
  resized = resample.resize_kernel(kernel, (7, 5), method)
  np.testing.assert_allclose(
    np.einsum('bhwc,hwcd->bd', larger, resized),
    np.einsum('bhwc,hwcd->bd', patches, kernel),
    atol=2e-5,
  )


def test_patches_and_channels_are_resized_only_when_asked():
  kernel = noise(4, 2, 3, 16)

  def resize(shape, path='embedding/kernel', **options):
    return resample.resize_parameter(None, path, kernel, shape, **options)

  assert resize((2, 2, 3, 16)) is None
  assert resize((4, 2, 1, 16), patch_resize='bilinear') is None
  assert resize((4, 2, 3, 8), patch_resize='bilinear') is None
  other = resize((2, 2, 3, 16), path='head/kernel', patch_resize='bilinear')
  assert other is None
  summed = resize((4, 2, 1, 16), adapt_channels=True)
  np.testing.assert_allclose(summed, kernel.sum(2, keepdims=True), rtol=1e-6)
  grey = resize((2, 2, 1, 16), patch_resize='bilinear', adapt_channels=True)
  smaller = resample.resize_kernel(summed, (2, 2), 'bilinear')
  np.testing.assert_allclose(grey, smaller, rtol=1e-6)
  more = resize((4, 2, 5, 16), adapt_channels=True)
  np.testing.assert_allclose(more[:, :, 4], kernel[:, :, 1] * 3 / 5, rtol=1e-6)
  mean = kernel.mean(2, keepdims=True)
  many = resize((4, 2, 13, 16), adapt_channels='mean')
  np.testing.assert_allclose(many, mean.repeat(13, 2) * 3 / 13, rtol=1e-5)
  assert (resize((4, 2, 3, 16), adapt_channels='mean') == kernel).all()
  kernel = many * np.float32(np.arange(13)[:, None])
  few = resize((4, 2, 3, 16), adapt_channels='mean')
  np.testing.assert_allclose(few[:, :, 2], kernel.sum(2) / 3, rtol=1e-5)
  with pytest.raises(ValueError, match="'area'"):
    resample.resize(noise(2, 2, 3), (4, 4), 'area')
