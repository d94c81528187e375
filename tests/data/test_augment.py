"""Augmentation against recordings of timm and torchvision, and Pillow."""

import collections
import dataclasses
import functools
import json
import pickle
import types

import numpy as np
import pytest
from options import all_set
from PIL import Image, ImageFilter
from tiny import golden, noise

from vit_jax import config as config_lib
from vit_jax.data import augment as A
from vit_jax.data import images
from vit_jax.data import transforms as T

FILL = (124, 116, 104)
DEIT = 'rand-m9-mstd0.5-inc1'
EACH = (
  A.RandAugment(),
  A.RandAugment(3, 20, faults=True),
  A.rand_augment(DEIT, fill=FILL),
  A.rand_augment('rand-m4-mstd101-n3-p1'),
  A.TrivialAugment(),
  A.ThreeAugment(),
  A.ColorJitter(hue=0.2),
  A.RandomErasing(0.7),
  T.SimpleRandomCrop((20, 24)),
)


@pytest.fixture(scope='module')
def recorded():
  return golden('augment')


def _rng(seed=0):
  return np.random.default_rng(seed)


def _name(transform):
  return type(transform).__name__


def _apply(policy, name, image, rng=None, *strength):
  return images.by_pillow(
    lambda x: policy.apply(name, x, rng or _rng(), *strength), image
  )


def _operate(name, image, argument=None, fill=128, kernel='nearest'):
  return images.by_pillow(
    lambda x: A.operate(name, x, argument, fill, kernel), image
  )


# What all of them do.


@pytest.mark.parametrize('channels', [1, 3])
@pytest.mark.parametrize('transform', EACH, ids=_name)
def test_result_depends_on_the_generator_only(transform, channels):
  image = noise(channels=channels)
  before = image.copy()
  out = [transform(image, _rng(seed)) for seed in range(60)]
  again = [pickle.loads(pickle.dumps(transform))(image, _rng(3))]
  np.testing.assert_array_equal(out[3], again[0])
  np.testing.assert_array_equal(image, before)
  size = getattr(transform, 'size', (30, 40))
  assert {(x.shape, x.dtype) for x in out} == {
    ((*size, channels), np.dtype(np.uint8))
  }
  assert len({x.tobytes() for x in out}) > 2


def test_draws_are_the_recorded_ones():
  """Numbers are drawn in the same order, and mean the same, as before."""
  means = [
    *(138.302, 154.946, 128.86, 112.701, 111.852, 109.472, 121.76, 125.328),
    127.234,
  ]
  image = noise()
  made = [[t(image, _rng(s)).mean() for s in range(40)] for t in EACH]
  np.testing.assert_allclose(np.mean(made, 1), means, atol=0.02)


@pytest.mark.parametrize('transform', EACH, ids=_name)
def test_tiny_images(transform):
  for shape in ((1, 1, 3), (2, 5, 1)):
    image = np.full(shape, 9, np.uint8)
    for seed in range(30):
      assert transform(image, _rng(seed)).shape[2] == shape[2]


@pytest.mark.parametrize('transform', EACH, ids=_name)
def test_survives_json(transform):
  settings = json.loads(json.dumps(config_lib.describe(transform)))
  assert config_lib.build(settings) == transform


# Operations.

COLOR_ARGUMENTS = {
  **{'Posterize': 3, 'Solarize': 77.4, 'SolarizeAdd': 60},
  **dict.fromkeys(A.ENHANCE, 1.9),
}


@pytest.mark.parametrize('kernel', ['nearest', 'bilinear', 'bicubic'])
@pytest.mark.parametrize('name', [*A.COLOR, *A.GEOMETRY])
def test_one_channel_is_one_of_three_equal_ones(name, kernel):
  argument = 0.3 if name in A.GEOMETRY else COLOR_ARGUMENTS.get(name)
  view = noise(44, 60, 1)[41:3:-1, ::2]
  before = view.copy()
  out = _operate(name, view, argument, 9, kernel)
  three = _operate(name, np.repeat(view, 3, 2), argument, 9, kernel)
  np.testing.assert_array_equal(np.repeat(out, 3, axis=2), three)
  np.testing.assert_array_equal(view, before)  # not changed
  if name in A.GEOMETRY:  # by nothing
    same = _operate(name, noise(), 0, FILL, kernel)
    np.testing.assert_array_equal(same, noise())


