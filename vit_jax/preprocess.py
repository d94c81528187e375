"""From the bytes of an image to what a model takes, on the device.

Images travel to the device as uint8, a quarter of float32's bytes.
"""

import dataclasses

import jax
import jax.numpy as jnp

from vit_jax.types import Array, Positive


@dataclasses.dataclass(frozen=True)
class Normalize:
  """(x - mean) / std of uint8 images; by default [0, 255] to [-1, 1].

  Attributes:
    mean, std: in units of 0..255; a number, or one per channel. The default is
      that of the paper's released code, (x - 127.5) / 127.5.
  """

  mean: float | tuple[float, ...] = 127.5
  std: Positive | tuple[Positive, ...] = 127.5

  def __call__(self, images: Array) -> jax.Array:
    """uint8 [..., H, W, C] -> float32 of the same shape."""
    mean = jnp.asarray(self.mean, jnp.float32)
    std = jnp.asarray(self.std, jnp.float32)
    shape = (1,) * (images.ndim - 1) + (-1,)
    scaled = jnp.asarray(images, jnp.float32) - mean.reshape(shape)
    return scaled / std.reshape(shape)
