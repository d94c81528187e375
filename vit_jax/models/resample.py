"""Resizing of parameters: position embeddings and patch kernels."""

import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.types import Array, Shape, UserError

Method = Literal[
  'paper',
  'paper_square',
  'bilinear',
  'bilinear_antialias',
  'bilinear_square',
  'bicubic',
  'bicubic_antialias',
  'dinov2_offset',
  'geometric',
]
METHODS: tuple[str, ...] = get_args(Method)
_ANTIALIAS = {'bilinear_antialias': 'linear', 'bicubic_antialias': 'cubic'}
# Parameters that the pixels of an image are multiplied with, [ph, pw, C, D].
PIXEL_KERNELS = ('embedding/kernel', 'resnet/root/conv/kernel')


def resize(table: Any, size: tuple[int, int], method: str = 'paper') -> Any:
  """Resize embeddings [..., gh, gw, D] to a grid (height, width) (section 3.2).

  'paper' is linear interpolation that keeps the corners in place, as in the
  paper's released code (scipy.ndimage.zoom). Others treat a cell as an area
  with a centre (half-pixel), as PyTorch does: 'bilinear' and 'bicubic', and
  both with '_antialias' where the grid shrinks (timm's is
  'bicubic_antialias'). 'dinov2_offset' is 'bicubic' whose scale is (n + 0.1) /
  old, as in DINOv2's code for models without registers. '_square' resizes a
  square to one with the larger side, and crops at the top left (RADIO); it
  resizes each axis of a table that is no square, as timm does. 'geometric' is
  BEiT's for relative positions: cells of the old table lie at distances from
  its middle that grow by a factor, so that near ones stay.

  NumPy arrays are resized in float64; JAX arrays on device, with a gradient.
  """
  if tuple(size) == table.shape[-3:-1]:
    return table
  *_, height, width, _ = table.shape
  crops = method.endswith('_square') and height == width
  sides = (max(size), max(size)) if crops else size
  rows = _weights(height, sides[0], method)[: size[0]]
  cols = _weights(width, sides[1], method)[: size[1]]
  spec = 'ih,jw,...hwd->...ijd'
  if isinstance(table, jax.Array):
    return jnp.einsum(spec, rows, cols, table, precision='highest')
  wide = (np.asarray(x, np.float64) for x in (rows, cols, table))
  return np.einsum(spec, *wide, optimize=True).astype(table.dtype)


def at_places(table: Any, places: Any, sizes: Any) -> jax.Array:
  """Return table [gh, gw, D] by 'bilinear_antialias' at places of grids.

  The places [B, n, 2] are row and column in grids of `sizes` [B, 2].
  """

  def triangles(axis):
    scale = (table.shape[axis] / sizes[:, axis])[:, None, None]
    centre = (places[..., axis, None] + 0.5) * scale - 0.5
    distance = jnp.abs(jnp.arange(table.shape[axis])[None, None] - centre)
    weights = jnp.maximum(0, 1 - distance / jnp.maximum(scale, 1))
    return weights / weights.sum(axis=-1, keepdims=True)

  weights = triangles(0)[..., None] * triangles(1)[..., None, :]
  return jnp.einsum('bnhw,hwd->bnd', weights, table, precision='highest')


def resize_kernel(
  kernel: Any, size: tuple[int, ...], method: str = 'bicubic_antialias'
) -> Any:
  """Resize a kernel [ph, pw, C, D] to patches (height, width), in pixels.

  With B the matrix that resizes an old patch x to a new one, the new kernel is
  pinv(Bᵀ) w. A resized patch then gets the embedding of the old patch as nearly
  as possible: (B x)ᵀ pinv(Bᵀ) w = xᵀ w where patches grow ("FlexiViT"). The
  default method is timm's. NumPy and JAX arrays as in `resize`.
  """
  if tuple(size) == kernel.shape[:2]:
    return kernel
  # B resizes rows and columns separately, and so does its pseudo-inverse.
  rows, cols = (_inverse(*x, method) for x in zip(kernel.shape, size))
  spec = 'ih,jw,hwcd->ijcd'
  if isinstance(kernel, jax.Array):
    rows, cols = np.float32(rows), np.float32(cols)
    return jnp.einsum(spec, rows, cols, kernel, precision='highest')
  out = np.einsum(spec, rows, cols, kernel.astype(np.float64), optimize=True)
  return out.astype(kernel.dtype)


