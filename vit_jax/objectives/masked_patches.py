"""Masked patch prediction: the paper's self-supervision (4.6, B.1.2).

Half of the patch embeddings of an image are corrupted: 80% of these are
replaced by a learned mask vector, 10% by the embedding of another patch, 10%
stay. The model predicts what each corrupted patch looked like from the output
at its position. The paper leaves open whether exactly half of an image's
patches are corrupted, or each with probability 1/2. Here it is exactly half, so
that every image has the same weight on any number of devices and micro-batches.
The other patch comes from the same image.

Shapes: B images, n patches of ph x pw pixels, C channels, K outputs a patch.
Patches are uint8 [B, n, ph, pw, C], row by row as the model embeds them;
outputs are float32 [B, n, K].
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from vit_jax.models.pooling import NoPooling
from vit_jax.models.vit import PatchEmbedding
from vit_jax.objectives.encode import encode
from vit_jax.step import Context, Objective
from vit_jax.types import (
  Array,
  Batch,
  Count,
  Outputs,
  Params,
  Preprocess,
  Shape,
  Share,
  Size,
  UserError,
)

LEVELS = 2**3  # 3 bits of each colour channel
MASKED, SWAPPED = 0.8, 0.1
Prediction = Literal['mean_colour', 'downsampled', 'pixels', 'tokens']


def cut(images: jax.Array, patch_size: Size) -> jax.Array:
  """Cut images into patches: uint8 [B, H, W, C] -> [B, n, ph, pw, C]."""
  patches = PatchEmbedding(patch_size).cut(images)
  return patches.reshape(len(images), -1, *patches.shape[3:])


@dataclasses.dataclass(frozen=True)
class Colours:
  """Target: mean colours of side x side cells of a patch, 3 bits a channel.

  A cell has one of 8^C classes (512 in colour, 8 in grey): the highest 3 bits
  of the mean of each channel, with the first channel in front. K = side^2 *
  8^C: the classes of the cells follow each other.
  """

  side: int

  def num_outputs(self, patch_shape: Shape) -> int:
    """Return K."""
    ph, pw, channels = patch_shape
    if ph % self.side or pw % self.side:
      raise UserError(
        f'downsampled_to={self.side} does not divide patches of {ph}x{pw}.'
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


@dataclasses.dataclass(frozen=True)
class Tokens(Colours):
  """Target: the token that a pixel is, of K; see models/tokens.py."""

  side: int = 1
  vocabulary: int = 128

  def num_outputs(self, patch_shape: Shape) -> int:
    return self.vocabulary

  def classes(self, patches: Array) -> jax.Array:
    return jnp.asarray(patches, jnp.int32).reshape(*patches.shape[:2], 1)


@dataclasses.dataclass(frozen=True)
class Pixels:
  """Target: the preprocessed patch, K = ph * pw * C; squared error (L2)."""

  preprocess: Preprocess

  def num_outputs(self, patch_shape: Shape) -> int:
    return math.prod(patch_shape)

  def compare(self, outputs: Array, patches: Array) -> dict[str, jax.Array]:
    """Return {'loss': [B, n]}, the mean over the values of a patch."""
    flat = patches.reshape(-1, *patches.shape[2:])
    values = self.preprocess(flat).reshape(outputs.shape)
    return {'loss': jnp.mean((outputs - values) ** 2, axis=-1)}


@dataclasses.dataclass(frozen=True)
class Task:
  """The prediction task: the target, and which patches are corrupted.

  Attributes:
    predict: 'mean_colour', 3 bits a channel as one of 512 classes (the paper's
      choice); 'downsampled', the same for each cell of the patch reduced to
      4 x 4; 'pixels', the preprocessed patch itself, with squared error;
      'tokens', for models of tokens.
    downsampled_to: cells on a side of a 'downsampled' patch.
    ratio: round(ratio * n) of n patches are corrupted, at least 1.
  """

  predict: Prediction = 'mean_colour'
  downsampled_to: Count = 4
  ratio: Share = 0.5


def draw(rng: Array, num_patches: int, ratio: float) -> tuple[Array, Array]:
  """Return what is corrupted in one image: (bool [n], sources int32 [n]).

  These are which patches count in the loss, and the index of the patch whose
  embedding replaces each patch, -1 for the mask vector.
  """
  which, how, other = jax.random.split(rng, 3)
  count = max(1, round(ratio * num_patches))
  place = jnp.arange(num_patches)
  corrupted = jax.random.permutation(which, place) < count
  draws = jax.random.uniform(how, (num_patches,))
  masked = corrupted & (draws < MASKED)
  swapped = corrupted & ~masked & (draws < MASKED + SWAPPED)
  # Another patch is 1 to n - 1 places further.
  step = jax.random.randint(other, (num_patches,), 1, num_patches)
  sources = jnp.where(swapped, (place + step) % num_patches, place)
  return corrupted, jnp.where(masked, -1, sources)


@dataclasses.dataclass(frozen=True)
class MaskedPatches(Objective):
  """Objective of masked patch prediction; no labels.

  The model is a VisionTransformer with NoPooling, embedding.mask_token and the
  num_classes that the target needs; with class_token if fine-tuning needs it.
  """

  model: Any
  _: dataclasses.KW_ONLY
  preprocess: Preprocess
  task: Task = Task()

  def __post_init__(self) -> None:
    embedding, pooling = self.model.embedding, self.model.pooling
    whole = embedding.mask_token and embedding.reduction == 1
    if not (isinstance(pooling, NoPooling) and whole):
      raise UserError(
        f'MaskedPatches: the model has pooling={pooling} and embedding='
        f'{embedding}. It needs NoPooling, mask_token=True and patches of '
        'pixels.'
      )

  @property
  def target(self) -> Colours | Pixels:
    if self.task.predict == 'pixels':
      return Pixels(self.preprocess)
    if self.task.predict == 'tokens':
      return Tokens(vocabulary=self.model.num_classes)
    one = self.task.predict == 'mean_colour'
    return Colours(1 if one else self.task.downsampled_to)

  def predict(
    self,
    params: Params,
    images: jax.Array,
    keys: jax.Array,
    *,
    dropout_rng: jax.Array | None = None,
  ) -> dict[str, Any]:
    """Corrupt images, predict their patches, and compare.

    Images are uint8 [B, H, W, C], keys [B]; only `dropout_rng` means training.

    Returns:
      metrics: {'loss', and for classes 'accuracy'}: [B], means over the
        corrupted patches of each image, including those that are kept.
      corrupted, sources: [B, n], see `draw`; outputs: float32 [B, n, K].
    """
    if images.dtype != jnp.uint8 and isinstance(self.target, Colours):
      raise UserError(
        f'predict={self.task.predict!r} is for levels 0 to 255, and the images '
        f"are {images.dtype}. Use predict='pixels'."
      )
    patches = cut(images, self.model.embedding.patch_size)
    num_patches, shape = patches.shape[1], patches.shape[2:]
    needed = self.target.num_outputs(shape)
    if self.model.num_classes != needed:
      raise UserError(
        f'The model has num_classes={self.model.num_classes}; to predict '
        f'{self.task.predict} of patches {shape} (height, width, channels) it '
        f'needs num_classes={needed}.'
      )
    draw_all = jax.vmap(draw, in_axes=(0, None, None))
    corrupted, sources = draw_all(keys, num_patches, self.task.ratio)
    seen = self.preprocess(images)
    found = encode(self.model, params, seen, dropout_rng, patch_sources=sources)
    outputs = found['logits']
    compared = self.target.compare(outputs, patches)
    weights = corrupted / jnp.sum(corrupted, axis=1, keepdims=True)
    return {
      'metrics': {k: jnp.sum(weights * x, 1) for k, x in compared.items()},
      'corrupted': corrupted,
      'sources': sources,
      'outputs': outputs,
    }

  def __call__(
    self, params: Params, batch: Batch, rng: Array, context: Context = Context()
  ) -> Outputs:
    draw_rng, dropout_rng = jax.random.split(rng)
    keys = jax.random.split(draw_rng, len(batch['image']))
    found = self.predict(params, batch['image'], keys, dropout_rng=dropout_rng)
    # Images have equally many corrupted patches: the mean of means is exact.
    metrics = {name: jnp.mean(x) for name, x in found['metrics'].items()}
    return metrics['loss'], metrics
