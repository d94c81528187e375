"""Views of an image: random colours on the device, and representations.

`data.transforms.MultiCrop` cuts the views on the host. Here they are flipped,
their colours change, and they are blurred. The key of a view depends on the
place of the example in the global batch, so the result is the same on any mesh.
"""

import dataclasses
import functools
import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from vit_jax import tree
from vit_jax.types import (
  Batch,
  Expect,
  Fraction,
  NonNegative,
  Params,
  Positive,
)

_LUMA = 0.2989, 0.587, 0.114  # torchvision's
_Turn = Annotated[float, Expect(lambda x: 0 <= x <= 0.5, 'in [0, 0.5]')]
_Jitter = tuple[NonNegative, NonNegative, NonNegative, _Turn]


@dataclasses.dataclass(frozen=True)
class Colour:
  """Random flip, colour jitter, grey, blur and solarize, in this order.

  Equal to torchvision's transforms of float images. With one channel, changes
  of saturation and hue and grey do nothing.

  Attributes:
    flip, jitter_probability, grey, blur, solarize: probabilities.
    jitter: brightness, contrast, saturation and hue, changed in random order.
      x: the factor is uniform between max(0, 1 - x) and 1 + x; the hue is
      turned by a uniform fraction of the circle between -x and x.
    blur_sigma: bounds of the standard deviation of the blur, in pixels, which
      is uniform. The kernel ends at 3 times the upper bound.
  """

  flip: Fraction = 0.5
  jitter: _Jitter = (0.4, 0.4, 0.2, 0.1)
  jitter_probability: Fraction = 0.8
  grey: Fraction = 0.2
  blur: Fraction = 0.5
  blur_sigma: tuple[Positive, Positive] = (0.1, 2.0)
  solarize: Fraction = 0.0

  def __call__(self, image: jax.Array, key: jax.Array) -> jax.Array:
    """Return an image, float32 [H, W, C] in 0..255, with random colours."""
    draws = jax.random.uniform(key, (14,))
    changes = (
      (self.flip, lambda x: x[:, ::-1]),
      (self.jitter_probability, lambda x: self._jittered(x, draws[6:])),
      (self.grey, lambda x: jnp.broadcast_to(luma(x), x.shape)),
      (self.blur, lambda x: self._blurred(x, draws[5])),
      (self.solarize, lambda x: jnp.where(x >= 128, 255 - x, x)),
    )
    for draw, (probability, change) in zip(draws[:5], changes):
      if probability:  # else spare the work
        image = jnp.where(draw < probability, change(image), image)
    return image

  def _jittered(self, image, draws):
    in_colour = image.shape[-1] > 1
    *widths, turn = self.jitter
    widths[2] *= in_colour
    low = jnp.array([max(0.0, 1 - x) for x in widths] + [-turn])
    high = jnp.array([1 + x for x in widths] + [turn])
    factors = low + (high - low) * draws[4:]
    order = jnp.argsort(draws[:4])
    for kind, factor in zip(order, factors[order]):
      grey = luma(image)
      other = jnp.where(kind == 1, jnp.mean(grey), grey * (kind == 2))
      changed = jnp.clip(factor * image + (1 - factor) * other, 0, 255)
      turned = turn_hue(image, factor) if turn and in_colour else image
      image = jnp.where(kind == 3, turned, changed)
    return image

  def _blurred(self, image, draw):
    low, high = self.blur_sigma
    return blur(image, low + (high - low) * draw, math.ceil(3 * high))


def luma(image: jax.Array) -> jax.Array:
  """Return the grey levels of an image: [H, W, C] -> [H, W, 1]."""
  if image.shape[-1] == 1:
    return image
  return jnp.sum(image * jnp.array(_LUMA)[None, None], -1, keepdims=True)


