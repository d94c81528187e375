"""Two names for one array: tables that are read in both directions.

A template such as 'blocks.{i}.norm1.weight' names many arrays; what stands in
braces is one part of a path, the same on both sides.
"""

import dataclasses
import re
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rule:
  """One name of theirs, one of ours, and what leads from array to array."""

  theirs: str  # 'blocks.{i}.norm1.weight'
  ours: str  # 'block_{i}/norm1/scale'
  to_ours: Callable = np.asarray
  to_theirs: Callable = np.asarray


def rename(arrays, rules, *, to):
  """Renames and converts arrays; the first rule that matches a name counts.

  Args:
    arrays: {name: array}, of theirs or of ours.
    rules: Rules.
    to: 'ours' or 'theirs'.

  Returns:
    (renamed, those that no rule names).
  """
  source = 'theirs' if to == 'ours' else 'ours'
  compiled = [
    (_pattern(getattr(r, source)), getattr(r, to), getattr(r, f'to_{to}'))
    for r in rules
  ]
  renamed, rest = {}, {}
  for name, array in arrays.items():
    for pattern, template, convert in compiled:
      if found := pattern.fullmatch(name):
        renamed[template.format(**found.groupdict())] = convert(array)
        break
    else:
      rest[name] = array
  return renamed, rest


def _pattern(template):
  parts = re.split(r'\{(\w+)\}', template)
  text, seen = '', set()
  for i, part in enumerate(parts):
    if i % 2 == 0:
      text += re.escape(part)
    else:
      text += f'(?P={part})' if part in seen else f'(?P<{part}>[^/.]+)'
      seen.add(part)
  return re.compile(text)
