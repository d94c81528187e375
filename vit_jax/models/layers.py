"""Layers that the models share, and how each parameter is initialised.

Shapes as in vit.py: B examples, N tokens, D width, M hidden width of an MLP.
Parameters are float32; `dtype` is the dtype of matrix products. LayerNorm
statistics, softmax and logits are always float32.

The parts that a model is composed of (PatchEmbedding, Head, and those of
posemb.py and pooling.py) are frozen dataclasses. They get the module that
applies them as an argument and create their parameters in it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import PartitionSpec

from vit_jax.types import (
  Array,
  Natural,
  NonNegative,
  Positive,
  Rate,
  Size,
  UserError,
)

# Initialisation of all models. Biases start at zero and norms as the identity
# unless listed. The paper leaves this open; these are the distributions of its
# released code. Fans are those of the matrix that is multiplied: an attention
# kernel [D, h, d] counts as [D, D], the patch embedding [ph, pw, C, D] as
# [ph * pw * C, D], and so does the fan-in of a convolution.
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
# Rate in the last layer, which grows linearly from 0 in the first layer; or
# the rates in the first and in the last layer.
StochasticDepth = Rate | tuple[Rate, Rate]


def as_pair(size: Size) -> tuple[int, int]:
  """Return (height, width) of a size that is one number or two."""
  height, width = (size, size) if isinstance(size, int) else size
  return height, width


def platform() -> str:
  """Return 'cpu', 'gpu' or 'tpu', the platform of the program being traced.

  It is that of the mesh, whose devices may be those of another machine; without
  a mesh, of the default device.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.platform if device else jax.default_backend()


def batch_axes(
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
) -> tuple[str, ...]:
  """Return the names of the axes of a mesh that the batch is sharded over."""
  return tuple(a for a in mesh.axis_names if not is_model_axis(a))


def is_model_axis(name: str) -> bool:
  """Return whether devices along this axis work on the same examples."""
  return name.startswith('model')


def keep_batch_split(x: jax.Array) -> jax.Array:
  """Return x, [B, ...], constrained to stay sharded over the batch.

  Along 'fsdp' axes both parameters and batch are sharded, and the compiler may
  choose to gather the whole batch instead of the parameters of one layer. On
  other meshes it has no such choice, and there is no constraint, because each
  one costs a copy: 8% of B/16's step in the TPU compiler's estimate. There is
  none either if the axes do not divide B.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not any(a.startswith('fsdp') and n > 1 for a, n in mesh.shape.items()):
    return x
  axes = batch_axes(mesh)
  if x.shape[0] % math.prod(mesh.shape[a] for a in axes):
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(axes))


class Dense(nn.Module):
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
  def __call__(self, x: jax.Array) -> jax.Array:
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
    y = matmul(x, kernel.reshape(matrix))
    # The bias is added in float32, so that its gradient is summed in float32:
    # TPUs without bfloat16 arithmetic take several times as long otherwise.
    row = bias.reshape((1,) * (y.ndim - 1) + (-1,))
    y = (y.astype(jnp.float32) + row).astype(self.dtype)
    return y.reshape(*batch, *self.outputs)


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Return x [..., i] @ kernel [i, o], [..., o] in the dtype of x.

  A float32 kernel is rounded to the dtype of x. Its gradient is the float32 sum
  that matrix units make of bfloat16 factors, so gradients are not rounded
  before they are summed over devices and micro-batches.
  """
  return x @ kernel if x.dtype == kernel.dtype else _mixed_matmul(x, kernel)


@jax.custom_vjp
def _mixed_matmul(x, kernel):
  return x @ _rounded(kernel, x.dtype)


def _mixed_matmul_forward(x, kernel):
  # Not _mixed_matmul, in which remat policies would find no product.
  return x @ _rounded(kernel, x.dtype), (x, kernel)


def _mixed_matmul_backward(saved, gradient):
  x, kernel = saved
  rows, last = tuple(range(x.ndim - 1)), (x.ndim - 1,)
  of_x = jax.lax.dot_general(
    gradient, _rounded(kernel, x.dtype), ((last, (1,)), ((), ()))
  )
  of_kernel = jax.lax.dot_general(
    x,
    gradient,
    ((rows, rows), ((), ())),
    preferred_element_type=kernel.dtype,
  )
  return of_x, of_kernel


