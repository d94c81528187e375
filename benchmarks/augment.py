r"""Time augmentation next to timm's and torchvision's, in one process.

  pip install torch torchvision timm   # in an environment of its own
  python benchmarks/augment.py [--rounds=5] [--images=256]

Each policy is applied to the same decoded images on one thread: uint8 arrays
here, and Pillow images there, where the result is converted to an array. The
implementations take turns in rounds. A line has the images per CPU second of
both, and the median of the ratios of the rounds with the smallest and largest.
The last rows are complete recipes without decoding and normalization, from
375 x 500 pixels to 224 x 224; the others keep 224 x 224. What is drawn differs,
so that small numbers of images give other ratios.
"""

import argparse
import pathlib
import random
import sys
import time

import numpy as np
from PIL import Image, ImageFilter, ImageOps

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests' / 'golden')]

import jpegs  # noqa: E402
import seeded  # noqa: E402

from vit_jax.data import augment as A  # noqa: E402
from vit_jax.data import images  # noqa: E402
from vit_jax.data import transforms as T  # noqa: E402

DEIT = 'rand-m9-mstd0.5-inc1'


def policies():
  """Return {name: (size, ours, theirs)}; size None: 375 x 500."""
  import torch

  auto, erasing, factory, vision = seeded.import_torch(
    'timm.data.auto_augment',
    'timm.data.random_erasing',
    'timm.data.transforms',
    'torchvision.transforms',
  )
  bicubic = vision.InterpolationMode.BICUBIC

  def rand(**hparams):
    return auto.rand_augment_transform(
      DEIT, {'img_mean': (128,) * 3, **hparams}
    )

  def blurred(image):
    radius = random.uniform(0.1, 2)
    return image.filter(ImageFilter.GaussianBlur(radius))

  three = vision.RandomChoice([vision.Grayscale(3), ImageOps.solarize, blurred])
  jitter = vision.ColorJitter(0.3, 0.3, 0.3)
  flip = vision.RandomHorizontalFlip()
  erase = erasing.RandomErasing(0.25, mode='pixel', device='cpu')

  def erased(image):
    # There it comes after normalization, which is not counted.
    array = np.asarray(image).transpose(2, 0, 1)
    return erase(torch.from_numpy(array.copy()).float())

  resized = factory.RandomResizedCropAndInterpolation(
    224, interpolation='bicubic'
  )
  here = [A.rand_augment(DEIT, interpolation='bicubic')]
  crop = T.InceptionCrop(
    224,
    area=(0.08, 1.0),
    interpolation='bicubic',
    antialias=True,
    method='torch',
  )
  simple = [
    vision.Resize(224, bicubic),
    vision.RandomCrop(224, padding=4, padding_mode='reflect'),
  ]
  return {
    'RandAugment, timm, random kernel': (
      *(224, [A.rand_augment(DEIT)]),
      [rand(), np.asarray],
    ),
    'RandAugment, timm, bicubic (DeiT)': (
      *(224, here),
      [rand(interpolation=Image.Resampling.BICUBIC), np.asarray],
    ),
    'TrivialAugment, torchvision': (
      *(224, [A.TrivialAugment()]),
      [vision.TrivialAugmentWide(), np.asarray],
    ),
    '3-Augment and jitter': (
      *(224, [A.ThreeAugment(), A.ColorJitter()]),
      [three, jitter, np.asarray],
    ),
    'colour jitter, torchvision': (
      *(224, [A.ColorJitter()]),
      [jitter, np.asarray],
    ),
    'random erasing, timm': (224, [A.RandomErasing()], [erased]),
    'simple random crop, torchvision': (
      *(None, [T.SimpleRandomCrop(224)]),
      [*simple, np.asarray],
    ),
    'DeiT: crop, flip, RandAugment, erasing': (
      None,
      [crop, T.FlipLR(), *here, A.RandomErasing()],
      [resized, flip, rand(interpolation=Image.Resampling.BICUBIC), erased],
    ),
    'DeiT III: crop, flip, 3-Augment, jitter': (
      None,
      [crop, T.FlipLR(), A.ThreeAugment(), A.ColorJitter()],
      [resized, flip, three, jitter, np.asarray],
    ),
    'DeiT III, 21k: simple crop, flip, 3-Augment, jitter': (
      None,
      [T.SimpleRandomCrop(224), T.FlipLR(), A.ThreeAugment(), A.ColorJitter()],
      [*simple, flip, three, jitter, np.asarray],
    ),
  }


def photographs(size, count):
  """Return arrays uint8 [H, W, 3]: smooth shapes with some noise."""
  made = [images.decode(file) for file in jpegs.make('imagenet', count)]
  return made if size is None else [T.resize(x, size, 'area') for x in made]


def rate_of_ours(transforms, arrays, seed):
  """Return images per CPU second."""
  begin = time.process_time()
  for index, image in enumerate(arrays):
    rng = np.random.default_rng((seed, index))
    for transform in transforms:
      image = transform(image, rng)
  return len(arrays) / (time.process_time() - begin)


def rate_of_theirs(transforms, pictures, seed):
  """Return images per CPU second."""
  random.seed(seed)
  np.random.seed(seed)
  begin = time.process_time()
  for image in pictures:
    for transform in transforms:
      image = transform(image)
  return len(pictures) / (time.process_time() - begin)


def main():
  import torch

  torch.set_num_threads(1)
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--images', type=int, default=256)
  args = parser.parse_args()
  print(f'{"images per CPU second":52} {"ours":>6} {"theirs":>6}  ratio')
  for name, (size, ours, theirs) in policies().items():
    arrays = photographs(size, args.images)
    pictures = [Image.fromarray(x) for x in arrays]
    rates = []
    for seed in range(-1, args.rounds):  # the first round does not count
      pair = (
        rate_of_ours(ours, arrays, seed + 1),
        rate_of_theirs(theirs, pictures, seed + 1),
      )
      rates += [pair] * (seed >= 0)
    here, there = np.median(rates, axis=0)
    ratios = [a / b for a, b in rates]
    print(
      f'{name:52} {here:6.0f} {there:6.0f}  {np.median(ratios):.2f} '
      f'({min(ratios):.2f} to {max(ratios):.2f})',
      flush=True,
    )


if __name__ == '__main__':
  main()
