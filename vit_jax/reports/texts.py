"""Numbers as texts of a page."""

import math
import re
from typing import Any


def percent(name: str, value: Any) -> str:
  """Return a metric in percent if it is a fraction, else with four digits."""
  if re.search(r'(accuracy|\dshot)$', name):
    return f'{100 * value:.1f}%'
  return number(value)


def number(value: Any) -> str:
  """Return a number with four digits, an integer with all of its digits."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return str(value)
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  if value == int(value) and abs(value) < 1e9:
    return f'{int(value):,}'
  return f'{value:.4g}'


def duration(seconds: float) -> str:
  """Return seconds as hours, minutes or seconds."""
  if seconds < 60:
    return f'{seconds:.3g} s'
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours:,} h {minutes} min' if hours else f'{minutes} min {seconds} s'
