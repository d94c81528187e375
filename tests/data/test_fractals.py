"""Fractals: the systems, their images, and the cache on disk."""

import concurrent.futures
import hashlib
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from vit_jax.data.embedded import fractals

_SMALL = dict(num_classes=4, images_per_class=3, image_size=16)
_GENERATE = """
import sys
from vit_jax.data.embedded import fractals
fractals.Fractals(num_classes={n}, images_per_class=8, image_size=32,
                  cache_dir=sys.argv[1], show_progress=False)
"""


def _images(source):
  return np.stack([source[i]['image'] for i in range(len(source))])


def _files(folder, pattern='*.bin'):
  return sorted(folder.glob(f'*/{pattern}'))


def test_golden_pixels():
  """The promise of the same pixels on every machine."""
  images = fractals.render_category(0, 7, 104, 24)
  digest = hashlib.sha256(images.tobytes()).hexdigest()
  assert (
    digest == '25f36c75fb5847db4b6f4c9954863aa06e5d4475f49bdcbe99c8486a1de12053'
  )
  images = fractals.render_category(1, 2, 2, 224)
  digest = hashlib.sha256(images.tobytes()).hexdigest()
  assert (
    digest == '6f23c30b67aef9571e9255ce6cd563456d9f63b67bdd2b2170288f9752d0d6ec'
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


def test_sampler_covers_rotations_and_reflections():
  systems = [
    fractals.sample_system(fractals._Stream(6, k))[0] for k in range(300)
  ]
  maps = np.concatenate(systems)
  det = np.linalg.det(maps[:, :4].reshape(-1, 2, 2))
  assert 0.4 < (det < 0).mean() < 0.6
  # Uniform rotations leave no direction preferred, in the mean.
  assert np.abs(maps.mean(0)).max() < 0.08
  x, y = fractals._Stream(1).directions(4000)
  np.testing.assert_allclose(x * x + y * y, 1, rtol=1e-14)
  angles = np.histogram(np.arctan2(y, x), bins=8, range=(-np.pi, np.pi))[0]
  assert angles.min() > 400


def test_weights_scale_one_parameter_and_never_expand():
  system, _ = fractals.category(0, 3)
  np.testing.assert_array_equal(fractals.weighted(system, 0), system)
  seen = {system.tobytes()}
  for row in range(1, fractals.NUM_ROWS):
    got = fractals.weighted(system, row)
    parameter, factor = (row - 1) // 4, (0.2, 0.6, 1.4, 1.8)[(row - 1) % 4]
    want = system.copy()
    want[:, parameter] *= factor
    norms = np.linalg.norm(want[:, :4].reshape(-1, 2, 2), 2, axis=(1, 2))
    want[:, :4] /= np.maximum(norms, 1)[:, None]
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    seen.add(got.tobytes())
  assert len(seen) == fractals.NUM_ROWS


def test_classes_fill_a_fifth_by_an_independent_chaos_game():
  for label in range(2):
    system, p = fractals.category(2, label)
    assert fractals.fill(system, p) >= 0.2
    rng = np.random.default_rng(label)
    choices = rng.choice(len(p), 25_020, p=p)
    point, points = np.zeros(2), []
    for a, b, c, d, e, f in system[choices]:
      point = np.array([[a, b], [c, d]]) @ point + [e, f]
      points.append(point)
    x, y = np.array(points[20:]).T
    hits = np.histogram2d(x, y, bins=250)[0] > 0
    assert hits.mean() > 0.17  # other bins, other random points


def test_map_choice_follows_the_probabilities():
  # Map k sends everything to the point (k, 0), so x tells which was chosen.
  p = np.array([0.5, 0.3, 0.15, 0.05])
  system = np.zeros((4, 6))
  system[:, 4] = np.arange(4)
  x, _ = fractals.attractor(system[None], p, 100_000)
  np.testing.assert_allclose(
    np.bincount(x[0].astype(int)) / x.size, p, atol=0.006
  )


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


def test_examples(tmp_path):
  source = fractals.Fractals(**_SMALL, channels=3, cache_dir=tmp_path)
  assert len(source) == 12
  images = _images(source)
  assert images.shape == (12, 16, 16, 3) and images.dtype == np.uint8
  assert [source[i]['label'] for i in range(12)] == [0, 1, 2, 3] * 3
  for label in range(4):
    want = fractals.render_category(0, label, 3, 16)
    np.testing.assert_array_equal(images[label::4, ..., 1], want)
  assert 'class 1, image 2' in source.describe(9)
  with pytest.raises(IndexError, match='index 12'):
    source[12]


def test_a_class_does_not_depend_on_the_number_of_classes(tmp_path):
  few = fractals.Fractals(**_SMALL, cache_dir=tmp_path)
  more = fractals.Fractals(
    num_classes=5, images_per_class=4, image_size=16, cache_dir=tmp_path
  )
  np.testing.assert_array_equal(few[4 + 2]['image'], more[5 + 2]['image'])
  seed = fractals.Fractals(**_SMALL, seed=1, cache_dir=tmp_path)
  assert (seed[0]['image'] != few[0]['image']).any()


def test_cache_is_reused(tmp_path, monkeypatch):
  before = _images(fractals.Fractals(**_SMALL, cache_dir=tmp_path))
  monkeypatch.setattr(fractals, 'render_category', None)
  os.chmod(_files(tmp_path)[0], 0o444)
  after = _images(fractals.Fractals(**_SMALL, cache_dir=tmp_path))
  np.testing.assert_array_equal(before, after)


def test_default_cache_is_the_users(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  source = fractals.Fractals(**_SMALL)
  assert source.folder.parent == tmp_path / 'vit_jax'


def test_a_copy_by_pickle_reads_the_cache(tmp_path, monkeypatch):
  source = fractals.Fractals(**_SMALL, cache_dir=tmp_path)
  source[0]
  data = pickle.dumps(source)
  assert len(data) < 2000
  monkeypatch.setattr(fractals, 'render_category', None)
  np.testing.assert_array_equal(_images(pickle.loads(data)), _images(source))


@pytest.mark.parametrize('damage', ['flip', 'cut', 'gone'])
@pytest.mark.parametrize('when', ['before', 'after'])
def test_damage_is_repaired(tmp_path, damage, when):
  before = _images(fractals.Fractals(**_SMALL, cache_dir=tmp_path))
  copy = pickle.dumps(fractals.Fractals(**_SMALL, cache_dir=tmp_path))
  path = _files(tmp_path)[0]
  data = bytearray(path.read_bytes())
  path.unlink()
  if damage != 'gone':
    data[100] ^= 1
    path.write_bytes(data if damage == 'flip' else data[:-50])
  if when == 'before':
    source = fractals.Fractals(**_SMALL, cache_dir=tmp_path)
  else:
    source = pickle.loads(copy)
  np.testing.assert_array_equal(_images(source), before)
  again = fractals.Fractals(**_SMALL, cache_dir=tmp_path)
  np.testing.assert_array_equal(_images(again), before)


def test_a_killed_generation_goes_on(tmp_path):
  command = [sys.executable, '-c', _GENERATE.format(n=8), str(tmp_path)]
  process = subprocess.Popen(command)
  while len(_files(tmp_path)) < 2:
    assert process.poll() is None
    time.sleep(0.005)
  process.send_signal(signal.SIGKILL)
  process.wait()
  done = _files(tmp_path)
  assert 2 <= len(done) < 8
  times = [path.stat().st_mtime_ns for path in done]
  # What a kill within the next file leaves is not read.
  half = done[0].with_name(f'.{len(done):05d}.bin.123.part')
  half.write_bytes(b'half')
  source = fractals.Fractals(
    num_classes=8, images_per_class=8, image_size=32, cache_dir=tmp_path
  )
  assert [path.stat().st_mtime_ns for path in done] == times
  for label in range(8):
    want = fractals.render_category(0, label, 8, 32)
    got = [source[i * 8 + label]['image'][..., 0] for i in range(8)]
    np.testing.assert_array_equal(got, want)


def test_processes_share_a_cache(tmp_path):
  command = [sys.executable, '-c', _GENERATE.format(n=6), str(tmp_path)]
  processes = [subprocess.Popen(command) for _ in range(2)]
  assert [process.wait() for process in processes] == [0, 0]
  files = _files(tmp_path)
  assert len(files) == 6 and not _files(tmp_path, '.*.part')
  for label, path in enumerate(files):
    want = fractals.render_category(0, label, 8, 32)
    rows = np.frombuffer(path.read_bytes(), np.uint8).reshape(8, -1)
    np.testing.assert_array_equal(rows[:, :-4].reshape(want.shape), want)


def test_threads_share_a_source(tmp_path):
  source = fractals.Fractals(**_SMALL, cache_dir=tmp_path)
  want = _images(fractals.Fractals(**_SMALL, cache_dir=tmp_path))
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    got = list(pool.map(lambda i: source[i % 12]['image'], range(120)))
  np.testing.assert_array_equal(got, np.concatenate([want] * 10))


def test_no_write_permission(tmp_path, monkeypatch):
  def refuse(*args, **kwargs):
    raise PermissionError(13, 'Permission denied')

  # Tests may run as root, whom no mode bits stop.
  monkeypatch.setattr(fractals, 'write_atomically', refuse)
  with pytest.raises(PermissionError, match='Set cache_dir, or XDG_CACHE_HOME'):
    fractals.Fractals(**_SMALL, cache_dir=tmp_path)
  assert not _files(tmp_path) and not _files(tmp_path, '.*.part')


@pytest.mark.parametrize(
  'change, message',
  [
    ({'num_classes': 0}, 'num_classes=0 must be an integer of at least 1'),
    ({'images_per_class': 0}, 'images_per_class=0 must be'),
    ({'image_size': 4}, 'image_size=4 must be an integer of at least 8'),
    ({'seed': 1.0}, 'seed=1.0 must be an integer'),
    ({'channels': 2}, 'channels=2 must be one of 1, 3'),
  ],
)
def test_arguments_are_checked(change, message):
  with pytest.raises(ValueError, match=message):
    fractals.Fractals(**(_SMALL | change))
