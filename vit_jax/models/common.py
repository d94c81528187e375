"""Building blocks that the models share, and how each parameter is initialised.

Shapes as in vit.py: B examples, N tokens, D width, h heads of dimension
d = D / h, M hidden width of an MLP. Parameters are float32; `dtype` is the
dtype of matrix products. LayerNorm statistics, softmax and logits are always
float32.

The parts that a model is composed of (PatchEmbedding, Head, and those of
posemb.py and pooling.py) are frozen dataclasses. They get the module that
applies them as an argument and create their parameters in it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from vit_jax.config import domains
from vit_jax.config.domains import OneOf, Range, Rate
from vit_jax.models import products, resample
from vit_jax.models.attention import ATTENTION, Projection
from vit_jax.models.mesh import keep_batch_split, platform
from vit_jax.types import Shape, Size

# Initialisation of all models. Biases start at zero and norms as the identity
# unless listed. The paper leaves this open; these are the distributions of its
# released code. Fans are those of the matrix that is multiplied: an attention
# kernel [D, h, d] counts as [D, D], the patch embedding [ph, pw, C, D] as
# [ph * pw * C, D]. So does the fan-in of a convolution.
INIT = {
  'embedding': nn.initializers.lecun_normal(),  # E of equation 1
  'cls': nn.initializers.zeros,  # x_class of equation 1
  'dist': nn.initializers.zeros,  # DeiT's distillation token, as 'cls'
  'registers': nn.initializers.normal(0.02),
  'mask': nn.initializers.normal(0.02),  # appendix B.1.2; BERT's std
  # Position embeddings: normal, with the init_std of posemb.py.
  'attention': nn.initializers.xavier_uniform(),  # U_qkv, U_msa, appendix A
  'mlp': nn.initializers.xavier_uniform(),  # both layers of equation 3
  'mlp_bias': nn.initializers.normal(1e-6),
  'mixing': nn.initializers.lecun_normal(),  # both layers of a Mixer's MLPs
  'mixing_bias': nn.initializers.zeros,
  'conv': nn.initializers.lecun_normal(),  # ResNets and hybrids
  'last_norm': nn.initializers.zeros,  # scale of norm3 in the hybrids' units
  'probe': nn.initializers.xavier_uniform(),  # the query of MAP pooling
  'pre_logits': nn.initializers.lecun_normal(),  # tanh layer, section 3.1
  'head': nn.initializers.zeros,  # section 3.2; Head sets its bias
}


def initializer(name: str, std: float | None = None) -> Callable[..., Any]:
  """Return INIT[name], or, with `std`, a normal distribution around 0."""
  return INIT[name] if std is None else nn.initializers.normal(std)


GELU = {
  'tanh': functools.partial(nn.gelu, approximate=True),
  'exact': functools.partial(nn.gelu, approximate=False),
}

_saveable = jax.checkpoint_policies
_POLICIES = {
  'dots': _saveable.save_from_both_policies(
    _saveable.dots_with_no_batch_dims_saveable,
    _saveable.save_only_these_names(ATTENTION),
  ),
  'full': _saveable.nothing_saveable,
}
# The other functions of jax.checkpoint_policies return a policy.
REMAT = (
  'none',
  *_POLICIES,
  *(n for n in dir(jax.checkpoint_policies) if n.endswith('saveable')),
)

# Bounds far beyond what has been trained: above them, tracing and compiling
# take hours, or the shapes overflow.
Width = Annotated[int, Range(1, 2**16)]
Hidden = Annotated[int, Range(1, 2**18)]  # width inside an MLP
Depth = Annotated[int, Range(1, 1000)]
Heads = Annotated[int, Range(1, 2**16)]
NumClasses = Annotated[int, Range(0, 2**24)]
# Whether to loop over stacked layers, or the number of layers per iteration.
Scan = bool | Depth
Remat = Annotated[str, OneOf(*REMAT)]
Gelu = Annotated[str, OneOf(*GELU)]
Epsilon = Annotated[float, Range(0, 1, above=True)]  # of a norm
Std = Annotated[float, Range(0, 100)]  # of initial values
# Rate in the last layer, which grows linearly from 0 in the first layer; or
# the rates in the first and in the last layer.
StochasticDepth = Rate | tuple[Rate, Rate]


def remat(
  module: type[nn.Module], name: str, **options: Any
) -> type[nn.Module]:
  """Return a module class with the rematerialisation of that name in REMAT."""
  if name == 'none':
    return module
  policy = _POLICIES.get(name) or getattr(jax.checkpoint_policies, name)
  return nn.remat(module, policy=policy, **options)


class Classifier(nn.Module):
  """Base class of the models, which define `features` and `num_classes`.

  Raises:
    ValueError: a field that does not fit its annotation, or a `scan` that does
      not divide `depth`.
  """

  def __post_init__(self) -> None:
    domains.check_fields(self)
    if scan := getattr(self, 'scan', False):
      _check_scan(scan, self.depth)
    super().__post_init__()

  def __call__(
    self, images: jax.Array, *, train: bool = False, **options: Any
  ) -> jax.Array:
    """Compute logits, or the pooled representation if there is no head.

    Args:
      images: float [B, H, W, C], normalised as in training, such as [-1, 1].
      train: whether dropout and stochastic depth act; they need an rng
        'dropout'.
      **options: other arguments of features().

    Returns:
      float32 [B, K], or [B, gh * gw, K] with NoPooling. Without a head, the
      'pre_logits' of features(), in dtype.

    Raises:
      ValueError: images are not a batch, not floats, or of another size or
        number of channels than the parameters expect.
    """
    out = self.features(images, train=train, per_layer=False, **options)
    return out['logits'] if self.num_classes else out['pre_logits']


def _check_scan(scan, depth):
  if depth % scan:
    divisors = [str(k) for k in range(1, depth + 1) if depth % k == 0]
    raise ValueError(
      f'scan={scan} does not divide depth={depth}. Use True, False or the '
      f'number of layers of a group: {", ".join(divisors)}.'
    )


def check_images(module: nn.Module, images: Any) -> None:
  """Raise ValueError unless `images` is a batch for the module's parameters.

  Only shapes and dtypes are checked, so nothing is computed.

  Args:
    module: a model whose parameters have one of resample.PIXEL_KERNELS.
    images: float [B, H, W, C].
  """
  shape, dtype = jnp.shape(images), jnp.result_type(images)
  if len(shape) != 4:
    single = ' For a single image, use images[None].' if len(shape) == 3 else ''
    raise ValueError(
      f'images have the shape {shape}. Expected a batch [B, H, W, C] of 4 '
      f'dimensions.{single}'
    )
  if not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(
      f'images are {dtype}. Expected floats, normalised as in training. For '
      'images in 0..255 use the `preprocess` of the weights '
      '(vit_jax.weights.formats.read(PATH).preprocess), or '
      'vit_jax.preprocess.Normalize(), which maps them to [-1, 1].'
    )
  params = module.variables.get('params', {})
  stem = 'resnet/root/conv' if 'resnet' in params else 'embedding'
  layer = functools.reduce(
    lambda x, key: x.get(key, {}), stem.split('/'), params
  )
  if 'kernel' not in layer:
    return  # being initialised
  channels = layer['kernel'].shape[2]
  if shape[3] != channels:
    order = ''
    if shape[1] == channels:
      order = ' For images [B, C, H, W], use images.transpose(0, 2, 3, 1).'
    raise ValueError(
      f'images have the shape {shape}, with {shape[3]} channels. The parameter '
      f'{stem}/kernel expects [B, H, W, {channels}].{order}'
    )


@domains.checked
@dataclasses.dataclass(frozen=True)
class BlockOptions:
  """Options of an encoder layer that the paper does not vary.

  Attributes:
    attention_dropout: dropout rate of the attention weights.
    layerscale_init: initial scale of each residual branch; None: no LayerScale.
    qk_norm: whether queries and keys are normalised per head (LayerNorm).
    gelu: 'tanh' (the paper's code) or 'exact' (PyTorch models).
    norm_eps: epsilon of every LayerNorm; 1e-6 in the paper's code.
    init_std: standard deviation of the initial kernels of attention and MLP;
      DeiT has 0.02. None: as in INIT.
  """

  attention_dropout: Rate = 0.0
  layerscale_init: Annotated[float, Range(-100, 100)] | None = None
  qk_norm: bool = False
  gelu: Gelu = 'tanh'
  norm_eps: Epsilon = 1e-6
  init_std: Std | None = None


class Affine(nn.Module):
  """x W + b over the last dimensions: [..., *inputs] -> [..., *outputs].

  The kernel is stored as [*inputs, *outputs], but initialised and multiplied as
  the matrix [prod(inputs), prod(outputs)].
  """

  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  kernel_init: Callable[..., Any]
  bias_init: Callable[..., Any] = nn.initializers.zeros
  dtype: Any = 'float32'

  @nn.compact
  def __call__(self, x: jax.Array, *, parts: bool = False) -> Any:
    """Return x W + b; with `parts`, a Projection."""
    matrix = math.prod(self.inputs), math.prod(self.outputs)
    kernel = self.param(
      'kernel',
      lambda rng: self.kernel_init(rng, matrix).reshape(
        *self.inputs, *self.outputs
      ),
    )
    bias = self.param('bias', self.bias_init, self.outputs)
    batch = x.shape[: x.ndim - len(self.inputs)]
    # CPUs get one large product: with batch and tokens apart, a training step
    # of a small ViT takes 1.2 times as long. TPUs get the tokens of each
    # example apart: as rows of one matrix they lie elsewhere in memory, unless
    # their number is a multiple of 8, so that activations would be copied.
    rows = batch if platform() == 'tpu' else (-1,)
    x = jnp.asarray(x, self.dtype).reshape(*rows, matrix[0])
    x = products.matmul(x, kernel.reshape(matrix))
    # The bias is added in float32, so that its gradient is summed in float32:
    # TPUs without bfloat16 arithmetic take several times as long otherwise.
    row = bias.reshape((1,) * (x.ndim - 1) + (-1,))
    y = (x.astype(jnp.float32) + row).astype(self.dtype)
    x, y = (z.reshape(*batch, *self.outputs) for z in (x, y))
    return Projection(y, x, bias) if parts else y


class AffinePerToken(Affine):
  """x W + b with other W and b for each of two tokens: [B, 2, D] -> [B, 2, K].

  The parameters are those of Affine, below 'cls' and 'dist'.
  """

  @nn.compact
  def __call__(self, x: jax.Array, *, parts: bool = False) -> jax.Array:
    assert not parts, 'there is no product common to both tokens'
    affine = functools.partial(
      Affine,
      self.inputs,
      self.outputs,
      self.kernel_init,
      self.bias_init,
      self.dtype,
    )
    tokens = affine(name='cls')(x[:, 0]), affine(name='dist')(x[:, 1])
    return jnp.stack(tokens, axis=1)


class LayerNorm(nn.LayerNorm):
  """Flax's LayerNorm with the epsilon of the paper's code."""

  epsilon: float = 1e-6


def drop_path(module: nn.Module, y: jax.Array, rate: Any) -> jax.Array:
  """Drop the output of a residual branch for some examples (AugReg).

  Args:
    module: whose rng 'dropout' is used.
    y: [B, N, D], output of the branch.
    rate: None, or the fraction of examples whose branch is dropped; the branch
      of the others is scaled up.
  """
  if rate is None:
    return y
  keep, rng = 1 - rate, module.make_rng('dropout')
  kept = jax.random.bernoulli(rng, keep, (y.shape[0], 1, 1))
  return jnp.where(kept, y / jnp.asarray(keep, y.dtype), 0)


def run_layers(
  layer: type[nn.Module],
  x: jax.Array,
  *,
  depth: int,
  stochastic_depth: float | tuple[float, float],
  scan: bool | int,
  remat_policy: str,
  per_layer: bool,
  shared: jax.Array | None = None,
  **fields: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Apply layers 'block_0', 'block_1', ...; or loop over 'blocks', stacked.

  Groups of layers have the parameters and the random numbers of single ones;
  if all layers are one group there is no loop. A loop writes what the backward
  pass needs to memory once more, so a policy that saves little is faster.

  Args:
    layer: class of modules, called as layer(x, rate or None, shared) -> x.
    x: [B, N, D].
    depth, stochastic_depth, scan: as in VisionTransformer.
    remat_policy: a name in REMAT.
    per_layer: whether to return the output of each layer.
    shared: argument of all layers.
    **fields: of the layers.

  Returns:
    [B, N, D], and {'block_i': [B, N, D]}, which is empty if not per_layer.
  """
  rates = None
  if stochastic_depth:
    rates = jnp.linspace(*depth_rates(stochastic_depth), depth)
  group = int(scan)  # layers that an iteration computes; 0: there is no loop
  # Inside a loop nothing can be merged with the forward pass anyway.
  in_loop = 0 < group < depth
  layer = remat(layer, remat_policy, prevent_cse=not in_loop)

  def apply(block, x, rate, shared):
    x = block(x, rate, shared)
    return x, x if per_layer else None

  if group:
    loop = nn.scan(
      apply,
      variable_axes={'params': 0, 'intermediates': 0},
      split_rngs={'params': True, 'dropout': True},
      in_axes=(0, nn.broadcast),
      length=depth,
      unroll=group,
    )
    x, outputs = loop(layer(name='blocks', **fields), x, rates, shared)
  else:
    outputs = []
    for i in range(depth):
      block = layer(name=f'block_{i}', **fields)
      x, output = apply(block, x, None if rates is None else rates[i], shared)
      outputs.append(output)
  x = keep_batch_split(x)
  found = {f'block_{i}': outputs[i] for i in range(depth)} if per_layer else {}
  return x, found


def depth_rates(rate: float | tuple[float, float]) -> tuple[float, float]:
  """Return the rates of StochasticDepth in the first and the last layer."""
  first, last = (0.0, rate) if isinstance(rate, int | float) else rate
  return first, last


def as_pair(size: Size) -> tuple[int, int]:
  """Return (height, width) of a size that is one number or two."""
  height, width = (size, size) if isinstance(size, int) else size
  return height, width


@domains.checked
@dataclasses.dataclass(frozen=True)
class PatchEmbedding:
  """Linear embedding of image patches (E of equation 1).

  Attributes:
    patch_size: side of a patch in pixels, or (height, width).
    stride: pixels from one patch to the next, one number or two; patches
      overlap if it is smaller than patch_size. None: patch_size.
    mask_token: whether there is a learned vector that can replace patches, see
      objectives/masked_patches.py.
    init_std: standard deviation of the initial kernel; None: as in INIT.
  """

  patch_size: domains.Size
  stride: domains.Size | None = None
  mask_token: bool = False
  init_std: Std | None = None

  def __post_init__(self) -> None:
    size, stride = as_pair(self.patch_size), self.stride
    object.__setattr__(self, 'patch_size', size)
    if stride is not None:
      object.__setattr__(self, 'stride', as_pair(stride))
    if not all(0 < s <= p for s, p in zip(self.step, size)):
      raise ValueError(
        f'stride={stride} with patch_size={size} must be at least 1 and at '
        'most patch_size. Use None for patches that do not overlap.'
      )

  @property
  def step(self) -> tuple[int, int]:
    """Cells from one patch to the next, (rows, columns)."""
    return as_pair(self.stride or self.patch_size)

  @property
  def reduction(self) -> int:
    """Pixels per side of a cell of what is cut into patches."""
    return 1

  @property
  def pixels_per_token(self) -> tuple[int, int]:
    """Pixels from one patch to the next, (rows, columns)."""
    rows, columns = self.step
    return rows * self.reduction, columns * self.reduction

  def grid(self, image_shape: Sequence[int]) -> tuple[int, int]:
    """Return (gh, gw), the grid of patches of an image [H, W, ...]."""
    sides = zip(image_shape, as_pair(self.patch_size), self.step)
    gh, gw = ((n // self.reduction - p) // s + 1 for n, p, s in sides)
    return gh, gw

  def image_size(self, grid: tuple[int, int]) -> tuple[int, int]:
    """Return (H, W) of the smallest image with that grid of patches."""
    sides = zip(grid, as_pair(self.patch_size), self.step)
    height, width = (((n - 1) * s + p) * self.reduction for n, p, s in sides)
    return height, width

  def __call__(
    self, module: nn.Module, images: jax.Array
  ) -> tuple[dict[str, jax.Array], tuple[int, int]]:
    """Embed the patches of images [B, H, W, C].

    Returns:
      ({'patches': [B, gh * gw, D]} and other features by name, (gh, gw)).
    """
    x = self.cut(images)
    batch, gh, gw = x.shape[:3]
    # A convolution whose stride is its kernel size is one matrix product.
    x = Affine(
      x.shape[3:],
      (module.width,),
      initializer('embedding', self.init_std),
      dtype=module.dtype,
      name='embedding',
    )(x)
    return {'patches': x.reshape(batch, -1, module.width)}, (gh, gw)

  def cut(self, images: jax.Array) -> jax.Array:
    """Cut images into patches: [B, H, W, C] -> [B, gh, gw, ph, pw, C]."""
    size, step = as_pair(self.patch_size), self.step
    batch, *sides, channels = images.shape
    if any(n < p or (n - p) % s for n, p, s in zip(sides, size, step)):
      rows, columns = (
        max(round((n - p) / s), 0) + 1 for n, p, s in zip(sides, size, step)
      )
      nearest = self.image_size((rows, columns))
      what = 'Images'
      if self.reduction > 1:
        what = f'Feature maps (images / {self.reduction})'
      every = '' if step == size else f' every {step[0]}x{step[1]}'
      raise ValueError(
        f'{what} of {sides[0]}x{sides[1]} (height x width) cannot be cut into '
        f'patches of {size[0]}x{size[1]}{every}; the nearest image size that '
        f'can is {nearest[0]}x{nearest[1]}. Resize or crop the images to it, '
        'or use another patch_size.'
      )
    if step == size:
      gh, gw = self.grid([n * self.reduction for n in sides])
      cells = images.reshape(batch, gh, size[0], gw, size[1], channels)
      return cells.swapaxes(2, 3)
    y, x = (
      np.arange(0, n - p + 1, s)[:, None] + np.arange(p)[None]
      for n, p, s in zip(sides, size, step)
    )
    return images[:, y][:, :, :, x].swapaxes(2, 3)

  def replace(
    self, module: nn.Module, patches: jax.Array, sources: jax.Array | None
  ) -> jax.Array:
    """Replace patches by other patches, or by the mask vector.

    Args:
      module: gets the parameter 'mask' [1, 1, D] if there is a mask token.
      patches: [B, n, D].
      sources: int32 [B, n], index of the patch that replaces each patch, or
        below 0 for the mask vector. None: nothing is replaced.

    """
    if self.mask_token:
      mask = module.param('mask', INIT['mask'], (1, 1, patches.shape[-1]))
    if sources is None:
      return patches
    if not self.mask_token:
      raise ValueError(
        'The model got patch_sources but has no mask vector. Set '
        'embedding.mask_token=True.'
      )
    if sources.shape != patches.shape[:2]:
      raise ValueError(
        f'patch_sources has shape {sources.shape}; expected one source for '
        f'each patch, {patches.shape[:2]}.'
      )
    sources = sources[..., None]
    moved = jnp.take_along_axis(patches, jnp.maximum(sources, 0), axis=1)
    return jnp.where(sources < 0, mask.astype(patches.dtype), moved)

  def resize(
    self,
    path: str,
    kernel: np.ndarray,
    shape: Shape,
    *,
    method: str | None = None,
    adapt_channels: bool = False,
  ) -> np.ndarray | None:
    """Return a kernel in another shape, see `resample.resize_pixels`."""
    if path not in resample.PIXEL_KERNELS:
      return None
    return resample.resize_pixels(kernel, shape, method, adapt_channels)


@domains.checked
@dataclasses.dataclass(frozen=True)
class Head:
  """Classification head: an optional tanh layer, and a linear layer.

  Attributes:
    representation_size: width of the tanh layer that the paper pre-trains with
      (section 3.1); None: no such layer.
    bias_init: initial bias of the logits, such as -10 for a sigmoid loss over
      many classes.
    init_std: standard deviation of the initial kernels; None: as in INIT.
  """

  representation_size: Annotated[int, Range(0, 2**16)] | None = None
  bias_init: Annotated[float, Range(-1e4, 1e4)] = 0.0
  init_std: Std | None = None

  def __call__(
    self, module: nn.Module, x: jax.Array, *, layer: type[Affine] = Affine
  ) -> dict[str, jax.Array]:
    """Compute the logits of pooled features [..., D].

    Args:
      module: the model, which gets the parameters.
      x: pooled features.
      layer: class of the layers.

    Returns:
      {'pooled': x, 'pre_logits': output of the tanh layer or x,
      'logits': float32 [..., K] unless module.num_classes is None or 0}.
    """
    out = {'pooled': x}
    if self.representation_size:
      outputs = (self.representation_size,)
      init = initializer('pre_logits', self.init_std)
      affine = layer(
        x.shape[-1:], outputs, init, dtype=module.dtype, name='pre_logits'
      )
      x = jnp.tanh(affine(x))
    out['pre_logits'] = x
    if module.num_classes:
      out['logits'] = layer(
        x.shape[-1:],
        (module.num_classes,),
        initializer('head', self.init_std),
        nn.initializers.constant(self.bias_init),
        name='head',
      )(x)
    return out
