"""The worker that times the data pipeline: JPEGs in memory to batches."""

import time

import numpy as np

SIZE, QUALITY, EXAMPLES = (375, 500), 90, 64  # as ImageNet's are, about


class Jpegs:
  """A source of encoded pictures, some 50 to 100 kB each, held in memory.

  Smooth shapes with grain on them, of (seed, i): noise alone is larger and
  slower to decode than photographs are.
  """

  class_names = None
  num_classes = 1000
  channels = 3

  def __init__(self, num_examples=EXAMPLES, size=SIZE, seed=0):
    self._files = [_jpeg(size, (seed, i)) for i in range(num_examples)]

  def __len__(self):
    return len(self._files)

  def __getitem__(self, index):
    return {'image': self._files[index], 'label': index % self.num_classes}

  def describe(self, index):
    return f'JPEG {index} made for a benchmark'

  def mean_bytes(self):
    return float(np.mean([len(f) for f in self._files]))


class Input:
  """Batches of one process: decode, InceptionCrop, FlipLR.

  Args:
    settings: 'batch_size', 'image_size', 'num_workers', 'warmup' (batches).
  """

  def __init__(self, settings):
    try:
      from vit_jax.data import pipeline, transforms

      self._source = Jpegs()
      size = settings['image_size']
      self._batches = pipeline.train_batches(
        self._source,
        (transforms.InceptionCrop(size), transforms.FlipLR()),
        batch_size=settings['batch_size'],
        num_workers=settings.get('num_workers', 0),
      )
      start = time.perf_counter()
      next(self._batches)
    except ModuleNotFoundError as error:
      raise ModuleNotFoundError(
        f'The input pipeline needs {error.name}, which is not installed here: '
        f'pip install {_PACKAGES.get(error.name, error.name)}, or leave '
        'input out of --mode.'
      ) from error
    first_s = time.perf_counter() - start
    self.round(settings.get('warmup', 0))
    self.started = {
      'first_batch_s': first_s,
      'jpeg_bytes': self._source.mean_bytes(),
      'device_kind': 'host',
      'n_devices': 1,
    }

  def round(self, steps):
    """Seconds that so many batches take."""
    start = time.perf_counter()
    for _ in range(steps):
      next(self._batches)
    return time.perf_counter() - start


_PACKAGES = {'cv2': 'opencv-python-headless'}


def _jpeg(size, seed):
  from vit_jax.data import images

  cv2 = images.opencv()
  rng = np.random.default_rng(seed)
  picture = np.zeros((*size, 3), np.float32)
  for cells in (4, 16, 64):
    coarse = rng.uniform(-1, 1, (cells, cells, 3)).astype(np.float32)
    shape = cv2.resize(coarse, size[::-1], interpolation=cv2.INTER_CUBIC)
    picture += shape * 160 / cells**0.5
  picture += rng.normal(0, 6, picture.shape)
  picture = np.uint8(np.clip(picture + 128, 0, 255))
  quality = [cv2.IMWRITE_JPEG_QUALITY, QUALITY]
  return cv2.imencode('.jpg', picture, quality)[1].tobytes()
