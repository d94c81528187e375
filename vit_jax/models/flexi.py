"""Patches of any size with one set of parameters.

"FlexiViT: One Model for All Patch Sizes" (Beyer et al., 2023, section 3.4):
the patch kernel and the position table are stored at sizes of their own, and
resized in each pass. Resizing what was resized loses information.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np

from vit_jax.models import resample
from vit_jax.models.dense import Dense
from vit_jax.models.posemb import Grids, Learned
from vit_jax.models.vit import PatchEmbedding, as_pair
from vit_jax.types import Count, Expect, Size, UserError


class _ResizedDense(Dense):
  """Dense whose kernel is stored for `stored`, (height, width, channels)."""

  stored: tuple[int, ...] = ()
  method: str = 'bilinear'

  def param(self, name: str, init_fn: Any, *args: Any, **options: Any) -> Any:
    if name != 'kernel':
      return super().param(name, init_fn, *args, **options)
    shape = math.prod(self.stored), *self.outputs

    def init(rng):
      kernel = self.kernel_init(rng, shape)
      return kernel.reshape(*self.stored, *self.outputs)

    kernel = super().param('kernel', init)
    return resample.resize_kernel(kernel, self.inputs[:2], self.method)


@dataclasses.dataclass(frozen=True)
class FlexiPatches(PatchEmbedding):
  """Embedding of patches of any size.

  Attributes:
    patch_size: in this pass; a run with RandomPatches changes it.
    kernel_size: side of the patches that the kernel is stored for.
    method: see `resample.resize_kernel`; big_vision's by default.
  """

  kernel_size: Size = 32
  method: resample.Method = 'bilinear'

  for_grids = False

  def layer(self, inputs: tuple[int, ...], *args: Any, **fields: Any) -> Dense:
    stored = *as_pair(self.kernel_size), inputs[-1]
    fields |= {'stored': stored, 'method': self.method}
    return _ResizedDense(inputs, *args, **fields)


@dataclasses.dataclass(frozen=True)
class FlexiPositions(Learned):
  """Learned embeddings, stored for a grid and resized to that of the patches.

  Attributes:
    stored: the grid, (gh, gw); big_vision's by default.
  """

  stored: tuple[Count, Count] = (7, 7)
  _: dataclasses.KW_ONLY
  resize_method: resample.Method = 'bilinear_antialias'

  def __post_init__(self) -> None:
    is_so = not self.in_layers and self.resize_method == 'bilinear_antialias'
    object.__setattr__(self, 'for_grids', is_so)

  def _patches(self, module, grid, width):
    table = super()._patches(module, self.stored, width)
    table = table.reshape(1, *self.stored, width)
    if isinstance(grid, Grids):
      return resample.at_places(table[0], grid.places(), grid.sizes)
    table = resample.resize(table, grid, self.resize_method)
    return table.reshape(1, -1, width)


def fixed(model: Any, method: Any) -> tuple[Any, Any]:
  """Return the model with patches of one size, and how its kernel is resized.

  Other models, and `method`, are returned as they are.
  """
  embedding = getattr(model, 'embedding', None)
  if not isinstance(embedding, FlexiPatches):
    return model, method
  parts = {'embedding': _plain(PatchEmbedding, embedding)}
  if isinstance(model.posemb, FlexiPositions):
    parts['posemb'] = _plain(Learned, model.posemb)
  return model.clone(**parts), embedding.method


def _plain(cls, part):
  return cls(**{x.name: getattr(part, x.name) for x in dataclasses.fields(cls)})


def with_patches(model: Any, patch_size: Size) -> Any:
  """Return the model for other patches."""
  embedding = getattr(model, 'embedding', None)
  if not isinstance(embedding, FlexiPatches):
    raise UserError(
      f'patch_size={patch_size}, but the patches of this model have one size. '
      'Use vit_jax.models.flexi.FlexiPatches and FlexiPositions.'
    )
  embedding = dataclasses.replace(embedding, patch_size=patch_size)
  return model.clone(embedding=embedding)


@dataclasses.dataclass(frozen=True)
class RandomPatches:
  """Variants of a run: each step draws a size ("FlexiViT", section 3.4).

  Attributes:
    patch_sizes: int or (height, width) each, with equal probability.
  """

  patch_sizes: Annotated[
    Sequence[Size], Expect(lambda x: 1 <= len(x) <= 256, '1 to 256 sizes')
  ]

  @property
  def changes(self) -> dict[str, Callable[[Any], Any]]:
    """Functions model -> model, 'patch_16' or 'patch_4x2' by name."""
    found = dict[str, Callable[[Any], Any]]()
    for size in self.patch_sizes:
      sides = dict.fromkeys(map(str, as_pair(size)))
      change = functools.partial(with_patches, patch_size=size)
      found[f'patch_{"x".join(sides)}'] = change
    return found

  def of_steps(self, count: int, seed: int) -> Any:
    # One number for each step: a longer run begins as a shorter one.
    drawn = np.random.default_rng([seed, 0x512E]).random(count)
    return (drawn * len(self.patch_sizes)).astype(np.uint8)
