"""Learned positions: how tokens, or pairs of them, know where they are.

Table 8 compares these kinds:

  learned    one embedding for each patch (the paper's 1-D), kept as a grid
  learned2d  one of width D / 2 for each column, one for each row, side by side
  relative   one for each difference of two patches' numbers, see `logits`

Shapes as in vit.py; posemb.py has the fixed sines, and resizes all these.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from vit_jax.models.layers import INIT

KINDS = ('learned', 'learned2d', 'relative')
PLACES = ('stem', 'layers', 'layers_shared')


@dataclasses.dataclass(frozen=True)
class Positions:
  """What a module needs to know to have positions of its own.

  The methods make parameters of the module that they are given.

  Attributes:
    kind: of KINDS; others have no parameters.
    grid: (gh, gw).
    init_std: of the embeddings.
    has_cls: whether a class token comes first.
    num_registers: tokens between it and the patches; they have no position.
  """

  kind: str
  grid: tuple[int, int]
  init_std: float = 0.02
  has_cls: bool = False
  num_registers: int = 0

  @property
  def are_added(self) -> bool:
    """Whether they are embeddings of tokens."""
    return self.kind in ('learned', 'learned2d')

  def of_patches(self, module: nn.Module, width: int) -> jax.Array:
    """[1, gh * gw, D], of 'learned' and 'learned2d'."""
    gh, gw = self.grid
    if self.kind == 'learned':
      table = self._table(module, 'pos_embedding', (1, gh, gw, width))
      return table.reshape(1, -1, width)
    if width % 2:
      raise ValueError(
        f"posemb='learned2d' halves the width, which is {width}; expected an "
        "even one. Choose that, or posemb='learned'."
      )
    x = self._table(module, 'pos_embedding_x', (1, 1, gw, width // 2))
    y = self._table(module, 'pos_embedding_y', (1, gh, 1, width // 2))
    return side_by_side(x, y).reshape(1, -1, width)

  def of_cls(self, module: nn.Module, width: int) -> jax.Array:
    """[1, 1, D]; with the patches' the N + 1 rows of equation 1."""
    init = INIT['pos_embedding'](self.init_std)
    return module.param('cls_pos_embedding', init, (1, 1, width))

  def of_tokens(self, module: nn.Module, width: int) -> jax.Array:
    """[1, N, D]: the patches', the class token's, and zeros for registers."""
    parts = [self.of_cls(module, width)] if self.has_cls else []
    parts.append(jnp.zeros((1, self.num_registers, width)))
    return jnp.concatenate([*parts, self.of_patches(module, width)], axis=1)

  def logits(self, module: nn.Module, q: jax.Array) -> jax.Array:
    """Relative attention: what is to be added to q kᵀ, [B, h, N, N] float32.

    Patches are numbered row by row. Where one asks and another answers the
    difference of their numbers has an embedding, which the query is multiplied
    with as it is with the key. Not in the paper, and our choice: each layer and
    each head has embeddings of its own; the class token comes first in the
    sequence, so its number is -1; registers are nowhere, and pairs with one of
    them get 0; the sum is scaled by 1 / √d.

    The table is [2 gh, gw, h, d], in which difference key - query of 0 is in
    row gh and column 0, so that it tells the grid and can be resized. Its first
    cell is of -gh * gw, between the last patch and the class token, and of
    gh * gw, too; without a class token it is never used.

    Args:
      module: of the attention, which gets the parameter 'offset_embedding'.
      q: [B, N, h, d], class token and registers included.
    """
    gh, gw = self.grid
    heads = q.shape[2:]
    table = self._table(module, 'offset_embedding', (2 * gh, gw, *heads))
    table = table.reshape(-1, *heads).astype(q.dtype)
    first, prefix = int(self.has_cls), self.has_cls + self.num_registers
    q = jnp.concatenate([q[:, :first], q[:, prefix:]], axis=1)
    logits = jnp.einsum(
      'bqhd,ohd->bhqo', q, table, preferred_element_type=jnp.float32
    )
    if self.has_cls:  # two more differences, of which one is never asked for
      ends = logits[..., :1]
      logits = jnp.concatenate([ends, logits, ends], axis=-1)
    logits = _by_key(logits)
    if self.num_registers:
      at = np.r_[:first, prefix : prefix + gh * gw]
      zeros = jnp.zeros((*logits.shape[:2], at[-1] + 1, at[-1] + 1))
      logits = zeros.at[..., at[:, None], at].set(logits)
    return logits

  def _table(self, module, name, shape):
    """A parameter, if it is of this grid."""
    if module.has_variable('params', name):
      found = module.get_variable('params', name).shape
      if found != shape:
        relative = name == 'offset_embedding'
        dims = slice(0, 2) if relative else slice(1, 3)
        had = 'x'.join(map(str, found[dims]))
        raise ValueError(
          f'The image has {self.grid[0]}x{self.grid[1]} patches but {name} is '
          f'a grid of {had}; resize it first with '
          f'vit_jax.models.posemb.resize{"_offsets" if relative else ""}.'
        )
    return module.param(name, INIT['pos_embedding'](self.init_std), shape)


def side_by_side(x: jax.Array, y: jax.Array) -> jax.Array:
  """The tables of 'learned2d', [1, 1, gw, D/2] and [1, gh, 1, D/2], as one.

  Returns:
    [1, gh, gw, D].
  """
  grid = jnp.broadcast_shapes(x.shape, y.shape)
  both = [jnp.broadcast_to(table, grid) for table in (x, y)]
  return jnp.concatenate(both, axis=-1)


def _by_key(x):
  """[..., Q, 2 Q] by difference -> [..., Q, Q] by key.

  Cell (i, j) is that of column j - i + Q. In rows one cell shorter it is in
  column j, if the first Q cells of all are left out.
  """
  *batch, size, _ = x.shape
  x = x.reshape(*batch, -1)[..., size:]
  return x.reshape(*batch, size, 2 * size - 1)[..., :size]
