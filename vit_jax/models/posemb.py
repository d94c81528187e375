"""Position embeddings: the fixed 2-D sines, and resizing of learned grids.

Arrays in, arrays out; a grid is [gh, gw, D], rows first. The kernels of patch
embeddings are resized here, too, by the same weights.
"""

import numpy as np

RESIZE_METHODS = ('paper', 'bilinear', 'bicubic_antialias')


def sincos2d(
  grid: tuple[int, int], width: int, *, temperature: float = 10_000.0
) -> np.ndarray:
  """Fixed sine and cosine position embeddings of a grid, one row per cell.

  With ω_i = temperature^(-i / (width/4 - 1)), i = 0 .. width/4 - 1, the cell
  in row y and column x gets [sin ωx, cos ωx, sin ωy, cos ωy] ("Better plain
  ViT baselines for ImageNet-1k", section 2).

  Returns:
    float32 [gh, gw, width].

  Raises:
    ValueError: width is not a multiple of 4, or is below 8.
  """
  if width % 4 or width < 8:
    raise ValueError(
      f'sincos2d positions got width {width}, expected a multiple of 4 from 8 '
      "up; use posemb='learned' or another width."
    )
  omega = temperature ** -(np.arange(width // 4) / (width // 4 - 1))
  y, x = np.mgrid[: grid[0], : grid[1]]
  x, y = x[..., None] * omega, y[..., None] * omega
  waves = [np.sin(x), np.cos(x), np.sin(y), np.cos(y)]
  return np.concatenate(waves, axis=-1).astype(np.float32)


def resize(
  table: np.ndarray, size: tuple[int, int], method: str = 'paper'
) -> np.ndarray:
  """Resizes a grid of embeddings to another grid (paper section 3.2).

  'paper' is linear interpolation with the corners kept in place, as the
  paper's released code does it. 'bilinear' and 'bicubic_antialias' take a cell
  for an area with a centre (half-pixel), as image libraries do; PyTorch models
  were mostly fine-tuned with one of these two. From 14x14 to 24x24 they differ
  from 'paper' by 5% of the norm on smooth tables and 26% on noise.

  Args:
    table: [..., gh, gw, D].
    size: (height, width) of the new grid, in cells.
    method: one of RESIZE_METHODS.

  Returns:
    [..., height, width, D] in the dtype of the table; computed in float64.
  """
  _check_method(method)
  table = np.asarray(table)
  if table.ndim < 3 or min(size) < 1:
    raise ValueError(
      f'Cannot resize a table of shape {table.shape} to the grid {size}; '
      'expected a table [..., gh, gw, D] and two sizes of 1 or more.'
    )
  rows = _weights(table.shape[-3], size[0], method)
  cols = _weights(table.shape[-2], size[1], method)
  out = np.einsum(
    'ih,jw,...hwd->...ijd', rows, cols, table.astype(np.float64), optimize=True
  )
  return out.astype(table.dtype)


def resize_offsets(table: np.ndarray, size: tuple[int, int]) -> np.ndarray:
  """Resizes the embeddings of relative positions to another grid of patches.

  The paper does not say how. A difference of patch numbers is taken for so many
  rows and, as few as can be, columns; both are measured in units of the grid's
  last row and column, and embeddings between four known ones are interpolated.

  Args:
    table: [..., 2 gh, gw, h, d], as positions.py has it.
    size: (height, width) of the new grid, in patches.

  Returns:
    [..., 2 height, width, h, d] in the dtype of the table.
  """
  *batch, rows, width, heads, dim = table.shape
  old = table.reshape(*batch, rows * width, heads, dim).astype(np.float64)
  offsets = np.arange(-size[0] * size[1], size[0] * size[1])
  dy = np.round(offsets / size[1]) if size[0] > 1 else 0 * offsets
  dx = offsets - dy * size[1]
  dy = dy * (rows / 2 - 1) / max(size[0] - 1, 1)
  dx = dx * (width - 1) / max(size[1] - 1, 1)
  out = 0
  for y, y_weight in _neighbours(dy):
    for x, x_weight in _neighbours(dx):
      cell = (rows // 2 + y) * width + x
      # The first cell is of the class token alone, see positions.py.
      cell = np.clip(cell, offsets > offsets[0], rows * width - 1)
      found = old[..., cell, :, :]
      out = out + (y_weight * x_weight)[:, None, None] * found
  out = out.reshape(*batch, 2 * size[0], size[1], heads, dim)
  return out.astype(table.dtype)


def _neighbours(at):
  """(whole numbers below, weights), (above, weights)."""
  below = np.floor(at)
  weight = at - below
  return (below.astype(int), 1 - weight), (below.astype(int) + 1, weight)


def resize_kernel(
  kernel: np.ndarray, size: tuple[int, int], method: str = 'bicubic_antialias'
) -> np.ndarray:
  """Resizes a patch embedding to patches of another size, by pseudo-inverse.

  With B the matrix that resizes an old patch x to a new one, the new kernel is
  pinv(Bᵀ) w, so that patches which are resized get, as nearly as can be, the
  embedding they had: (B x)ᵀ pinv(Bᵀ) w = xᵀ w where patches grow ("FlexiViT").
  The default method is timm's.

  Args:
    kernel: [ph, pw, C, D].
    size: (height, width) of the new patches, in pixels.
    method: one of RESIZE_METHODS.

  Returns:
    [height, width, C, D] in the dtype of the kernel; computed in float64.
  """
  _check_method(method)
  # B resizes rows and columns apart, and so does its pseudo-inverse.
  rows = np.linalg.pinv(_weights(kernel.shape[0], size[0], method).T)
  cols = np.linalg.pinv(_weights(kernel.shape[1], size[1], method).T)
  out = np.einsum(
    'ih,jw,hwcd->ijcd', rows, cols, kernel.astype(np.float64), optimize=True
  )
  return out.astype(kernel.dtype)


def _check_method(method):
  if method not in RESIZE_METHODS:
    raise ValueError(
      f'Unknown resize method {method!r}; '
      f'choose one of {", ".join(RESIZE_METHODS)}.'
    )


def _weights(old, new, method):
  """[new, old] matrix that resamples one axis; each row sums to 1."""
  if method == 'paper':
    at = np.linspace(0, old - 1, new)
  else:
    at = (np.arange(new) + 0.5) * old / new - 0.5
  if method == 'bicubic_antialias':
    # A coarser grid averages over more cells: the kernel is stretched.
    distance = np.abs(at[:, None] - np.arange(old)) / max(old / new, 1)
    weights = _cubic(distance)
  else:
    at = np.clip(at, 0, old - 1)
    weights = np.maximum(1 - np.abs(at[:, None] - np.arange(old)), 0)
  return weights / weights.sum(axis=1, keepdims=True)


def _cubic(x, a=-0.5):
  """Keys' cubic kernel; a = -0.5 is what antialiasing resizers use."""
  near = (a + 2) * x**3 - (a + 3) * x**2 + 1
  far = a * (x**3 - 5 * x**2 + 8 * x - 4)
  return np.where(x < 1, near, np.where(x < 2, far, 0))
