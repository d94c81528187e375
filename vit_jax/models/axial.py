"""Axial attention: along the rows, then along the columns (paper's appendix).

Shapes as in vit.py. A token sees gw + gh others in two steps, not gh * gw in
one.

The paper tells no more than is said at the two models; what they leave open is
our choice.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from vit_jax.models import frame, posemb
from vit_jax.models.layers import (
  GELU,
  Attention,
  Block,
  LayerNorm,
  MapHead,
)
from vit_jax.models.positions import Positions
from vit_jax.models.resnet import ResNet


def to_lines(x: jax.Array, grid: tuple[int, int], axis: int) -> jax.Array:
  """Each row of a grid a sequence (axis 1), or each column (axis 0).

  Args:
    x: [B, gh * gw, D], row by row.
    grid: (gh, gw).
    axis: which dimension of the grid runs along a sequence.

  Returns:
    [B * gh, gw, D] or [B * gw, gh, D].
  """
  x = x.reshape(x.shape[0], *grid, -1)
  if axis == 0:
    x = x.swapaxes(1, 2)
  return x.reshape(-1, grid[axis], x.shape[-1])


def from_lines(x: jax.Array, grid: tuple[int, int], axis: int) -> jax.Array:
  """The inverse of `to_lines`."""
  if axis == 0:
    x = x.reshape(-1, grid[1], grid[0], x.shape[-1]).swapaxes(1, 2)
  return x.reshape(-1, grid[0] * grid[1], x.shape[-1])


class AxialBlock(nn.Module):
  """Two Blocks, of rows and of columns: [B, gh * gw, D] -> the same."""

  grid: tuple[int, int]
  block: dict[str, Any]
  per_layer: bool = False

  @nn.compact
  def __call__(self, x, skip_rate):
    """skip_rate: None; there is no stochastic depth here."""
    for axis, name in ((1, 'row'), (0, 'column')):
      x = to_lines(x, self.grid, axis)
      x, _ = Block(**self.block, name=name)(x, skip_rate)
      x = from_lines(x, self.grid, axis)
    return x, x if self.per_layer else None


class AxialViT(nn.Module):
  """A ViT, each of whose layers is two: attention and MLP, in rows and columns.

  Its MLPs are twice as many, so it has more parameters and takes more compute
  than the ViT of its name. It has no class token, which would be in no row.

  Attributes: those of VisionTransformer of the same names, but
    pooling: 'gap', 'map' or 'none'.
    posemb: 'learned', 'learned2d', 'sincos2d' or 'none', at the stem.
  """

  width: int
  depth: int
  mlp_dim: int
  num_heads: int
  patch_size: int | tuple[int, int]
  num_classes: int | None = None
  pooling: str = 'gap'
  representation_size: int | None = None
  posemb: str = 'learned'
  posemb_init_std: float = 0.02
  dropout: float = 0.0
  head_bias_init: float = 0.0
  gelu: str = 'tanh'
  dtype: Any = 'float32'
  scan: bool = False
  remat: str = 'none'
  attention: str = 'auto'

  def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
    """As VisionTransformer."""
    out = self.features(images, train=train, per_layer=False)
    return out['logits'] if self.num_classes else out['pre_logits']

  @nn.compact
  def features(
    self, images: jax.Array, *, train: bool = False, per_layer: bool = True
  ) -> dict[str, jax.Array]:
    """As VisionTransformer; the tokens are the gh * gw patches."""
    frame.check_choices(
      self,
      pooling=('gap', 'map', 'none'),
      posemb=('learned', 'learned2d', 'sincos2d', 'none'),
      gelu=tuple(GELU),
      remat=frame.REMAT,
    )
    frame.check_rates(self, 'dropout')
    patches, grid = frame.embed_patches(
      images, self.patch_size, self.width, self.dtype
    )
    x = nn.Dropout(self.dropout, deterministic=not train)(
      self._position(patches, grid)
    )
    x, layers = self._encode(x, grid, train, per_layer)
    tokens = x = LayerNorm(dtype=self.dtype, name='norm')(x)
    out = {'patches': patches, **layers, 'tokens': tokens}
    if self.pooling == 'gap':
      x = x.mean(axis=1)
    elif self.pooling == 'map':
      fields = self.num_heads, self.mlp_dim, self.gelu, self.dtype
      x = MapHead(*fields, self.attention, name='map_head')(x)
    return out | frame.read_out(self, x)

  def _position(self, patches, grid):
    x = patches.astype(jnp.float32)
    positions = Positions(self.posemb, grid, self.posemb_init_std)
    if positions.are_added:
      x = x + positions.of_patches(self, self.width)
    elif self.posemb == 'sincos2d':
      x = x + posemb.sincos2d(grid, self.width).reshape(1, -1, self.width)
    return x.astype(self.dtype)

  def _encode(self, x, grid, train, per_layer):
    block = {
      'num_heads': self.num_heads,
      'mlp_dim': self.mlp_dim,
      'dropout': self.dropout,
      'gelu': self.gelu,
      'dtype': self.dtype,
      'attention': self.attention,
      'train': train,
    }
    return frame.run_layers(
      AxialBlock,
      x,
      depth=self.depth,
      skip_rate=0.0,
      scan=self.scan,
      remat=self.remat,
      per_layer=per_layer,
      grid=grid,
      block=block,
    )


class AxialAttention(nn.Module):
  """In a 3x3 convolution's place: [B, H, W, C] -> [B, H/s, W/s, features].

  Attention with relative positions along the rows, then the columns, and the
  mean of s x s cells where the convolution has stride s. 8 heads and that mean
  are Axial-DeepLab's, from memory. Not its own: of its three relative terms
  only the query's, as in table 8; and an output projection, as in a ViT.
  """

  features: int
  size: int  # of the convolution; of no meaning here
  stride: int
  form: str  # the same
  dtype: Any = 'float32'
  num_heads: int = 8

  @nn.compact
  def __call__(self, x):
    batch, *grid, channels = x.shape
    if channels != self.features or channels % self.num_heads:
      raise ValueError(
        f'Axial attention of {self.num_heads} heads got {channels} channels '
        f'for {self.features}; expected as many, and a multiple of the heads. '
        'Choose another width_factor.'
      )
    x = x.reshape(batch, -1, channels)
    for axis, name in ((1, 'row'), (0, 'column')):
      attention = Attention(
        self.num_heads,
        dtype=self.dtype,
        positions=Positions('relative', (1, grid[axis])),
        name=name,
      )
      x = to_lines(x, grid, axis)
      x = from_lines(attention(x, x), grid, axis)
    x = x.reshape(batch, *grid, channels)
    if self.stride == 1:
      return x
    window = self.stride, self.stride
    return nn.avg_pool(x, window, window, 'SAME', count_include_pad=False)


class AxialResNet(ResNet):
  """A ResNet with axial attention in place of its 3x3 convolutions.

  The paper's is an R50: stages (3, 4, 6, 3). Its positions are of one size of
  feature maps; for images of another they are resized as a ViT's are.
  """

  middle: Any = AxialAttention