def turn_hue(image: jax.Array, turn: jax.Array) -> jax.Array:
  """Turn the hues of an RGB image by a fraction of the circle."""
  red, green, blue = jnp.moveaxis(image, -1, 0)
  top, chroma = image.max(-1), image.max(-1) - image.min(-1)
  scale = jnp.where(chroma == 0, 1, chroma)
  far = jnp.where(top == green, 2 * scale + blue - red, 4 * scale + red - green)
  hue = jnp.where(top == red, green - blue, far) / scale + 6 * turn
  places = [jnp.mod(hue + start, 6) for start in (5, 3, 1)]
  below = [jnp.clip(jnp.minimum(x, 4 - x), 0, 1) for x in places]
  return jnp.stack([top - chroma * x for x in below], -1)


def blur(image: jax.Array, sigma: jax.Array, radius: int) -> jax.Array:
  """Blur an image by a Gaussian that ends at `radius`; edges reflect."""
  height, width, _ = image.shape
  radius = min(radius, height - 1, width - 1)
  weights = jnp.exp(-0.5 * (jnp.arange(-radius, radius + 1) / sigma) ** 2)
  weights /= jnp.sum(weights)
  pad = ((radius, radius),) * 2
  image = jnp.pad(image, (*pad, (0, 0)), 'reflect')
  image = sum(w * image[i : i + height] for i, w in enumerate(weights))
  return sum(w * image[:, i : i + width] for i, w in enumerate(weights))


@dataclasses.dataclass(frozen=True)
class Views:
  """The colours of the views of a batch; the defaults are those of DINO.

  Attributes:
    globals: of each global view; more views have the last one.
    local: of all local views.
  """

  globals: tuple[Colour, ...] = (
    Colour(blur=1.0),
    Colour(blur=0.1, solarize=0.2),
  )
  local: Colour = Colour()

  def prepare(self, batch: Batch, rng: jax.Array) -> dict[str, Any]:
    """Return the batch with other colours: uint8 -> float32 in 0..255.

    'image' is [B, V, H, W, C], or [B, H, W, C] for one view. 'local' may be
    absent.
    """
    colours = {'image': self.globals, 'local': (self.local,)}
    keys = dict(zip(colours, jax.random.split(rng)))
    return {
      name: _change(x, colours[name], keys[name]) if name in colours else x
      for name, x in batch.items()
    }


def represent(
  model: Any,
  params: Params,
  views: jax.Array,
  *,
  rng: jax.Array | None = None,
) -> jax.Array:
  """Return the representations of views: float [B, V, H, W, C] -> [B, V, D].

  The images may be smaller than those that the parameters are for: learned
  position embeddings are resized by the `resize_method` of the model's posemb,
  and trained through it. Without `rng` the model does not train.
  """
  images = views.reshape(-1, *views.shape[2:])
  init = functools.partial(model.init, jax.random.key(0))
  shapes = tree.flatten(jax.eval_shape(init, images)['params'])

  def fit(path, x):
    if path not in shapes or x.shape == (shape := shapes[path].shape):
      return x
    name, posemb = path.rsplit('/', 1)[-1], model.posemb
    resized = posemb.resize(name, x, shape, posemb.resize_method)
    return x if resized is None else resized

  out = model.apply(
    {'params': tree.map_with_path(fit, params)},
    images,
    train=rng is not None,
    rngs=None if rng is None else {'dropout': rng},
  )
  return out.reshape(*views.shape[:2], -1)


def _change(images, colours, key):
  """Return images [B, V, H, W, C], view i by colours[i] or the last one."""
  if images.ndim == 4:
    return _change(images[:, None], colours, key)[:, 0]
  images = images.astype(jnp.float32)
  keys = jax.random.split(key, images.shape[:2])
  ends = [*range(1, len(colours)), images.shape[1]]
  parts = [
    jax.vmap(jax.vmap(colour))(images[:, i:end], keys[:, i:end])
    for i, (colour, end) in enumerate(zip(colours, ends))
    if i < images.shape[1]
  ]
  return jnp.concatenate(parts, axis=1)


# As published: in main_dino.py of DINO, and in the README of LeJEPA.
DINO = Views()
LEJEPA = Views((Colour(solarize=0.2),), Colour(solarize=0.2))
