"""Masked autoencoders (He et al., 2022, arXiv 2111.06377).

The encoder sees some patches of an image. A small decoder gets its tokens, and
a mask vector for each hidden patch, and predicts the pixels of hidden patches.
The recipe of the paper (table 8) is in configs/pretrain_folder.py.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models.pooling import Head, NoPooling
from vit_jax.models.posemb import Layout, SinCos2d
from vit_jax.models.vit import Depth, PatchEmbedding, VisionTransformer
from vit_jax.objectives.encode import encode
from vit_jax.step import Context, Objective
from vit_jax.types import (
  Array,
  Batch,
  Between,
  Count,
  Outputs,
  Params,
  Preprocess,
  UserError,
)

_PATCH = 3, 4, 5  # axes of the values of a patch


@dataclasses.dataclass(frozen=True)
class Decoder:
  """Size of the decoder, whose MLPs are four times as wide as its tokens.

  Attributes:
    width: None: 2/3 of the encoder's, in multiples of 32, at most 512. This is
      the paper's 512 for ViT-B and larger models; the paper has no smaller one.
    num_heads: None: one for each 32 of the width, 16 in the paper.
  """

  width: Count | None = None
  depth: Depth = 8
  num_heads: Count | None = None


@dataclasses.dataclass(frozen=True)
class _Positions(SinCos2d):
  """Positions of the patches in `layout`; the tokens before them have none."""

  layout: Layout = Layout((1, 1))

  def table(self, params: Any, grid: Any, width: int) -> np.ndarray:
    table = super().table(params, self.layout.grid, width)
    return np.pad(table.reshape(-1, width), ((self.layout.prefix, 0), (0, 0)))


@dataclasses.dataclass(frozen=True)
class Mae(Objective):
  """Objective of a masked autoencoder, with the metric 'loss'; no labels.

  Attributes:
    model: VisionTransformer with PatchEmbedding; its head is not trained.
    preprocess: scales and shifts each channel, as dense.Normalize does.
    ratio: fraction of hidden patches; int(n * (1 - ratio)) of n are visible.
    normalize: whether each patch is compared less its mean, over its deviation.
    decoder: its layers have the same options as those of the model.
  """

  model: Any
  _: dataclasses.KW_ONLY
  preprocess: Preprocess
  ratio: Between = 0.75
  normalize: bool = True
  decoder: Decoder = Decoder()

  def __post_init__(self) -> None:
    if self.model.embedding.reduction > 1:
      raise UserError('Mae needs patches of pixels, and no hybrid model.')

  def init(self, rng: jax.Array, images: jax.ShapeDtypeStruct) -> Params:
    decoder = self._decoder(images)
    token = jnp.zeros((1, 1, 1, self.model.width))
    sources = jnp.zeros((1, decoder.posemb.layout.num_tokens), jnp.int32)
    return decoder.init(rng, token, patch_sources=sources)['params']

  def prepare(self, batch: Any, rng: jax.Array) -> dict[str, Any]:
    """Return the batch with 'rank' of patches, int32 [B, n]: low is visible."""
    keys = jax.random.split(rng, len(batch['image']))
    n = math.prod(self.model.embedding.grid(batch['image'].shape[1:]))
    rank = jax.vmap(lambda key: jax.random.permutation(key, n))(keys)
    return {**batch, 'rank': rank}

  def __call__(
    self, params: Params, batch: Batch, rng: Array, context: Context = Context()
  ) -> Outputs:
    images, rank = self.preprocess(batch['image']), batch['rank']
    found, patches, mean, std, hidden = self._predict(params, images, rank, rng)
    errors = (found - (patches - mean) / std) ** 2
    # Each image has the same number of hidden patches.
    loss = jnp.mean(errors.mean(_PATCH, keepdims=True), where=hidden)
    return loss, {'loss': loss}

  def pictures(self, params: Params, batch: Any, rng: jax.Array) -> Any:
    """Return rows of 8 images: hidden patches grey, and predicted; all.

    If `normalize`, predictions get the patch's own mean and deviation.
    """
    images = batch['image'][:8]
    rank = self.prepare({'image': images}, rng)['rank']
    found, _, mean, std, hidden = self._predict(
      params, self.preprocess(images), rank
    )
    one = jnp.ones_like(found[:1, :1, :1, :1, :1])
    black, white = self.preprocess(0 * one), self.preprocess(255 * one)
    pixels = 255 * (found * std + mean - black) / (white - black)
    cells = self.model.embedding.cut(images)

    def fill(values):
      filled = jnp.where(hidden, values, cells).astype(images.dtype)
      return filled.swapaxes(2, 3).reshape(images.shape)

    grey = jnp.nan  # of rasters, whose values may be any
    if images.dtype == jnp.uint8:
      pixels, grey = jnp.clip(pixels, 0, 255).round(), 128
    rows = fill(grey), fill(pixels), images
    return {'Hidden, predicted and true patches': jnp.stack(rows, axis=1)}

  def _predict(self, params, images, rank, rng=None):
    """Return predictions, patches, what to remove from these, what is hidden.

    All are [B, gh, gw, ph, pw, C], or 1 along some axes.
    """
    visible = max(1, int(rank.shape[1] * (1 - self.ratio)))
    order = jnp.argsort(rank, axis=1)
    found = encode(self.model, params, images, rng, visible=order[:, :visible])
    tokens = found['tokens']
    # The tokens are an image of one row, which becomes all patches.
    prefix = tokens.shape[1] - visible
    start = jnp.tile(jnp.arange(prefix), (len(rank), 1))
    sources = jnp.where(rank < visible, prefix + rank, -1)
    sources = jnp.concatenate([start, sources], axis=1)
    decoder, params = self._decoder(images), params['objective']
    found = encode(decoder, params, tokens[:, None], rng, patch_sources=sources)
    found = found['logits'][:, prefix:]
    patches, mean, std = self.model.embedding.cut(images), 0.0, 1.0
    if self.normalize:
      mean = patches.mean(_PATCH, keepdims=True)
      std = jnp.sqrt(patches.var(_PATCH, ddof=1, keepdims=True) + 1e-6)
    hidden = (rank >= visible).reshape(*patches.shape[:3], 1, 1, 1)
    return found.reshape(patches.shape), patches, mean, std, hidden

  def _decoder(self, images):
    """Return a ViT whose images are tokens, and whose logits are pixels."""
    model, depth = self.model, self.decoder.depth
    width = self.decoder.width or min(512, max(1, model.width // 48) * 32)
    grid = model.embedding.grid(images.shape[1:])
    outputs = math.prod(model.embedding.patch_size) * images.shape[-1]
    return VisionTransformer(
      width=width,
      depth=depth,
      num_heads=self.decoder.num_heads or max(1, width // 32),
      mlp_dim=4 * width,
      embedding=PatchEmbedding(1, mask_token=True),
      posemb=_Positions(layout=model.pooling.layout(grid), endpoint=False),
      pooling=NoPooling(),
      head=Head(init_std=math.sqrt(2 / (width + outputs))),  # Xavier's
      num_classes=outputs,
      **{k: getattr(model, k) for k in ('block', 'dtype', 'scan', 'remat')},
    )
