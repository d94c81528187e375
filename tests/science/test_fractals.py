"""Fractals: the systems and their images."""

import hashlib

import numpy as np
import packed
import pytest

from vit_jax.science import fractals


@pytest.mark.parametrize(
  'image, digest',
  [
    ((0, 7, 24), 'd9475a778263d442926708f16c66032a8e6674de5918f946'),
    ((1, 2, 224), '7d3108a23fb72a5cee68e3b79fc7c1e7372f9787aeff622f'),
    ((0, 3, 24, 0.1), '3baa8ee85a46da982b5141902a0dbb712f1fa6d73fe07926'),
  ],
)
def test_golden_pixels(image, digest):
  pixels = fractals.render(*image).tobytes()
  assert hashlib.sha256(pixels).hexdigest().startswith(digest)


def test_systems_are_contractive_with_the_sampled_sum():
  numbers = set()
  for k in range(300):
    system, p = fractals.sample_system(fractals._Stream(5, k))
    n = len(system)
    numbers.add(n)
    linear = system[:, :4].reshape(n, 2, 2)
    s = np.linalg.svd(linear, compute_uv=False)
    assert s.max() <= 1 + 1e-12
    total = (s[:, 0] + 2 * s[:, 1]).sum()
    assert (5 + n) / 2 - 1e-9 <= total <= (6 + n) / 2 + 1e-9
    det = np.abs(np.linalg.det(linear))
    np.testing.assert_allclose(p, det / det.sum(), atol=1e-12)
    assert np.abs(system[:, 4:]).max() < 1
  assert numbers == {2, 3, 4, 5, 6, 7}


def test_examples():
  source = fractals.Fractals(num_classes=4, image_size=16)
  images = packed.stack(source)
  assert images.shape == (4, 16, 16, 1) and images.dtype == np.uint8
  assert [source[i]['label'] for i in range(4)] == [0, 1, 2, 3]
  assert len({x.tobytes() for x in images}) == 4
  source[2]['image'][:] = 0  # as a transform may
  np.testing.assert_array_equal(packed.stack(source), images)
  with pytest.raises(IndexError):
    source[4]
  other = fractals.Fractals(num_classes=4, image_size=16, seed=1)
  assert (other[0]['image'] != images[0]).any()


def test_perturbations_of_one_fractal():
  base, _ = fractals.category(0, 0)
  systems = [fractals.perturbed(0, k, 0.2) - base for k in range(300)]
  noise = np.concatenate([x[:, 4:].ravel() for x in systems])  # not scaled
  assert -0.1 <= noise.min() < -0.099 and 0.099 < noise.max() <= 0.1
  assert noise.std() == pytest.approx(0.2 / 12**0.5, rel=0.02)

  def spread(**options):
    few = dict(num_classes=9, image_size=32)
    images = packed.stack(fractals.Fractals(**few, **options)) / 255.0
    return images.std(axis=0).mean()

  found = [spread(spread=0.01), spread(spread=0.2), spread()]
  assert 0 < found[0] < found[1] < found[2]
