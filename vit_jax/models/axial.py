"""Axial attention: along the rows, then along the columns (paper's appendix).

A token attends to gw + gh others in two steps, instead of gh * gw in one. The
paper says no more than what stands in the docstrings of the two models; we
chose the rest. Shapes as in vit.py.
"""

import functools
from collections.abc import Callable
from typing import Any

from flax import linen as nn
from jax import Array

from vit_jax.models.attention import Attention
from vit_jax.models.pooling import Mean, Pooling
from vit_jax.models.posemb import Grid, Layout, Relative
from vit_jax.models.resnet import ResNet
from vit_jax.models.vit import Block, VisionTransformer
from vit_jax.types import UserError


def along(axis: int, fn: Callable[..., Array], x: Array, grid: Grid) -> Array:
  """Apply fn to each row (axis 1) or column (axis 0) of a grid as a sequence.

  `x` is [B, gh * gw, D], row by row; fn maps [lines, tokens, D] to the same.
  """
  lines = x.reshape(x.shape[0], *grid, -1)
  lines = lines if axis else lines.swapaxes(1, 2)
  out = fn(lines.reshape(-1, *lines.shape[2:])).reshape(lines.shape)
  return (out if axis else out.swapaxes(1, 2)).reshape(x.shape)


class AxialBlock(Block):
  """Two Blocks, for rows and for columns: [B, gh * gw, D] -> the same."""

  for_grids = False

  @nn.compact
  def __call__(
    self, x: Any, drop_rate: Any = None, shared: Any = None, lengths: Any = None
  ) -> Array:
    names = Block.__dataclass_fields__.keys() - {'parent', 'name'}
    fields = {name: getattr(self, name) for name in names}
    for axis, name in ((1, 'row'), (0, 'column')):
      layer = functools.partial(Block(**fields, name=name), drop_rate=drop_rate)
      x = along(axis, layer, x, self.layout.grid)
    return x


class AxialViT(VisionTransformer):
  """A ViT with two layers, each attention and MLP, in place of each layer.

  The first attends along rows, the second along columns. There are twice as
  many MLPs, so it has more parameters and takes more compute than the ViT of
  the same size. It has no class token and no registers, which would be in no
  row, and no position embeddings in its layers.
  """

  pooling: Pooling = Mean()

  layer = AxialBlock

  def _check(self):
    super()._check()
    extra = self.pooling.class_token or self.pooling.num_registers
    if extra or (self.posemb is not None and self.posemb.in_layers):
      raise UserError(
        'AxialViT cannot have a class token, registers or positions in the '
        f'layers, got {self.pooling} and {self.posemb}.'
      )


class AxialAttention(nn.Module):
  """Axial attention in place of a 3x3 convolution of a ResNet.

  [B, H, W, C] -> [B, H/s, W/s, features]: attention with relative positions
  along the rows, then the columns, and the mean of s x s cells where the
  convolution has stride s. 8 heads and that mean are as in Axial-DeepLab, from
  memory of its paper. Unlike there, only the query's relative term is used, as
  in table 8; and there is an output projection, as in a ViT.
  """

  features: int
  size: int  # of the convolution; not used
  stride: int
  form: str  # not used
  dtype: Any = 'float32'
  num_heads: int = 8

  @nn.compact
  def __call__(self, x: Array) -> Array:
    shape, grid = x.shape, (x.shape[1], x.shape[2])
    x = x.reshape(shape[0], -1, shape[-1])
    for axis, name in ((1, 'row'), (0, 'column')):
      fields = {'layout': Layout((1, grid[axis])), 'dtype': self.dtype}
      attention = Attention(
        self.num_heads, posemb=Relative(), **fields, name=name
      )

      def attend(lines, attention=attention):
        return attention(lines, lines)

      x = along(axis, attend, x, grid)
    x = x.reshape(shape)
    if self.stride == 1:
      return x
    window = self.stride, self.stride
    return nn.avg_pool(x, window, window, 'SAME', count_include_pad=False)


class AxialResNet(ResNet):
  """A ResNet with axial attention in place of its 3x3 convolutions.

  The paper's is an R50, stages (3, 4, 6, 3). It takes images of one size only.
  """

  middle: Any = AxialAttention
