"""Rotary position embeddings (RoPE) in two dimensions.

Queries and keys of patches are rotated, those of other tokens are not (except
for RotaryAxial.registers and class_angles). Each pair of the d dimensions of a
head turns by an angle that grows with the row or column of the patch, so that
q kᵀ depends on differences of positions only. Shapes as in vit.py; r = d / 2.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array

from vit_jax.models.posemb import Grids, Layout, Learned, PositionEmbedding
from vit_jax.types import Factor, NonNegative, Positive, UserError


def _of_learned(name: str) -> Any:
  """Return the method of a name of `learned`, which changes nothing if None."""
  none = PositionEmbedding()
  return property(lambda self: getattr(self.learned or none, name))


@dataclasses.dataclass(frozen=True)
class Rotary(PositionEmbedding):
  """Base class: a rotation in each layer, and perhaps a learned table.

  In training, positions p become (p + shift) * jitter * rescale, drawn once for
  all patches of a call, as in DINOv3's code; 0, 1 and 1: they do not.

  Attributes:
    learned: table that is also added to the embedded patches, or None.
    shift: one number for rows, one for columns, uniform in [-shift, shift].
      Positions are counted in patches, or as the class says.
    jitter: two factors, uniform in their logarithm in [1 / jitter, jitter].
    rescale: one such factor for both.
  """

  learned: Learned | None = None
  _: dataclasses.KW_ONLY
  shift: NonNegative = 0.0
  jitter: Factor = 1.0
  rescale: Factor = 1.0

  in_layers = True
  for_grids = True
  pairs_axis = -1  # of [r, 2]: neighbours are pairs; of [2, r]: halves are

  add_to_patches = _of_learned('add_to_patches')
  add_to_token = _of_learned('add_to_token')
  resize = _of_learned('resize')
  table = _of_learned('table')

  def shared(self, module: nn.Module, layout: Layout, train: bool) -> Array:
    """Return cosines and sines of all tokens, float32 [2, 1 or B, N, 1, r]."""
    return _waves(self.angles(module, layout, train)[..., None, :], layout)

  def angles(self, module: nn.Module, layout: Layout, train: bool) -> Array:
    """Return angles of patches [n, r], or [B, n, r], for all heads."""
    raise NotImplementedError

  def moved(self, module: nn.Module, positions: Any, train: bool) -> Any:
    """Return positions [..., 2] after shift, jitter and rescale."""
    if not train or (self.shift, self.jitter, self.rescale) == (0, 1, 1):
      return positions
    keys = jax.random.split(module.make_rng('dropout'), 3)
    most = self.shift, math.log(self.jitter), math.log(self.rescale)
    shift, jitter, rescale = (
      jax.random.uniform(
        key, (1,) * (positions.ndim - 1) + (count,), minval=-x, maxval=x
      )
      for key, x, count in zip(keys, most, (2, 2, 1))
    )
    return (jnp.float32(positions) + shift) * jnp.exp(jitter + rescale)

  def queries_and_keys(
    self, module: nn.Module, q: Array, k: Array, layout: Layout, shared: Array
  ) -> tuple[Array, Array]:
    return self._rotate(q, shared), self._rotate(k, shared)

  def _rotate(self, x, waves):
    """Rotate the pairs of x [B, N, h, d] by waves [2, ., N, h or 1, r]."""
    axis, pairs = self.pairs_axis, waves.shape[-1]
    shape = (pairs, 2) if axis == -1 else (2, pairs)
    a, b = jnp.moveaxis(x.reshape(*x.shape[:-1], *shape), axis, 0)
    cos, sin = waves
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis)
    return turned.reshape(x.shape).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class RotaryAxial(Rotary):
  """Half of the pairs for rows, half for columns, as in EVA-02, PE, RoPE-ViT.

  Pair k of d / 4 turns by t temperature^(-k / (d / 4)) at position t.

  Attributes:
    temperature: 10,000 in EVA-02 and PE, 100 in RoPE-ViT.
    order: which half comes first: rows, 'yx' (EVA-02); or 'xy' (PE, RoPE-ViT).
    first: position of the first row and column; PE with a class token has 1.
    reference: grid that positions are scaled to, (16, 16) in EVA-02; None:
      positions are counted.
    registers: temperature for registers, which turn as a square grid of their
      own, 100 in ViT-5; None: they do not turn.
    pairs_axis: -1: neighbours are pairs; -2: halves are (DeepSeek, Qwen, MLCD).
    class_angles: whether the class token turns by learned angles (MLCD), the
      parameter `cls_angles` [1, r]; otherwise it does not turn.
  """

  temperature: Positive = 10_000.0
  order: Literal['yx', 'xy'] = 'yx'
  first: NonNegative = 0
  reference: tuple[int, int] | None = None
  registers: Positive | None = None
  pairs_axis: Literal[-1, -2] = -1
  class_angles: bool = False

  def shared(self, module: nn.Module, layout: Layout, train: bool) -> Array:
    waves = super().shared(module, layout, train)
    if self.class_angles:
      init = jax.nn.initializers.normal(waves.shape[-1] ** -0.5)
      angles = module.param('cls_angles', init, (1, waves.shape[-1]))
      waves = waves.at[:, :, :1].set(_waves(angles[:, None], Layout((0, 0))))
    if self.registers is None:
      return waves
    count = layout.num_registers
    side = math.isqrt(count)
    if side**2 != count or not count:
      raise UserError(
        f'posemb.registers={self.registers:g} turns registers as a square '
        f'grid, and pooling.num_registers={count}. Use 4, or leave it out.'
      )
    own = RotaryAxial(temperature=self.registers, order=self.order)
    turned = own.shared(module, Layout((side, side)), train)
    return waves.at[:, :, layout.prefix - count : layout.prefix].set(turned)

  def angles(self, module: nn.Module, layout: Layout, train: bool) -> Array:
    count = module.width // module.num_heads // 4
    found = _positions(layout.grid, self.first, self.reference)
    found = self.moved(module, found, train)
    bands = self.temperature ** -(_last(np.arange(count), found) / count)
    found = found if self.order == 'yx' else found[..., ::-1]
    return jnp.float32(found[..., None] * bands).reshape(*found.shape[:-1], -1)


@dataclasses.dataclass(frozen=True)
class RotaryDino(Rotary):
  """DINOv3's: positions are centres of patches between -1 and 1.

  Pair k of d / 4 turns by 2π t temperature^(-k / (d / 4)); rows come first, and
  the halves of a head are pairs. Files of Meta hold the periods in bfloat16;
  here they are computed, as in timm and transformers. The 7B has rescale=2, the
  published training of ViT-L on ImageNet 1.
  """

  temperature: Positive = 100.0
  _: dataclasses.KW_ONLY
  rescale: Factor = 2.0

  pairs_axis = -2

  def angles(self, module: nn.Module, layout: Layout, train: bool) -> Array:
    count = module.width // module.num_heads // 4
    found = 2 * _positions(layout.grid, 0.5, (1, 1)) - 1
    found = self.moved(module, found, train)
    periods = self.temperature ** (_last(np.arange(count), found) / count)
    angles = 2 * math.pi * found[..., None] / periods
    return jnp.float32(angles).reshape(*found.shape[:-1], -1)


@dataclasses.dataclass(frozen=True)
class RotaryMixed(Rotary):
  """Learned frequencies of x and y for each pair, head and layer (RoPE-ViT).

  The parameter `frequencies` [2, h, r] of a layer is for columns and rows. It
  starts as vectors of length temperature^(-k / (d / 4)) in two directions at
  right angles, which are random for each head.
  """

  temperature: Positive = 10.0

  def shared(self, module: nn.Module, layout: Layout, train: bool) -> Any:
    """Return positions [1 or B, n, 2], as the angles differ between layers."""
    found = jnp.float32(self.moved(module, _positions(layout.grid), train))
    return found.reshape(-1, *found.shape[-2:])

  def queries_and_keys(
    self, module: nn.Module, q: Array, k: Array, layout: Layout, shared: Any
  ) -> tuple[Array, Array]:
    frequencies = module.param('frequencies', self._init, q.shape[2:])
    y, x = jnp.moveaxis(shared, -1, 0)[..., None, None]
    angles = x * frequencies[None, :1] + y * frequencies[None, 1:]
    waves = _waves(angles, layout)
    return super().queries_and_keys(module, q, k, layout, waves)

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


def _waves(angles, layout):
  """Return cosines and sines; tokens before the patches do not turn."""
  angles = angles.reshape(-1, *angles.shape[-3:])
  angles = jnp.pad(angles, ((0, 0), (layout.prefix, 0), (0, 0), (0, 0)))
  return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def _last(row, like):
  """Return a row as the last of one more axes than `like` has."""
  return np.array(row)[(None,) * like.ndim]


def _positions(grid, first=0, reference=None):
  """Return row and column of each patch, [n, 2], or [B, n, 2] in Grids."""
  if isinstance(grid, Grids):
    found, sizes = first + grid.places(), grid.sizes[:, None]
  else:
    found = first + np.indices(grid, np.float64).reshape(2, -1).T
    sizes = np.array(grid)
  return found / sizes * _last(reference, found[0]) if reference else found
