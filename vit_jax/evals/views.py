"""Views of a test image, whose predicted probabilities are averaged.

A view is a function images [B, H, W, C] -> list of images [B, h, w, C], on the
device. Views are applied one after the other: five crops and then the flip are
ten-crop evaluation (Krizhevsky et al., 2012).
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from vit_jax.config.domains import Size, checked

View = Callable[[jax.Array], list[jax.Array]]


@checked
@dataclasses.dataclass(frozen=True)
class Flip:
  """The images, and their mirror images (left and right)."""

  def __call__(self, images: jax.Array) -> list[jax.Array]:
    return [images, images[:, :, ::-1]]


@checked
@dataclasses.dataclass(frozen=True)
class FiveCrop:
  """Crops at the four corners and at the centre.

  The images must be larger than the crops: resize the smaller side to 256 and
  crop the centre of 256 x 256 for crops of 224.

  Attributes:
    size: of the crops, in pixels; an int (square) or (height, width).
  """

  size: Size

  def __call__(self, images: jax.Array) -> list[jax.Array]:
    size = self.size
    height, width = (size, size) if isinstance(size, int) else size
    bottom, right = images.shape[1] - height, images.shape[2] - width
    if min(bottom, right) < 0:
      raise ValueError(
        f'FiveCrop: crops of {height}x{width} do not fit into images of '
        f'{images.shape[1]}x{images.shape[2]} (height, width). Let the '
        "transforms of the evaluator's data make larger images."
      )
    corners = [(0, 0), (0, right), (bottom, 0), (bottom, right)]
    return [
      images[:, y : y + height, x : x + width]
      for y, x in [*corners, (bottom // 2, right // 2)]
    ]


def average(
  predict: Callable[[jax.Array], jax.Array],
  images: jax.Array,
  views: Sequence[View],
  activation: str,
) -> jax.Array:
  """Return logits [B, K] of the mean probabilities over all views.

  Args:
    predict: images [B, h, w, C] -> logits [B, K]. It is compiled once, and
      works on one view after the other.
    images: [B, H, W, C].
    views: see the module docstring; none: the images themselves.
    activation: 'softmax' or 'sigmoid', converts logits to probabilities.
  """
  each = [images]
  for view in views:
    each = [view_of for one in each for view_of in view(one)]
  if len(each) == 1:
    return predict(each[0])
  logits = jax.lax.map(predict, jnp.stack(each))
  if activation == 'softmax':
    return _log_mean(jax.nn.log_softmax(logits))
  on, off = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
  return _log_mean(on) - _log_mean(off)


def _log_mean(x):
  """Return the logarithm of the mean of exp(x) over the first dimension."""
  return jax.nn.logsumexp(x, axis=0) - jnp.log(x.shape[0])
