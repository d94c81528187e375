"""Costs of a compiled program, read from the text of its optimized HLO.

    costs(jitted.lower(...).compile().as_text())

The TPU compiler writes an estimate in clock cycles next to most instructions;
other compilers write none, see roofline.py. Loops count as often as they run.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

_BITS = {'pred': 8, 's4': 4, 'u4': 4, 's2': 2, 'u2': 2, 'c64': 64, 'c128': 128}
_ARRAY = re.compile(r'\b(pred|[sufc]\d+\w*|bf16)\[([\d,]*)\]')
_HEADER = re.compile(r'(ENTRY )?%?([\w.\-]+) .*\{$')
_LINE = re.compile(
  r'\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)((?:, [\w\-]+=.*)?)$'
)
COLLECTIVE = re.compile(
  '(all-reduce|all-gather|reduce-scatter|(ragged-)?all-to-all|'
  'collective-permute|collective-broadcast)(-start)?'
)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_KERNEL = 'custom_call_target="tpu_custom_call"'
_STATED = re.compile(
  r'"cost_estimate":\{"flops":"(\d+)"[^}]*"bytes_accessed":"(\d+)"'
)
_ATTENTION = re.compile(r'op_name="[^"]*/attention_(forward|backward)/')
_NETWORK = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# Parts of an instruction's name that do not say where in the model it is.
_LOOPS = ('while', 'body', 'closed_call', 'checkpoint', 'rematted_computation')


@dataclasses.dataclass
class Costs:
  """Costs of one run of a program on one device.

  The compiler has no estimate for collectives, asynchronous copies and Pallas
  kernels; `kernel_flops` and `kernel_bytes` are what kernels state.
  """

  cycles: int = 0
  # {(part of the model, op): cycles}
  operations: Counter = dataclasses.field(default_factory=Counter)
  # {kind: bytes}, the larger of input and output
  collectives: Counter = dataclasses.field(default_factory=Counter)
  # {kind: bytes} that a device passes to the network between TPU slices; the
  # compiler splits a sum into one in each slice and one of their parts
  network: Counter = dataclasses.field(default_factory=Counter)
  unknown_loops: int = 0  # counted as one iteration
  # {'attention' or 'layer': number}
  kernel_flops: Counter = dataclasses.field(default_factory=Counter)
  kernel_bytes: Counter = dataclasses.field(default_factory=Counter)
  unknown_kernels: int = 0  # they state no cost


class Instruction(NamedTuple):
  """`root name = shape op(text), attributes`; the text names the operands."""

  root: str | None
  name: str
  shape: str
  op: str
  text: str
  attributes: str

  @property
  def operands(self) -> list[str]:
    return re.findall(r'%([\w.\-]+)', self.text)

  @property
  def cycles(self) -> int | None:
    """The compiler's estimate, or None if there is none."""
    found = _CYCLES.search(self.attributes)
    return found and int(found[1])

  def called(self, attribute: str) -> str | None:
    """Return the name of the computation that an attribute names, or None."""
    found = re.search(rf'\b{attribute}=%?([\w.\-]+)', self.attributes)
    return found and found[1]


Computation = dict[str, Instruction]
Module = dict[str, Computation]


def costs(text: str) -> Costs:
  """Return the Costs of an HLO module, given as text."""
  module, entry = parse(text)
  found = Costs()
  for times, instruction, computation, fused in executed(module, entry):
    op = instruction.op
    if op == 'while' and _trips(module, instruction) is None:
      found.unknown_loops += 1
    # The estimate of a fusion includes the instructions inside it.
    if not fused and (cycles := instruction.cycles) is not None:
      found.cycles += times * cycles
      found.operations[where(instruction)] += times * cycles
    elif _KERNEL in instruction.attributes:
      if stated := _STATED.search(instruction.attributes):
        attends = _ATTENTION.search(instruction.attributes)
        kind = 'attention' if attends else 'layer'
        found.kernel_flops[kind] += times * int(stated[1])
        found.kernel_bytes[kind] += times * int(stated[2])
      else:
        found.unknown_kernels += times
    if op == 'send' and (sent := _NETWORK.search(instruction.attributes)):
      payload = num_bytes(computation[instruction.operands[0]].shape)
      kind = sent[1].lower().replace('_', '-')
      found.network[kind] += times * payload
    if collective := COLLECTIVE.fullmatch(op):
      payload = _payload(instruction, computation)
      found.collectives[collective[1]] += times * payload
  return found


