"""ResNets with group norm and weight standardisation: BiT, and of hybrids.

Two forms are published, whose weights are not interchangeable:

                       'preact' (the BiT paper)     'postact' (hybrids)
  a unit               norm, relu, conv; 3 times    conv, norm, relu; 3 times,
                                                    the last relu after the sum
  norms besides        one before the head          one in the root, one in each
                                                    projection
  padding              symmetric, see pool_padding  SAME: on even sides nothing
                                                    before, one more after
  GroupNorm epsilon    1e-5                         1e-6
  standardised kernel  (w - mean) / √(var + 1e-10)  (w - mean) / (std + 1e-5)

Both have 32 groups, bottlenecks four times as wide outside as inside, and the
stride in the 3x3 convolution. Shapes as in vit.py.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from vit_jax.models import vit
from vit_jax.models.dense import INIT, keep_batch_split
from vit_jax.models.pooling import Head
from vit_jax.types import HARMLESS, Count, Dtype, Natural, Size

Form = Literal['preact', 'postact']
Stages = tuple[Count, ...]
ROOT_WIDTH = 64  # times width_factor


class StdConv(nn.Module):
  """Convolution with a kernel standardised over [kh, kw, C], without bias."""

  features: int
  size: int
  stride: int
  form: str
  dtype: Any = 'float32'

  @nn.compact
  def __call__(self, x: Array) -> Array:
    shape = self.size, self.size, x.shape[-1], self.features
    kernel = self.param('kernel', INIT['conv'], shape)
    kernel -= kernel.mean((0, 1, 2), keepdims=True)
    variance = (kernel**2).mean((0, 1, 2), keepdims=True)
    if self.form == 'preact':
      kernel /= jnp.sqrt(variance + 1e-10)
      padding: Any = [(self.size // 2, self.size // 2)] * 2
    else:
      # The square root has no finite gradient at a variance of 0.
      kernel /= jnp.sqrt(jnp.maximum(variance, 1e-20)) + 1e-5
      padding = 'SAME'
    return convolve(jnp.asarray(x, self.dtype), kernel, self.stride, padding)


def convolve(x: Array, kernel: Array, stride: int, padding: Any) -> Array:
  """Return the convolution of x [B, H, W, C]; dtypes as in `dense.matmul`."""
  product = functools.partial(
    jax.lax.conv_general_dilated,
    window_strides=(stride, stride),
    padding=padding,
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
  )
  if x.dtype == kernel.dtype:
    return product(x, kernel)
  return _mixed_convolve(product, x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed_convolve(product, x, kernel):
  return product(x, kernel.astype(x.dtype))


def _mixed_convolve_forward(product, x, kernel):
  return _mixed_convolve(product, x, kernel), (x, kernel)


def _mixed_convolve_backward(product, saved, gradient):
  x, kernel = saved
  rounded = kernel.astype(x.dtype)
  (of_x,) = jax.linear_transpose(lambda x: product(x, rounded), x)(gradient)
  # JAX's derivative of a convolution has one dtype throughout. TPUs round these
  # float32 copies to bfloat16 again, without loss.
  exact = x.astype(kernel.dtype)
  (of_kernel,) = jax.linear_transpose(lambda k: product(exact, k), kernel)(
    gradient.astype(kernel.dtype)
  )
  return of_x, of_kernel


_mixed_convolve.defvjp(_mixed_convolve_forward, _mixed_convolve_backward)


def group_norm(form: str, dtype: Any, **fields: Any) -> nn.GroupNorm:
  """Return a GroupNorm of 32 groups with statistics in float32."""
  epsilon = 1e-5 if form == 'preact' else 1e-6
  return nn.GroupNorm(
    32, epsilon=epsilon, dtype=dtype, use_fast_variance=False, **fields
  )


class Unit(nn.Module):
  """A bottleneck: [B, H, W, C] -> [B, H / stride, W / stride, 4 * width]."""

  width: int
  stride: int
  form: str
  dtype: Any = 'float32'
  middle: Any = StdConv  # class in place of the 3x3 convolution

  @nn.compact
  def __call__(self, x: Array) -> Array:
    x = keep_batch_split(x)
    outside, options = 4 * self.width, (self.form, self.dtype)
    norm = functools.partial(group_norm, *options)
    conv1 = StdConv(self.width, 1, 1, *options, name='conv1')
    conv2 = self.middle(self.width, 3, self.stride, *options, name='conv2')
    conv3 = StdConv(outside, 1, 1, *options, name='conv3')
    project = None
    if x.shape[-1] != outside or self.stride > 1:
      project = StdConv(outside, 1, self.stride, *options, name='conv_proj')
    if self.form == 'preact':
      y = nn.relu(norm(name='norm1')(x))
      x = project(y) if project else x  # the activated input, not x itself
      y = nn.relu(norm(name='norm2')(conv1(y)))
      y = nn.relu(norm(name='norm3')(conv2(y)))
      return x + conv3(y)
    y = nn.relu(norm(name='norm1')(conv1(x)))
    y = nn.relu(norm(name='norm2')(conv2(y)))
    y = norm(name='norm3', scale_init=INIT['last_norm'])(conv3(y))
    x = norm(name='norm_proj')(project(x)) if project else x
    return nn.relu(x + y)


class Backbone(nn.Module):
  """Root and stages: [B, H, W, C] -> {'stage0': ..., 'stage1': ..., ...}.

  'stage0' is the output of the root, [B, H/4, W/4, 64 * width_factor]. Stage s
  has 256 * 2**(s - 1) * width_factor channels; from the second stage on, each
  has half the height and width of the previous one. Fields as of ResNet.
  """

  stages: tuple[int, ...]
  width_factor: int = 1
  form: str = 'postact'
  dtype: Any = 'float32'
  remat: str = 'none'
  middle: Any = StdConv
  pool_padding: str = 'zero'

  @nn.compact
  def __call__(self, images: Array) -> dict[str, Array]:
    width = ROOT_WIDTH * self.width_factor
    root = Root(width, self.form, self.dtype, self.pool_padding, name='root')
    x = root(images)
    out = {'stage0': x}
    cls = vit.remat(Unit, self.remat)
    unit = functools.partial(
      cls, form=self.form, dtype=self.dtype, middle=self.middle
    )
    for i, units in enumerate(self.stages, 1):
      name, stride = f'stage{i}', 1 if i == 1 else 2
      stage = Stage(units, width * 2 ** (i - 1), stride, unit, name=name)
      out[name] = x = stage(x)
    return out


class Root(nn.Module):
  """A convolution and max-pooling, both of stride 2: [B, H/4, W/4, width]."""

  width: int
  form: str
  dtype: Any = 'float32'
  pool_padding: str = 'zero'

  @nn.compact
  def __call__(self, images: Array) -> Array:
    x = StdConv(self.width, 7, 2, self.form, self.dtype, name='conv')(images)
    if self.form == 'postact':
      x = nn.relu(group_norm(self.form, self.dtype, name='norm')(x))
      return nn.max_pool(x, (3, 3), (2, 2), 'SAME')
    if self.pool_padding == 'zero':  # zeros can be the maximum
      x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
      return nn.max_pool(x, (3, 3), (2, 2), 'VALID')
    return nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))


class Stage(nn.Module):
  """Units 'unit1', 'unit2', ... of one width; the first has the stride."""

  units: int
  width: int
  stride: int
  unit: Callable[..., nn.Module]

  @nn.compact
  def __call__(self, x: Array) -> Array:
    for i in range(1, self.units + 1):
      stride = self.stride if i == 1 else 1
      x = self.unit(self.width, stride, name=f'unit{i}')(x)
    return x


@dataclasses.dataclass(frozen=True)
class Hybrid(vit.PatchEmbedding):
  """Patches of the feature map of a ResNet (section 3.1), for hybrids.

  Attributes:
    patch_size: as in PatchEmbedding, in cells of the feature map.
    stages: units in each stage of the 'postact' ResNet; (): its root alone.
  """

  patch_size: Size = 1
  stages: Stages = (3, 4, 6, 3)

  for_grids = False

  def __post_init__(self) -> None:
    super().__post_init__()
    object.__setattr__(self, 'stages', tuple(self.stages))

  @property
  def reduction(self) -> int:  # type: ignore[override]
    # The root reduces each side by 4, each stage but the first by 2.
    return 4 * 2 ** max(len(self.stages) - 1, 0)

  def __call__(self, module: nn.Module, images: Array) -> vit.Embedded:
    maps = Backbone(
      self.stages, dtype=module.dtype, remat=module.remat, name='resnet'
    )(images)
    feature_map = maps[f'stage{len(self.stages)}']
    out, grid = super().__call__(module, feature_map)
    return {'feature_map': feature_map} | out, grid


class ResNet(vit.Classifier):
  """Images to logits: the baselines of the paper, from "Big Transfer".

  Attributes:
    stages: units in each stage; (3, 4, 6, 3) is an R50.
    width_factor: the x1, x2, ... in the name.
    head, num_classes, dtype, remat (of units): as in VisionTransformer.
    middle: class in place of the 3x3 convolutions, with the fields of StdConv.
    pool_padding: what the root of 'preact' pads with before max-pooling: 'zero'
      as in BiT's own code, or 'lowest', minus infinity, as in big_vision's.
  """

  stages: Stages = (3, 4, 6, 3)
  width_factor: Count = 1
  form: Form = 'preact'
  head: Head = Head()
  num_classes: Natural | None = None
  dtype: Dtype = 'float32'
  remat: Annotated[vit.Remat, HARMLESS] = 'none'
  middle: Callable[..., nn.Module] = StdConv
  pool_padding: Literal['zero', 'lowest'] = 'zero'

  @nn.compact
  def features(
    self, images: Array, *, train: bool = False, per_layer: bool = True
  ) -> dict[str, Array]:
    """Compute all intermediate features and the logits, by name.

    Returns:
      root, stage1, stage2, ...: [B, ., ., .], feature maps (if per_layer).
      map_-1: [B, ., ., F], the last one, which 'preact' normalises first.
      pooled: [B, F], its mean.
      pre_logits, logits: see VisionTransformer.
    """
    vit.check_images(images)
    maps = Backbone(
      *(self.stages, self.width_factor, self.form, self.dtype, self.remat),
      *(self.middle, self.pool_padding),
      name='resnet',
    )(images)
    x = maps[f'stage{len(self.stages)}']
    if self.form == 'preact':
      x = nn.relu(group_norm(self.form, self.dtype, name='norm')(x))
    out = {'root': maps.pop('stage0')} | maps if per_layer else {}
    return out | {'map_-1': x} | self.head(self, x.mean((1, 2)))
