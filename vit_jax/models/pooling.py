"""The head, and poolings: one class each, which also defines extra tokens.

A subclass of Pooling, here or in your own package, overrides the methods it
needs; nothing else has to change. Shapes as in vit.py.
"""

import dataclasses
import functools
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array

from vit_jax.models.attention import Attention
from vit_jax.models.dense import INIT, BlockOptions, Dense, Mlp, initializer
from vit_jax.models.posemb import Grid, Layout, PositionEmbedding
from vit_jax.types import Count, Natural, NonNegative, OfSource, UserError

Features = dict[str, Array]  # by name


@dataclasses.dataclass(frozen=True)
class Head:
  """Classification head: an optional tanh layer, and a linear layer.

  Attributes:
    representation_size: width of the tanh layer (section 3.1), or None.
    bias_init: initial bias of the logits; -10 for sigmoids of many classes.
    init_std: standard deviation of the initial kernels; None: as in INIT.
    bias: whether the linear layer has a bias; CLIP's projection has none.
  """

  representation_size: Natural | None = None
  bias_init: float = 0.0
  init_std: NonNegative | None = None
  bias: bool = True

  fewer_outputs: ClassVar[int] = 0  # than num_classes

  def __call__(
    self, module: nn.Module, x: jax.Array, *, layer: type[Dense] = Dense
  ) -> Features:
    """Compute the logits of pooled features x [..., D], by `layer`s.

    Returns:
      {'pooled': x, 'pre_logits': output of the tanh layer or x,
      'logits': float32 [..., K] unless module.num_classes is None or 0}.
    """
    out = {'pooled': x}
    if self.representation_size:
      shape = x.shape[-1:], (self.representation_size,)
      init = initializer('pre_logits', self.init_std)
      dense = layer(*shape, init, dtype=module.dtype, name='pre_logits')
      x = jnp.tanh(dense(x))
    out['pre_logits'] = x
    if module.num_classes:
      sizes = x.shape[-1:], (module.num_classes - self.fewer_outputs,)
      init = initializer('head', self.init_std)
      bias_init = nn.initializers.constant(self.bias_init)
      head = layer(*sizes, init, bias_init, bias=self.bias, name='head')
      out['logits'] = self.convert(head(x))
    return out

  def convert(self, outputs: jax.Array) -> jax.Array:
    """Return the logits of outputs of the linear layer."""
    return outputs

  def plain(self, params: dict[str, Any]) -> tuple['Head', dict[str, Any]]:
    """Return (equal head whose logits are those of a linear layer, params)."""
    return self, params

  def new(self) -> 'Head':
    """Return the head for other classes, without a tanh layer."""
    return Head(None, self.bias_init, self.init_std, self.bias)


@dataclasses.dataclass(frozen=True)
class ScaledHead(Head):
  """Head of numbers in their own units: mean + std * outputs.

  Attributes:
    moments: mean and std of each number in the training data.
  """

  moments: tuple[tuple[float, float], ...] | OfSource = dataclasses.field(
    kw_only=True
  )

  def convert(self, outputs: jax.Array) -> jax.Array:
    mean, std = np.array(self.moments, np.float32).T
    shape = (1,) * (outputs.ndim - 1) + (-1,)
    return mean.reshape(shape) + std.reshape(shape) * outputs

  def plain(self, params: dict[str, Any]) -> tuple[Head, dict[str, Any]]:
    mean, std = np.array(self.moments, np.float32).T
    found = {k: x for k, x in params.items() if k.startswith('head/')}
    plain = {k: std * x + mean * k.endswith('bias') for k, x in found.items()}
    head = Head(self.representation_size, init_std=self.init_std)
    return head, params | plain


class OrdinalHead(Head):
  """Head of K ordered classes, whose logits are log-probabilities.

  Output k of K - 1 is the logit of "above class k, given at least class k":
  the conditional probabilities of CORN (Shi et al., 2021, arXiv 2111.08851), so
  that probabilities of "above class k" never rise with k. Cross-entropy of the
  logits is CORN's loss of an example, which it sums over k.
  """

  fewer_outputs: ClassVar[int] = 1

  def convert(self, outputs: jax.Array) -> jax.Array:
    above, not_above = nn.log_sigmoid(outputs), nn.log_sigmoid(-outputs)
    pad = [(0, 0)] * (outputs.ndim - 1)
    at_least = jnp.pad(jnp.cumsum(above, axis=-1), [*pad, (1, 0)])
    return at_least + jnp.pad(not_above, [*pad, (0, 1)])

  def plain(self, params: dict[str, Any]) -> tuple[Head, dict[str, Any]]:
    raise UserError('Its head is for ordered classes.')


