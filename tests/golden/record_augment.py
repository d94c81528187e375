"""Records what timm's and torchvision's augmentations do to a small image.

Operations are recorded one by one, for both signs of those with a random sign:

  timm/TABLE/NAME/KERNEL/SIGN   magnitude 7 of rand-m7-inc0 and rand-m7-inc1
  trivial/NAME/BIN/SIGN         bins 11 and 30 of 31 of TrivialAugmentWide
  hue/TURN                      adjust_hue of a tensor
  uncropped, padded             resized to 16 and padded by 4, before the crop

tests/parity/test_augment_live.py makes them live, of larger images.

Record again, in an environment of its own:

  pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
  pip install --no-deps timm==1.0.31 torchvision==0.28.0
  pip install huggingface_hub pillow pyyaml safetensors
  python tests/golden/record_augment.py
"""

import pathlib
import random
from unittest import mock

import numpy as np
import seeded
import torch
from PIL import Image

auto_augment, autoaugment, functional = seeded.import_torch(
  'timm.data.auto_augment',
  'torchvision.transforms.autoaugment',
  'torchvision.transforms.functional',
)

FILL = (124, 116, 104)
SIGNED = ('Rotate', 'ShearX', 'ShearY', 'TranslateX', 'TranslateY')
ENHANCE = ('Color', 'Contrast', 'Brightness', 'Sharpness')
KERNELS = {
  'bilinear': Image.Resampling.BILINEAR,
  'bicubic': Image.Resampling.BICUBIC,
}


def picture(height, width):
  """A smooth image with noise, uint8 [H, W, 3]."""
  rng = np.random.default_rng(0)
  coarse = rng.integers(30, 220, (4, 3, 3), dtype=np.uint8)
  image = Image.fromarray(coarse).resize((width, height), KERNELS['bicubic'])
  noise = rng.integers(-25, 25, (height, width, 3))
  return np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)


def timm_operation(name, kernel, image):
  """What timm's operation of a name makes of an image, for both signs."""
  hparams = {'img_mean': FILL, 'interpolation': KERNELS[kernel]}
  operation = auto_augment.AugmentOp(name, 1.0, 7, hparams)
  for sign, drawn in (('+', 0.1), ('-', 0.9)):
    with mock.patch.object(random, 'random', lambda drawn=drawn: drawn):
      yield sign, np.asarray(operation(image))


def made(height, width):
  """{name: array} of an image of this size."""
  image = picture(height, width)
  arrays, pil = {'image': image}, Image.fromarray(image)
  for table, names in (
    ('plain', auto_augment._RAND_TRANSFORMS),
    ('increasing', auto_augment._RAND_INCREASING_TRANSFORMS),
  ):
    for name in names:
      short = name.removesuffix('Increasing').removesuffix('Rel')
      if table == 'increasing' and name in auto_augment._RAND_TRANSFORMS:
        continue  # the same as in the other table
      for kernel in KERNELS if short in SIGNED else ('bilinear',):
        for sign, out in timm_operation(name, kernel, pil):
          arrays[f'timm/{table}/{short}/{kernel}/{sign}'] = out
  space = autoaugment.TrivialAugmentWide()._augmentation_space(31)
  for name, (magnitudes, signed) in space.items():
    for index in (11, 30):
      value = float(magnitudes[index]) if magnitudes.ndim else 0.0
      for sign in ('+', '-') if signed else ('+',):
        out = autoaugment._apply_op(
          pil,
          name,
          -value if sign == '-' else value,
          functional.InterpolationMode.NEAREST,
          None,
        )
        arrays[f'trivial/{name}/{index}/{sign}'] = np.asarray(out)
  tensor = torch.from_numpy(image.transpose(2, 0, 1).copy())
  for turn in (-0.3, 0.1, 0.5):
    out = functional.adjust_hue(tensor, turn).numpy().transpose(1, 2, 0)
    arrays[f'hue/{turn}'] = out
  small = functional.resize(
    Image.fromarray(picture(21, 35)), 16, functional.InterpolationMode.BICUBIC
  )
  arrays['uncropped'] = picture(21, 35)
  arrays['padded'] = np.asarray(functional.pad(small, 4, 0, 'reflect'))
  return arrays


if __name__ == '__main__':
  path = pathlib.Path(__file__).parent / 'augment.npz'
  np.savez_compressed(path, **made(18, 15))
