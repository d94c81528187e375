"""Embedded fractals: FractalDB-like classes drawn from a seed.

A class is an iterated function system of n maps, float64 [n, 6]:
x' = a x + b y + e, y' = c x + d y + f, as in FractalDB, with contractive maps.

The images are the same on every machine. So this file uses only raw bits of
PCG64, whose stream numpy guarantees; +, -, *, / and sqrt, which IEEE 754 rounds
exactly, one numpy operation at a time in a fixed order (matmul, einsum and sum
may fuse or reorder); and directions by rejection in the disk, not by sine.
"""

import dataclasses
import functools
from typing import Annotated, Any

import numpy as np

from vit_jax.types import Count, Expect, Positive, Seed

_BURN_IN = 20
_STEPS = 64  # points of an orbit after the burn-in
_MIN_FILL = 0.2
_FILL_PX = 256
_POINTS_PER_PX = 0.38  # FractalDB: 100,000 points at 512 x 512
_CANVAS_PX = 256  # least side that an image is drawn at


@dataclasses.dataclass(kw_only=True, eq=False)
class Fractals:
  """Classes of 2-D iterated function systems: uint8 [size, size, 1], one each.

  The image of a class, see `render`, depends on (seed, class) only.

  Attributes:
    image_size: side in pixels, at least 8.
    spread: None, or width of the uniform distribution of what is added to all
      parameters of one fractal: class k is its perturbation k ("Scaling
      Backwards", Nakamura et al., 2024).
  """

  num_classes: Count = 1000
  image_size: Annotated[int, Expect(lambda n: n >= 8, 'at least 8')] = 32
  seed: Seed = 0
  spread: Positive | None = None

  def __len__(self) -> int:
    return self.num_classes

  def __getitem__(self, index: int) -> dict[str, Any]:
    label = range(len(self))[index]
    image = render(self.seed, label, self.image_size, self.spread)
    return {'image': image[..., None].copy(), 'label': label}


