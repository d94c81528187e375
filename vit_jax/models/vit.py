"""The Vision Transformer ("An Image is Worth 16x16 Words", section 3.1).

Shapes:
  B  examples in the batch      ph, pw  patch height and width
  H  image height, W width      gh, gw  the grid of patches, H / ph by W / pw
  C  image channels             N  tokens: those of the pooling, then the
  D  model width                   gh * gw patches, row by row
  h  attention heads            M  hidden width of the MLPs
  d  head dimension, D / h      L  layers, K classes

VisionTransformer embeds patches, applies L Blocks and pools. PatchEmbedding,
Head, position embeddings and poolings are frozen dataclasses, which get the
module that applies them as an argument and create their parameters in it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from vit_jax.models import dense
from vit_jax.models.attention import ATTENTION, Attention, Implementation
from vit_jax.models.pooling import (
  ClassToken,
  DistillationToken,
  Head,
  Pooling,
)
from vit_jax.models.posemb import Grids, Layout, Learned, PositionEmbedding
from vit_jax.types import (
  HARMLESS,
  Count,
  Dtype,
  Expect,
  Natural,
  NonNegative,
  Rate,
  Size,
  UserError,
)

# Features by name, among them 'patches' [B, gh * gw, D]; and (gh, gw).
Embedded = tuple[dict[str, jax.Array], tuple[int, int]]
StochasticDepth = Rate | tuple[Rate, Rate]
# Number of layers. More would be traced for hours, and are a typing mistake.
Depth = Annotated[int, Expect(lambda n: 1 <= n <= 1000, 'between 1 and 1000')]


def as_pair(size: Size) -> tuple[int, int]:
  """Return (height, width) of a size that is one number or two."""
  return (size, size) if isinstance(size, int) else (size[0], size[1])


@dataclasses.dataclass(frozen=True)
class PatchEmbedding:
  """Linear embedding of image patches (E of equation 1).

  Attributes:
    patch_size: side of a patch in pixels, or (height, width).
    mask_token: whether a learned vector can replace patches, see `replace`.
    init_std: standard deviation of the initial kernel; None: as in INIT.
    bias: whether the linear layer has a bias.
    norm: what a norm follows: the embedded 'patches' (AIMv2), or all 'tokens'
      with their positions (CLIP); None: there is none.
  """

  patch_size: Size
  mask_token: bool = False
  init_std: NonNegative | None = None
  bias: bool = True
  norm: Literal['patches', 'tokens'] | None = None

  layer: ClassVar[Callable[..., dense.Dense]] = dense.Dense
  for_grids = True  # each patch is embedded alone
  reduction = 1  # factor of downsampling before patches are cut

  def __post_init__(self) -> None:
    object.__setattr__(self, 'patch_size', as_pair(self.patch_size))

  def grid(self, image_shape: Sequence[int]) -> tuple[int, int]:
    """Return (gh, gw), the grid of patches of an image [H, W, ...]."""
    ph, pw = as_pair(self.patch_size)
    height, width = (n // self.reduction for n in image_shape[:2])
    return height // ph, width // pw

  def image_size(self, grid: tuple[int, int]) -> tuple[int, int]:
    """Return (H, W) of the images with that grid of patches."""
    ph, pw = as_pair(self.patch_size)
    return grid[0] * ph * self.reduction, grid[1] * pw * self.reduction

  def __call__(self, module: nn.Module, images: jax.Array) -> Embedded:
    """Embed the patches of images [B, H, W, C]."""
    x = self.cut(images)
    batch, gh, gw = x.shape[:3]
    # A convolution whose stride is its kernel size is one matrix product.
    shape = x.shape[3:], (module.width,)
    init = dense.initializer('embedding', self.init_std)
    x = self.layer(
      *shape, init, dtype=module.dtype, bias=self.bias, name='embedding'
    )(x)
    if self.norm == 'patches':
      x = module.block.make_norm(module.dtype, 'embedding_norm')(x)
    return {'patches': x.reshape(batch, -1, module.width)}, (gh, gw)

  def cut(self, images: jax.Array) -> jax.Array:
    """Cut images into patches: [B, H, W, C] -> [B, gh, gw, ph, pw, C]."""
    (ph, pw), (batch, *sides, channels) = as_pair(self.patch_size), images.shape
    if sides[0] % ph or sides[1] % pw:
      raise UserError(
        f'Images, or feature maps, of {sides[0]}x{sides[1]} (height x width) '
        f'cannot be cut into patches of {ph}x{pw}. Resize or crop the images, '
        'or use another patch_size.'
      )
    rows = images.reshape(batch, sides[0] // ph, ph, -1, pw, channels)
    return rows.swapaxes(2, 3)

  def replace(
    self, module: nn.Module, patches: jax.Array, sources: jax.Array | None
  ) -> jax.Array:
    """Replace patches [B, n, D] by others, or the mask: `patch_sources`."""
    if self.mask_token:
      mask = module.param('mask', dense.INIT['mask'], (1, 1, patches.shape[-1]))
    if sources is None:
      return patches
    sources = sources[..., None]
    moved = jnp.take_along_axis(patches, jnp.maximum(sources, 0), axis=1)
    return jnp.where(sources < 0, mask.astype(patches.dtype), moved)


class Block(nn.Module):
  """One layer of the encoder (equations 2 and 3): [B, N, D] -> [B, N, D].

  With `outputs` it computes only so many of the first tokens.
  """

  num_heads: int
  mlp_dim: int
  options: dense.BlockOptions = dense.BlockOptions()
  posemb: PositionEmbedding | None = None  # if it acts in the layers
  layout: Layout = Layout((0, 0))
  dropout: float = 0.0
  attention: str = 'auto'
  dtype: Any = 'float32'
  train: bool = False
  outputs: int | None = None

  for_grids = True

  attend = Attention  # class of the attention

  @nn.compact
  def __call__(
    self,
    x: Array,
    drop_rate: Any = None,
    shared: Any = None,
    lengths: Array | None = None,
  ) -> Array:
    """Apply the layer; see drop_path, PositionEmbedding.shared, attention."""
    options = self.options
    norm = functools.partial(options.make_norm, self.dtype)
    x = dense.keep_batch_split(x)
    if self.posemb:
      x = self.posemb.add_to_layer(self, x, self.layout, shared)
    y = x if options.post_norm else norm('norm1')(x)
    y = self.attend(
      *(self.num_heads, options, self.posemb, self.layout),
      *(self.attention, self.dtype, self.train, self.outputs),
      name='attn',
    )(y, y, shared, lengths)
    y = norm('norm1')(y) if options.post_norm else y
    y = nn.Dropout(self.dropout, deterministic=not self.train)(y)
    x = x[:, : self.outputs] + self._branch(y, 'ls1', drop_rate)
    mlp = dense.Mlp(
      self.mlp_dim, options, self.dropout, self.dtype, self.train, name='mlp'
    )
    y = norm('norm2')(mlp(x)) if options.post_norm else mlp(norm('norm2')(x))
    return x + self._branch(y, 'ls2', drop_rate)

  def _branch(self, y, name, drop_rate):
    """Apply LayerScale (DeiT III) and stochastic depth to a branch."""
    if self.options.layerscale_init is not None:
      init = nn.initializers.constant(self.options.layerscale_init)
      scale = self.param(name, init, y.shape[-1:])
      y = y * scale.reshape(1, 1, -1).astype(y.dtype)
    return drop_path(self, y, drop_rate)


def drop_path(module: nn.Module, y: Array, rate: Array | None) -> Array:
  """Drop the output of a residual branch [B, N, D] for some examples (AugReg).

  `rate` is their fraction, None: 0. The branch of the others is scaled up.
  """
  if rate is None:
    return y
  keep, rng = 1 - rate, module.make_rng('dropout')
  kept = jax.random.bernoulli(rng, keep, (y.shape[0], 1, 1))
  return jnp.where(kept, y / jnp.asarray(keep, y.dtype), 0)


_POLICIES = {
  'dots': jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(ATTENTION),
  ),
  'full': jax.checkpoint_policies.nothing_saveable,
}
Remat = Literal['none', 'dots', 'full']


def remat(cls: type[nn.Module], name: str, **options: Any) -> type[nn.Module]:
  """Return a module class with a rematerialisation, see VisionTransformer."""
  if name == 'none':
    return cls
  return nn.remat(cls, policy=_POLICIES[name], **options)


@dataclasses.dataclass(frozen=True)
class Layers:
  """Application of the layers of a model, here one after the other.

  A subclass, here or in your own package, may apply them in another way, or
  return another class of layers, such as a Block with another `attend`.
  """

  def layer(self, model: Any) -> type[nn.Module]:
    """Return the class of the layers, called as (x, rate or None, *shared)."""
    return model.layer

  def __call__(
    self,
    model: Any,
    x: jax.Array,
    *,
    training: bool,
    per_layer: bool,
    shared: tuple[Any, ...] = (),
    of_last: Mapping[str, Any] | None = None,
    **fields: Any,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Apply layers 'block_0', 'block_1', ...; or loop over 'blocks', stacked.

    `model` has depth, stochastic_depth, scan and remat. `shared` and `fields`
    are arguments and fields of all layers, `of_last` are more of the last one,
    which a loop ignores; in training, stochastic depth acts.
    Returns [B, N, D] as x, and {'block_i': [B, N, D]}, empty if not per_layer.
    """
    x, rates = dense.keep_rows(x), None
    if training and model.stochastic_depth:
      ends = model.stochastic_depth
      first, last = (0.0, ends) if isinstance(ends, int | float) else ends
      rates = jnp.linspace(first, last, model.depth)
    # Inside a loop nothing can be merged with the forward pass anyway.
    layer = remat(self.layer(model), model.remat, prevent_cse=not model.scan)

    def apply(block, x, rate, shared):
      x = block(x, rate, *shared)
      return x, x if per_layer else None

    if model.scan:
      loop = nn.scan(
        apply,
        variable_axes={'params': 0, 'intermediates': 0},
        split_rngs={'params': True, 'dropout': True},
        in_axes=(0, nn.broadcast),
        length=model.depth,
      )
      x, outputs = loop(layer(name='blocks', **fields), x, rates, shared)
    else:
      outputs = []
      for i in range(model.depth):
        if of_last and i == model.depth - 1:
          fields |= of_last
        block = layer(name=f'block_{i}', **fields)
        x, output = apply(block, x, None if rates is None else rates[i], shared)
        outputs.append(output)
    kept = range(model.depth * per_layer)
    return dense.keep_batch_split(x), {f'block_{i}': outputs[i] for i in kept}


