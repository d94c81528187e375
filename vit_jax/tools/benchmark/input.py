"""Worker that times the data pipeline, from JPEGs in memory to batches."""

import time
from typing import Any

import numpy as np

SIZE, QUALITY, NUM_EXAMPLES = (375, 500), 90, 64  # about ImageNet's
_PACKAGES = {'cv2': 'opencv-python-headless'}


class Jpegs:
  """Source of encoded images of 50 to 100 kB, held in memory.

  They show smooth shapes with some noise: noise alone is slower to decode than
  photographs.
  """

  class_names = None
  num_classes = 1000
  channels = 3

  def __init__(
    self,
    num_examples: int = NUM_EXAMPLES,
    size: tuple[int, int] = SIZE,
    seed: int = 0,
  ) -> None:
    self.files = [_jpeg(size, (seed, i)) for i in range(num_examples)]

  def __len__(self) -> int:
    return len(self.files)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return {'image': self.files[index], 'label': index % self.num_classes}


class Input:
  """Batches of one process: decode, InceptionCrop, FlipLR.

  Args:
    settings: 'batch_size', 'image_size', 'num_workers', 'warmup' (batches).
  """

  def __init__(self, settings: Any) -> None:
    try:
      from vit_jax.data import pipeline, transforms

      source = Jpegs()
      size = settings['image_size']
      data = pipeline.Data(
        source,
        settings['batch_size'],
        (transforms.InceptionCrop(size), transforms.FlipLR()),
        num_workers=settings.get('num_workers', 0),
      )
      self._batches = data.train_batches()
      first_batch_s = self.round(1)
    except ModuleNotFoundError as error:
      raise ModuleNotFoundError(
        f'The input pipeline needs {error.name}, which is not installed here: '
        f'pip install {_PACKAGES.get(str(error.name), error.name)}, or leave '
        'input out of --mode.'
      ) from error
    self.round(settings.get('warmup', 0))
    self.started = {
      'first_batch_s': first_batch_s,
      'jpeg_bytes': float(np.mean([len(file) for file in source.files])),
      'device_kind': 'host',
      'n_devices': 1,
    }

  def round(self, steps: int) -> float:
    """Return the seconds that some batches take."""
    start = time.perf_counter()
    for _ in range(steps):
      next(self._batches)
    return time.perf_counter() - start


def _jpeg(size, seed):
  from vit_jax.data import images

  cv2 = images.opencv()
  rng = np.random.default_rng(seed)
  picture = np.full((*size, 3), 128, np.float32)
  for cells in (4, 16, 64):
    coarse = rng.uniform(-1, 1, (cells, cells, 3)).astype(np.float32)
    smooth = cv2.resize(coarse, size[::-1], interpolation=cv2.INTER_CUBIC)
    picture += smooth * 160 / cells**0.5
  picture += rng.normal(0, 6, picture.shape)
  picture = np.uint8(np.clip(picture, 0, 255))
  quality = [cv2.IMWRITE_JPEG_QUALITY, QUALITY]
  return cv2.imencode('.jpg', picture, quality)[1].tobytes()
