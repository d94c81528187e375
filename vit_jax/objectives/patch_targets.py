"""What is predicted of a masked patch (B.1.2), how well, and how it looks.

A target has num_outputs(patch shape), compare(outputs, patches), and for the
eye picture(outputs, patch shape) and truth(patches), both uint8 as patches are.
Patches are uint8 [B, n, ph, pw, C], rows of the grid one after the other, as
the model embeds them; outputs float32 [B, n, K].
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from vit_jax.models import frame

BITS = 3  # of each colour channel
LEVELS = 2**BITS
TARGETS = ('mean_colour', 'downsampled', 'pixels')


def make(name, preprocess, downsampled_to=4):
  """The target that `predict` names; see `masked_patches` for what they are."""
  if name not in TARGETS:
    raise ValueError(f'predict={name!r} must be one of {", ".join(TARGETS)}.')
  if name == 'pixels':
    return Pixels(preprocess)
  return Colours(1 if name == 'mean_colour' else downsampled_to)


def cut(images, patch_size):
  """uint8 [B, H, W, C] -> [B, n, ph, pw, C]; n numbers the model's patches."""
  patches = frame.patchify(images, patch_size)
  return patches.reshape(len(images), -1, *patches.shape[3:])


def join(patches, shape):
  """[B, n, ph, pw, C] -> images of that shape, the inverse of `cut`."""
  batch, height, width, channels = shape
  ph, pw = patches.shape[2:4]
  grid = patches.reshape(batch, height // ph, width // pw, ph, pw, channels)
  return grid.swapaxes(2, 3).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Colours:
  """Mean colours of side x side cells of a patch, with 3 bits a channel.

  Each cell is one of 8^C classes (512 in colour, 8 in grey): the highest bits
  of its channels' means, the first channel's at the top. K = side^2 * 8^C, the
  classes of one cell after the other.
  """

  side: int

  def __str__(self):
    return f'{self.side}x{self.side} colours'

  def num_outputs(self, patch_shape):
    """K.

    Raises:
      ValueError: cells do not tile the patch.
    """
    ph, pw, channels = patch_shape
    if ph % self.side or pw % self.side:
      raise ValueError(
        f'Patches of {ph}x{pw} cannot be reduced to {self.side}x{self.side}; '
        'choose a downsampled_to that divides both sides.'
      )
    return self.side**2 * LEVELS**channels

  def classes(self, patches):
    """int32 [B, n, side^2]."""
    *batch, ph, pw, channels = patches.shape
    side = self.side
    cells = patches.astype(jnp.int32).reshape(
      *batch, side, ph // side, side, pw // side, channels
    )
    area = (ph // side) * (pw // side)
    # In whole numbers, so that a mean at a border is never rounded across it.
    levels = cells.sum(axis=(-4, -2)) // (area * 256 // LEVELS)
    powers = [LEVELS**i for i in reversed(range(channels))]
    powers = jnp.asarray(powers, jnp.int32).reshape(
      *[1] * levels[..., 0].ndim, -1
    )
    return (levels * powers).sum(axis=-1).reshape(*batch, side**2)

  def compare(self, outputs, patches):
    """{'loss': cross-entropy, 'accuracy'}, [B, n], means over the cells."""
    classes = self.classes(patches)
    logits = outputs.reshape(*classes.shape, -1)
    log_p = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_p, classes[..., None], axis=-1)[..., 0]
    hits = jnp.argmax(logits, axis=-1) == classes
    return {
      'loss': -jnp.mean(picked, axis=-1),
      'accuracy': jnp.mean(hits, axis=-1, dtype=jnp.float32),
    }

  def picture(self, outputs, patch_shape):
    """uint8 [B, n, ph, pw, C]: the middle of each cell's likeliest colour."""
    logits = outputs.reshape(*outputs.shape[:2], self.side**2, -1)
    return self._paint(jnp.argmax(logits, axis=-1), patch_shape)

  def truth(self, patches):
    """The same of the patches themselves."""
    return self._paint(self.classes(patches), patches.shape[2:])

  def _paint(self, classes, patch_shape):
    """[B, n, side^2] -> [B, n, ph, pw, C]."""
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

  preprocess: Callable

  def __str__(self):
    return 'pixels'

  def num_outputs(self, patch_shape):
    ph, pw, channels = patch_shape
    return ph * pw * channels

  def compare(self, outputs, patches):
    """{'loss'}: [B, n], the mean over a patch's values."""
    values = self._preprocessed(patches).reshape(outputs.shape)
    return {'loss': jnp.mean((outputs - values) ** 2, axis=-1)}

  def picture(self, outputs, patch_shape):
    """uint8 [B, n, ph, pw, C]: preprocessing undone, for it scales channels."""
    patches = outputs.reshape(*outputs.shape[:2], *patch_shape)
    ends = [jnp.full_like(patches, x, jnp.uint8) for x in (0, 255)]
    low, high = map(self._preprocessed, ends)
    values = 255 * (patches - low) / (high - low)
    return jnp.clip(jnp.round(values), 0, 255).astype(jnp.uint8)

  def truth(self, patches):
    return patches

  def _preprocessed(self, patches):
    """float32 of the same shape; preprocess takes [B, H, W, C]."""
    flat = patches.reshape(-1, *patches.shape[2:])
    return self.preprocess(flat).reshape(patches.shape)