def test_levels_of_operations():
  assert not _operate('Posterize', noise(), 0).any()
  image = np.array([[[0], [100], [127], [128], [250]]], np.uint8)
  for addition, expected in ((60, 187), (220, 255), (300, 255)):
    out = _operate('SolarizeAdd', image, addition).ravel().tolist()
    assert out[0] == min(addition, 255) and out[2:] == [expected, 128, 250]
  assert A.levels(7, 3) == (7, 7, 7)
  assert A.levels((255, 0, 0), 1) == (76,)
  assert A.levels((0, 255, 0), 1) == (150,)


# RandAugment of big_vision.


# Beyond timm's magnitudes; `operate` is compared with timm's below.
AT_15 = {'AutoContrast': None, 'Equalize': None, 'Invert': None, 'Posterize': 6}
AT_15 |= {'Solarize': 384, 'SolarizeAdd': 165, **dict.fromkeys(A.ENHANCE, 2.8)}
SIGNED_AT_15 = {'Rotate': 45, 'ShearX': 0.45, 'ShearY': 0.45}
SIGNED_AT_15 |= {'TranslateX': 150, 'TranslateY': 150}


@pytest.mark.parametrize(('name', 'argument'), AT_15.items())
def test_rand_augment_levels(name, argument):
  assert {*AT_15, *SIGNED_AT_15, 'Cutout'} == set(A.RandAugment.names)
  made = _apply(A.RandAugment(1, 15), name, noise())
  np.testing.assert_array_equal(made, _operate(name, noise(), argument))


@pytest.mark.parametrize(('name', 'argument'), SIGNED_AT_15.items())
def test_rand_augment_geometry_has_a_random_sign(name, argument):
  image = noise(220, 200)
  expected = {
    _operate(name, image, sign * argument).tobytes(): sign for sign in (1, -1)
  }
  transform = A.RandAugment(1, 15)
  signs = [
    expected[_apply(transform, name, image, _rng(seed)).tobytes()]
    for seed in range(40)
  ]
  assert 8 <= signs.count(1) <= 32


def test_cutout_sizes():
  whole = np.zeros((300, 300, 3), np.uint8)
  sizes = [
    (_apply(A.RandAugment(1, 10), 'Cutout', whole, _rng(i)) == 128).sum() // 3
    for i in range(30)
  ]
  assert max(sizes) == 80 * 80 and min(sizes) >= 40 * 40


def test_posterize_keeps_one_bit_at_magnitude_0():
  # As TensorFlow, which shifts by at most 7 bits.
  out = _apply(A.RandAugment(1, 0), 'Posterize', noise())
  assert set(np.unique(out)) == {0, 128}


def test_faults_are_off_by_default():
  image = noise(40, 30)
  sound = A.RandAugment(1, 10)
  assert not sound.faults
  np.testing.assert_array_equal(_apply(sound, 'Solarize', image), image)
  mean = Image.fromarray(image).convert('L')
  mean = int(np.asarray(mean).mean() + 0.5)
  out = _apply(sound, 'Contrast', image)
  expected = np.clip(mean + 1.9 * (image.astype(float) - mean), 0, 255)
  assert np.abs(out - expected).max() <= 1


