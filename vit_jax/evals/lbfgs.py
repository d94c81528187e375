"""L-BFGS for smooth convex functions, by their gradients alone.

Close to the minimum the differences of a loss drown in the rounding of float32
long before its gradient does, and a line search that compares losses, as
scipy's does, gives up there. Of a convex function the slope tells enough.
(Nocedal and Wright, Numerical Optimization, 2006, algorithms 7.4 and 7.5.)
"""

import numpy as np


def minimise(gradient, start, *, tol, max_iter, memory=10):
  """(x, gradient at x, whether no component of it is above tol).

  Args:
    gradient: float64 [n] -> float64 [n].
    start: float64 [n].
    tol: where to stop.
    max_iter: steps; each takes one evaluation of the gradient, seldom more.
    memory: pairs of steps and changes of the gradient that are kept.

  Stops early where rounding leaves no step that lessens the slope.
  """
  x, g = start, gradient(start)
  pairs = []
  for _ in range(max_iter):
    if np.abs(g).max() <= tol:
      break
    direction = -_times_inverse_hessian(g, pairs)
    length = 1.0 if pairs else min(1.0, 1 / np.linalg.norm(g))
    found = _line_search(gradient, x, direction, g @ direction, length)
    if found is None:
      break
    x_next, g_next = found
    step, change = x_next - x, g_next - g
    x, g = x_next, g_next
    if step @ change > 0:
      pairs = [*pairs, (step, change)][-memory:]
  return x, g, bool(np.abs(g).max() <= tol)


def _times_inverse_hessian(g, pairs):
  """Of the estimate that the pairs make, without forming it."""
  q, factors = g.copy(), []
  for step, change in reversed(pairs):
    factor = (step @ q) / (step @ change)
    q -= factor * change
    factors.append(factor)
  if pairs:
    step, change = pairs[-1]
    q *= (step @ change) / (change @ change)
  for (step, change), factor in zip(pairs, reversed(factors)):
    q += (factor - (change @ q) / (step @ change)) * step
  return q


def _line_search(gradient, x, direction, slope, length, tries=20):
  """(x, gradient) on the line where the slope has lessened; None if nowhere.

  Its size falls to 0.9 of that at the start, or half, if uphill: of a convex
  function, this is a decrease.
  """
  low, slope_low, high, slope_high = 0.0, slope, None, None
  for _ in range(tries):
    there = x + length * direction
    g = gradient(there)
    found = g @ direction
    if 0.9 * slope <= found <= -0.5 * slope:
      return there, g
    if found < 0:
      low, slope_low = length, found
    else:
      high, slope_high = length, found
    if high is None:
      length *= 4
    else:
      # Where a straight line between the two slopes is zero, not too near them.
      part = slope_low / (slope_low - slope_high)
      length = low + np.clip(part, 0.1, 0.9) * (high - low)
  return None