_mixed_matmul.defvjp(_mixed_matmul_forward, _mixed_matmul_backward)


def _rounded(kernel, dtype):
  """Return the kernel in a dtype; TPUs round it before products.

  Their compiler would do so within each product, which then reads float32, and
  reads it again for each tile of the result.
  """
  rounded = kernel.astype(dtype)
  if platform() == 'tpu':
    rounded = jax.lax.optimization_barrier(rounded)
  return rounded


class LayerNorm(nn.LayerNorm):
  """Flax's LayerNorm with the epsilon of the paper's code."""

  epsilon: float = 1e-6


class Mlp(nn.Module):
  """Two layers with a GELU between them: [..., D] -> [..., D].

  `kernel_init` is the key of the kernels' initialiser in INIT; `init_std` as in
  BlockOptions.
  """

  mlp_dim: int
  dropout: float = 0.0
  gelu: str = 'tanh'
  dtype: Any = 'float32'
  train: bool = False
  kernel_init: str = 'mlp'
  init_std: float | None = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    width, hidden = (x.shape[-1],), (self.mlp_dim,)
    dense = functools.partial(
      Dense,
      kernel_init=initializer(self.kernel_init, self.init_std),
      bias_init=INIT[f'{self.kernel_init}_bias'],
      dtype=self.dtype,
    )
    dropout = nn.Dropout(self.dropout, deterministic=not self.train)
    x = dense(width, hidden, name='fc1')(x)
    x = dropout(GELU[self.gelu](x))
    return dropout(dense(hidden, width, name='fc2')(x))


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
  layerscale_init: float | None = None
  qk_norm: bool = False
  gelu: Literal['tanh', 'exact'] = 'tanh'
  norm_eps: Positive = 1e-6
  init_std: NonNegative | None = None


def drop_path(
  module: nn.Module, y: jax.Array, rate: jax.Array | None
) -> jax.Array:
  """Drop the output of a residual branch for some examples (AugReg).

  Args:
    module: module with the rng 'dropout'.
    y: [B, N, D], output of the branch.
    rate: fraction of examples whose branch is dropped; the branch of the others
      is scaled up. None: 0.
  """
  if rate is None:
    return y
  keep, rng = 1 - rate, module.make_rng('dropout')
  kept = jax.random.bernoulli(rng, keep, (y.shape[0], 1, 1))
  return jnp.where(kept, y / jnp.asarray(keep, y.dtype), 0)


ATTENTION = 'attention'  # name of the results of attention, for remat policies
_POLICIES = {
  'dots': jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(ATTENTION),
  ),
  'full': jax.checkpoint_policies.nothing_saveable,
}
Remat = Literal['none', 'dots', 'full']


def remat(
  module: type[nn.Module], name: str, **options: Any
) -> type[nn.Module]:
  """Return a module class with a rematerialisation, see VisionTransformer."""
  if name == 'none':
    return module
  return nn.remat(module, policy=_POLICIES[name], **options)