@pytest.mark.parametrize(
  ('magnitude', 'threshold'), [(5, 128), (10, 0), (15, 128), (20, 0)]
)
def test_faulty_solarize_wraps_its_threshold(magnitude, threshold):
  image = noise()
  out = _apply(A.RandAugment(1, magnitude, faults=True), 'Solarize', image)
  expected = np.where(image < threshold, image, 255 - image)
  np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
  ('size', 'mean'), [((40, 32), 5), ((224, 224), 196), ((256, 300), 255)]
)
def test_faulty_contrast_takes_the_number_of_pixels(size, mean):
  image = noise(*size)
  out = _apply(A.RandAugment(1, 5, faults=True), 'Contrast', image)
  np.testing.assert_array_equal(out, image)  # factor 1
  out = _apply(A.RandAugment(1, 2, faults=True), 'Contrast', image)
  expected = mean + 0.46 * (image.astype(float) - mean)
  assert np.abs(out - expected).max() <= 1


# RandAugment of timm.


@pytest.mark.parametrize(
  'policy, expected',
  [
    (DEIT, A.TimmRandAugment()),
    (DEIT, A.TimmRandAugment(9, 0.5, True, 2, 0.5, 10.0, 'random', 128)),
    ('rand', A.TimmRandAugment(10, 0, False)),
    (
      'rand-inc0-m7-n3-mstd101-mmax30-p.25',
      A.TimmRandAugment(7, 101, False, 3, 0.25, 30),
    ),
  ],
)
def test_names_of_timm(policy, expected):
  assert A.rand_augment(policy) == expected
  more = dict(interpolation='bicubic', fill=FILL)
  assert A.rand_augment(policy, **more) == dataclasses.replace(expected, **more)


@pytest.mark.parametrize(
  'policy',
  [
    *('', 'm9', 'augmix-m3', 'rand-m', 'rand-m9-m8', 'rand-x3', 'rand--m9'),
    *('RAND', 'rand-m9-mstd', 'rand-tweights', 'rand-m-9', 'rand-m9 '),
  ],
)
def test_other_names_are_refused(policy):
  with pytest.raises(ValueError, match=r'not a RandAugment of timm.*mstd0\.5'):
    A.rand_augment(policy)


def _recorded(recorded, kind):
  """Return {text of a case: [(image, result), ...]}, over the images."""
  names = [x.removeprefix('image/') for x in recorded if 'image/' in x]
  return {
    str(case): [
      (recorded[f'image/{name}'], recorded[f'{kind}/{name}'][i])
      for name in names
    ]
    for i, case in enumerate(recorded[kind])
  }


def _with_sign(sign):
  """Return a generator whose random signs are this one."""
  return types.SimpleNamespace(random=lambda: {'+': 0.1, '-': 0.9}[sign])


@pytest.mark.parametrize('table', ['plain', 'increasing'])
def test_operations_are_timms(recorded, table):
  seen = set()
  for case, pairs in _recorded(recorded, 'timm').items():
    which, name, magnitude, kernel, sign = case.split()
    if which != table:
      continue
    name = name.removesuffix('Increasing').removesuffix('Rel')
    transform = A.TimmRandAugment(
      int(magnitude), 0, table == 'increasing', interpolation=kernel, fill=FILL
    )
    for image, expected in pairs:
      made = _apply(transform, name, image, _with_sign(sign))
      np.testing.assert_array_equal(made, expected, case)
    seen.add(name)
  assert seen == set(A.TimmRandAugment.names) and len(seen) == 15


def test_layers_are_applied_with_the_probability():
  image = noise()
  for probability, unchanged in ((0.0, 200), (0.5, 50), (1.0, 0)):
    transform = A.TimmRandAugment(9, 0, probability=probability)
    same = sum(
      np.array_equal(transform(image, _rng(seed)), image) for seed in range(200)
    )
    assert abs(same - unchanged) <= 25


@pytest.mark.parametrize(
  ('std', 'top', 'mean', 'deviation'),
  [(0, 10, 9, 0), (0, 5, 5, 0), (0.5, 30, 9, 0.5), (200, 10, 4.5, 2.6)],
)
def test_magnitudes(std, top, mean, deviation):
  transform = A.TimmRandAugment(9, std, max_magnitude=top)
  rng = _rng()
  drawn = [transform._magnitude(rng) for _ in range(2000)]
  assert np.mean(drawn) == pytest.approx(mean, abs=0.15)
  assert np.std(drawn) == pytest.approx(deviation, abs=0.05)
  assert max(drawn) <= top and min(drawn) >= 0


