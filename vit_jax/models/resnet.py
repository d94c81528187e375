"""ResNets with group norm and weight standardisation (BiT), and of hybrids.

Two forms are published, whose weights do not fit each other:

                       'preact' (the BiT paper)     'postact' (hybrids)
  a unit               norm, relu, conv; 3 times    conv, norm, relu; 3 times,
                                                    the last relu after the sum
  norms besides        one before the head          one in the root, one in each
                                                    projection
  padding              symmetric; zeros before      SAME: on even sides nothing
                       max-pooling                  before, one more behind
  GroupNorm epsilon    1e-5                         1e-6
  standardised kernel  (w - mean) / √(var + 1e-10)  (w - mean) / (std + 1e-5)

Both have 32 groups, bottlenecks four times as wide outside as inside, and the
stride in the 3x3 convolution. Shapes: B examples, H x W pixels, C channels,
F features after the last stage, K classes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from vit_jax.models import frame
from vit_jax.models.layers import INIT
from vit_jax.models.mesh import keep_batch_split

FORMS = ('preact', 'postact')
ROOT_WIDTH = 64  # times width_factor, as the inside of the units of stage 1


class StdConv(nn.Module):
  """Convolution with a standardised kernel, without bias.

  Kernels have mean 0 and variance 1 over [kh, kw, C] for each output, however
  they are scaled. Standardised in float32, applied in dtype.
  """

  features: int
  size: int
  stride: int
  form: str
  dtype: Any = 'float32'

  @nn.compact
  def __call__(self, x):
    shape = self.size, self.size, x.shape[-1], self.features
    kernel = self.param('kernel', INIT['conv'], shape)
    axes = 0, 1, 2
    kernel -= kernel.mean(axes, keepdims=True)
    variance = (kernel**2).mean(axes, keepdims=True)
    if self.form == 'preact':
      kernel /= jnp.sqrt(variance + 1e-10)
      padding = [(self.size // 2, self.size // 2)] * 2
    else:
      # The root of a variance of 0 has no finite gradient.
      kernel /= jnp.sqrt(jnp.maximum(variance, 1e-20)) + 1e-5
      padding = 'SAME'
    return jax.lax.conv_general_dilated(
      jnp.asarray(x, self.dtype),
      kernel.astype(self.dtype),
      (self.stride, self.stride),
      padding,
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )


def group_norm(form: str, dtype: Any, name: str, **fields) -> nn.GroupNorm:
  """32 groups; statistics in float32."""
  epsilon = 1e-5 if form == 'preact' else 1e-6
  return nn.GroupNorm(
    32,
    epsilon=epsilon,
    dtype=dtype,
    use_fast_variance=False,
    name=name,
    **fields,
  )


class Unit(nn.Module):
  """A bottleneck: [B, H, W, C] -> [B, H / stride, W / stride, 4 * width]."""

  width: int
  stride: int
  form: str
  dtype: Any = 'float32'
  middle: Any = StdConv  # what has the place of the 3x3 convolution

  def conv(self, name, features, size=1, stride=1):
    return StdConv(features, size, stride, self.form, self.dtype, name=name)

  def conv2(self):
    return self.middle(
      self.width, 3, self.stride, self.form, self.dtype, name='conv2'
    )

  def norm(self, name, **fields):
    return group_norm(self.form, self.dtype, name, **fields)

  @nn.compact
  def __call__(self, x):
    x = keep_batch_split(x)
    outside = 4 * self.width
    project = x.shape[-1] != outside or self.stride > 1
    return (self._preact if self.form == 'preact' else self._postact)(
      x, outside, project
    )

  def _preact(self, x, outside, project):
    y = nn.relu(self.norm('norm1')(x))
    if project:  # of what is activated, not of x
      x = self.conv('conv_proj', outside, stride=self.stride)(y)
    y = self.conv('conv1', self.width)(y)
    y = nn.relu(self.norm('norm2')(y))
    y = self.conv2()(y)
    y = nn.relu(self.norm('norm3')(y))
    return x + self.conv('conv3', outside)(y)

  def _postact(self, x, outside, project):
    y = nn.relu(self.norm('norm1')(self.conv('conv1', self.width)(x)))
    y = self.conv2()(y)
    y = nn.relu(self.norm('norm2')(y))
    y = self.conv('conv3', outside)(y)
    y = self.norm('norm3', scale_init=INIT['last_norm'])(y)
    if project:
      x = self.conv('conv_proj', outside, stride=self.stride)(x)
      x = self.norm('norm_proj')(x)
    return nn.relu(x + y)


class Backbone(nn.Module):
  """Root and stages: [B, H, W, C] -> {'stage0': ..., 'stage1': ..., ...}.

  'stage0' is the root's output, [B, H/4, W/4, 64 * width_factor]; stage s has
  256 * 2**(s - 1) * width_factor channels, and from the second on half the
  height and width of the one before.
  """

  stages: tuple[int, ...]
  width_factor: int = 1
  form: str = 'postact'
  dtype: Any = 'float32'
  remat: str = 'none'
  middle: Any = StdConv

  @property
  def reduction(self) -> int:
    """Pixels to the side of a cell of the last stage."""
    return 4 * 2 ** max(len(self.stages) - 1, 0)

  @nn.compact
  def __call__(self, images):
    for what, counts in (
      ('ResNet stages', self.stages),
      ('width_factor', (self.width_factor,)),
    ):
      if any(not isinstance(n, int) or n < 1 for n in counts):
        raise ValueError(
          f'{what}: {counts}; expected integers of 1 or more, as in '
          'stages=(3, 4, 6, 3), width_factor=1.'
        )
    width = ROOT_WIDTH * self.width_factor
    out = {}
    out['stage0'] = x = Root(width, self.form, self.dtype, name='root')(images)
    for i, units in enumerate(self.stages, 1):
      stage = Stage(
        units,
        width * 2 ** (i - 1),
        1 if i == 1 else 2,
        self.form,
        self.dtype,
        self.remat,
        self.middle,
        name=f'stage{i}',
      )
      out[f'stage{i}'] = x = stage(x)
    return out


class Root(nn.Module):
  """A convolution and max-pooling, both of stride 2: a quarter of each side."""

  width: int
  form: str
  dtype: Any = 'float32'

  @nn.compact
  def __call__(self, images):
    x = StdConv(self.width, 7, 2, self.form, self.dtype, name='conv')(images)
    if self.form == 'postact':
      x = nn.relu(group_norm(self.form, self.dtype, 'norm')(x))
      return nn.max_pool(x, (3, 3), (2, 2), 'SAME')
    # Zeros, which can be the maximum, as in BiT's weights.
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return nn.max_pool(x, (3, 3), (2, 2), 'VALID')


class Stage(nn.Module):
  """Units of one width, 'unit1' on; the first has the stride."""

  units: int
  width: int
  stride: int
  form: str
  dtype: Any = 'float32'
  remat: str = 'none'
  middle: Any = StdConv

  @nn.compact
  def __call__(self, x):
    unit = Unit
    if self.remat != 'none':
      unit = nn.remat(unit, policy=frame.remat_policy(self.remat))
    for i in range(1, self.units + 1):
      stride = self.stride if i == 1 else 1
      fields = self.width, stride, self.form, self.dtype, self.middle
      x = unit(*fields, name=f'unit{i}')(x)
    return x


class ResNet(nn.Module):
  """Images to logits: the baselines of the paper, from "Big Transfer".

  Attributes:
    stages: units in each stage; (3, 4, 6, 3) is an R50.
    width_factor: the x1, x2, ... in the name; an integer of 1 or more.
    form: 'preact' or 'postact', see above.
    num_classes: K; None or 0 for no head.
    head_bias_init: such as -10 for a sigmoid loss over many classes.
    dtype: of the computation, 'float32' or 'bfloat16'.
    remat: what to recompute of a unit in the backward pass, as in
      VisionTransformer.
    middle: class of modules with the fields of StdConv, which have the place of
      the 3x3 convolutions; AxialResNet has another.
  """

  stages: tuple[int, ...] = (3, 4, 6, 3)
  width_factor: int = 1
  form: str = 'preact'
  num_classes: int | None = None
  head_bias_init: float = 0.0
  dtype: Any = 'float32'
  remat: str = 'none'
  middle: Any = StdConv

  def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
    """Logits, or the pooled representation when there is no head.

    Args:
      images: [B, H, W, C], in [-1, 1].
      train: taken as by other models; nothing here depends on it.

    Returns:
      float32 [B, K]; without a head [B, F] in dtype.

    Raises:
      ValueError: a field makes no sense.
    """
    out = self.features(images, train=train, per_layer=False)
    return out['logits'] if self.num_classes else out['pre_logits']

  @nn.compact
  def features(
    self, images: jax.Array, *, train: bool = False, per_layer: bool = True
  ) -> dict[str, jax.Array]:
    """Everything on the way to the logits, by name.

    Returns:
      root, stage1, stage2, ...: [B, ., ., .], feature maps (if per_layer).
      pooled: [B, F], the mean of the last one, normalised first in 'preact'.
      pre_logits: the same.
      logits: float32 [B, K]. Not there without a head.
    """
    del train
    frame.check_choices(self, form=FORMS, remat=frame.REMAT)
    maps = Backbone(
      self.stages,
      self.width_factor,
      self.form,
      self.dtype,
      self.remat,
      self.middle,
      name='resnet',
    )(images)
    x = maps[f'stage{len(self.stages)}']
    if self.form == 'preact':
      x = nn.relu(group_norm(self.form, self.dtype, 'norm')(x))
    out = {'root': maps.pop('stage0')} | maps if per_layer else {}
    out['pooled'] = out['pre_logits'] = x = x.mean((1, 2))
    if self.num_classes:
      out['logits'] = frame.classify(x, self.num_classes, self.head_bias_init)
    return out
