"""Targets of masked patch prediction (B.1.2): their loss, and how to draw them.

A target has num_outputs(patch shape) and compare(outputs, patches); and, for
figures, picture(outputs, patch shape) and truth(patches), both uint8 like
patches. Patches are uint8 [B, n, ph, pw, C], row by row as the model embeds
them; outputs are float32 [B, n, K].
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from vit_jax.models.layers import PatchEmbedding
from vit_jax.types import Array, Preprocess, Shape, Size

BITS = 3  # of each colour channel
LEVELS = 2**BITS


def cut(images: jax.Array, patch_size: Size) -> jax.Array:
  """Cut images into patches: uint8 [B, H, W, C] -> [B, n, ph, pw, C]."""
  patches = PatchEmbedding(patch_size).cut(images)
  return patches.reshape(len(images), -1, *patches.shape[3:])


def join(patches: jax.Array, shape: Shape) -> jax.Array:
  """Invert `cut`: [B, n, ph, pw, C] -> images of that shape."""
  batch, height, width, channels = shape
  ph, pw = patches.shape[2:4]
  grid = patches.reshape(batch, height // ph, width // pw, ph, pw, channels)
  return grid.swapaxes(2, 3).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Colours:
  """Mean colours of side x side cells of a patch, with 3 bits a channel.

  A cell has one of 8^C classes (512 in colour, 8 in grey): the highest 3 bits
  of the mean of each channel, those of the first channel in front. K = side^2 *
  8^C, the classes of one cell after the other.
  """

  side: int

  def __str__(self) -> str:
    return f'{self.side}x{self.side} colours'

  def num_outputs(self, patch_shape: Shape) -> int:
    """Return K; ValueError if cells do not tile the patch."""
    ph, pw, channels = patch_shape
    if ph % self.side or pw % self.side:
      raise ValueError(
        f'Patches of {ph}x{pw} cannot be reduced to {self.side}x{self.side}. '
        'Use a downsampled_to that divides both sides.'
      )
    return self.side**2 * LEVELS**channels

  def classes(self, patches: Array) -> jax.Array:
    """Return the classes of cells, int32 [B, n, side^2]."""
    *batch, ph, pw, channels = patches.shape
    side = self.side
    cells = patches.astype(jnp.int32).reshape(
      *batch, side, ph // side, side, pw // side, channels
    )
    area = (ph // side) * (pw // side)
    # With integers, a mean at the border of two levels is never rounded up.
    levels = cells.sum(axis=(-4, -2)) // (area * 256 // LEVELS)
    powers = [LEVELS**i for i in reversed(range(channels))]
    classes = levels @ jnp.asarray(powers, jnp.int32)
    return classes.reshape(*batch, side**2)

  def compare(self, outputs: Array, patches: Array) -> dict[str, jax.Array]:
    """Return {'loss': cross-entropy, 'accuracy'}, [B, n], means over cells."""
    classes = self.classes(patches)
    logits = outputs.reshape(*classes.shape, -1)
    log_p = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_p, classes[..., None], axis=-1)[..., 0]
    hits = jnp.argmax(logits, axis=-1) == classes
    return {
      'loss': -jnp.mean(picked, axis=-1),
      'accuracy': jnp.mean(hits, axis=-1, dtype=jnp.float32),
    }

  def picture(self, outputs: Array, patch_shape: Shape) -> jax.Array:
    """Draw each cell in its likeliest colour: uint8 [B, n, ph, pw, C]."""
    logits = outputs.reshape(*outputs.shape[:2], self.side**2, -1)
    return self._paint(jnp.argmax(logits, axis=-1), patch_shape)

  def truth(self, patches: Array) -> jax.Array:
    """Draw each cell in its true colour: uint8 [B, n, ph, pw, C]."""
    return self._paint(self.classes(patches), patches.shape[2:])

  def _paint(self, classes, patch_shape):
    ph, pw, channels = patch_shape
    classes = classes.reshape(*classes.shape[:2], self.side, self.side)
    levels = [classes // LEVELS**i % LEVELS for i in reversed(range(channels))]
    step = 256 // LEVELS
    cells = jnp.stack(levels, axis=-1) * step + step // 2
    cells = jnp.repeat(cells, ph // self.side, axis=-3)
    return jnp.repeat(cells, pw // self.side, axis=-2).astype(jnp.uint8)


@dataclasses.dataclass(frozen=True)
class Pixels:
  """The preprocessed patch itself, K = ph * pw * C; squared error (L2)."""

  preprocess: Preprocess

  def __str__(self) -> str:
    return 'pixels'

  def num_outputs(self, patch_shape: Shape) -> int:
    return math.prod(patch_shape)

  def compare(self, outputs: Array, patches: Array) -> dict[str, jax.Array]:
    """Return {'loss': [B, n]}, the mean over the values of a patch."""
    values = self._preprocessed(patches).reshape(outputs.shape)
    return {'loss': jnp.mean((outputs - values) ** 2, axis=-1)}

  def picture(self, outputs: Array, patch_shape: Shape) -> jax.Array:
    """Undo preprocessing, which scales channels: uint8 [B, n, ph, pw, C]."""
    patches = outputs.reshape(*outputs.shape[:2], *patch_shape)
    ends = [jnp.full_like(patches, x, jnp.uint8) for x in (0, 255)]
    low, high = map(self._preprocessed, ends)
    values = 255 * (patches - low) / (high - low)
    return jnp.clip(jnp.round(values), 0, 255).astype(jnp.uint8)

  def truth(self, patches: Array) -> Array:
    return patches

  def _preprocessed(self, patches):
    """Preprocess patches, which takes [B, H, W, C]: float32, same shape."""
    flat = patches.reshape(-1, *patches.shape[2:])
    return self.preprocess(flat).reshape(patches.shape)
