"""Parts of encoded images: the pixels are those of a whole decoding."""

import io

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import images, pipeline, transforms

compiled = pytest.mark.skipif(
  images._jpeg is None, reason='the extension _jpeg.c is not compiled'
)

HEIGHT, WIDTH = 75, 101  # no multiples of a block
KINDS = {
  '4:2:0': {'subsampling': 2},
  '4:2:2': {'subsampling': 1},
  '4:4:4': {'subsampling': 0},
  'progressive': {'progressive': True},
  'restart markers': {'restart_marker_blocks': 3},
  'codes of its own': {'optimize': True},
  'long codes': {'quality': 100},
  'few coefficients': {'quality': 3},
}


def _picture(height=HEIGHT, width=WIDTH):
  """Colourful, with edges and noise, so that each pixel counts."""
  rng = np.random.default_rng(0)
  y, x = np.mgrid[:height, :width]
  planes = [x * 255 // width, y * 255 // height, (x // 7 + y // 5) % 2 * 200]
  noise = rng.normal(0, 12, (height, width, 3))
  return np.uint8(np.clip(np.stack(planes, -1) + noise, 0, 255))


def _jpeg(image=None, **options):
  file = io.BytesIO()
  image = _picture() if image is None else image
  Image.fromarray(image).save(file, 'JPEG', **{'quality': 90} | options)
  return file.getvalue()


def _boxes(height=HEIGHT, width=WIDTH):
  rng = np.random.default_rng(1)
  yield from [(0, 0, 1, 1), (height - 1, width - 1, 1, 1), (3, 0, 9, width)]
  for _ in range(40):
    y, x = int(rng.integers(height)), int(rng.integers(width))
    h, w = rng.integers(1, height - y + 1), rng.integers(1, width - x + 1)
    yield y, x, int(h), int(w)


def _assert_parts_are_of_the_whole(data, channels=3, **options):
  whole = images.decode(data, channels, **options)
  assert images.Encoded(data, channels, **options).shape == whole.shape
  for y, x, h, w in _boxes(*whole.shape[:2]):
    encoded = images.Encoded(data, channels, **options)
    pixels, inner = encoded.part((y, x, h, w))
    assert inner == (0, 0, h, w)
    np.testing.assert_array_equal(pixels, whole[y : y + h, x : x + w])
  return encoded


@pytest.mark.parametrize('channels', [1, 3])
@pytest.mark.parametrize('kind', KINDS)
def test_parts_of_jpegs(kind, channels):
  encoded = _assert_parts_are_of_the_whole(_jpeg(**KINDS[kind]), channels)
  assert images._jpeg is None or encoded._pixels is None  # only the part


@pytest.mark.parametrize('factors', [0x411111, 0x121111])
def test_parts_of_jpegs_with_other_sampling(factors):
  """Four columns, or two rows, have one value of colour: 4:1:1 and 4:4:0."""
  cv2 = images.opencv()
  options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factors]
  data = cv2.imencode('.jpg', _picture(), options)[1].tobytes()
  _assert_parts_are_of_the_whole(data)


def test_a_damaged_part_is_that_of_the_damaged_whole():
  data, (y, x, h, w) = _jpeg(optimize=True), (20, 30, 40, 50)
  start = data.index(b'\xff\xda') + 14  # of the codes
  rng = np.random.default_rng(5)
  compared = 0
  for _ in range(300):
    damaged = bytearray(data)
    damaged[rng.integers(start, len(data) - 2)] = rng.integers(255)
    try:
      whole = images.decode(bytes(damaged))
      part = images.Encoded(bytes(damaged)).part((y, x, h, w))[0]
    except images.UnreadableError:
      continue
    np.testing.assert_array_equal(part, whole[y : y + h, x : x + w])
    compared += 1
  assert compared > 30


@pytest.mark.parametrize('channels', [1, 3])
def test_parts_of_grey_jpegs(channels):
  data = _jpeg(_picture()[..., 0])
  _assert_parts_are_of_the_whole(data, channels)