class Classifier(nn.Module):
  """Base class of the models, which define `features` and `num_classes`."""

  def __call__(
    self, images: jax.Array, *, train: bool = False, **options: Any
  ) -> jax.Array:
    """Return 'logits' of `features`, or 'pre_logits' if there is no head.

    Args:
      images: float [B, H, W, C], normalised as in training, such as [-1, 1].
      train: whether dropout and stochastic depth act, with an rng 'dropout'.
      **options: other arguments of `features`.
    """
    out = self.features(images, train=train, per_layer=False, **options)
    return out['logits'] if self.num_classes else out['pre_logits']


def grid_of(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
  """Return {'grid': ...} for a model, if a batch is of KeepAspect, or {}."""
  if 'grid' not in batch:
    return {}
  names = 'posemb', 'embedding', 'pooling', 'layer'
  parts = [getattr(model, name, model) for name in names]
  parts.append(getattr(parts[0], 'learned', None))
  if layers := getattr(model, 'layers', None):
    parts.append(layers.layer(model))
  for part in parts:
    if not getattr(part, 'for_grids', part is None):
      raise UserError(
        f'Images of any aspect ratio (KeepAspect) are not for {part}. Use a '
        'VisionTransformer with PatchEmbedding, a pooling, and as posemb '
        'SinCos2d, a rotary one, or FlexiPositions of models/flexi.py.'
      )
  return {'grid': batch['grid']}


def padded(model: Any, layout: Layout, grid: Any) -> Layout:
  """Return the Layout of examples whose grids are int32 [B, 2]."""
  grid_of(model, {'grid': grid})
  if layout.grid[0] != 1:
    raise UserError(
      f'KeepAspect has another patch_size than {model.embedding}. Use its own.'
    )
  sizes = jnp.maximum(grid, 1)  # evaluators pad batches with 0
  lengths = layout.prefix + sizes.prod(axis=1)
  grids = Grids(sizes, layout.grid[1])
  return dataclasses.replace(layout, grid=grids, lengths=lengths)


def check_images(images: Any) -> None:
  """Raise UserError unless `images` is a batch of floats [B, H, W, C]."""
  shape, dtype = jnp.shape(images), jnp.result_type(images)
  if len(shape) != 4 or not jnp.issubdtype(dtype, jnp.floating):
    raise UserError(
      f'images are {dtype} {shape}. Expected a batch of floats [B, H, W, C]. '
      'Normalise them with the `preprocess` of the weights.'
    )


class VisionTransformer(Classifier):
  """Images to logits.

  Attributes:
    width, depth, mlp_dim, num_heads: D, L, M and h.
    embedding: PatchEmbedding, or resnet.Hybrid.
    posemb: position embedding, a class of posemb.py; None: no positions.
    pooling: a class of pooling.py, also for class token and registers.
    num_classes: K; None or 0: no head.
    dropout: rate after position embedding, attention output and MLP layers.
    stochastic_depth: fraction of examples whose residual branches are dropped,
      in the last layer; grows linearly from 0 in the first layer (AugReg). Or
      those in the first and the last layer; two equal ones in DeiT III.
    dtype: dtype of the computation, 'float32' or 'bfloat16'.
    scan: compile one layer and loop over stacked parameters, blocks/... with a
      leading dimension L, instead of block_0/..., block_1/... This compiles
      faster and runs slower, see docs/compile.md.
    remat: what backward passes recompute to save memory: 'none'; 'full', all;
      'dots', all but the results of attention and of products with parameters.
    attention: an implementation named in attention.py.
    layers: how the layers are applied, see Layers; None: one after the other.
  """

  width: Count
  depth: Depth
  mlp_dim: Count
  num_heads: Count
  embedding: PatchEmbedding
  posemb: PositionEmbedding | None = Learned()
  pooling: Pooling = ClassToken()
  head: Head = Head()
  num_classes: Natural | None = None
  block: dense.BlockOptions = dense.BlockOptions()
  dropout: Rate = 0.0
  stochastic_depth: StochasticDepth = 0.0
  dtype: Dtype = 'float32'
  scan: bool = False
  remat: Annotated[Remat, HARMLESS] = 'none'
  attention: Implementation = 'auto'
  layers: Layers | None = None

  layer = Block  # class of the layers

  def __call__(
    self, images: jax.Array, *, train: bool = False, **options: Any
  ) -> jax.Array:
    """Return what Classifier does; only training computes all tokens."""
    return super().__call__(images, train=train, tokens=train, **options)

  @nn.compact
  def features(
    self,
    images: jax.Array,
    *,
    grid: jax.Array | None = None,
    train: bool = False,
    per_layer: bool = True,
    tokens: bool = True,
    maps: Sequence[int] = (),
    patch_sources: jax.Array | None = None,
    visible: jax.Array | None = None,
  ) -> dict[str, jax.Array]:
    """Compute all intermediate features and the logits, by name.

    Args:
      images, train: see Classifier.
      grid: int32 [B, 2], for images of KeepAspect; features of padding are 0.
      per_layer: whether to return the output of each layer.
      tokens: whether 'tokens' are needed. If not, and there are no `per_layer`,
        `maps`, `grid` and `layers`, the last layer computes only the output of
        ClassToken or DistillationToken, which saves three quarters of it. Then
        'tokens' are absent, and logits differ by rounding.
      maps: layers whose patches are returned as maps; -1: after the final norm.
      patch_sources: int32 [B, gh * gw], index of the patch whose embedding
        replaces each before positions are added; below 0: the mask vector.
      visible: int32 [B, v], the patches that the layers get, in this order,
        each with its own position. Then there are no maps. None: all patches.

    Returns:
      feature_map: [B, ., ., F], output of the ResNet of a hybrid.
      patches: [B, gh * gw, D], embedded patches before any is replaced.
      block_0 ... block_{L-1}: [B, N, D], output of each layer.
      map_i, map_-1: [B, gh, gw, D], the patches of block_i, and of tokens.
      tokens: [B, N, D], after the final norm if that comes before pooling.
      pooled: [B, D], or [B, gh * gw, D] with NoPooling.
      pre_logits: output of the head's tanh layer if there is one, else pooled.
      logits: float32 [B, K], or [B, gh * gw, K]. Absent without a head.
      class_logits, distillation_logits: [B, K], see pooling.DistillationToken.
    """
    self._check()
    check_images(images)
    pooling, posemb = self.pooling, self.posemb or PositionEmbedding()
    # Equation 1, added in float32.
    out, cells = self.embedding(self, images)
    layout = pooling.layout(cells)
    whole = layout if grid is None else padded(self, layout, grid)
    x = self.embedding.replace(self, out['patches'], patch_sources)
    x = posemb.add_to_patches(self, x.astype(jnp.float32), whole.grid)
    if visible is not None:
      if posemb.in_layers:
        raise UserError(f'{posemb} needs all patches. Use SinCos2d().')
      x = jnp.take_along_axis(x, visible[..., None], axis=1)
    prefix = [
      jnp.broadcast_to(token, (x.shape[0], *token.shape[1:]))
      for token in pooling.tokens(self, posemb, layout)
    ]
    x = jnp.concatenate([*prefix, x], axis=1).astype(self.dtype)
    norm = functools.partial(self.block.make_norm, self.dtype)
    if self.embedding.norm == 'tokens':
      x = norm('embedding_norm')(x)
    x = nn.Dropout(self.dropout, deterministic=not train)(x)
    # Equations 2 and 3.
    few = not (tokens or per_layer or maps or self.layers) and grid is None
    # A subclass of these, of your own, may read other tokens.
    few = few and type(pooling) in (ClassToken, DistillationToken)
    last = {'of_last': {'outputs': pooling.read(layout).stop}} if few else {}
    x, outputs = (self.layers or Layers())(
      self,
      x,
      training=train,
      per_layer=per_layer or bool(maps),
      shared=(posemb.shared(self, whole, train), whole.lengths),
      **self.layer_fields(layout, train),
      **last,
    )
    # Equation 4.
    outputs['tokens'] = norm('norm')(x) if pooling.norm == 'before' else x
    if grid is not None:
      out, outputs = jax.tree.map(whole.without_padding, (out, outputs))
    if not few:
      out |= outputs if per_layer else {'tokens': outputs['tokens']}
    for i in maps:
      if not -1 <= i < self.depth:
        raise UserError(f'map_{i}: there are {self.depth} layers, from map_0.')
      chosen = outputs['tokens' if i == -1 else f'block_{i}']
      patches = chosen[:, layout.prefix :]
      out[f'map_{i}'] = patches.reshape(-1, *cells, self.width)
    x = pooling(self, outputs['tokens'], whole)
    x = norm('norm')(x) if pooling.norm == 'after' else x
    return out | pooling.classify(self, self.head, x)

  def layer_fields(self, layout: Layout, train: bool) -> dict[str, Any]:
    """Return the fields of the layers, which are of the class `layer`."""
    names = 'num_heads', 'mlp_dim', 'dropout', 'attention', 'dtype'
    fields = {name: getattr(self, name) for name in names}
    posemb = self.posemb if self.posemb and self.posemb.in_layers else None
    fields |= {'options': self.block, 'posemb': posemb}
    return fields | {'layout': layout, 'train': train}

  def _check(self):
    if self.width % self.num_heads:
      raise UserError(
        f'width={self.width} must be a multiple of num_heads={self.num_heads}.'
      )