@functools.cache
def _inverse(old, new, method):
  """Return pinv(Bᵀ), float64 [new, old], also while a program is traced."""
  with jax.ensure_compile_time_eval(), jax.transfer_guard('allow'):
    weights = np.asarray(_weights(old, new, method), np.float64)
  return np.linalg.pinv(weights.T)


def resize_parameter(
  model: Any,
  path: str,
  array: Array,
  shape: Shape,
  *,
  posemb_resize: str = 'paper',
  patch_resize: str | None = None,
  adapt_channels: bool | Literal['mean'] = False,
) -> np.ndarray | None:
  """Fit a parameter to other image sizes, patch sizes or channels, if possible.

  Args:
    model: model that the parameter is for; its `posemb` resizes its own tables.
    path, array, shape: its path, value in another model, and shape in this one;
      None is returned if it cannot have that shape.
    posemb_resize: method for position embeddings, one of METHODS.
    patch_resize: method for patches; None: their size must not differ.
    adapt_channels: whether channels of images may be summed to one, or repeated
      and scaled to more (as timm does); 'mean': each gets the mean of the old
      ones, scaled.
  """
  array, shape = np.asarray(array), tuple(shape)
  if posemb := getattr(model, 'posemb', None):
    out = posemb.resize(path.rsplit('/', 1)[-1], array, shape, posemb_resize)
    if out is not None:
      return out
  if path not in PIXEL_KERNELS or array.ndim != len(shape):
    return None
  old, new = array.shape[2], shape[2]
  if adapt_channels and new == 1:
    array = array.sum(axis=2, keepdims=True)
  elif adapt_channels and new != old:
    if adapt_channels == 'mean':
      array = np.repeat(array.mean(axis=2, keepdims=True), old, axis=2)
    array = array[:, :, np.arange(new) % old]
    array = array * np.asarray(old / new, array.dtype)
  if patch_resize and shape[:2] != array.shape[:2]:
    array = resize_kernel(array, (shape[0], shape[1]), patch_resize)
  return array if array.shape == shape else None


def _weights(old, new, method):
  """Return the [new, old] matrix that resamples one axis; rows sum to 1."""
  units, places = np.eye(old, dtype=np.float32), np.arange(old)
  if method in _ANTIALIAS:
    return jax.image.resize(units, (new, old), _ANTIALIAS[method])
  if method in ('bicubic', 'dinov2_offset'):
    scale = (new + 0.1 * (method == 'dinov2_offset')) / old
    run = jax.jit(jax.image.scale_and_translate, static_argnums=(1, 2, 5, 6))
    return run(
      *(units, (new, old), (0,)),
      *(np.float32([scale]), np.zeros(1, np.float32), 'cubic-pytorch', False),
    )
  if method in ('paper', 'paper_square'):
    at = np.linspace(0, old - 1, new)
  elif method in ('bilinear', 'bilinear_square'):
    at = (np.arange(new) + 0.5) * old / new - 0.5
  elif method == 'geometric':
    at, places = np.arange(new) - new // 2, _geometric(old // 2, new // 2)
  else:
    raise UserError(f'method={method!r} must be one of {METHODS}.')
  return np.stack([np.interp(at, places, x) for x in units], axis=1)


def _geometric(steps, end):
  """Return places from -end to end, whose distances grow from 1 at 0."""
  low, high = 1.01, 1.5
  while high - low > 1e-6:  # bisection, as in BEiT's code
    factor = (low + high) / 2
    is_long = (factor**steps - 1) / (factor - 1) > end
    low, high = (low, factor) if is_long else (factor, high)
  places = np.cumsum(factor ** np.arange(steps))
  return np.concatenate([-places[::-1], [0], places])
