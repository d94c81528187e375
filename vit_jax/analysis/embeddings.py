"""Principal components of filters and patches; similarity of positions."""

from collections.abc import Sequence

import numpy as np

from vit_jax.types import Array


def filters(kernel: Array, count: int = 28) -> tuple[np.ndarray, np.ndarray]:
  """Return principal components of patch embedding filters (Fig. 7 left).

  The D columns of the kernel [ph, pw, C, D] are filters; their mean is
  subtracted first. The largest entry of a component is positive.

  Returns:
    (components [n, ph, pw, C] of length one, fractions [n] of the variance),
    the largest first; n is at most count, ph * pw * C, and D - 1.
  """
  kernel = np.asarray(kernel, np.float64)
  *shape, dim = kernel.shape
  rows, shares = _principal(kernel.reshape(-1, dim).T, min(count, dim - 1))
  return rows.reshape(-1, *shape).astype(np.float32), shares


def _principal(points, count):
  """Return components [count, D] of points [n, D], and their fractions."""
  # The triangle of a QR decomposition has the same components, in fewer rows.
  triangle = np.linalg.qr(points - points.mean(axis=0), mode='r')
  _, singular, rows = np.linalg.svd(triangle, full_matrices=False)
  largest = np.abs(rows).argmax(axis=1)[:, None]
  rows *= np.sign(np.take_along_axis(rows, largest, axis=1))
  shares = singular**2 / max((singular**2).sum(), 1e-30)
  return rows[:count], shares[:count].astype(np.float32)


def tiles(components: Array) -> np.ndarray:
  """Return components [n, ph, pw, C] as images in [0, 1]: [n, H, W, 3].

  0 becomes mid-grey. Three channels are red, green and blue; any other number
  becomes grey images one below the other (H = C * ph).
  """
  components = np.asarray(components)
  n, ph, pw, channels = components.shape
  largest = np.abs(components).max(axis=(1, 2, 3), keepdims=True)
  scaled = 0.5 + components / (2 * np.maximum(largest, 1e-30))
  if channels != 3:
    scaled = np.moveaxis(scaled, 3, 1).reshape(n, channels * ph, pw, 1)
  return np.broadcast_to(scaled, (*scaled.shape[:3], 3))


def patch_components(
  maps: Array, count: int = 3
) -> tuple[np.ndarray, np.ndarray]:
  """Return principal components of all patches, maps [n, gh, gw, D].

  They are float32 [n, gh, gw, count]; with them come their fractions of the
  variance. The largest weight of a component is positive.
  """
  points = np.asarray(maps, np.float64)
  points = points - points.mean(axis=(0, 1, 2))
  rows, shares = _principal(points.reshape(-1, points.shape[-1]), count)
  return (points @ rows.T).astype(np.float32), shares


def colours(components: np.ndarray) -> np.ndarray:
  """Return three components [..., 3] as red, green, blue, uint8."""
  axes = tuple(range(components.ndim - 1))
  low, high = np.percentile(components, (1, 99), axis=axes)
  scaled = (components - low) / np.maximum(high - low, 1e-30)
  return (255 * np.clip(scaled, 0, 1)).astype(np.uint8)


def enlarge(values: np.ndarray, shape: Sequence[int]) -> np.ndarray:
  """Return [gh, gw, ...] as [H, W, ...]; each pixel has its cell's value."""
  sides = zip(shape[:2], values.shape)
  rows, columns = (np.arange(n) * cells // n for n, cells in sides)
  return values[rows][:, columns]


def similarity(table: Array) -> np.ndarray:
  """Return the cosine of each pair of patches or positions (Figs. 7, 10).

  The table is [gh, gw, D]. [i, j] of the float32 [gh, gw, gh, gw] is the map of
  similarities to the patch in row i, column j; 0 for an embedding of zeros.
  """
  table = np.asarray(table, np.float64)
  norms = np.linalg.norm(table, axis=-1, keepdims=True)
  unit = table / np.where(norms > 0, norms, 1)
  cosines = np.einsum('ijd,mnd->ijmn', unit, unit, optimize=True)
  return np.clip(cosines, -1, 1).astype(np.float32)


def representatives(cosines: np.ndarray, count: int) -> np.ndarray:
  """Return the places [count, 2] of patches that represent an image.

  They are chosen one by one, so that the mean over all patches of the cosine to
  the closest of them is as large as possible. `cosines` are from `similarity`.
  """
  rows = cosines.reshape(-1, cosines[0, 0].size)
  chosen, closest = [], np.full(len(rows), -1.0)
  for _ in range(count):
    chosen.append(np.maximum(rows, closest).sum(axis=1).argmax())
    closest = np.maximum(closest, rows[chosen[-1]])
  return np.stack(np.unravel_index(chosen, cosines.shape[:2]), axis=1)
