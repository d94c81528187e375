"""Position embeddings: one class each, which creates and resizes its tables.

A subclass of PositionEmbedding, here or in your own package, overrides the
methods it needs; nothing else has to change. Shapes as in vit.py.
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array

from vit_jax.models import resample
from vit_jax.types import FlatParams, NonNegative, Positive, Shape, UserError

Grid = tuple[int, int]  # (gh, gw), rows and columns of patches
Table = np.ndarray  # [gh, gw, D], an embedding for each patch


class Grids(NamedTuple):
  """Grid of each example, int32 [B, 2], padded to `num_patches`."""

  sizes: Array
  num_patches: int

  def places(self) -> Array:
    """Return row and column of each patch, int32 [B, num_patches, 2]."""
    rows, columns = self.sizes.T[..., None]
    index = jnp.minimum(jnp.arange(self.num_patches)[None], rows * columns - 1)
    return jnp.stack([index // columns, index % columns], axis=-1)


@dataclasses.dataclass(frozen=True)
class Layout:
  """Order of the tokens: class, distillation, registers, patches row by row."""

  grid: Any  # Grid, or Grids for the whole model
  class_token: bool = False
  num_registers: int = 0
  distillation_token: bool = False
  lengths: Any = None  # with Grids: tokens before padding, int32 [B]

  @property
  def prefix(self) -> int:
    """Number of tokens before the patches."""
    return self.class_token + self.distillation_token + self.num_registers

  @property
  def num_tokens(self) -> int:
    return self.prefix + math.prod(self.grid)

  def without_padding(self, x: Array) -> Array:
    """Return tokens or patches [B, ., D] with zeros for padding, of Grids."""
    index = jnp.arange(x.shape[1]) - x.shape[1] + self.grid.num_patches
    is_real = index[None] < self.grid.sizes.prod(axis=1, keepdims=True)
    return jnp.where(is_real[..., None], x, 0)


@dataclasses.dataclass(frozen=True)
class PositionEmbedding:
  """Interface of position embeddings, whose methods change nothing here.

  Methods with the argument `module` may create parameters in it. The model
  calls `add_to_patches`, `add_to_token` and `shared`; its layers call
  `add_to_layer`, `queries_and_keys` and `logits`, only if `in_layers`.

  Attributes:
    resize_method: method that resizes tables by default, see `resample.resize`.
    grid_tables: beginnings of the names of tables [..., gh, gw, D].
    for_grids: whether arguments `grid` and `layout.grid` may be Grids.
    in_layers: whether the embedding acts in the layers.
  """

  grid_tables: ClassVar[tuple[str, ...]] = ()
  for_grids = False
  in_layers = False

  _: dataclasses.KW_ONLY
  resize_method: resample.Method = 'paper'

  def add_to_patches(self, module: nn.Module, x: Array, grid: Grid) -> Array:
    """Add positions to embedded patches, float32 [B, gh * gw, D]."""
    return x

  def add_to_token(self, module: nn.Module, name: str, token: Array) -> Array:
    """Add positions to the tokens 'cls', 'dist' or 'registers', [1, n, D]."""
    return token

  def shared(self, module: nn.Module, layout: Layout, train: bool) -> Any:
    """Return arrays that each layer gets as `shared`, or None.

    `module` is the model; it has `width` and `num_heads`.
    """
    return None

  def add_to_layer(
    self, module: nn.Module, x: Array, layout: Layout, shared: Any
  ) -> Array:
    """Add positions to the input of a layer, [B, N, D]."""
    return x

  def queries_and_keys(
    self, module: nn.Module, q: Array, k: Array, layout: Layout, shared: Any
  ) -> tuple[Array, Array]:
    """Change queries and keys of a layer, each [B, N, h, d]."""
    return q, k

  def logits(self, module: nn.Module, q: Array, layout: Layout) -> Array | None:
    """Return what is added to q kᵀ, float32 [B, h, N, N], or None."""
    return None

  def resize(
    self, name: str, table: Any, shape: Shape, method: str = 'paper'
  ) -> Any:
    """Return the parameter `name` for another grid of patches, or None.

    None: it is not one of `grid_tables`, or `shape` differs in more than the
    grid. The array is of NumPy or JAX as the table. Stacked layers have one
    more dimension in front. `method` is one of resample.METHODS.
    """
    same = table.ndim == len(shape) and table.shape[-1] == shape[-1]
    if not name.startswith(self.grid_tables) or not same:
      return None
    return resample.resize(table, (shape[-3], shape[-2]), method)

  def table(self, params: FlatParams, grid: Grid, width: int) -> Table | None:
    """Return the embeddings of all patches, [gh, gw, D], or None."""
    return None


@dataclasses.dataclass(frozen=True)
class Learned(PositionEmbedding):
  """Learned embeddings (the paper's 1-D) of patches, class and other tokens.

  Attributes:
    init_std: standard deviation of the initial values; as in the paper's code.
    at: where embeddings are added (table 8): at the 'stem', that is, to the
      embedded patches (the paper); to the input of each of the 'layers', each
      with its own table; or 'layers_shared', with one table for all.
    prefix: whether class and distillation tokens have embeddings, too (the
      paper). False: only patches have, as in DeiT III and big_vision.
    registers: whether registers have embeddings at the stem, too (Pixio).
  """

  init_std: NonNegative = 0.02
  at: Literal['stem', 'layers', 'layers_shared'] = 'stem'
  prefix: bool = True
  registers: bool = False

  grid_tables = ('pos_embedding',)
  in_layers = property(lambda self: self.at != 'stem')  # type: ignore

  def add_to_patches(self, module: nn.Module, x: Array, grid: Grid) -> Array:
    return x if self.in_layers else x + self._patches(module, grid, x.shape[-1])

  def add_to_token(self, module: nn.Module, name: str, token: Array) -> Array:
    has_row = self.registers if name == 'registers' else self.prefix
    if self.in_layers or not has_row:
      return token
    return token + self._token(module, name, token.shape)

  def shared(self, module: nn.Module, layout: Layout, train: bool) -> Any:
    is_shared = self.at == 'layers_shared'
    return self._tokens(module, layout, module.width) if is_shared else None

  def add_to_layer(
    self, module: nn.Module, x: Array, layout: Layout, shared: Any
  ) -> Array:
    if self.at == 'layers':
      shared = self._tokens(module, layout, x.shape[-1])
    return x + shared.astype(x.dtype)

  def table(self, params: FlatParams, grid: Grid, width: int) -> Table | None:
    table = params.get('pos_embedding')
    return None if table is None else np.asarray(table)[0]

  def _patches(self, module, grid, width):
    """Return [1, gh * gw, D]."""
    table = _table(module, 'pos_embedding', (1, *grid, width), self.init_std)
    return table.reshape(1, -1, width)

  def _token(self, module, name, shape):
    """Return [1, 1, D]; with the patches, the N + 1 rows of equation 1."""
    init = jax.nn.initializers.normal(self.init_std)
    return module.param(f'{name}_pos_embedding', init, shape)

  def _tokens(self, module, layout, width):
    """Return [1, N, D], with zeros for tokens without a position."""
    names = ['cls'] * layout.class_token + ['dist'] * layout.distillation_token
    shape = 1, 1, width
    parts = [self._token(module, x, shape) for x in names if self.prefix]
    parts.append(jnp.zeros((1, layout.prefix - len(parts), width)))
    parts.append(self._patches(module, layout.grid, width))
    return jnp.concatenate(parts, axis=1)


class Learned2d(Learned):
  """Learned embeddings of columns (x) and rows (y), concatenated; D is even."""

  def table(self, params: FlatParams, grid: Grid, width: int) -> Table | None:
    if 'pos_embedding_x' not in params:
      return None
    x, y = (params[f'pos_embedding_{axis}'] for axis in 'xy')
    return np.asarray(_concatenate(x, y))[0]

  def _patches(self, module, grid, width):
    cells = {'x': (1, grid[1]), 'y': (grid[0], 1)}
    x, y = (
      _table(module, f'pos_embedding_{k}', (1, *n, width // 2), self.init_std)
      for k, n in cells.items()
    )
    return _concatenate(x, y).reshape(1, -1, width)


def _concatenate(x, y):
  """[1, 1, gw, D/2], [1, gh, 1, D/2] -> [1, gh, gw, D]."""
  return jnp.concatenate(jnp.broadcast_arrays(x, y), axis=-1)


@dataclasses.dataclass(frozen=True)
class SinCos2d(PositionEmbedding):
  """Fixed sine and cosine embeddings, added to the embedded patches.

  With ω_i = temperature^(-i / (D/4 - 1)), i = 0 .. D/4 - 1, the patch in row y
  and column x gets [sin ωx, cos ωx, sin ωy, cos ωy] ("Better plain ViT
  baselines for ImageNet-1k", section 2). Without `endpoint`, ω_i is
  temperature^(-i / (D/4)), as in MAE's code. The class token has no position.
  """

  temperature: Positive = 10_000.0
  endpoint: bool = True

  for_grids = True

  def add_to_patches(self, module: nn.Module, x: Array, grid: Any) -> Array:
    width = x.shape[-1]
    if isinstance(grid, Grids):  # by index in the waves of a row and a column
      waves = self.table({}, (1, grid.num_patches), width)[0, :, : width // 2]
      row, column = jnp.moveaxis(jnp.asarray(waves)[grid.places()], 2, 0)
      return x + jnp.concatenate([column, row], axis=-1)
    return x + self.table({}, grid, width).reshape(1, -1, width)

  def table(self, params: FlatParams, grid: Grid, width: int) -> Table:
    if width % 4 or width < 8:
      raise UserError(f'SinCos2d needs a width of 8, 12, 16, ..., got {width}.')
    n = width // 4
    omega = self.temperature ** -(np.arange(n) / (n - self.endpoint))
    y, x = np.mgrid[: grid[0], : grid[1]]
    x, y = x[..., None] * omega, y[..., None] * omega
    waves = [np.sin(x), np.cos(x), np.sin(y), np.cos(y)]
    return np.concatenate(waves, axis=-1).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Relative(PositionEmbedding):
  """Relative attention: learned embeddings of differences, in every layer.

  Patches are numbered row by row. Each difference of a key's and a query's
  number has an embedding, which the query is multiplied with as it is with the
  key; the sum is scaled by 1 / √d. The paper leaves the rest open, and we chose
  it: each layer and each head has its own embeddings; the class token comes
  first, so its number is -1; pairs with a register, which has none, get 0.

  The table is [2 gh, gw, h, d], in which difference key - query of 0 is in row
  gh and column 0. Its first cell is for -gh * gw, from the last patch to the
  class token, and also for gh * gw; without a class token it is not used.
  """

  init_std: NonNegative = 0.02
  in_layers = True

  def logits(self, module: nn.Module, q: Array, layout: Layout) -> Array:
    gh, gw = layout.grid
    heads = q.shape[2:]
    shape = 2 * gh, gw, *heads
    table = _table(module, 'offset_embedding', shape, self.init_std)
    table = table.reshape(-1, *heads).astype(q.dtype)
    first, prefix = int(layout.class_token), layout.prefix
    q = jnp.concatenate([q[:, :first], q[:, prefix:]], axis=1)
    logits = jnp.einsum(
      'bqhd,ohd->bhqo', q, table, preferred_element_type=jnp.float32
    )
    if layout.class_token:  # two more differences, of which one does not occur
      ends = logits[..., :1]
      logits = jnp.concatenate([ends, logits, ends], axis=-1)
    logits = _by_key(logits)
    if layout.num_registers:
      at = np.r_[:first, prefix : layout.num_tokens]
      zeros = jnp.zeros((*logits.shape[:2], at[-1] + 1, at[-1] + 1))
      logits = zeros.at[..., at[:, None], at].set(logits)
    return logits


@dataclasses.dataclass(frozen=True)
class RelativeBias(PositionEmbedding):
  """A learned number for each head and difference of positions (BEiT).

  It is added to the scaled logits of attention, in every layer. The tables are
  `relative_bias` [2 gh - 1, 2 gw - 1, h], by row and column of query - key, and
  `class_bias` [3, h], from the class token, to it, and within it.
  """

  init_std: NonNegative = 0.02
  in_layers = True
  grid_tables = ('relative_bias',)

  def logits(self, module: nn.Module, q: Array, layout: Layout) -> Array:
    (gh, gw), heads = layout.grid, q.shape[2]
    shape = 2 * gh - 1, 2 * gw - 1, heads
    table = _table(module, 'relative_bias', shape, self.init_std)
    y, x = np.indices(layout.grid).reshape(2, -1)
    dy, dx = (at[:, None] - at for at in (y, x))
    bias = table[dy + gh - 1, dx + gw - 1]  # [n, n, h]
    if layout.class_token:
      ends = _table(module, 'class_bias', (3, heads), self.init_std)
      bias = jnp.pad(bias, ((1, 0), (1, 0), (0, 0)))
      bias = bias.at[0].set(ends[0]).at[:, 0].set(ends[1]).at[0, 0].set(ends[2])
    # attention() divides by √d.
    return jnp.moveaxis(bias, -1, 0)[None] * math.sqrt(q.shape[-1])


def _by_key(x):
  """[..., Q, 2 Q] by difference -> [..., Q, Q] by key.

  Cell (i, j) is in column j - i + Q. If rows are one cell shorter and the first
  Q cells of all are left out, it is in column j.
  """
  *batch, size, _ = x.shape
  x = x.reshape(*batch, -1)[..., size:]
  return x.reshape(*batch, size, 2 * size - 1)[..., :size]


def _table(module, name, shape, init_std):
  """Create a table of `module`, or return it, whose shape fits the images."""
  if module.has_variable('params', name):
    found = module.get_variable('params', name).shape
    if found != shape:
      raise UserError(
        f'The images need position embeddings {name} of shape {shape}, but the '
        f'parameters have {found}. Use images of the size that the model was '
        'trained at, or load the weights with image_size=(height, width).'
      )
  return module.param(name, jax.nn.initializers.normal(init_std), shape)
