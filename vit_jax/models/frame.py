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
  images: jax.Array,
  patch_size: int | tuple[int, int],
  *,
  stride: int | tuple[int, int] | None = None,
  reduction: int = 1,
) -> jax.Array:
  """Cuts images into patches: [B, H, W, C] -> [B, gh, gw, ph, pw, C].

  Args:
    images: images; or feature maps of hybrids, if reduction > 1.
    patch_size: in pixels or cells of the feature map.
    stride: from one patch to the next, in the same; patches overlap where it is
      smaller than they are. None: their size.
    reduction: pixels to the side of a cell, for the error only.

  Raises:
    ValueError: patches do not tile the images, or the stride leaves gaps.
  """
  patch, step = as_pair(patch_size), as_pair(stride or patch_size)
  if not all(0 < s <= p for s, p in zip(step, patch)):
    raise ValueError(
      f'patch_stride is {step[0]}x{step[1]} for patches of {patch[0]}x'
      f'{patch[1]}; expected 1 or more, and no more than a patch. Choose that, '
      'or None for patches side by side.'
    )
  batch, *sides, channels = images.shape
  if any(n < p or (n - p) % s for n, p, s in zip(sides, patch, step)):
    near = [
      max(round((n - p) / s), 0) * s + p for n, p, s in zip(sides, patch, step)
    ]
    what = 'Images'
    if reduction > 1:
      what = f'Feature maps (images / {reduction})'
    every = '' if step == patch else f' every {step[0]}x{step[1]}'
    raise ValueError(
      f'{what} of {sides[0]}x{sides[1]} (height x width) cannot be cut into '
      f'patches of {patch[0]}x{patch[1]}{every}; the nearest image size that '
      f'can is {near[0] * reduction}x{near[1] * reduction}. Resize or crop the '
      'images to it, or choose another patch_size.'
    )
  if step == patch:
    ph, pw = patch
    x = images.reshape(batch, sides[0] // ph, ph, sides[1] // pw, pw, channels)
    return x.swapaxes(2, 3)
  rows, cols = (
    jnp.arange(0, n - p + 1, s)[:, None] + jnp.arange(p)[None]
    for n, p, s in zip(sides, patch, step)
  )
  return images[:, rows][:, :, :, cols].swapaxes(2, 3)


def as_pair(size: int | tuple[int, int]) -> tuple[int, int]:
  """(height, width) of what is given by one number, or by both."""
  return (size, size) if isinstance(size, int) else tuple(size)


def embed_patches(
  images: jax.Array,
  patch_size: int | tuple[int, int],
  width: int,
  dtype: Any,
  *,
  stride: int | tuple[int, int] | None = None,
  reduction: int = 1,
) -> tuple[jax.Array, tuple[int, int]]:
  """[B, H, W, C] -> [B, gh * gw, D], and the grid (gh, gw)."""
  x = patchify(images, patch_size, stride=stride, reduction=reduction)
  batch, *grid = x.shape[:3]
  # A convolution whose stride is its kernel size is one matrix product.
  x = Affine(
    x.shape[3:], (width,), INIT['embedding'], dtype=dtype, name='embedding'
  )(x)
  return x.reshape(batch, -1, width), tuple(grid)


def replace_patches(
  module: nn.Module, patches: jax.Array, sources: jax.Array | None
) -> jax.Array:
  """Puts other patches, or the mask vector, in the place of patches.

  Args:
    module: gets the parameter 'mask' [1, 1, D] if its mask_token says so.
    patches: [B, n, D].
    sources: int32 [B, n], the patch that each becomes; below 0 for the mask
      vector. None: each stays.

  Returns:
    [B, n, D].

  Raises:
    ValueError: there are sources but no mask vector, or not one for each patch.
  """
  if module.mask_token:
    mask = module.param('mask', INIT['mask'], (1, 1, patches.shape[-1]))
  if sources is None:
    return patches
  if not module.mask_token:
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
  shared: tuple[jax.Array, ...] = (),
  **fields,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Layers one after the other, 'block_0' on; or looped over, as 'blocks'.

  Args:
    layer: class of modules (x, skip rate or None, *shared) -> (x, x if
      per_layer).
    x: [B, N, D].
    depth: number of layers.
    skip_rate: stochastic depth's, of the last layer.
    scan: compile one layer and loop over stacked parameters.
    remat: name in REMAT.
    per_layer: whether each layer's output is wanted.
    shared: what all layers get besides.
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
      in_axes=(0, *(nn.broadcast for _ in shared)),
      length=depth,
    )
    x, outputs = layer(name='blocks', **fields)(x, rates, *shared)
  else:
    outputs = []
    for i in range(depth):
      rate = None if rates is None else rates[i]
      x, output = layer(name=f'block_{i}', **fields)(x, rate, *shared)
      outputs.append(output)
  x = keep_batch_split(x)
  if not per_layer:
    return x, {}
  return x, {f'block_{i}': outputs[i] for i in range(depth)}


def read_out(module: nn.Module, x: jax.Array) -> dict[str, jax.Array]:
  """[..., D] -> 'pooled', 'pre_logits' and, where there are classes, 'logits'.

  Args:
    module: its fields say whether there is a tanh layer and a head.
    x: of the pooling.
  """
  out = {'pooled': x}
  if module.representation_size:
    outputs, init = (module.representation_size,), INIT['pre_logits']
    affine = Affine(
      x.shape[-1:], outputs, init, dtype=module.dtype, name='pre_logits'
    )
    x = jnp.tanh(affine(x))
  out['pre_logits'] = x
  if module.num_classes:
    out['logits'] = classify(x, module.num_classes, module.head_bias_init)
  return out


def classify(x: jax.Array, num_classes: int, bias: float) -> jax.Array:
  """The head: [..., D] -> logits [..., K], in float32 whatever the dtype."""
  return Affine(
    x.shape[-1:],
    (num_classes,),
    INIT['head'],
    nn.initializers.constant(bias),
    name='head',
  )(x)
