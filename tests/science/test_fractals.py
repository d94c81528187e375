"""Fractals: the systems, their images, and the cache on disk."""

import hashlib
import pickle

import numpy as np
import packed
import pytest

from vit_jax.science import fractals

_SMALL = dict(num_classes=4, images_per_class=3, image_size=16)


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))


def _digest(images):
  return hashlib.sha256(images.tobytes()).hexdigest()


def test_golden_pixels():
  assert _digest(fractals.render_category(0, 7, 104, 24)).startswith(
    '25f36c75fb5847db4b6f4c9954863aa06e5d4475f49bdcbe'
  )
  assert _digest(fractals.render_category(1, 2, 2, 224)).startswith(
    '6f23c30b67aef9571e9255ce6cd563456d9f63b67bdd2b2170'
  )


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


def test_instances_are_rows_times_flips_times_patches():
  images = fractals.render_category(0, 1, 130, 16)
  np.testing.assert_array_equal(images[25], images[0][::-1])
  np.testing.assert_array_equal(images[52], images[2][:, ::-1])
  np.testing.assert_array_equal(images[75], images[0][::-1, ::-1])
  assert (images[100] != images[0]).any()  # another pattern of patches ...
  assert np.abs(images[100].astype(int) - images[0]).mean() < 12  # ... only
  assert len({i.tobytes() for i in images}) > 125
  few = fractals.render_category(0, 1, 27, 16)
  np.testing.assert_array_equal(few, images[:27])


def test_examples():
  source = fractals.Fractals(**_SMALL)
  assert len(source) == 12
  images = packed.stack(source)
  assert images.shape == (12, 16, 16, 1) and images.dtype == np.uint8
  assert [source[i]['label'] for i in range(12)] == [0, 1, 2, 3] * 3
  for label in range(4):
    want = fractals.render_category(0, label, 3, 16)
    np.testing.assert_array_equal(images[label::4, ..., 0], want)
  with pytest.raises(IndexError):
    source[12]


def test_a_class_does_not_depend_on_the_number_of_classes():
  few = fractals.Fractals(**_SMALL)
  more = fractals.Fractals(num_classes=5, images_per_class=4, image_size=16)
  np.testing.assert_array_equal(few[4 + 2]['image'], more[5 + 2]['image'])
  seed = fractals.Fractals(**_SMALL, seed=1)
  assert (seed[0]['image'] != few[0]['image']).any()


def test_the_cache_is_reused(tmp_path, monkeypatch):
  source = fractals.Fractals(**_SMALL)
  assert source.folder.parent == tmp_path / 'vit_jax'
  before, copy = packed.stack(source), pickle.dumps(source)
  assert len(copy) < 2000  # no images
  monkeypatch.setattr(fractals, 'render_category', None)
  for again in (fractals.Fractals(**_SMALL), pickle.loads(copy)):
    np.testing.assert_array_equal(before, packed.stack(again))


def test_an_interrupted_generation_resumes():
  source = fractals.Fractals(**_SMALL)
  before = packed.stack(source)
  first, second, *_ = sorted(source.folder.iterdir())
  drawn = first.stat().st_mtime_ns
  second.unlink()
  again = fractals.Fractals(**_SMALL)
  np.testing.assert_array_equal(packed.stack(again), before)
  assert first.stat().st_mtime_ns == drawn


def test_perturbations_of_one_fractal():
  base, _ = fractals.category(0, 0)
  systems = [fractals.perturbed(0, k, 0.2) - base for k in range(300)]
  noise = np.concatenate([x[:, 4:].ravel() for x in systems])  # not scaled
  assert -0.1 <= noise.min() < -0.099 and 0.099 < noise.max() <= 0.1
  assert noise.std() == pytest.approx(0.2 / 12**0.5, rel=0.02)

  def spread(**options):
    few = dict(num_classes=9, images_per_class=1, image_size=32)
    images = packed.stack(fractals.Fractals(**few, **options)) / 255.0
    return images.std(axis=0).mean()

  found = [spread(spread=0.01), spread(spread=0.2), spread()]
  assert 0 < found[0] < found[1] < found[2]
