"""Records what timm's and torchvision's augmentations do to small images.

The images are noise, constant, binary, extreme, and of a single pixel or row.
An array of 'timm/IMAGE' has the results of each of 'timm', which is text:

  timm      TABLE NAME MAGNITUDE KERNEL SIGN, of rand-mMAGNITUDE-inc0 and -inc1
  trivial   NAME BIN SIGN, of 31 bins of TrivialAugmentWide
  hue       TURN, of adjust_hue of a tensor
  uncropped, padded   resized to 16 and padded by 4, before the crop

tests/parity/test_augment_live.py makes them live, of larger images.

Record again, in an environment of its own:

  pip install torch==2.15.0 --index-url https://download.pytorch.org/whl/cpu
  pip install --no-deps timm==1.0.31 torchvision==0.29.2
  pip install huggingface_hub pillow pyyaml safetensors
  python tests/golden/record_augment.py
"""

import itertools
import random
from unittest import mock

import numpy as np
import seeded
import torch
from PIL import Image, ImageOps

auto_augment, autoaugment, functional = seeded.import_torch(
  'timm.data.auto_augment',
  'torchvision.transforms.autoaugment',
  'torchvision.transforms.functional',
)

FILL = (124, 116, 104)
KERNELS = {
  'bilinear': Image.Resampling.BILINEAR,
  'bicubic': Image.Resampling.BICUBIC,
}
TABLES = {
  'plain': auto_augment._RAND_TRANSFORMS,
  'increasing': auto_augment._RAND_INCREASING_TRANSFORMS,
}
POSTERIZE = ImageOps.posterize
SPACE = autoaugment.TrivialAugmentWide()._augmentation_space(31)


def picture(height, width):
  """A smooth image with noise, uint8 [H, W, 3]."""
  rng = np.random.default_rng(0)
  coarse = rng.integers(30, 220, (4, 3, 3), dtype=np.uint8)
  image = Image.fromarray(coarse).resize((width, height), KERNELS['bicubic'])
  noise = rng.integers(-25, 25, (height, width, 3))
  return np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)


def pictures(height, width):
  rng = np.random.default_rng(1)
  return {
    'noise': picture(height, width),
    'constant': np.full((3, 4, 3), 77, np.uint8),
    'binary': rng.choice(np.uint8([0, 255]), (5, 4, 3)),
    'extreme': rng.choice(np.uint8([0, 1, 127, 128, 254, 255]), (4, 5, 3)),
    'pixel': np.uint8([[[3, 200, 90]]]),
    'row': picture(1, 7),
  }


def posterize(image, bits):
  """Also to 0 bits, which timm asks for and Pillow 13 refuses."""
  return POSTERIZE(image, bits) if bits else image.point(lambda _: 0)


def timm_operation(image, table, name, magnitude, kernel, sign):
  hparams = {'img_mean': FILL, 'interpolation': KERNELS[kernel]}
  operation = auto_augment.AugmentOp(name, 1.0, magnitude, hparams)
  drawn = 0.1 if sign == '+' else 0.9
  with (
    mock.patch.object(random, 'random', lambda: drawn),
    mock.patch.object(ImageOps, 'posterize', posterize),
  ):
    return operation(Image.fromarray(image))


def trivial_operation(image, name, index, sign):
  magnitudes, _ = SPACE[name]
  value = float(magnitudes[index]) if magnitudes.ndim else 0.0
  return autoaugment._apply_op(
    Image.fromarray(image),
    *(name, -value if sign == '-' else value),
    *(functional.InterpolationMode.NEAREST, None),
  )


def turned(image, turn):
  tensor = torch.from_numpy(image.transpose(2, 0, 1).copy())
  return functional.adjust_hue(tensor, turn).numpy().transpose(1, 2, 0)


CASES = {
  'timm': [
    (table, *rest)
    for table, names in TABLES.items()
    for rest in itertools.product(names, range(11), KERNELS, '+-')
  ],
  'trivial': [
    case
    for case in itertools.product(SPACE, range(31), '+-')
    if case[2] == '+' or SPACE[case[0]][1]
  ],
  'hue': [(turn,) for turn in np.linspace(-0.5, 0.5, 11).round(1).tolist()],
}
OPERATE = {'timm': timm_operation, 'trivial': trivial_operation, 'hue': turned}


def made(height, width):
  """{name: array}; the image of noise is of this size."""
  arrays = {
    k: np.array([' '.join(map(str, x)) for x in v]) for k, v in CASES.items()
  }
  for image_name, image in pictures(height, width).items():
    arrays[f'image/{image_name}'] = image
    for kind, cases in CASES.items():
      results = [np.asarray(OPERATE[kind](image, *case)) for case in cases]
      arrays[f'{kind}/{image_name}'] = np.stack(results)
  small = functional.resize(
    Image.fromarray(picture(21, 35)), 16, functional.InterpolationMode.BICUBIC
  )
  arrays['uncropped'] = picture(21, 35)
  arrays['padded'] = np.asarray(functional.pad(small, 4, 0, 'reflect'))
  return arrays


if __name__ == '__main__':
  seeded.save('augment', made(7, 6))