class _Stream:
  """Uniform random numbers from raw bits, whose stream never changes."""

  def __init__(self, *key: int) -> None:
    self._bits = np.random.PCG64(np.random.SeedSequence(key))

  def uniform(self, *shape):
    """Return float64 numbers in [0, 1)."""
    raw = self._bits.random_raw(int(np.prod(shape)))
    return ((raw >> np.uint64(11)) * 2.0**-53).reshape(shape)

  def bits16(self, count):
    """Return uint16 [count]."""
    raw = self._bits.random_raw(-(-count // 4))
    return raw.astype('<u8').view('<u2')[:count]

  def directions(self, count):
    """Return unit vectors of uniform direction: float64 [count], [count]."""
    x, y = np.empty(0), np.empty(0)
    while len(x) < count:
      u, v = 2 * self.uniform(2, 2 * count) - 1
      square = u * u + v * v
      inside = (square <= 1) & (square > 1e-4)
      norm = np.sqrt(square[inside])
      x = np.concatenate([x, u[inside] / norm])
      y = np.concatenate([y, v[inside] / norm])
    return x[:count], y[:count]


def sample_system(stream: _Stream) -> tuple[np.ndarray, np.ndarray]:
  """Draw 2 to 7 contractive maps: (system [n, 6], probabilities [n]).

  Each linear part is rotation . diag(+-s1, +-s2) . rotation, uniform under the
  condition that the sum of s1 + 2 s2 over the maps is in
  [(5 + n) / 2, (6 + n) / 2] (Anderson & Farrell); translations are uniform in
  (-1, 1). Probabilities are proportional to |det| = s1 s2.
  """
  n = 2 + int(6 * stream.uniform(1)[0])
  while True:
    s = stream.uniform(64, n, 2)
    s1, s2 = s.max(axis=2), s.min(axis=2)
    total = np.cumsum(s1 + 2 * s2, axis=1)[:, -1]
    fits = np.flatnonzero((total >= (5 + n) / 2) & (total <= (6 + n) / 2))
    if len(fits):
      s1, s2 = s1[fits[0]], s2[fits[0]]
      break
  (c1, c2), (n1, n2) = (v.reshape(2, n) for v in stream.directions(2 * n))
  sign1, sign2 = np.where(stream.uniform(2, n) < 0.5, -1.0, 1.0)
  r1, r2 = s1 * sign1, s2 * sign2
  a = c1 * r1 * c2 - n1 * r2 * n2
  b = -(c1 * r1 * n2) - n1 * r2 * c2
  c = n1 * r1 * c2 + c1 * r2 * n2
  d = c1 * r2 * c2 - n1 * r1 * n2
  e, f = 2 * stream.uniform(2, n) - 1
  det = s1 * s2
  return np.stack([a, b, c, d, e, f], axis=1), det / np.cumsum(det)[-1]


@functools.lru_cache(maxsize=64)
def category(seed: int, label: int) -> tuple[np.ndarray, np.ndarray]:
  """Return the system of a class: (system [n, 6], probabilities [n]).

  The first of the stream of (seed, label) whose points hit at least 0.2 of the
  pixels (FractalDB's rule).
  """
  stream = _Stream(seed, label)
  num_points = int(_POINTS_PER_PX * _FILL_PX * _FILL_PX)
  while True:
    system, probabilities = sample_system(stream)
    points = attractor(system, probabilities, num_points)
    if len(np.unique(_positions(points, _FILL_PX))) >= _MIN_FILL * _FILL_PX**2:
      return system, probabilities


def contractive(system: np.ndarray) -> np.ndarray:
  """Return a system whose expanding maps are divided by their norm."""
  system = system.copy()
  a, b, c, d = system[:, :4].T
  square = a * a + b * b + c * c + d * d
  det = a * d - b * c
  # The larger root of t^2 - square t + det^2, the squared singular values.
  root = np.sqrt(np.maximum(square * square - 4 * (det * det), 0))
  norm = np.sqrt((square + root) / 2)
  system[:, :4] /= np.maximum(norm, 1)[:, None]
  return system


def attractor(
  system: np.ndarray, probabilities: np.ndarray, num_points: int
) -> np.ndarray:
  """Play the chaos game for a system [n, 6]: x, y float64 [points].

  Many short orbits in parallel, without their first 20 points. All systems use
  the same sequence of random choices, as in FractalDB.
  """
  orbits = -(-num_points // _STEPS)
  steps = _BURN_IN + _STEPS
  # Probabilities become counts out of 2^16, so a choice is a table lookup.
  bounds = np.rint(np.cumsum(probabilities) * 65536).astype(np.int64)
  bounds[-1] = 65536
  table = np.repeat(np.arange(len(bounds)), np.diff(bounds, prepend=0))
  choices = table[_Stream(100).bits16(orbits * steps)].reshape(steps, orbits)
  x = y = np.zeros(orbits)
  kept = np.empty((2, _STEPS, orbits))
  for step, choice in enumerate(choices):
    a, b, c, d, e, f = system.T[:, choice]
    x, y = a * x + b * y + e, c * x + d * y + f
    if step >= _BURN_IN:
      kept[:, step - _BURN_IN] = x, y
  return kept.reshape(2, -1)


def _positions(points, side):
  """Return row * side + column of each point: int64 [points].

  Each axis is stretched to the image without its border: 3 of 512 pixels as in
  FractalDB, at least 1.
  """
  pad = max(1, side * 3 // 512)

  def place(v):
    span = np.maximum(v.max() - v.min(), 1e-12)
    pixel = ((v - v.min()) / span * (side - 2 * pad)).astype(np.int64)
    return np.minimum(pixel, side - 2 * pad - 1) + pad

  x, y = points
  return place(y) * side + place(x)


def perturbed(seed: int, label: int, spread: float) -> np.ndarray:
  """Return the system [n, 6] of class 0 with noise; no map expands."""
  system, _ = category(seed, 0)
  noise = _Stream(seed, label, 1).uniform(*system.shape) - 0.5
  return contractive(system + spread * noise)


@functools.lru_cache(maxsize=4096)  # of all runs of a study
def render(
  seed: int, label: int, image_size: int, spread: float | None = None
) -> np.ndarray:
  """Return the image of a class: uint8 [size, size].

  Each point is drawn as a random non-empty 3x3 patch, white (FractalDB: grey
  127) on black. An image below 256 px is drawn an integer factor larger and
  averaged, so it shows the texture in grey.
  """
  scale = max(1, -(-_CANVAS_PX // image_size))
  side = scale * image_size
  system, probabilities = category(seed, 0 if spread else label)
  if spread:
    system = perturbed(seed, label, spread)
  points = attractor(system, probabilities, int(_POINTS_PER_PX * side * side))
  positions = _positions(points, side)
  masks = 1 + _Stream(seed, label, 0).bits16(len(positions)) % 511
  image = _stamp(positions, masks, side)
  # Exact: a mean over scale^2 pixels of 0 or 255, rounded down.
  image = image.reshape(image_size, scale, image_size, scale)
  image = image.sum(axis=(1, 3), dtype=np.int64) * 255 // scale**2
  return image.astype(np.uint8)


def _stamp(positions, masks, side):
  """Draw a 3x3 patch at each position: uint8 [side, side], 0 or 1."""
  canvas = np.zeros(side * side, np.uint8)
  for bit in range(9):
    offset = (bit // 3 - 1) * side + bit % 3 - 1
    canvas[positions[masks & (1 << bit) != 0] + offset] = 1
  return canvas.reshape(side, side)