def run_layers(
  layer: type[nn.Module],
  x: jax.Array,
  *,
  depth: int,
  stochastic_depth: StochasticDepth,
  scan: bool,
  remat_policy: str,
  per_layer: bool,
  shared: jax.Array | None = None,
  **fields: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Apply layers 'block_0', 'block_1', ...; or loop over 'blocks', stacked.

  A loop writes what the backward pass needs to memory once more, so a policy
  that saves little is faster.

  Args:
    layer: class of modules, called as layer(x, rate or None, shared) -> x.
    x: [B, N, D].
    depth, stochastic_depth, scan, remat_policy: as in VisionTransformer.
    per_layer: whether to return the output of each layer.
    shared: argument of all layers.
    **fields: fields of the layers.

  Returns:
    [B, N, D], and {'block_i': [B, N, D]}, which is empty if not per_layer.
  """
  rates = None
  if stochastic_depth:
    ends = stochastic_depth
    first, last = (0.0, ends) if isinstance(ends, int | float) else ends
    rates = jnp.linspace(first, last, depth)
  # Inside a loop nothing can be merged with the forward pass anyway.
  layer = remat(layer, remat_policy, prevent_cse=not scan)

  def apply(block, x, rate, shared):
    x = block(x, rate, shared)
    return x, x if per_layer else None

  if scan:
    loop = nn.scan(
      apply,
      variable_axes={'params': 0, 'intermediates': 0},
      split_rngs={'params': True, 'dropout': True},
      in_axes=(0, nn.broadcast),
      length=depth,
    )
    x, outputs = loop(layer(name='blocks', **fields), x, rates, shared)
  else:
    outputs = []
    for i in range(depth):
      block = layer(name=f'block_{i}', **fields)
      x, output = apply(block, x, None if rates is None else rates[i], shared)
      outputs.append(output)
  x = keep_batch_split(x)
  return x, {f'block_{i}': outputs[i] for i in range(depth * per_layer)}


@dataclasses.dataclass(frozen=True)
class Normalize:
  """(x - mean) / std of uint8 images [..., H, W, C], which become float32.

  Attributes:
    mean, std: in units of 0..255; a number, or one per channel. The default
      maps to [-1, 1], as in the paper's released code.
  """

  mean: float | tuple[float, ...] = 127.5
  std: Positive | tuple[Positive, ...] = 127.5

  def __call__(self, images: Array) -> jax.Array:
    mean = jnp.asarray(self.mean, jnp.float32)
    std = jnp.asarray(self.std, jnp.float32)
    shape = (1,) * (images.ndim - 1) + (-1,)
    scaled = jnp.asarray(images, jnp.float32) - mean.reshape(shape)
    return scaled / std.reshape(shape)


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

  patch_size: Size
  stride: Size | None = None
  mask_token: bool = False
  init_std: NonNegative | None = None

  def __post_init__(self) -> None:
    size, stride = as_pair(self.patch_size), self.stride
    object.__setattr__(self, 'patch_size', size)
    if stride is not None:
      object.__setattr__(self, 'stride', as_pair(stride))
    if not all(0 < s <= p for s, p in zip(self.step, size)):
      raise UserError(
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
    x = Dense(
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
      raise UserError(
        f'Images, or feature maps, of {sides[0]}x{sides[1]} (height x width) '
        f'cannot be cut into patches of {size[0]}x{size[1]} every '
        f'{step[0]}x{step[1]}. Resize or crop the images, or use another '
        'patch_size.'
      )
    if step == size:
      gh, gw = (n // p for n, p in zip(sides, size))
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
      sources: see VisionTransformer.features.
    """
    if self.mask_token:
      mask = module.param('mask', INIT['mask'], (1, 1, patches.shape[-1]))
    if sources is None:
      return patches
    if not self.mask_token:
      raise UserError(
        'The model got patch_sources but has no mask vector. Set '
        'embedding.mask_token=True.'
      )
    sources = sources[..., None]
    moved = jnp.take_along_axis(patches, jnp.maximum(sources, 0), axis=1)
    return jnp.where(sources < 0, mask.astype(patches.dtype), moved)


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

  representation_size: Natural | None = None
  bias_init: float = 0.0
  init_std: NonNegative | None = None

  def __call__(
    self, module: nn.Module, x: jax.Array, *, layer: type[Dense] = Dense
  ) -> dict[str, jax.Array]:
    """Compute the logits of pooled features x [..., D].

    Args:
      module: model that gets the parameters.
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
      dense = layer(
        x.shape[-1:], outputs, init, dtype=module.dtype, name='pre_logits'
      )
      x = jnp.tanh(dense(x))
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


class Classifier(nn.Module):
  """Base class of the models, which define `features` and `num_classes`."""

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
    """
    out = self.features(images, train=train, per_layer=False, **options)
    return out['logits'] if self.num_classes else out['pre_logits']


def check_images(images: Any) -> None:
  """Raise ValueError unless `images` is a batch of floats [B, H, W, C]."""
  shape, dtype = jnp.shape(images), jnp.result_type(images)
  if len(shape) != 4:
    raise UserError(
      f'images have the shape {shape}. Expected a batch [B, H, W, C]. For a '
      'single image, use images[None].'
    )
  if not jnp.issubdtype(dtype, jnp.floating):
    raise UserError(
      f'images are {dtype}. Expected floats, normalised as in training. Use '
      'the `preprocess` of the weights, or vit_jax.models.layers.Normalize().'
    )