# The others.


def test_trivial_augment_is_torchvisions(recorded):
  assert len(A.TrivialAugment.names) == 14
  for case, pairs in _recorded(recorded, 'trivial').items():
    name, index, sign = case.split()
    if name.startswith('Translate'):  # positive is the other direction
      if index == '15':  # 15.99 pixels there, in float32, are 15 and not 16
        continue
      sign = {'+': '-', '-': '+'}[sign]
    for image, expected in pairs:
      rng, strength = _with_sign(sign), int(index) / 30
      made = _apply(A.TrivialAugment(), name, image, rng, strength)
      # torchvision's strengths are float32.
      np.testing.assert_allclose(made, expected, 0, 1, err_msg=case)


def test_trivial_augment_draws_evenly(monkeypatch):
  drawn, rng = [], _rng()

  def apply(self, name, picture, rng, strength):
    drawn.append((name, round(30 * strength, 9)))

  monkeypatch.setattr(A.TrivialAugment, 'apply', apply)
  for _ in range(31 * 14 * 40):
    A.TrivialAugment()._change(None, rng)
  for found, kinds in zip(zip(*drawn), (A.TrivialAugment.names, range(31))):
    counts = collections.Counter(found)
    assert counts.keys() == {*kinds}
    expected = len(drawn) / len(kinds)
    far = [abs(n - expected) / expected**0.5 for n in counts.values()]
    assert max(far) < 4  # standard deviations


def test_all_fields_of_policies_act(monkeypatch):
  seen = []

  def operate(name, picture, *others):
    seen.append((name, *others))
    return picture

  monkeypatch.setattr(A, 'operate', operate)
  shared = {'num_layers': 400, 'magnitude': 3, 'fill': 7}
  timm = {'magnitude_std': 0, 'increasing': False, 'probability': 1.0}
  timm |= {'max_magnitude': 2, 'interpolation': 'bilinear'}
  big = all_set(A.RandAugment, faults=True, **shared)
  for policy, count, angle, kernel in (
    (big, range(300, 370), 9, 'nearest'),  # without Contrast and Cutout
    (all_set(A.TimmRandAugment, **shared, **timm), [400], 6, 'bilinear'),
    (all_set(A.TrivialAugment, fill=7), [1], None, 'nearest'),
  ):
    seen.clear()
    policy(noise(), _rng(1))
    names, arguments, fills, kernels = zip(*seen)
    turns = {abs(x) for n, x in zip(names, arguments) if n == 'Rotate'}
    kernels = {k for n, k in zip(names, kernels) if n in A.GEOMETRY}
    assert len(seen) in count and {*fills} == {7} and kernels <= {kernel}
    assert angle is None or turns == {angle}
  zeros = np.zeros((30, 40, 3), np.uint8)
  assert _apply(big, 'Cutout', zeros).max() == 7


def test_hue_is_torchvisions(recorded):
  for turn, pairs in _recorded(recorded, 'hue').items():
    change = functools.partial(A.hue, turn=float(turn))
    for image, expected in pairs:
      made = images.by_pillow(change, image)
      np.testing.assert_allclose(made, expected, 0, 1, err_msg=turn)


def test_three_augment_chooses_evenly():
  image = noise(60, 60)
  made = [A.ThreeAugment()(image, _rng(seed)) for seed in range(300)]
  luma = np.asarray(Image.fromarray(image).convert('L'))[..., None]
  for known in (luma.repeat(3, 2), _operate('Solarize', image, 128)):
    assert 70 <= sum(np.array_equal(x, known) for x in made) <= 130
  seed = next(x for x in range(99) if _rng(x).integers(3) == 2)
  rng = _rng(seed)
  rng.integers(3)
  kernel = ImageFilter.GaussianBlur(rng.uniform(0.1, 2.0))
  blurred = Image.fromarray(image).filter(kernel)
  np.testing.assert_array_equal(made[seed], blurred)