def executed(
  module: Module, name: str, times: int = 1, fused: bool = False
) -> Iterator[tuple[int, Instruction, Computation, bool]]:
  """Yield what a computation and those that it calls run.

  Yields (number of runs, instruction, its computation, whether it is fused).
  """
  for instruction in module[name].values():
    yield times, instruction, module[name], fused
    op, called = instruction.op, instruction.called
    if op == 'while':
      trips = _trips(module, instruction) or 1
      yield from executed(module, called('body') or '', times * trips)
    elif op in ('call', 'async-start', 'fusion'):
      inner = called('to_apply') or called('calls') or ''
      yield from executed(module, inner, times, fused or op == 'fusion')


def where(instruction: Instruction) -> tuple[str, str]:
  """Return (part of the model, op), from the name that JAX gave it."""
  named = re.search(r'op_name="([^"]*)"', instruction.attributes)
  path = named[1] if named else ''
  parts = [p for p in path.split('/') if '(' not in p and '.' not in p]
  parts = [re.sub(r'_\d+$', '_*', p) for p in parts if p not in _LOOPS]
  backward = ' (backward)' if 'transpose(' in path else ''
  return ('/'.join(parts) or 'other') + backward, instruction.op


def _trips(module, loop):
  """Return how often a loop runs, or None if that is not known.

  The compiler's own count comes first. Otherwise the loop must have the form
  `i < constant`, i starting at 0. The step of i can be more than 1: loops that
  overlap a gather with a product are unrolled twice.
  """
  if known := _TRIPS.search(loop.attributes):
    return int(known[1])
  condition = module[loop.called('condition')]
  compare = _root(condition)
  bound = _constant(condition, compare.operands)
  read = ' '.join(condition[name].attributes for name in compare.operands)
  counter = re.search(r'index=(\d+)', read)
  if compare.op == 'fusion':
    bound = bound or _constant(condition, condition)
    compare = _root(module[compare.called('calls')])
  if compare.op != 'compare' or 'direction=LT' not in compare.attributes:
    return None
  step = counter and _step(module, module[loop.called('body')], int(counter[1]))
  return math.ceil(bound / step) if bound and step else None


def _step(module, body, counter):
  """Return what an iteration adds to element `counter` of the loop's state."""
  result = _root(body)
  if result.op != 'tuple':
    return None
  update, computation = body[result.operands[counter]], body
  if update.op == 'fusion':
    computation = module[update.called('calls')]
    update = _root(computation)
  return _constant(computation, update.operands) if update.op == 'add' else None


def _root(computation):
  (root,) = (i for i in computation.values() if i.root)
  return root


def _constant(computation, names):
  """Return the only integer constant among `names`, or None."""
  found = [computation[name] for name in names if name in computation]
  found = [i.text for i in found if i.op == 'constant' and i.text.isdecimal()]
  return int(found[0]) if len(found) == 1 else None


def _payload(instruction, computation):
  """Return the bytes of a collective: the larger of input and output."""
  read = sum(num_bytes(computation[x].shape) for x in instruction.operands)
  written = num_bytes(instruction.shape)
  if instruction.op.endswith('-start') and 'all-reduce' not in instruction.op:
    written -= read  # the shape contains the operands, too
  return max(read, written)


def parse(text: str) -> tuple[Module, str]:
  """Return ({computation: {name: Instruction}}, name of the entry)."""
  computations: Module = {}
  entry, current = '', {}
  for line in text.splitlines():
    if header := _HEADER.match(line):
      current = computations.setdefault(header[2], {})
      entry = header[2] if header[1] else entry
    elif found := _LINE.match(line):
      current[found[2]] = Instruction(*found.groups())
  return computations, entry


def num_bytes(shape: str) -> int:
  """Return the bytes of a shape such as 'f32[2,3]{1,0}', or of a tuple."""
  total = 0
  for dtype, dims in _ARRAY.findall(shape):
    bits = _BITS.get(dtype) or int(re.findall(r'\d+', dtype)[0])
    total += math.prod(int(d) for d in dims.split(',') if d) * bits // 8
  return total


def dimensions(shape: str) -> list[int]:
  """Return the dimensions of a shape, or of the first array of a tuple."""
  (_, dims), *_ = _ARRAY.findall(shape)
  return [int(d) for d in dims.split(',') if d]
