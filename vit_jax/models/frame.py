"""What the models have in common: patches in, layers in a loop, logits out.

Shapes as in vit.py. The functions are called from within a module's method and
make submodules of that module.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from vit_jax.models.layers import INIT, Affine
from vit_jax.models.mesh import keep_batch_split

# Functions of jax.checkpoint_policies that are policies; the others make one.
REMAT = (
  'none',
  'dots',
  'full',
  *(n for n in dir(jax.checkpoint_policies) if n.endswith('saveable')),
)


def remat_policy(name: str) -> Callable:
  """The policy of jax.checkpoint that a name in REMAT (not 'none') means."""
  aliases = {
    'dots': 'dots_with_no_batch_dims_saveable',
    'full': 'nothing_saveable',
  }
  return getattr(jax.checkpoint_policies, aliases.get(name, name))


def check_choices(module: nn.Module, **choices: tuple[str, ...]) -> None:
  """Raises ValueError where a field is none of its choices."""
  for field, allowed in choices.items():
    if getattr(module, field) not in allowed:
      raise ValueError(
        f'{field} is {getattr(module, field)!r}; '
        f'choose one of {", ".join(allowed)}.'
      )


def check_rates(module: nn.Module, *fields: str) -> None:
  """Raises ValueError where a field is no share of less than 1."""
  for field in fields:
    if not 0 <= getattr(module, field) < 1:
      raise ValueError(
        f'{field} is {getattr(module, field)}; expected 0 <= {field} < 1.'
      )


def patchify(
  images: jax.Array, patch_size: int | tuple[int, int], *, reduction: int = 1
) -> jax.Array:
  """Cuts images into patches: [B, H, W, C] -> [B, gh, gw, ph, pw, C].

  Args:
    images: images; or feature maps of hybrids, if reduction > 1.
    patch_size: in pixels or cells of the feature map.
    reduction: pixels to the side of a cell, for the error only.

  Raises:
    ValueError: patches do not tile the images.
  """
  if isinstance(patch_size, int):
    patch_size = patch_size, patch_size
  ph, pw = patch_size
  batch, height, width, channels = images.shape
  if height % ph or width % pw or not height * width:
    near = [max(round(s / p), 1) * p for s, p in ((height, ph), (width, pw))]
    what = 'Images'
    if reduction > 1:
      what = f'Feature maps (images / {reduction})'
    raise ValueError(
      f'{what} of {height}x{width} (height x width) cannot be cut into patches '
      f'of {ph}x{pw}; the nearest image size that can is '
      f'{near[0] * reduction}x{near[1] * reduction}. Resize or crop the images '
      'to it, or choose another patch_size.'
    )
  x = images.reshape(batch, height // ph, ph, width // pw, pw, channels)
  return x.swapaxes(2, 3)


def embed_patches(
  images: jax.Array,
  patch_size: int | tuple[int, int],
  width: int,
  dtype: Any,
  *,
  reduction: int = 1,
) -> tuple[jax.Array, tuple[int, int]]:
  """[B, H, W, C] -> [B, gh * gw, D], and the grid (gh, gw)."""
  x = patchify(images, patch_size, reduction=reduction)
  batch, *grid = x.shape[:3]
  # A convolution whose stride is its kernel size is one matrix product.
  x = Affine(
    x.shape[3:], (width,), INIT['embedding'], dtype=dtype, name='embedding'
  )(x)
  return x.reshape(batch, -1, width), tuple(grid)


def replace_patches(
  patches: jax.Array, sources: jax.Array | None, mask: jax.Array | None
) -> jax.Array:
  """Puts other patches, or the mask vector, in the place of patches.

  Args:
    patches: [B, n, D].
    sources: int32 [B, n], the patch that each becomes; below 0 for the mask
      vector. None: each stays.
    mask: [1, 1, D], or None for a model that has none.

  Returns:
    [B, n, D].

  Raises:
    ValueError: there are sources but no mask vector, or not one for each patch.
  """
  if sources is None:
    return patches
  if mask is None:
    raise ValueError(
      'The model got patch_sources but has no mask vector; give it '
      'mask_token=True.'
    )
  if sources.shape != patches.shape[:2]:
    raise ValueError(
      f'patch_sources has shape {sources.shape}; these images have patches '
      f'{patches.shape[:2]}, and each needs one.'
    )
  sources = sources[..., None]
  moved = jnp.take_along_axis(patches, jnp.maximum(sources, 0), axis=1)
  return jnp.where(sources < 0, mask.astype(patches.dtype), moved)


def run_layers(
  layer: Callable,
  x: jax.Array,
  *,
  depth: int,
  skip_rate: float,
  scan: bool,
  remat: str,
  per_layer: bool,
  **fields,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Layers one after the other, 'block_0' on; or looped over, as 'blocks'.

  Args:
    layer: class of modules (x, skip rate or None) -> (x, x if per_layer).
    x: [B, N, D].
    depth: number of layers.
    skip_rate: stochastic depth's, of the last layer.
    scan: compile one layer and loop over stacked parameters.
    remat: name in REMAT.
    per_layer: whether each layer's output is wanted.
    **fields: of each layer.

  Returns:
    [B, N, D], and {'block_i': [B, N, D]}, empty if not per_layer.
  """
  rates = jnp.linspace(0, skip_rate, depth) if skip_rate else None
  fields['per_layer'] = per_layer
  if remat != 'none':
    # Inside a scan nothing can be merged with the forward pass anyway.
    layer = nn.remat(layer, policy=remat_policy(remat), prevent_cse=not scan)
  if scan:
    layer = nn.scan(
      layer,
      variable_axes={'params': 0, 'intermediates': 0},
      split_rngs={'params': True, 'dropout': True},
      length=depth,
    )
    x, outputs = layer(name='blocks', **fields)(x, rates)
  else:
    outputs = []
    for i in range(depth):
      rate = None if rates is None else rates[i]
      x, output = layer(name=f'block_{i}', **fields)(x, rate)
      outputs.append(output)
  x = keep_batch_split(x)
  if not per_layer:
    return x, {}
  return x, {f'block_{i}': outputs[i] for i in range(depth)}


def classify(x: jax.Array, num_classes: int, bias: float) -> jax.Array:
  """The head: [..., D] -> logits [..., K], in float32 whatever the dtype."""
  return Affine(
    x.shape[-1:],
    (num_classes,),
    INIT['head'],
    nn.initializers.constant(bias),
    name='head',
  )(x)
