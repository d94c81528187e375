"""Layer-wise decay of the learning rate."""

import dataclasses
import re

import numpy as np

from vit_jax import tree
from vit_jax.types import Params, PathRule, PyTree, Share, UserError


@dataclasses.dataclass(frozen=True)
class LayerDecay:
  """Layer-wise learning-rate decay: rate ** (distance to the head).

  The head and the final norm have factor 1, the last block `rate`, the first of
  L blocks rate**L, and everything before it (patch, class and position
  embeddings) rate**(L+1), as BEiT and MAE fine-tune (from memory).

  Attributes:
    rate: e.g. 0.75.
    head, block, stacked: path rules of the parameters with factor 1, of
      unrolled layers (the group is the index), and of scanned layers.
  """

  rate: Share
  head: PathRule = r'(norm|pre_logits|map_head|head)/.*'
  block: PathRule = r'(?:.*/)?block_(\d+)/.*'
  stacked: PathRule = r'(?:.*/)?blocks/.*'

  def factors(self, params: Params) -> PyTree:
    """Return a tree of floats and, for scanned leaves, [L, 1, ...] arrays.

    Raises:
      ValueError: no parameter belongs to a block.
    """
    depth = 0
    for path, leaf in tree.flatten(params).items():
      if found := re.fullmatch(self.block, path):
        depth = max(depth, int(found.group(1)) + 1)
      elif re.fullmatch(self.stacked, path):
        depth = max(depth, leaf.shape[0])
    if not depth:
      raise UserError(
        f'layer_decay: no parameter path matches block={self.block!r} or '
        f'stacked={self.stacked!r}. Set them to the paths of your model.'
      )

    def factor(path, leaf):
      if re.fullmatch(self.head, path):
        return 1.0
      if found := re.fullmatch(self.block, path):
        return self.rate ** (depth - int(found.group(1)))
      if re.fullmatch(self.stacked, path):
        powers = self.rate ** (depth - np.arange(depth, dtype=np.float32))
        return powers.reshape((depth,) + (1,) * (leaf.ndim - 1))
      return self.rate ** (depth + 1)

    return tree.map_with_path(factor, params)
