"""Mixing of images and of their labels: mixup and CutMix, on the device.

`Mixed` wraps any objective of labels, and mixes all examples of a batch in the
same way. Example i of the global batch of B is mixed with its partner, example
i + B // 2 (modulo B), across devices, hosts and micro-batches. Repeats of one
image (`data.order.Repeated`) never mix if they fill at most half of the batch.
A mesh of an even number of devices exchanges whole shards, as uint8.

A mixer is any function (rng, (H, W)) -> Blend of one image:

  Mixup     weighted means of images (Zhang et al., 2018)
  Cutmix    a box of the partner in the image (Yun et al., 2019)
  Choice    one of several mixers, at random, or none

timm's mixup=0.8, cutmix=1, mixup_prob=p, mixup_switch_prob=s is

  Choice((Mixup(0.8), Cutmix(1.0)), (p * (1 - s), p * s))

with its mixup_mode 'batch'. big_vision's mixup replaces w by max(w, 1 - w):
this only exchanges the images with their partners.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.objectives.classification import soft_targets
from vit_jax.objectives.wrapper import Wrapper
from vit_jax.step import Context
from vit_jax.types import Batch, Fraction, Outputs, Params, Positive, UserError


class Blend(NamedTuple):
  """Mix of an image with its partner in a box; outside it is unchanged."""

  share: jax.Array  # float32, of the own label; the partner's is 1 - share
  weight: jax.Array  # float32, of the own pixels in the box
  box: jax.Array  # int32 [4], (top, left, bottom, right), last two excluded


Mixer = Callable[[jax.Array, tuple[int, int]], Blend]


@dataclasses.dataclass(frozen=True)
class Mixup:
  """w * image + (1 - w) * partner for w ~ Beta(alpha, alpha), labels alike."""

  alpha: Positive

  def __call__(self, rng: jax.Array, size: tuple[int, int]) -> Blend:
    weight = jax.random.beta(rng, self.alpha, self.alpha)
    return Blend(weight, weight, _whole(size))


@dataclasses.dataclass(frozen=True)
class Cutmix:
  """A box of the partner; labels are weighted by the pixels of each image.

  The box has the aspect ratio of the image and the area 1 - w of it, for w ~
  Beta(alpha, alpha). Its centre is uniform in the image, which crops it. Sides
  are even, as in the paper's code and DeiT; timm 1.0.31 also has odd ones.
  """

  alpha: Positive

  def __call__(self, rng: jax.Array, size: tuple[int, int]) -> Blend:
    area_rng, centre_rng = jax.random.split(rng)
    sides = jnp.array(size, jnp.int32)
    kept = jax.random.beta(area_rng, self.alpha, self.alpha)
    side = jnp.sqrt(1 - kept)
    half = (sides * side).astype(jnp.int32) // 2
    centre = jax.random.randint(centre_rng, (2,), 0, sides)
    low = jnp.maximum(centre - half, 0)
    high = jnp.minimum(centre + half, sides)
    share = 1 - jnp.prod(high - low) / math.prod(size)
    return Blend(share, jnp.zeros(()), jnp.concatenate([low, high]))


@dataclasses.dataclass(frozen=True)
class Choice:
  """One of several mixers, with these probabilities; otherwise none."""

  mixers: Sequence[Mixer]
  probabilities: Sequence[Fraction]

  def __post_init__(self) -> None:
    counts = len(self.mixers), len(self.probabilities)
    if counts[0] != counts[1] or sum(self.probabilities) > 1 + 1e-6:
      raise UserError(
        f'Choice: {counts[0]} mixers have probabilities='
        f'{tuple(self.probabilities)}. Give one for each, in total at most 1.'
      )

  def __call__(self, rng: jax.Array, size: tuple[int, int]) -> Blend:
    which_rng, *rngs = jax.random.split(rng, 1 + len(self.mixers))
    blends = [mixer(r, size) for mixer, r in zip(self.mixers, rngs)]
    blends.append(Blend(jnp.ones(()), jnp.ones(()), _whole(size)))
    ends = [*itertools.accumulate(self.probabilities)]
    if abs(ends[-1] - 1) < 1e-6:  # always one of the mixers
      ends[-1] = math.inf
    chosen = jnp.sum(jax.random.uniform(which_rng) >= jnp.array(ends))
    return jax.tree.map(lambda *x: jnp.stack(x)[chosen], *blends)


def _whole(size):
  return jnp.array([0, 0, *size], jnp.int32)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Mixed(Wrapper):
  """An objective of labels, for mixed images and labels.

  The inner objective gets float32 images in 0..255 and float32 labels [B, K].
  """

  mixer: Mixer

  def prepare(self, batch: Batch, rng: jax.Array) -> dict[str, Any]:
    """Add 'mixing': the partner of each example, and how they are mixed."""
    count, *size = batch['image'].shape[:3]
    roll = functools.partial(jnp.roll, shift=-(count // 2), axis=0)
    mixing = {name: roll(batch[name]) for name in ('image', 'label')}
    blend = self.mixer(rng, tuple(size))
    mixing['blend'] = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (count, *x.shape)), blend
    )
    return {**batch, 'mixing': mixing}

  def __call__(
    self, params: Params, batch: Batch, rng: Any, context: Context = Context()
  ) -> Outputs:
    if 'mixing' not in batch:
      batch = self.prepare(batch, jax.random.fold_in(rng, 2**32 - 1))
    return self.inner(params, self._mixed(batch), rng, context)

  def shown(self, batch: Batch, rng: Any) -> Batch:
    """Return the batch with mixed images and labels."""
    return self._mixed(self.prepare(batch, rng))

  def _mixed(self, batch):
    mix = functools.partial(_mix, num_classes=self.model.num_classes)
    return jax.vmap(mix)(batch)


def _mix(example, num_classes):
  """Return one example, mixed with its partner as `prepare` decided."""
  example = dict(example)
  partner = example.pop('mixing')
  blend = partner['blend']
  top, left, bottom, right = blend.box
  height, width, _ = example['image'].shape
  y, x = jnp.arange(height)[:, None], jnp.arange(width)[None]
  inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)
  weights = jnp.where(inside, blend.weight, 1.0)[..., None]
  labels = [soft_targets(x['label'], num_classes) for x in (example, partner)]
  return example | {
    'image': _mean(weights, example['image'], partner['image']),
    'label': _mean(blend.share, *labels),
  }


def _mean(weight, one, other):
  """Return the weighted mean; at weights of 0 and 1 exactly one of them.

  NaN, a missing label, makes others unknown too, except at these weights.
  """
  mean = weight * one + (1 - weight) * other
  return jnp.where(weight == 1, one, jnp.where(weight == 0, other, mean))