@pytest.mark.parametrize('exif', [True, False])
@pytest.mark.parametrize('orientation', range(1, 9))
def test_parts_of_turned_jpegs(orientation, exif):
  tags = Image.Exif()
  tags[0x0112] = orientation
  data = _jpeg(exif=tags)
  encoded = _assert_parts_are_of_the_whole(data, exif=exif)
  is_turned = exif and orientation >= 5
  assert encoded.shape[:2] == (
    (WIDTH, HEIGHT) if is_turned else (HEIGHT, WIDTH)
  )


def test_orientation_is_ignored_on_demand():
  tags = Image.Exif()
  tags[0x0112] = 3
  for kind in ('JPEG', 'PNG', 'WEBP'):
    file = io.BytesIO()
    Image.fromarray(_picture()).save(file, kind, exif=tags, quality=95)
    data = file.getvalue()
    as_stored = images.decode(data, exif=False).astype(int)
    np.testing.assert_array_equal(
      as_stored[::-1, ::-1], images.decode(data, exif=True)
    )
    assert np.abs(as_stored[..., 1] - _picture()[..., 1]).mean() < 10


@pytest.mark.parametrize('kind', ['PNG', 'WEBP', 'GIF', 'TIFF'])
def test_parts_of_other_kinds(kind):
  file = io.BytesIO()
  Image.fromarray(_picture()).save(file, kind)
  _assert_parts_are_of_the_whole(file.getvalue())


def test_parts_without_the_extension_are_the_same(monkeypatch):
  monkeypatch.setattr(images, '_jpeg', None)
  encoded = _assert_parts_are_of_the_whole(_jpeg())
  assert encoded._pixels is not None


def test_a_cut_off_jpeg_is_an_error_in_its_intact_part():
  """With the extension as without it: a run must not depend on it."""
  data = _jpeg()
  encoded = images.Encoded(data[:-300])
  with pytest.raises(images.UnreadableError, match='cannot decode'):
    encoded.part((0, 0, 8, 8))


def test_damaged_jpegs_end_in_pixels_or_an_error():
  data = bytearray(_jpeg(_picture(40, 40), restart_marker_blocks=2))
  rng = np.random.default_rng(2)
  for _ in range(300):
    damaged = bytearray(data)
    for place in rng.integers(2, len(data) - 2, 3):
      damaged[place] = rng.integers(256)
    try:
      encoded = images.Encoded(bytes(damaged), max_image_bytes=2**20)
      if min(encoded.shape[:2]) >= 9:
        assert encoded.part((4, 4, 5, 5))[0].shape == (5, 5, 3)
    except images.UnreadableError:
      pass


@compiled
@pytest.mark.parametrize('size', [24, (40, 24)])
@pytest.mark.parametrize('orientation', [1, 6])
def test_scaled_decoding_is_near(size, orientation):
  """A smooth picture: noise would be filtered out."""
  y, x = np.mgrid[:600, :800]
  waves = [np.sin(x / 18), np.sin(y / 14), np.sin((x + y) / 22)]
  picture = np.uint8(128 + 100 * np.stack(waves, -1))
  tags = Image.Exif()
  tags[0x0112] = orientation
  data = _jpeg(picture, quality=95, exif=tags)
  crop = transforms.InceptionCrop(size)
  differences, scaled_once = [], 0
  for seed in range(20):
    exact, scaled = (
      images.Encoded(data, scaled=scaled) for scaled in (False, True)
    )
    box = crop.box(*exact.shape[:2], np.random.default_rng(seed))
    scaled_once += scaled.part(box, crop.size)[0].shape[0] < box[2] // 2 + 2
    left, right = (
      crop(image, np.random.default_rng(seed)).astype(int)
      for image in (exact, scaled)
    )
    assert left.shape == right.shape == (*crop.size, 3)
    differences.append(np.abs(left - right).mean())
  assert scaled_once == 20
  # Measured 0.9 at most, and 46 with a shift of half a pixel of the result.
  assert max(differences) < 2


@compiled
@pytest.mark.parametrize(
  'transform',
  [
    transforms.Resize(100),
    transforms.ResizeSmall(100),
    transforms.ResizeSmall(100, 'bilinear'),
  ],
)
def test_scaled_decoding_of_whole_images(transform):
  y, x = np.mgrid[:600, :803]
  picture = np.uint8(
    128 + 100 * np.stack([np.sin(x / 40), np.sin(y / 30), np.sin(x / 50)], -1)
  )
  data = _jpeg(picture, quality=95)
  left, right = (
    transform(images.Encoded(data, scaled=scaled), None).astype(int)
    for scaled in (False, True)
  )
  assert np.abs(left - right).mean() < 0.7


