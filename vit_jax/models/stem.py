"""A stem of convolutions in place of the linear patch embedding.

"Early Convolutions Help Transformers See Better" (Xiao et al., 2021, arXiv
2106.14881) shows that a few small convolutions make ViTs easier to train. This
stem is ours: as in a ResNet, the first convolution is a large one of stride 4,
which takes a third of the time of two small ones of stride 2 on a CPU.
"""

import dataclasses

import jax
from flax import linen as nn

from vit_jax.models.dense import keep_batch_split
from vit_jax.models.resnet import StdConv
from vit_jax.models.vit import Embedded, PatchEmbedding
from vit_jax.types import Count, Size, UserError


@dataclasses.dataclass(frozen=True)
class ConvStem(PatchEmbedding):
  """Patches of the feature map of a few convolutions.

  Attributes:
    patch_size: as in PatchEmbedding, in cells of the feature map.
    widths: channels, multiples of 8, after the first convolution, and after
      each further one, which halves height and width.
  """

  patch_size: Size = 1
  widths: tuple[Count, ...] = (32, 48, 96, 128)

  for_grids = False

  def __post_init__(self) -> None:
    super().__post_init__()
    object.__setattr__(self, 'widths', tuple(self.widths))

  @property
  def reduction(self) -> int:  # type: ignore[override]
    return 4 * 2 ** (len(self.widths) - 1)

  def __call__(self, module: nn.Module, images: jax.Array) -> Embedded:
    if any(side % self.reduction for side in images.shape[1:3]):
      raise UserError(
        f'Images of {images.shape[1]}x{images.shape[2]} (height x width) do '
        f'not fit a stem of {len(self.widths)} convolutions. Use sides that '
        f'are multiples of {self.reduction}.'
      )
    feature_map = Stem(self.widths, module.dtype, name='stem')(images)
    out, grid = super().__call__(module, feature_map)
    return {'feature_map': feature_map} | out, grid


class Stem(nn.Module):
  """Convolutions: [B, H, W, C] -> [B, H / 2**(n+1), W / 2**(n+1), widths[-1]].

  The first of n has a kernel of 7x7 and stride 4. Each of the others, 3x3 of
  stride 2, is followed by a residual one of stride 1. Kernels are standardised,
  and group norm (8 groups) and ReLU follow.
  """

  widths: tuple[int, ...]
  dtype: str = 'float32'

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    def convolve(x, width, size, stride, name):
      conv = StdConv(width, size, stride, 'preact', self.dtype, name=name)
      norm = nn.GroupNorm(8, dtype=self.dtype, name=f'{name}_norm')
      return nn.relu(norm(conv(x)))

    x = convolve(images, self.widths[0], 7, 4, 'conv0')
    for i, width in enumerate(self.widths[1:], 1):
      x = convolve(keep_batch_split(x), width, 3, 2, f'conv{i}')
      x = x + convolve(x, width, 3, 1, f'conv{i}_residual')
    return x
