"""Random colours of the views of an image, on the device.

`data.transforms.MultiCrop` cuts views on the host. The key of a view depends
on the place of its example in the global batch, so the mesh changes nothing.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.types import Batch, Fraction, NonNegative, Positive, UserError

_Jitter = tuple[NonNegative, NonNegative, NonNegative, Fraction]


@dataclasses.dataclass(frozen=True)
class Colour:
  """Random flip, colour jitter, grey, blur and solarize, in this order.

  Equal to torchvision's transforms of float images. With one channel, grey and
  the changes of saturation and hue do nothing.

  Attributes:
    flip, jitter_probability, grey, blur, solarize: probabilities.
    jitter: strengths of brightness, contrast, saturation and hue, which change
      in random order. For strength x, a factor is uniform in max(0, 1 - x) to
      1 + x; the hue turns by a uniform fraction of the circle in -x to x.
    blur_sigma: bounds of the uniform standard deviation, in pixels. The kernel
      ends at 3 times the upper one.
  """

  flip: Fraction = 0.5
  jitter: _Jitter = (0.4, 0.4, 0.2, 0.1)
  jitter_probability: Fraction = 0.8
  grey: Fraction = 0.2
  blur: Fraction = 0.5
  blur_sigma: tuple[Positive, Positive] = (0.1, 2.0)
  solarize: Fraction = 0.0

  def __call__(self, image: jax.Array, key: jax.Array) -> jax.Array:
    """Change an image, float32 [H, W, C] in 0..255, C = 1 or 3."""
    *widths, turn = self.jitter
    least, most = self.blur_sigma
    low = [*[0.0] * 9, least, *(max(0.0, 1 - x) for x in widths), -turn]
    high = [*[1.0] * 9, most, *(1 + x for x in widths), turn]
    bounds = jnp.array(low), jnp.array(high)
    draws = jax.random.uniform(key, (14,), jnp.float32, *bounds)
    chances, order, (sigma,), factors = jnp.split(draws, (5, 9, 10))
    changes = (
      (self.flip, lambda x: x[..., ::-1]),
      (self.jitter_probability, lambda x: jitter(x, order.argsort(), factors)),
      (self.grey, luma),
      (self.blur, lambda x: blur(x, sigma, math.ceil(3 * most))),
      (self.solarize, lambda x: jnp.where(x >= 128, 255 - x, x)),
    )
    image = jnp.moveaxis(image, -1, 0)  # CPUs are twice as fast with [C, H, W]
    for chance, (probability, change) in zip(chances, changes):
      if probability:  # else spare the work
        image = jnp.where(chance < probability, change(image), image)
    return jnp.moveaxis(image, 0, -1)


@dataclasses.dataclass(frozen=True)
class Channels:
  """Random flip and `augment.ChannelJitter`, for rasters of any values."""

  flip: Fraction = 0.5
  scale: Fraction = 0.2
  shift: NonNegative = 0.2

  def __call__(self, image: jax.Array, key: jax.Array) -> jax.Array:
    """Change an image, float32 [H, W, C]; NaN stays NaN."""
    of_flip, of_channels = jax.random.split(key)
    is_turned = jax.random.bernoulli(of_flip, self.flip)
    image = jnp.where(is_turned, image[:, ::-1], image)
    shape = (2, 1, 1, image.shape[-1])
    scale, shift = jax.random.uniform(of_channels, shape, minval=-1)
    std = jnp.nanstd(image, axis=(0, 1), keepdims=True)
    return image * (1 + self.scale * scale) + std * self.shift * shift


def jitter(image: jax.Array, order: jax.Array, factors: jax.Array) -> jax.Array:
  """Change brightness, contrast, saturation, hue of [C, H, W] in an order."""
  for kind, factor in zip(order, factors[order]):
    grey = luma(image)
    other = jnp.where(kind == 1, jnp.mean(grey), grey * (kind == 2))
    changed = jnp.clip(factor * image + (1 - factor) * other, 0, 255)
    turned = turn_hue(image, factor) if len(image) == 3 else image
    image = jnp.where(kind == 3, turned, changed)
  return image


def luma(image: jax.Array) -> jax.Array:
  """Return the grey levels of an image: [C, H, W] -> [1, H, W]."""
  if len(image) == 1:
    return image
  return (0.2989 * image[0] + 0.587 * image[1] + 0.114 * image[2])[None]


def turn_hue(image: jax.Array, turn: jax.Array) -> jax.Array:
  """Turn the hues of an RGB image [3, H, W] by a fraction of the circle."""
  red, green, blue = image
  top, chroma = image.max(0), image.max(0) - image.min(0)
  scale = jnp.where(chroma == 0, 1, chroma)
  # Not `top == red`: XLA may compute `red` twice, with different rounding.
  is_red, is_green = red >= jnp.maximum(green, blue), green >= blue
  hue = jnp.where(is_green, 2 + (blue - red) / scale, 4 + (red - green) / scale)
  hue = jnp.where(is_red, (green - blue) / scale, hue) + 6 * turn
  away = [abs(x - 6 * jnp.round(x / 6)) for x in (hue + 3, hue + 1, hue - 1)]
  return jnp.stack([top - chroma * jnp.clip(2 - x, 0, 1) for x in away])


def blur(image: jax.Array, sigma: jax.Array, radius: int) -> jax.Array:
  """Blur [C, H, W] by a Gaussian that ends at `radius`; edges reflect."""

  def weights(size):
    away = np.arange(size + 2 * radius) - radius - np.arange(size)[:, None]
    kernel = jnp.exp(-0.5 * (away / sigma) ** 2) * (abs(away) <= radius)
    kernel /= jnp.sum(kernel, 1, keepdims=True)
    reflected = np.pad(np.eye(size), ((radius, radius), (0, 0)), 'reflect')
    return jnp.matmul(kernel, reflected, precision='highest')

  # On CPUs, products are 5 to 20 times as fast as sums of shifted images.
  rows, columns = map(weights, image.shape[1:])
  return jnp.einsum('yh,xw,chw->cyx', rows, columns, image, precision='highest')


@dataclasses.dataclass(frozen=True)
class Views:
  """Colours of the views of a batch, by default as in main_dino.py of DINO.

  Attributes:
    globals: colours of each global view; more views have the last one.
    local: colours of all local views.
  """

  globals: tuple[Colour | Channels, ...] = (
    Colour(blur=1.0),
    Colour(blur=0.1, solarize=0.2),
  )
  local: Colour | Channels = Colour()

  def prepare(self, batch: Batch, rng: jax.Array) -> dict[str, Any]:
    """Change 'image' and 'local' to float32 in 0..255.

    'image' is uint8 [B, V, H, W, C] or [B, H, W, C]; 'local' may be absent.
    """
    batch = dict(batch)
    views = {'image': self.globals, 'local': (self.local,)}
    for key, (name, colours) in zip(jax.random.split(rng), views.items()):
      if name in batch:
        batch[name] = _change(batch[name], colours, key)
    return batch


LEJEPA = Views((Colour(solarize=0.2),), Colour(solarize=0.2))  # its README


def _change(images, colours, key):
  """Change [B, V, H, W, C], each view by its Colour or the last one."""
  if images.ndim == 4:
    return _change(images[:, None], colours, key)[:, 0]
  is_raster = images.dtype != jnp.uint8 or images.shape[-1] not in (1, 3)
  if is_raster and any(isinstance(x, Colour) for x in colours):
    raise UserError(
      'Colour is for levels 0 to 255 of 1 or 3 channels, and the images are '
      f'{images.dtype} with {images.shape[-1]}. Use {__name__}.Channels.'
    )
  images = images.astype(jnp.float32)
  keys = jax.random.split(key, images.shape[:2])
  ends = [*range(1, len(colours)), images.shape[1]]
  parts = [
    jax.vmap(jax.vmap(colour))(images[:, i:end], keys[:, i:end])
    for i, (colour, end) in enumerate(zip(colours, ends))
  ]
  return jnp.concatenate(parts, axis=1)
