"""Rotary position embeddings (RoPE) in two dimensions, and BEiT's bias.

Queries and keys of patches are rotated, those of other tokens are not. Each
pair of the d dimensions of a head turns by an angle that grows with the row or
column of the patch, so that q kᵀ depends on differences of positions only.
Shapes as in vit.py; r = d / 2 pairs.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from vit_jax.models import resample
from vit_jax.models.posemb import Layout, Learned, PositionEmbedding
from vit_jax.types import FlatParams, NonNegative, Positive, Shape


@dataclasses.dataclass(frozen=True)
class Rotary(PositionEmbedding):
  """Base class: a rotation in each layer, and perhaps a learned table.

  Attributes:
    learned: table that is also added to the embedded patches, or None.
  """

  learned: Learned | None = None

  in_layers = True
  pairs_axis = -1  # of [r, 2]: neighbours are pairs; of [2, r]: halves are

  def add_to_patches(
    self, module: nn.Module, x: jax.Array, grid: tuple[int, int]
  ) -> jax.Array:
    added = self.learned or PositionEmbedding()
    return added.add_to_patches(module, x, grid)

  def add_to_token(
    self, module: nn.Module, name: str, token: jax.Array
  ) -> jax.Array:
    added = self.learned or PositionEmbedding()
    return added.add_to_token(module, name, token)

  def add_to_layer(
    self, module: nn.Module, x: jax.Array, layout: Layout, shared: Any
  ) -> jax.Array:
    return x

  def resize(
    self, name: str, table: np.ndarray, shape: Shape, method: str = 'paper'
  ) -> np.ndarray | None:
    learned = self.learned
    return learned.resize(name, table, shape, method) if learned else None

  def table(
    self, params: FlatParams, grid: tuple[int, int], width: int
  ) -> np.ndarray | None:
    return self.learned.table(params, grid, width) if self.learned else None

  def shared(
    self, module: nn.Module, layout: Layout, train: bool
  ) -> jax.Array | None:
    """Return the angles of all patches, float32 [n, 1, r]."""
    return self.angles(module, layout, train)[:, None]

  def angles(self, module: nn.Module, layout: Layout, train: bool) -> jax.Array:
    """Return [n, r] for all heads of all layers."""
    raise NotImplementedError

  def queries_and_keys(
    self,
    module: nn.Module,
    q: jax.Array,
    k: jax.Array,
    layout: Layout,
    shared: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    rows = (layout.prefix, 0), (0, 0), (0, 0)
    angles = jnp.pad(shared, rows)  # other tokens keep their direction
    return self._rotate(q, angles), self._rotate(k, angles)

  def _rotate(self, x, angles):
    """Rotate the pairs of x [B, N, h, d] by angles [N, h or 1, r]."""
    axis, pairs = self.pairs_axis, angles.shape[-1]
    shape = (pairs, 2) if axis == -1 else (2, pairs)
    a, b = jnp.moveaxis(x.reshape(*x.shape[:-1], *shape), axis, 0)
    cos, sin = jnp.cos(angles)[None], jnp.sin(angles)[None]
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis)
    return turned.reshape(x.shape).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class RotaryAxial(Rotary):
  """Half of the pairs for rows, half for columns, as in EVA-02, PE, RoPE-ViT.

  Pair k of d / 4 turns by t temperature^(-k / (d / 4)) at position t.

  Attributes:
    temperature: 10,000 in EVA-02 and PE, 100 in RoPE-ViT.
    order: which half comes first, that of the rows 'yx' (EVA-02) or of the
      columns 'xy' (PE, RoPE-ViT).
    first: position of the first row and column; PE with a class token has 1.
    reference: grid that positions are scaled to, (16, 16) in EVA-02; None:
      positions are counted.
  """

  temperature: Positive = 10_000.0
  order: Literal['yx', 'xy'] = 'yx'
  first: NonNegative = 0
  reference: tuple[int, int] | None = None

  def angles(self, module: nn.Module, layout: Layout, train: bool) -> jax.Array:
    count = module.width // module.num_heads // 4
    bands = self.temperature ** -(np.arange(count) / count)
    found = _positions(layout.grid, self.first, self.reference)
    found = found if self.order == 'yx' else found[:, ::-1]
    return jnp.float32(found[..., None] * bands).reshape(len(found), -1)


@dataclasses.dataclass(frozen=True)
class RotaryDino(Rotary):
  """DINOv3's: positions are centres of patches between -1 and 1.

  Pair k of d / 4 turns by 2π t temperature^(-k / (d / 4)); rows come first, and
  the halves of a head are pairs. Files of Meta hold the periods in bfloat16;
  here they are computed, as in timm and transformers.

  Attributes:
    rescale: in training, positions are multiplied by a random number between
      1 / rescale and rescale, uniform in its logarithm, one in each step.
  """

  temperature: Positive = 100.0
  rescale: Positive = 2.0

  pairs_axis = -2

  def angles(self, module: nn.Module, layout: Layout, train: bool) -> jax.Array:
    count = module.width // module.num_heads // 4
    periods = self.temperature ** (np.arange(count) / count)
    found = 2 * (_positions(layout.grid) + 0.5) / np.array(layout.grid) - 1
    angles = 2 * math.pi * found[..., None] / periods
    angles = jnp.float32(angles).reshape(len(found), -1)
    if train and self.rescale != 1:
      span, key = math.log(self.rescale), module.make_rng('dropout')
      scale = jnp.exp(jax.random.uniform(key, minval=-span, maxval=span))
      angles = angles * scale
    return angles


@dataclasses.dataclass(frozen=True)
class RotaryMixed(Rotary):
  """Learned frequencies of x and y for each pair, head and layer (RoPE-ViT).

  The parameter `frequencies` [2, h, r] of a layer is for columns and rows. It
  starts as vectors of length temperature^(-k / (d / 4)) in two directions at
  right angles, which are random for each head.
  """

  temperature: Positive = 10.0

  def shared(
    self, module: nn.Module, layout: Layout, train: bool
  ) -> jax.Array | None:
    return None

  def queries_and_keys(
    self,
    module: nn.Module,
    q: jax.Array,
    k: jax.Array,
    layout: Layout,
    shared: Any,
  ) -> tuple[jax.Array, jax.Array]:
    frequencies = module.param('frequencies', self._init, q.shape[2:])
    found = _positions(layout.grid)
    y, x = jnp.float32(found.T)[..., None, None]
    angles = x * frequencies[:1] + y * frequencies[1:]
    return super().queries_and_keys(module, q, k, layout, angles)

  def _init(self, key, heads):
    count = heads[1] // 4
    lengths = self.temperature ** -(np.arange(count)[None] / count)
    turn = jax.random.uniform(key, (heads[0], 1), maxval=2 * math.pi)
    both = [turn, turn + math.pi / 2]
    x, y = (
      jnp.concatenate([lengths * wave(angle) for angle in both], axis=-1)
      for wave in (jnp.cos, jnp.sin)
    )
    return jnp.stack([x, y])


def _positions(grid, first=0, reference=None):
  """Return float64 [n, 2], row and column of each patch."""
  axes = [first + np.arange(size, dtype=np.float64) for size in grid]
  if reference:
    axes = [t / n * to for t, n, to in zip(axes, grid, reference)]
  return np.stack(np.meshgrid(*axes, indexing='ij'), axis=-1).reshape(-1, 2)


@dataclasses.dataclass(frozen=True)
class RelativeBias(PositionEmbedding):
  """A learned number for each head and difference of positions (BEiT).

  It is added to the scaled logits of attention, in every layer. The tables are
  [2 gh - 1, 2 gw - 1, h], by row and column of query - key, and
  `class_bias` [3, h], from the class token, to it, and within it.
  """

  init_std: NonNegative = 0.02

  in_layers = True

  def logits(
    self, module: nn.Module, q: jax.Array, layout: Layout
  ) -> jax.Array:
    gh, gw = layout.grid
    heads, init = q.shape[2], jax.nn.initializers.normal(self.init_std)
    shape = 2 * gh - 1, 2 * gw - 1, heads
    table = module.param('relative_bias', init, shape)
    at = _positions(layout.grid).astype(int)
    dy, dx = np.moveaxis(at[:, None] - at, -1, 0)
    bias = table[dy + gh - 1, dx + gw - 1]  # [n, n, h]
    if layout.prefix:
      ends = module.param('class_bias', init, (3, heads))
      bias = jnp.pad(bias, ((1, 0), (1, 0), (0, 0)))
      bias = bias.at[0].set(ends[0]).at[:, 0].set(ends[1])
      bias = bias.at[0, 0].set(ends[2])
    # attention() divides by √d.
    return jnp.moveaxis(bias, -1, 0)[None] * math.sqrt(q.shape[-1])

  def resize(
    self, name: str, table: np.ndarray, shape: Shape, method: str = 'paper'
  ) -> np.ndarray | None:
    if name != 'relative_bias' or table.shape[-1] != shape[-1]:
      return None
    return resample.resize(table, (shape[-3], shape[-2]), method)