@dataclasses.dataclass(frozen=True)
class Pooling:
  """Interface of poolings.

  A subclass changes a default with `class_token: bool = True`.

  Attributes:
    class_token: whether a learned class token comes first in the sequence.
    num_registers: learned tokens before the patches, which pooling ignores.
    norm: whether the final norm comes 'before' pooling (the paper) or 'after'
      it (timm's fc_norm); None: there is none.
    for_grids: whether `layout.grid` may be Grids; then padded tokens are 0.
  """

  class_token: bool = False
  num_registers: Natural = 0
  norm: Literal['before', 'after'] | None = 'before'

  distillation_token = False  # whether one follows the class token
  for_grids = False

  def layout(self, grid: Grid) -> Layout:
    """Return the Layout of tokens for patches of a grid (gh, gw)."""
    tokens = self.class_token, self.num_registers, self.distillation_token
    return Layout((grid[0], grid[1]), *tokens)

  def tokens(
    self, module: nn.Module, posemb: PositionEmbedding, layout: Layout
  ) -> list[Array]:
    """Return the tokens before the patches, each float32 [1, ., D]."""
    counts = layout.class_token, layout.distillation_token, layout.num_registers
    found = []
    for name, count in zip(('cls', 'dist', 'registers'), counts):
      if count:
        token = module.param(name, INIT[name], (1, int(count), module.width))
        found.append(posemb.add_to_token(module, name, token))
    return found

  def read(self, layout: Layout) -> slice:
    """Return the tokens that are pooled, by default the patches."""
    return slice(layout.prefix, None)

  def __call__(self, module: nn.Module, tokens: Array, layout: Layout) -> Array:
    """Pool tokens: [B, N, D] -> [B, D], or those of `read`, [B, ., D]."""
    return tokens[:, self.read(layout)]

  def classify(self, module: nn.Module, head: Head, x: Array) -> Features:
    """Return the features of the head, of x after pooling and final norm."""
    return head(module, x)

  def token_weights(self, layout: Layout, intermediates: Any) -> Array:
    """Return the weights [B or 1, 1, N] of tokens in pooling, of sum 1."""
    weights = np.zeros((1, 1, layout.num_tokens), np.float32)
    weights[..., self.read(layout)] = 1
    return jnp.asarray(weights / weights.sum())


@dataclasses.dataclass(frozen=True)
class ClassToken(Pooling):
  """The class token, as in the paper."""

  class_token: bool = dataclasses.field(default=True, init=False)

  for_grids = True

  def read(self, layout: Layout) -> slice:
    return slice(1)

  def __call__(self, module: nn.Module, tokens: Array, layout: Layout) -> Array:
    return tokens[:, 0]


@dataclasses.dataclass(frozen=True)
class DistillationToken(Pooling):
  """A class token and a distillation token, each with a head of its own (DeiT).

  Logits and representation are the mean of both. Objectives see both heads, as
  the features 'class_logits' and 'distillation_logits'.
  """

  class_token: bool = dataclasses.field(default=True, init=False)

  distillation_token = True
  for_grids = True

  def read(self, layout: Layout) -> slice:
    return slice(2)

  def classify(self, module: nn.Module, head: Head, x: Array) -> Features:
    found = head(module, x, layer=DensePerToken)  # each [B, 2, .]
    out = {name: both.mean(axis=1) for name, both in found.items()}
    if 'logits' in found:
      out['class_logits'] = found['logits'][:, 0]
      out['distillation_logits'] = found['logits'][:, 1]
    return out