class Photographs:
  """A source of JPEGs, one of them cut off."""

  def __len__(self):
    return 10

  def __getitem__(self, index):
    data = _jpeg()
    return {'image': data[:-200] if index == 4 else data, 'label': index}


def _batch(monkeypatch=None, **options):
  options = {'on_error': 'skip', 'num_workers': 0} | options
  crop = (transforms.InceptionCrop(32), transforms.FlipLR())
  data = pipeline.Data(Photographs(), 20, crop, **options)
  batches = data.train_batches(seed=3)
  batch = next(batches)
  spent, skipped = batches.spent, batches.skipped
  batches.close()
  return batch, skipped, spent


def test_batches_are_the_same_without_the_extension(monkeypatch):
  with_it, skipped, spent = _batch()
  monkeypatch.setattr(images, '_jpeg', None)
  without, skipped_without, _ = _batch()
  np.testing.assert_array_equal(with_it['image'], without['image'])
  np.testing.assert_array_equal(with_it['label'], without['label'])
  assert skipped == skipped_without == 2
  assert spent['decoding'] > 0 and spent['transforming'] > 0


@pytest.mark.parametrize('options', [{'num_threads': 1}, {'prefetch': 5}])
def test_batches_do_not_depend_on_threads_and_prefetch(options):
  left, right = _batch()[0], _batch(**options)[0]
  np.testing.assert_array_equal(left['image'], right['image'])


def test_a_source_says_whether_orientation_counts():
  tags = Image.Exif()
  tags[0x0112] = 6
  data = _jpeg(exif=tags)

  class Source:
    exif = False

    def __len__(self):
      return 1

    def __getitem__(self, index):
      return {'image': data, 'label': 0}

  first = pipeline.first_example(Source())
  assert first['image'].shape == (HEIGHT, WIDTH, 3)
  Source.exif = True
  first = pipeline.first_example(Source())
  assert first['image'].shape == (WIDTH, HEIGHT, 3)


@pytest.mark.parametrize(
  'cores, settings, expected',
  [
    (2, {}, (0, 4)),
    (16, {}, (0, 16)),
    (112, {}, (14, 16)),
    (112, {'num_workers': 0}, (0, 16)),
    (112, {'num_workers': 28}, (28, 8)),
    (2, {'num_workers': 2, 'num_threads': 5}, (2, 3)),
  ],
)
def test_workers_and_threads_are_chosen_from_the_machine(
  cores, settings, expected, monkeypatch
):
  monkeypatch.setattr(pipeline.workers, 'cores', lambda: cores)
  data = pipeline.Data(Photographs(), 2, **settings)
  assert data.processes_and_threads() == expected


@pytest.mark.parametrize(
  'num_workers, expected',
  [
    # 2 batches of 20 images, the chunks of one of them, and 4 + 1 chunks of 32,
    # of 32 x 32 x 3 bytes.
    (0, 'read by 4 threads; at most 0.7 MB of images ahead'),
    # 2 batches; of each worker 3 with their chunks, and the one that it sends.
    (2, 'read by 2 worker processes with 2 threads each; at most 1.0 MB of'),
  ],
)
def test_a_run_says_what_reads_its_batches(num_workers, expected, monkeypatch):
  monkeypatch.setattr(pipeline.workers, 'cores', lambda: 2)
  data = pipeline.Data(Photographs(), 20, num_workers=num_workers)
  assert data.describe_reading((32, 32, 3)).startswith(expected)


def test_complete_batches_take_a_bounded_share_of_memory(monkeypatch):
  monkeypatch.setattr(pipeline.workers, 'memory', lambda: 4 * 3 * 32 * 32 * 40)
  data = pipeline.Data(
    Photographs(), 20, (transforms.Resize(32),), prefetch=9, on_error='skip'
  )
  batches = data.train_batches()
  next(batches)
  assert len(batches._iterator[0]._next) == 1  # of 2, one with its labels
  batches.close()
