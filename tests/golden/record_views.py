"""Records torchvision's colour changes of float images, in 0..1.

views.npz has two images, uint8 [H, W, C]: noise with extreme and equal levels
in colour, and one channel of it. NAME/CASE is what a case makes of an image:

  jitter ORDER FACTORS   0 to 3: brightness, contrast, saturation and hue
  blur SIGMA RADIUS
  luma
  all                    flip, grey, blur 1.3 4, solarize

Record again, in the environment of record_augment.py:

  python tests/golden/record_views.py
"""

import pathlib

import numpy as np
import seeded
import torch

(functional,) = seeded.import_torch('torchvision.transforms.functional')

JITTERS = [
  *(((0,), (factor, 1, 1, 0)) for factor in (0.6, 1.4)),
  *(((1,), (1, factor, 1, 0)) for factor in (0.6, 1.4)),
  *(((2,), (1, 1, factor, 0)) for factor in (0, 0.8, 1.2)),
  *(((3,), (1, 1, 1, turn)) for turn in (-0.5, -0.1, 0.03, 0.1, 0.4)),
  ((0, 1, 2, 3), (1.4, 0.7, 1.2, 0.1)),
  ((3, 1, 0, 2), (1.3, 1.4, 0.8, -0.1)),
  ((1, 3, 2, 0), (0.6, 1.4, 1.2, 0.07)),
  ((2, 0, 3, 1), (1.2, 0.6, 1.9, -0.3)),
]
CHANGES = (
  functional.adjust_brightness,
  functional.adjust_contrast,
  functional.adjust_saturation,
  functional.adjust_hue,
)


def jitter(image, order, factors):
  for kind in order:
    image = CHANGES[kind](image, factors[kind])
  return image


def luma(image):
  return functional.rgb_to_grayscale(image, len(image))


def blur(image, sigma, radius):
  return functional.gaussian_blur(image, 2 * radius + 1, sigma)


def everything(image):
  image = blur(luma(functional.hflip(image)), 1.3, 4)
  return functional.solarize(image, 128 / 255)


def pictures():
  rng = np.random.default_rng(0)
  colour = rng.integers(0, 256, (12, 9, 3), np.uint8)
  colour[:3] = rng.choice(np.uint8([0, 1, 127, 128, 254, 255]), (3, 9, 3))
  colour[3:5, :, 1] = colour[3:5, :, 0]
  colour[5, :, 2] = colour[5, :, 1]
  colour[6] = colour[6, :, :1]
  return {'colour': colour, 'one': colour[..., :1]}


def cases():
  """Yield (name, function) of each case."""
  for order, factors in JITTERS:
    words = (''.join(map(str, order)), *factors)
    name = f'jitter {" ".join(map(str, words))}'
    yield (
      name,
      lambda x, order=order, factors=factors: jitter(x, order, factors),
    )
  for sigma in (0.1, 0.5, 1.3, 2.0):
    yield f'blur {sigma} 6', lambda x, sigma=sigma: blur(x, sigma, 6)
  yield 'luma', luma
  yield 'all', everything


def main():
  arrays = pictures()
  for name, image in pictures().items():
    tensor = torch.from_numpy(image.transpose(2, 0, 1).copy()) / 255
    for case, change in cases():
      arrays[f'{name}/{case}'] = change(tensor).numpy().transpose(1, 2, 0)
  path = pathlib.Path(__file__).parent / 'views.npz'
  np.savez_compressed(path, **arrays)
  print(f'{path}: {path.stat().st_size:,} bytes, {len(arrays)} arrays')


if __name__ == '__main__':
  main()
