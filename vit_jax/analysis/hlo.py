"""Parser of optimized HLO text: computations, instructions, shapes."""

import dataclasses
import math
import re

_BITS = {'pred': 8, 's4': 4, 'u4': 4, 's2': 2, 'u2': 2, 'c64': 64, 'c128': 128}
_ARRAY = re.compile(r'\b(pred|[sufc]\d+\w*|bf16)\[([\d,]*)\]')
_HEADER = re.compile(r'(ENTRY )?%?([\w.\-]+) .*\{$')
_LINE = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = (.*)')


@dataclasses.dataclass(frozen=True)
class Instruction:
  """name = shape op(operands), rest; `text` is the text inside ()."""

  name: str
  shape: str
  op: str
  operands: tuple[str, ...]
  text: str
  rest: str
  is_root: bool

  def attribute(self, name: str) -> str | None:
    """Return the name of the computation that `name=%...` names, or None."""
    found = re.search(rf'\b{name}=%?([\w.\-]+)', self.rest)
    return found and found[1]


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
  """Return ({computation: {name: Instruction}}, name of the entry)."""
  computations: dict[str, dict[str, Instruction]] = {}
  entry, current = None, None
  for line in text.splitlines():
    if line.startswith('HloModule'):
      continue
    if not line.startswith(' ') and (header := _HEADER.match(line)):
      current = computations.setdefault(header[2], {})
      entry = header[2] if header[1] else entry
    elif current is not None and (found := _LINE.match(line)):
      instruction = _instruction(bool(found[1]), found[2], found[3])
      current[instruction.name] = instruction
  if entry is None:
    raise ValueError('The text has no ENTRY computation. Expected HLO text.')
  return computations, entry


def num_bytes(shape: str) -> int:
  """Return the bytes of a shape such as 'f32[2,3]{1,0}', or of a tuple."""
  total = 0
  for dtype, dims in arrays(shape):
    bits = _BITS.get(dtype) or int(re.findall(r'\d+', dtype)[0])
    total += math.prod(dims) * bits // 8
  return total


def arrays(shape: str) -> list[tuple[str, list[int]]]:
  """Return [(dtype, dims)] of all arrays in a shape."""
  return [
    (dtype, [int(d) for d in dims.split(',') if d])
    for dtype, dims in _ARRAY.findall(shape)
  ]


def _instruction(is_root, name, text):
  end = _closing(text, 0) + 1 if text[0] == '(' else text.index(' ')
  shape, text = text[:end], text[end:].lstrip()
  begin = text.index('(')
  end = _closing(text, begin)
  inner = text[begin + 1 : end]
  operands = tuple(re.findall(r'%([\w.\-]+)', inner))
  return Instruction(
    name, shape, text[:begin], operands, inner, text[end + 1 :], is_root
  )


def _closing(text, begin):
  """Return the index of the parenthesis that closes the one at `begin`."""
  depth = 0
  for i in range(begin, len(text)):
    depth += (text[i] == '(') - (text[i] == ')')
    if not depth:
      return i
  raise ValueError(f'Unbalanced parentheses in HLO: {text[begin:][:80]}')