def test_jitter_stays_in_its_ranges_and_order_is_random(monkeypatch):
  calls = []

  def enhance(picture, change, kind='Hue'):
    calls.append((kind, change))
    return picture

  monkeypatch.setattr(A, '_enhance', enhance)
  monkeypatch.setattr(A, 'hue', enhance)
  widths = {'brightness': 0.1, 'contrast': 0.2, 'saturation': 4, 'hue': 0.4}
  jitter = all_set(A.ColorJitter, **widths)
  for seed in range(300):
    jitter(noise(4, 4), _rng(seed))
  kinds, changes = zip(*calls)
  assert len({kinds[i : i + 4] for i in range(0, len(kinds), 4)}) == 24
  for kind, low, high in (
    *(('Brightness', 0.9, 1.1), ('Contrast', 0.8, 1.2)),
    *(('Color', 0, 5), ('Hue', -0.4, 0.4)),  # no factor is negative
  ):
    found = [x for name, x in zip(kinds, changes) if name == kind]
    assert low <= min(found) < low + 0.05 * (high - low)
    assert high >= max(found) > high - 0.05 * (high - low)
  assert len(kinds) == 1200


def _erased(transform, size=(60, 80), seeds=400):
  """Return (fractions of the image, boxes) of what is erased of zeros."""
  image = np.zeros((*size, 3), np.uint8)
  fractions, boxes = [], []
  for seed in range(seeds):
    changed = transform(image, _rng(seed)).any(-1)
    fractions.append(changed.mean())
    if changed.any():
      boxes.append([np.ptp(x) + 1 for x in np.nonzero(changed)])
  return np.array(fractions), np.array(boxes)


def test_erasing_area_ratio_and_probability():
  fractions, boxes = _erased(A.RandomErasing(0.25, std=0))
  assert 0.18 < (fractions > 0).mean() < 0.32
  some = fractions[fractions > 0]
  assert 0.015 < some.min() < 0.05 and 0.25 < some.max() < 0.35
  ratios = boxes[:, 0] / boxes[:, 1]
  assert ratios.min() < 0.5 < 2 < ratios.max()
  # Boxes are filled entirely.
  np.testing.assert_allclose(boxes.prod(1) / 4800, some)


def test_all_fields_of_erasing_act():
  options = {'probability': 1.0, 'area': (0.3, 0.31), 'ratio': (1.9, 2)}
  options |= {'mean': (100, 150, 60), 'std': (10, 20, 15)}
  transform = all_set(A.RandomErasing, **options)
  out = transform(np.zeros((200, 200, 3), np.uint8), _rng())
  rows, columns = (np.ptp(x) + 1 for x in np.nonzero(out.any(-1)))
  assert 0.29 < rows * columns / 200**2 < 0.32 and 1.87 < rows / columns < 2.03
  noise = out[out.any(-1)]
  assert np.abs(noise.mean(0) - options['mean']).max() < 0.5
  assert np.abs(noise.std(0) - options['std']).max() < 0.5


@pytest.mark.parametrize('padding', [4, 2])  # recorded: 4
def test_simple_random_crop_is_torchvisions(recorded, padding):
  image, padded = recorded['uncropped'], recorded['padded'].astype(int)
  transform = T.SimpleRandomCrop(16, padding)
  windows = np.lib.stride_tricks.sliding_window_view(padded, (16, 16), (0, 1))
  windows = windows.transpose(0, 1, 3, 4, 2)  # [y, x, 16, 16, 3]
  found = set()
  for seed in range(150):
    far = np.abs(windows - transform(image, _rng(seed))).max((2, 3, 4))
    assert far.min() <= 1
    found.add(np.unravel_index(far.argmin(), far.shape))
  rows, columns = np.array(sorted(found)).T
  first, last = 4 - padding, windows.shape[1] - 5 + padding
  assert (rows.min(), rows.max()) == (first, 4 + padding)
  assert (columns.min(), columns.max()) == (first, last)
