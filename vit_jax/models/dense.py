"""Linear layers, MLPs, initial values, hints for compilers; Normalize.

Parameters are float32; `dtype` is the dtype of matrix products. LayerNorm
statistics, softmax and logits are always float32.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.experimental import layout as memory_layout
from jax.sharding import PartitionSpec

from vit_jax.meshes import batch_axes
from vit_jax.types import Array, NonNegative, OfSource, Positive, Rate

# Initialisation of all models. Biases start at zero and norms as the identity
# unless listed. The paper leaves this open; these are the distributions of its
# released code. Fan-in and fan-out refer to the flattened kernel.
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


def platform() -> str:
  """Return 'cpu', 'gpu' or 'tpu', for which a program is traced."""
  # The devices of the mesh may be those of another machine.
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.platform if device else jax.default_backend()


def keep_batch_split(x: jax.Array) -> jax.Array:
  """Return x, [B, ...], constrained to stay sharded over the batch.

  Along 'fsdp' axes both parameters and batch are sharded, and the compiler may
  choose to gather the batch instead of the parameters of one layer. Elsewhere a
  constraint would only cost a copy: 8% of B/16's step on TPUs (estimated).
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not any(a.startswith('fsdp') and n > 1 for a, n in mesh.shape.items()):
    return x
  axes = batch_axes(mesh)
  if x.shape[0] % math.prod(mesh.shape[a] for a in axes):
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(axes))


def keep_rows(x: jax.Array) -> jax.Array:
  """Return x, [B, N, D], laid out row by row in the memory of a GPU.

  The compiler would choose [N, D, B] for the tokens of all layers: each norm
  would transpose them and write float32. B/16's train step would take 1.15
  times as long on an H100, by the compiler's program.
  """
  if platform() != 'gpu':
    return x
  mesh = jax.sharding.get_abstract_mesh()
  axes = batch_axes(mesh)
  if x.shape[0] % math.prod(mesh.shape[a] for a in axes):
    return x

  def keep(x):
    rows = memory_layout.Layout((0, 1, 2))
    return memory_layout.with_layout_constraint(x, rows)

  if axes:  # outside of shard_map, it gathers the examples of all devices
    spec = PartitionSpec(axes)
    keep = jax.shard_map(keep, in_specs=spec, out_specs=spec)
  return keep(x)


