"""JPEGs in memory, and arguments, for the scripts of input pipelines."""

import os

import cv2
import numpy as np
import timing

KINDS = {  # (height, width), noise, number of files
  'imagenet': ((375, 500), 6, 64),
  'records': ((256, 341), 6, 64),
  'photographs': ((3000, 4000), 4, 4),
}


def make(kind, count=None):
  """Return JPEG files of smooth shapes with some noise, of 50 to 60 kB.

  Noise alone is slower to decode than photographs.
  """
  size, noise, usual = KINDS[kind]
  return [_make(size, noise, seed) for seed in range(count or usual)]


def _make(size, noise, seed):
  rng = np.random.default_rng((seed, *size))
  picture = np.full((*size, 3), 128, np.float32)
  for cells in (4, 16, 64):
    coarse = rng.uniform(-1, 1, (cells, cells, 3)).astype(np.float32)
    smooth = cv2.resize(coarse, size[::-1], interpolation=cv2.INTER_CUBIC)
    picture += smooth * 160 / cells**0.5
  picture += rng.normal(0, noise, picture.shape).astype(np.float32)
  picture = np.uint8(np.clip(picture, 0, 255))
  quality = [cv2.IMWRITE_JPEG_QUALITY, 90]
  return cv2.imencode('.jpg', picture, quality)[1].tobytes()


def arguments(doc):
  """Return the arguments of a script, on as many cores as threads."""
  parser = timing.parser(doc)
  parser.add_argument('--images', choices=KINDS, default='imagenet')
  parser.add_argument('--batch_size', type=int, default=64)
  parser.add_argument('--image_size', type=int, default=224)
  parser.add_argument('--threads', type=int, default=1)
  parser.add_argument('--batches', type=int, default=20)
  args = parser.parse_args()
  cores = sorted(os.sched_getaffinity(0))
  os.sched_setaffinity(0, cores[: args.threads])
  return args


def report(args, batches):
  """Print the images per second of an iterator over batches."""
  timing.report(lambda: next(batches), args.batches, args.batch_size)
