"""Iterated function systems and their pictures, the same on every machine.

The formulas follow FractalDB with a contractive sampler of the maps. Nothing
here may round differently from one machine to the next, because one flipped
bit can move a point to another pixel. So: raw bits of PCG64, whose stream
numpy guarantees; +, -, *, / and sqrt, which IEEE 754 rounds exactly, one numpy
operation at a time in a fixed order (a matmul, an einsum or a float sum may
fuse or reorder); directions by rejection in the disk, not by sine and cosine.

Legend: n maps, R weight rows, W orbits in parallel, T steps.
A system is float64 [n, 6]: x' = a x + b y + e, y' = c x + d y + f.
"""

import functools

import numpy as np

NUM_ROWS = 25  # parameter weights: none, or one of 6 parameters x 4 factors
NUM_FLIPS = 4
_FACTORS = (0.2, 0.6, 1.4, 1.8)
_BURN_IN = 20
_STEPS = 64  # points an orbit gives after the burn-in
_MIN_FILL = 0.2
_FILL_PX = 256
_POINTS_PER_PX = 0.38  # FractalDB: 100,000 points at 512 x 512
_CANVAS_PX = 256  # least side that a picture is drawn at


class Stream:
  """Uniform numbers from raw bits: the same for ever, unlike Generator's."""

  def __init__(self, *key):
    self._bits = np.random.PCG64(np.random.SeedSequence(key))

  def uniform(self, *shape):
    """float64 in [0, 1)."""
    raw = self._bits.random_raw(int(np.prod(shape)))
    return ((raw >> np.uint64(11)) * 2.0**-53).reshape(shape)

  def bits16(self, count):
    """uint16 [count]."""
    raw = self._bits.random_raw(-(-count // 4))
    return raw.astype('<u8').view('<u2')[:count]

  def directions(self, count):
    """Unit vectors of uniform direction: float64 [count], [count]."""
    x, y = np.empty(0), np.empty(0)
    while len(x) < count:
      u, v = 2 * self.uniform(2, 2 * count) - 1
      square = u * u + v * v
      inside = (square <= 1) & (square > 1e-4)
      norm = np.sqrt(square[inside])
      x = np.concatenate([x, u[inside] / norm])
      y = np.concatenate([y, v[inside] / norm])
    return x[:count], y[:count]


def sample_system(stream):
  """Draws 2 to 7 contractive maps: (system [n, 6], probabilities [n]).

  Each linear part is rotation . diag(+-s1, +-s2) . rotation with
  s2 <= s1 <= 1, uniform under the condition that the sum of s1 + 2 s2 over the
  maps is in [(5 + n) / 2, (6 + n) / 2] (Anderson & Farrell); translations are
  uniform in (-1, 1). Probabilities are proportional to |det| = s1 s2.
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
def category(seed, label):
  """The system of a class: the first that its stream draws with enough fill.

  FractalDB's rule: at least 0.2 of the pixels are hit. Depends on (seed,
  label) alone. Returns (system [n, 6], probabilities [n]).
  """
  stream = Stream(seed, label)
  while True:
    system, probabilities = sample_system(stream)
    if fill(system, probabilities) >= _MIN_FILL:
      return system, probabilities


def fill(system, probabilities):
  """Share of 256x256 pixels that 24,903 points of the attractor hit."""
  num_points = int(_POINTS_PER_PX * _FILL_PX * _FILL_PX)
  x, y = attractor(system[None], probabilities, num_points)
  position = _positions(x, y, _FILL_PX)[0]
  hit = np.zeros(_FILL_PX * _FILL_PX, bool)
  hit[position] = True
  return np.count_nonzero(hit) / hit.size


def weighted(system, row):
  """A system with one parameter of all maps scaled: row 0 is the identity.

  Row 1 + 4 p + q multiplies parameter p (a to f) by the q-th factor. A map
  that would expand is divided by its spectral norm.
  """
  if row == 0:
    return system
  parameter, factor = divmod(row - 1, len(_FACTORS))
  system = system.copy()
  system[:, parameter] *= _FACTORS[factor]
  a, b, c, d = system[:, :4].T
  square = a * a + b * b + c * c + d * d
  det = a * d - b * c
  # The larger root of t^2 - square t + det^2, the squared singular values.
  root = np.sqrt(np.maximum(square * square - 4 * (det * det), 0))
  norm = np.sqrt((square + root) / 2)
  system[:, :4] /= np.maximum(norm, 1)[:, None]
  return system


def attractor(systems, probabilities, num_points):
  """Chaos game for R systems [R, n, 6] of one law: x, y float64 [R, >= P].

  Many short orbits at once, their first 20 points dropped. The sequence of
  random choices is one and the same for every system, as in FractalDB.
  """
  orbits = -(-num_points // _STEPS)
  steps = _BURN_IN + _STEPS
  # Probabilities become counts of 2^16, so that a choice is a table look-up.
  bounds = np.rint(np.cumsum(probabilities) * 65536).astype(np.int64)
  bounds[-1] = 65536
  table = np.repeat(np.arange(len(bounds)), np.diff(bounds, prepend=0))
  choices = table[_draws(orbits * steps)].reshape(steps, orbits)
  parameters = np.ascontiguousarray(np.moveaxis(systems, 2, 0))
  x = y = np.zeros((len(systems), orbits))
  kept = np.empty((2, _STEPS, *x.shape))
  for step, choice in enumerate(choices):
    a, b, c, d, e, f = np.take(parameters, choice, axis=2)
    x, y = a * x + b * y + e, c * x + d * y + f
    if step >= _BURN_IN:
      kept[:, step - _BURN_IN] = x, y
  return np.moveaxis(kept, 1, 2).reshape(2, len(systems), -1)


@functools.lru_cache(maxsize=4)
def _draws(count):
  return Stream(100).bits16(count)


def _positions(x, y, side):
  """Pixel of each point, the axes stretched apart: int64 [R, P] into side^2.

  The border that stays free is FractalDB's, 3 of 512 pixels, at least 1.
  """
  pad = max(1, side * 3 // 512)

  def place(v):
    low = v.min(axis=1, keepdims=True)
    span = np.maximum(v.max(axis=1, keepdims=True) - low, 1e-12)
    pixel = ((v - low) / span * (side - 2 * pad)).astype(np.int64)
    return np.minimum(pixel, side - 2 * pad - 1) + pad

  return place(y) * side + place(x)


def render_category(seed, label, count, image_size):
  """The first `count` images of a class: uint8 [count, size, size].

  Image i has weight row i % 25, flip (i // 25) % 4 (none, vertical,
  horizontal, both) and patch pattern i // 100: FractalDB's grid of 25 x 4 x
  10, continued with further patterns. Each point is stamped as a 3x3 patch
  drawn from the 511 that are not empty, white (FractalDB: grey 127) on black.
  An image under 256 px is drawn a whole number of times larger and averaged,
  so that small images, too, show the texture in grey.
  """
  scale = max(1, -(-_CANVAS_PX // image_size))
  side = scale * image_size
  system, probabilities = category(seed, label)
  rows = min(count, NUM_ROWS)
  systems = np.stack([weighted(system, row) for row in range(rows)])
  points = attractor(systems, probabilities, int(_POINTS_PER_PX * side * side))
  positions = _positions(*points, side)
  images = np.empty((count, image_size, image_size), np.uint8)
  per_pattern = NUM_ROWS * NUM_FLIPS
  for first in range(0, count, per_pattern):
    stream = Stream(seed, label, first // per_pattern)
    masks = 1 + stream.bits16(positions.shape[1]) % 511
    for row in range(min(rows, count - first)):
      image = _stamp(positions[row], masks, side)
      # Exact: a mean over scale^2 pixels of 0 or 255, rounded down.
      image = image.reshape(image_size, scale, image_size, scale)
      image = image.sum(axis=(1, 3), dtype=np.int64) * 255 // scale**2
      flips = (image, image[::-1], image[:, ::-1], image[::-1, ::-1])
      for flip, flipped in enumerate(flips):
        index = first + flip * NUM_ROWS + row
        if index < count:
          images[index] = flipped
  return images


def _stamp(positions, masks, side):
  """Draws a 3x3 patch at each pixel number: uint8 [side, side], 0 or 1."""
  canvas = np.zeros(side * side, np.uint8)
  for bit in range(9):
    offset = (bit // 3 - 1) * side + bit % 3 - 1
    canvas[positions[masks & (1 << bit) != 0] + offset] = 1
  return canvas.reshape(side, side)
