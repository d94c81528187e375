"""Blocks of patches to hide, as of BEiT (arXiv 2106.08254), iBOT and DINOv2."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.types import Count, Share

_ATTEMPTS = 32  # blocks that are drawn for a view


@dataclasses.dataclass(frozen=True)
class BlockMasks:
  """Masks of some of the views of a batch.

  Blocks are drawn until a view has its number of hidden patches. A block that
  would hide too many is left out, and single patches make up for the rest.

  Attributes:
    views: fraction of the views that have a mask.
    least, most: bounds of the fraction of hidden patches in these, over which
      it is spread evenly, so that the number in a batch never changes.
    aspect: least height over width of a block, and least width over height.
    block: least number of patches of a block.
  """

  views: Share = 0.5
  least: Share = 0.1
  most: Share = 0.5
  aspect: Share = 0.3
  block: Count = 4

  def counts(self, views: int, patches: int) -> np.ndarray:
    """Return the numbers of hidden patches, int [views], in rising order."""
    masked = max(1, int(self.views * views))
    places = (np.arange(masked) + 0.5) / masked
    shares = self.least + (self.most - self.least) * places
    # Rounded first: 0.29 * 100 is 28.999999999999996.
    hidden = np.maximum(1, np.round(shares * patches, 6).astype(int))
    return np.pad(hidden, (views - masked, 0))

  def __call__(
    self, rng: jax.Array, views: int, grid: tuple[int, int]
  ) -> jax.Array:
    """Return bool [views, gh * gw]: whether a patch is hidden."""
    order_rng, rng = jax.random.split(rng)
    counts = jnp.asarray(self.counts(views, grid[0] * grid[1]))
    counts = jax.random.permutation(order_rng, counts)
    draw = jax.vmap(lambda key, count: self._draw(key, count, grid))
    return draw(jax.random.split(rng, views), counts)

  def _draw(self, rng, count, grid):
    """Return the mask of a view, bool [gh * gw], with `count` patches."""
    sides = jnp.array(grid)
    y, x = (axis.reshape(-1) for axis in np.indices(grid))
    rest_rng, rng = jax.random.split(rng)

    def add(hidden, draws):
      left = count - jnp.sum(hidden)
      area = self.block + draws[0] * jnp.maximum(0, left - self.block)
      # The logarithm of the aspect ratio is uniform.
      ratio = self.aspect ** (2 * draws[1] - 1)
      size = jnp.sqrt(area * jnp.stack([ratio, 1 / ratio]))
      size = jnp.clip(jnp.round(size).astype(jnp.int32), 1, sides)
      top, side = (draws[2:] * (sides - size + 1)).astype(jnp.int32)
      rows = (y >= top) & (y < top + size[0])
      more = hidden | (rows & (x >= side) & (x < side + size[1]))
      return jnp.where(jnp.sum(more) <= count, more, hidden), None

    draws = jax.random.uniform(rng, (_ATTEMPTS, 4))
    hidden, _ = jax.lax.scan(add, jnp.zeros(len(y), bool), draws)
    # Hidden patches come first, the others in random order.
    rank = jax.random.uniform(rest_rng, hidden.shape) - hidden
    return rank.argsort().argsort() < count