@dataclasses.dataclass(frozen=True)
class Mean(Pooling):
  """Mean over the patches (figure 9).

  Attributes:
    registers: whether it is over the registers instead (Pixio's class tokens).
    unit_norm: whether the mean is normalised like tokens, but without a scale
      and a bias (timm's classifiers of DeepSeek and Qwen).
  """

  registers: bool = False
  unit_norm: bool = False

  for_grids = True

  def read(self, layout: Layout) -> slice:
    end = layout.prefix
    registers = slice(end - layout.num_registers, end)
    return registers if self.registers else slice(end, None)

  def __call__(self, module: nn.Module, tokens: Array, layout: Layout) -> Array:
    x = super().__call__(module, tokens, layout)
    if layout.lengths is None or self.registers:
      x = x.mean(axis=1)
    else:  # padded tokens are 0
      total = x.sum(axis=1, dtype='float32')
      x = total / (layout.lengths[:, None] - layout.prefix)
      x = x.astype(tokens.dtype)
    if self.unit_norm:
      x = jnp.float32(x)
      x -= x.mean(axis=-1, keepdims=True) * (module.block.norm == 'layer')
      size = jnp.mean(x**2, axis=-1, keepdims=True) + module.block.norm_eps
      x = (x * jax.lax.rsqrt(size)).astype(tokens.dtype)
    return x


class NoPooling(Pooling):
  """No pooling: each patch gets its own logits."""


@dataclasses.dataclass(frozen=True)
class Map(Pooling):
  """One learned query that attends to the patches ("Scaling ViT").

  Attributes:
    num_heads, mlp_dim: sizes of its attention and MLP; None: as in the model.
    all_tokens: whether it attends to the tokens before the patches, too.
  """

  num_heads: Count | None = None
  mlp_dim: Count | None = None
  all_tokens: bool = False

  for_grids = True

  def read(self, layout: Layout) -> slice:
    return slice(0 if self.all_tokens else layout.prefix, None)

  def __call__(self, module: nn.Module, tokens: Array, layout: Layout) -> Array:
    lengths, read = layout.lengths, self.read(layout)
    lengths = None if lengths is None else lengths - read.start
    heads = self.num_heads or module.num_heads
    hidden = self.mlp_dim or module.mlp_dim
    fields = module.block, module.dtype, module.attention
    head = MapHead(heads, hidden, *fields, name='map_head')
    return head(tokens[:, read], lengths)

  def token_weights(self, layout: Layout, intermediates: Any) -> Array:
    """Return the attention of the query, mean over heads."""
    found = intermediates['map_head']['attn']
    q, k = (found[name][0].astype(jnp.float32) for name in 'qk')
    scores = jnp.einsum('bqhd,bnhd->bhqn', q, k)
    weights = jax.nn.softmax(scores * q.shape[-1] ** -0.5, axis=-1)
    start = self.read(layout).start
    return jnp.pad(weights.mean(axis=1), ((0, 0), (0, 0), (start, 0)))


class MapHead(nn.Module):
  """Attention of one learned query, and an MLP: [B, n, D] -> [B, D]."""

  num_heads: int
  mlp_dim: int
  options: BlockOptions = BlockOptions()
  dtype: Any = 'float32'
  attention: str = 'auto'

  @nn.compact
  def __call__(self, tokens: Array, lengths: Array | None = None) -> Array:
    shape, options = (1, 1, tokens.shape[-1]), self.options
    probe = self.param('probe', INIT['probe'], shape)
    probe = jnp.broadcast_to(probe, (tokens.shape[0], *shape[1:]))
    fields = {'implementation': self.attention, 'dtype': self.dtype}
    attend = Attention(self.num_heads, options, **fields, name='attn')
    x = attend(probe, tokens, lengths=lengths)
    norm = options.make_norm(self.dtype, 'norm')
    mlp = Mlp(self.mlp_dim, options, dtype=self.dtype, name='mlp')
    return (x + mlp(norm(x)))[:, 0]


class DensePerToken(Dense):
  """x W + b with other W and b for each of two tokens: [B, 2, D] -> [B, 2, K].

  The parameters are those of Dense, below 'cls' and 'dist'.
  """

  @nn.compact
  def __call__(self, x: Array) -> Array:
    fields = self.inputs, self.outputs, self.kernel_init, self.bias_init
    dense = functools.partial(Dense, *fields, self.dtype)
    tokens = dense(name='cls')(x[:, 0]), dense(name='dist')(x[:, 1])
    return jnp.stack(tokens, axis=1)