def recomputed(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """Return fn, which GPUs compute again in the backward pass.

  Elementwise functions take them less time than reading what would be kept:
  10% of B/16's train step on an H100, by the compiler's program.
  """
  return jax.checkpoint(fn) if platform() == 'gpu' else fn


@dataclasses.dataclass(frozen=True)
class Normalize:
  """(x - mean) / std of uint8 images [..., H, W, C], which become float32.

  Attributes:
    mean, std: in units of 0..255; a number, or one per channel. The default
      maps to [-1, 1], as in the paper's released code.
  """

  mean: float | tuple[float, ...] = 127.5
  std: Positive | tuple[Positive, ...] = 127.5

  of_levels: ClassVar = True  # from 0 to 255

  def __call__(self, images: Array) -> jax.Array:
    shape = (1,) * (images.ndim - 1) + (-1,)
    mean, std = (jnp.float32(x).reshape(shape) for x in (self.mean, self.std))
    return (jnp.float32(images) - mean) / std


@dataclasses.dataclass(frozen=True)
class Standardize:
  """(x - mean) / std of rasters [..., H, W, C]; NaN, missing, becomes 0.

  Attributes:
    moments: (mean, std) of each channel, in the values of the files.
  """

  moments: tuple[tuple[float, Positive], ...] | OfSource

  mean = property(lambda self: tuple(x for x, _ in self.moments))
  std = property(lambda self: tuple(x for _, x in self.moments))

  def __call__(self, images: Array) -> jax.Array:
    found = Normalize(self.mean, self.std)(images)
    return jnp.where(jnp.isnan(found), 0, found)


class Dense(nn.Module):
  """x W + b over the last dimensions: [..., *inputs] -> [..., *outputs].

  The kernel [*inputs, *outputs] is initialised and multiplied as a matrix.
  """

  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  kernel_init: Callable[..., Any]
  bias_init: Callable[..., Any] = nn.initializers.zeros
  dtype: Any = 'float32'
  bias: bool = True

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    matrix = math.prod(self.inputs), math.prod(self.outputs)
    shape = *self.inputs, *self.outputs
    kernel = self.param(
      'kernel', lambda rng: self.kernel_init(rng, matrix).reshape(shape)
    )
    if self.bias:
      bias = self.param('bias', self.bias_init, self.outputs)
    batch = x.shape[: x.ndim - len(self.inputs)]
    # CPUs get one large product: otherwise, a training step of a small ViT
    # takes 1.2 times as long. TPUs get the tokens of each example apart: as
    # rows of one matrix they would lie elsewhere in memory, and be copied.
    rows = batch if platform() == 'tpu' else (-1,)
    x = jnp.asarray(x, self.dtype).reshape(*rows, matrix[0])
    y = matmul(x, kernel.reshape(matrix))
    # The bias is added in float32, so that its gradient is summed in float32:
    # TPUs without bfloat16 arithmetic take several times as long otherwise. For
    # GPUs it is rounded after it is broadcast, and added within the product.
    if self.bias:
      row = bias.reshape((1,) * (y.ndim - 1) + (-1,))
      if platform() == 'gpu':
        y = y + jnp.broadcast_to(row, y.shape).astype(self.dtype)
      else:
        y = (y.astype(jnp.float32) + row).astype(self.dtype)
    return y.reshape(*batch, *self.outputs)


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Return x [..., i] @ kernel [i, o], [..., o] in the dtype of x.

  A float32 kernel is rounded to the dtype of x. Its gradient is a float32 sum,
  which is not rounded before it is summed over devices and micro-batches.
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
  kernel_ = _rounded(kernel, x.dtype)
  of_x = jax.lax.dot_general(gradient, kernel_, ((last, (1,)), ((), ())))
  of_kernel = jax.lax.dot_general(
    x, gradient, ((rows, rows), ((), ())), preferred_element_type=kernel.dtype
  )
  return of_x, of_kernel


_mixed_matmul.defvjp(_mixed_matmul_forward, _mixed_matmul_backward)


def _rounded(kernel, dtype):
  """Return the kernel in a dtype.

  TPUs round it before products. Their compiler would do so within each product,
  which then reads float32 for each tile of the result.
  """
  rounded = kernel.astype(dtype)
  is_tpu = platform() == 'tpu'
  return jax.lax.optimization_barrier(rounded) if is_tpu else rounded


GELU: dict[str, Callable[..., jax.Array]] = {
  'tanh': functools.partial(nn.gelu, approximate=True),
  'exact': functools.partial(nn.gelu, approximate=False),
  'quick': lambda x: x * nn.sigmoid(1.702 * x),
}


@dataclasses.dataclass(frozen=True)
class Gelu:
  """A linear layer and a GELU: the first half of an MLP.

  Attributes:
    form: 'tanh' (the paper's code), 'exact' (PyTorch) or 'quick' (CLIP).
  """

  form: Literal['tanh', 'exact', 'quick'] = 'tanh'

  def __call__(self, dense: Callable[..., Any], x: jax.Array) -> jax.Array:
    """Return hidden activations [..., M]; dense(name=...) makes the layers."""
    return recomputed(GELU[self.form])(dense(name='fc1')(x))


@dataclasses.dataclass(frozen=True)
class SwiGlu:
  """SiLU(x W_gate) * (x W_fc1): the first half of an MLP with three matrices.

  M is the width of each factor ("GLU Variants Improve Transformer").
  """

  def __call__(self, dense: Callable[..., Any], x: jax.Array) -> jax.Array:
    gated = recomputed(lambda gate, y: nn.silu(gate) * y)
    return gated(dense(name='gate')(x), dense(name='fc1')(x))


Projection = Literal['query', 'key', 'value', 'out', 'mlp']


@dataclasses.dataclass(frozen=True)
class BlockOptions:
  """Options of an encoder layer that the paper does not vary.

  Attributes:
    attention_dropout: dropout rate of the attention weights.
    layerscale_init: initial scale of each residual branch; None: no LayerScale.
    qk_norm: whether queries and keys are normalised per head.
    mlp: Gelu (the paper) or SwiGlu.
    sub_norm: what is normalised before its last linear layer: the output of
      attention ('attn'), the hidden activations ('mlp'), both, or nothing.
    norm: 'layer', LayerNorm, or 'rms', RMSNorm: the kind of every norm.
    norm_eps: epsilon of every norm; 1e-6 in the paper's code.
    post_norm: whether a residual branch ends, not starts, with its norm.
    biases: linear layers that have a bias; 'mlp' stands for all of the MLP.
    init_std: std of the initial kernels; 0.02 in DeiT. None: as in INIT.
    gate: whether the output of attention, before its last linear layer, is
      multiplied by sigmoid(x W), [B, Q, D], without a bias (timm's gated_attn).
  """

  attention_dropout: Rate = 0.0
  layerscale_init: float | None = None
  qk_norm: bool = False
  mlp: Gelu | SwiGlu = Gelu()
  sub_norm: tuple[Literal['attn', 'mlp'], ...] = ()
  norm: Literal['layer', 'rms'] = 'layer'
  norm_eps: Positive = 1e-6
  post_norm: bool = False
  biases: tuple[Projection, ...] = ('query', 'key', 'value', 'out', 'mlp')
  init_std: NonNegative | None = None
  gate: bool = False

  def make_norm(self, dtype: Any, name: str) -> nn.Module:
    """Return a norm of the module that calls this."""
    cls: Any = nn.LayerNorm if self.norm == 'layer' else nn.RMSNorm
    return cls(self.norm_eps, dtype=dtype, name=name)


class Mlp(nn.Module):
  """Two layers with a nonlinearity between them: [..., D] -> [..., D]."""

  mlp_dim: int
  options: BlockOptions = BlockOptions()
  dropout: float = 0.0
  dtype: Any = 'float32'
  train: bool = False
  kernel_init: str = 'mlp'  # key in INIT

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    width, hidden, options = (x.shape[-1],), (self.mlp_dim,), self.options
    dense = functools.partial(
      Dense,
      kernel_init=initializer(self.kernel_init, options.init_std),
      bias_init=INIT[f'{self.kernel_init}_bias'],
      dtype=self.dtype,
      bias='mlp' in options.biases,
    )
    dropout = nn.Dropout(self.dropout, deterministic=not self.train)
    x = dropout(options.mlp(functools.partial(dense, width, hidden), x))
    if 'mlp' in options.sub_norm:
      x = options.make_norm(self.dtype, 'norm')(x)
    return dropout(dense(hidden, width, name='fc2')(x))
