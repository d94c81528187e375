"""Costs of a compiled program, read from the text of its optimized HLO.

    costs(jitted.lower(...).compile().as_text())

The TPU compiler writes an estimate in clock cycles next to most instructions;
other compilers write none. Loops count as often as they run, which XLA's own
sums (`compiled.cost_analysis()`) do not do.
"""

import dataclasses
import math
import re
from collections import Counter

import numpy as np

from vit_jax.analysis.hlo import Instruction, arrays, num_bytes, parse

_COLLECTIVE = re.compile(
  '(all-reduce|all-gather|reduce-scatter|(ragged-)?all-to-all|'
  'collective-permute|collective-broadcast)(-start)?'
)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_KERNEL = 'custom_call_target="tpu_custom_call"'
_STATED = re.compile(
  r'"cost_estimate":\{"flops":"(\d+)"[^}]*"bytes_accessed":"(\d+)"'
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# Parts of an instruction's name that do not say where in the model it is.
_LOOPS = ('while', 'body', 'closed_call', 'checkpoint', 'rematted_computation')
_FREE = {'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast'}
_FREE |= {'while', 'conditional', 'call', 'after-all', 'partition-id'}


@dataclasses.dataclass
class Costs:
  """Costs of one run of a program on one device.

  Attributes:
    cycles: sum of the compiler's estimates; 0 if it makes none. Collectives
      and asynchronous copies have no estimate.
    operations: {(part of the model, op): cycles}.
    collectives: {kind: bytes}, the larger of input and output.
    repeated_flops: FLOPs of matrix products and convolutions in loops, from
      the second iteration on, which `cost_analysis` leaves out.
    repeated_bytes: bytes read and written in loops, in the same way.
    unknown_loops: loops with an unknown number of iterations, counted as 1.
    uncounted_kernels: runs of Pallas kernels, for which the compiler has no
      estimate.
    unknown_kernels: those of them that do not state their cost.
    kernel_flops, kernel_bytes: costs that the other kernels state.
  """

  cycles: int = 0
  operations: Counter = dataclasses.field(default_factory=Counter)
  collectives: Counter = dataclasses.field(default_factory=Counter)
  repeated_flops: int = 0
  repeated_bytes: int = 0
  unknown_loops: int = 0
  uncounted_kernels: int = 0
  unknown_kernels: int = 0
  kernel_flops: int = 0
  kernel_bytes: int = 0


def costs(text: str) -> Costs:
  """Return the Costs of an HLO module, given as text."""
  return _run_costs(*parse(text))


def _run_costs(module, name):
  found = Costs()
  _visit(module, name, 1, found)
  return found


def _visit(module, name, times, found, fused=False):
  """Add to `found` the costs of a computation that runs `times` times."""
  computation = module[name]
  for instruction in computation.values():
    op, attribute = instruction.op, instruction.attribute
    if op == 'while':
      trips = _trips(module, instruction)
      found.unknown_loops += trips is None
      _visit(module, attribute('body'), times * (trips or 1), found)
    elif op == 'conditional':
      _visit(module, _dearest_branch(module, instruction), times, found)
    elif op in ('call', 'async-start'):
      inner = attribute('to_apply') or attribute('calls')
      _visit(module, inner, times, found, fused)
    elif op == 'fusion':
      _visit(module, attribute('calls'), times, found, fused=True)
    # The estimate of a fusion includes the instructions inside it.
    if not fused and (cycles := _CYCLES.search(instruction.rest)):
      found.cycles += times * int(cycles[1])
      found.operations[where(instruction)] += times * int(cycles[1])
    elif _KERNEL in instruction.rest:
      found.uncounted_kernels += times
      if stated := _STATED.search(instruction.rest):
        found.kernel_flops += times * int(stated[1])
        found.kernel_bytes += times * int(stated[2])
      else:
        found.unknown_kernels += times
    if collective := _COLLECTIVE.fullmatch(op):
      payload = _payload(instruction, computation)
      found.collectives[collective[1]] += times * payload
    if times > 1:
      found.repeated_flops += (times - 1) * _flops(instruction, computation)
    if times > 1 and not fused:
      moved = _bytes_moved(module, instruction, computation)
      found.repeated_bytes += (times - 1) * moved


def where(instruction: Instruction) -> tuple[str, str]:
  """Return (part of the model, op), from the name that JAX gave it."""
  named = re.search(r'op_name="([^"]*)"', instruction.rest)
  path = named[1] if named else ''
  parts = [p for p in path.split('/') if '(' not in p and '.' not in p]
  parts = [re.sub(r'_\d+$', '_*', p) for p in parts if p not in _LOOPS]
  backward = ' (backward)' if 'transpose(' in path else ''
  return ('/'.join(parts) or 'other') + backward, instruction.op


def _dearest_branch(module, conditional):
  """Return the name of the branch with the most cycles."""
  listed = re.search(r'branch_computations=\{([^}]*)\}', conditional.rest)
  sides = ('true_computation', 'false_computation')
  names = (
    re.findall(r'[\w.\-]+', listed[1])
    if listed
    else [conditional.attribute(side) for side in sides]
  )
  return max(names, key=lambda name: _run_costs(module, name).cycles)


def _trips(module, loop):
  """Return how often a loop runs, or None if that is not known.

  The compiler's own count comes first. Otherwise the loop must have the form
  `i < constant`, i starting at 0. The step of i can be more than 1: loops that
  overlap a gather with a product are unrolled twice.
  """
  if known := _TRIPS.search(loop.rest):
    return int(known[1])
  condition = module[loop.attribute('condition')]
  compare = _root(condition)
  bound = _constant(condition, compare.operands)
  read = ' '.join(condition[name].rest for name in compare.operands)
  counter = re.search(r'index=(\d+)', read)
  if compare.op == 'fusion':
    bound = bound or _constant(condition, condition)
    compare = _root(module[compare.attribute('calls')])
  if compare.op != 'compare' or 'direction=LT' not in compare.rest:
    return None
  body = module[loop.attribute('body')]
  step = counter and _step(module, body, int(counter[1]))
  return math.ceil(bound / step) if bound and step else None


def _step(module, body, counter):
  """Return what an iteration adds to element `counter` of the loop's state."""
  result = _root(body)
  if result.op != 'tuple':
    return None
  update, computation = body[result.operands[counter]], body
  if update.op == 'fusion':
    computation = module[update.attribute('calls')]
    update = _root(computation)
  return _constant(computation, update.operands) if update.op == 'add' else None


def _root(computation):
  (root,) = (i for i in computation.values() if i.is_root)
  return root


def _constant(computation, names):
  """Return the only integer constant among `names`, or None."""
  found = [computation[name] for name in names if name in computation]
  found = [i.text for i in found if i.op == 'constant' and i.text.isdecimal()]
  return int(found[0]) if len(found) == 1 else None


def _payload(instruction, computation):
  """Return the bytes of a collective: the larger of input and output."""
  read = _operand_bytes(instruction, computation)
  written = num_bytes(instruction.shape)
  if instruction.op.endswith('-start') and 'all-reduce' not in instruction.op:
    written -= read  # the shape contains the operands, too
  return max(read, written)


def _operand_bytes(instruction, computation):
  return sum(num_bytes(computation[o].shape) for o in instruction.operands)


def _bytes_moved(module, instruction, computation):
  """Return the bytes read and written; of a sliced array only the slice."""
  op = instruction.op
  if op in _FREE or op.endswith('-done'):
    return 0
  written = _bytes_written(instruction, computation)
  if op in ('dynamic-slice', 'dynamic-update-slice'):
    return 2 * written
  if op != 'fusion':
    return _operand_bytes(instruction, computation) + written
  inner = module[instruction.attribute('calls')]
  return _fusion_reads(inner) + _bytes_written(_root(inner), inner)


def _bytes_written(instruction, computation):
  if instruction.op == 'dynamic-update-slice':
    instruction = computation[instruction.operands[1]]
  return num_bytes(instruction.shape)


def _fusion_reads(inner):
  total = 0
  for parameter in inner.values():
    if parameter.op != 'parameter':
      continue
    users = [i for i in inner.values() if parameter.name in i.operands]
    sliced = all(user.operands[0] == parameter.name for user in users)
    ops = {user.op for user in users} if sliced else set()
    if ops == {'dynamic-slice'}:
      total += sum(num_bytes(user.shape) for user in users)
    elif ops != {'dynamic-update-slice'}:
      total += num_bytes(parameter.shape)
  return total


def _flops(instruction, computation):
  """Return 2 per multiply-add of a matrix product or convolution, else 0."""
  if instruction.op not in ('dot', 'convolution'):
    return 0
  ((_, out),) = arrays(instruction.shape)
  shapes = [arrays(computation[o].shape)[0][1] for o in instruction.operands]
  if instruction.op == 'dot':
    dims = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', instruction.rest)
    contracted = [shapes[0][int(d)] for d in dims[1].split(',') if d]
    return 2 * math.prod(out) * math.prod(contracted)
  return _convolution_flops(instruction.rest, *shapes, out)


def _convolution_flops(rest, lhs, rhs, out):
  # The TPU compiler writes '?' for a dim that has no role, as in '0b?f'.
  labels = re.search(r'dim_labels=([\w?]+)_([\w?]+)->([\w?]+)', rest).groups()
  of_lhs, of_rhs, of_out = (
    dict(zip(names, shape)) for names, shape in zip(labels, (lhs, rhs, out))
  )
  window = re.findall(r'\b(stride|pad|lhs_dilate|rhs_dilate)=(\S+?)[ }]', rest)
  total = 2 * of_out.get('b', 1) * of_out.get('f', 1) * of_rhs.get('i', 1)
  total *= math.prod(n for name, n in zip(labels[2], out) if name == '?')
  for name in filter(str.isdecimal, of_out):
    size, kernel = of_lhs.get(name, 1), of_rhs.get(name, 1)
    # 'pad=1_1x2_2' is low and high of each dim.
    settings = {
      k: int(v.split('x')[int(name)].split('_')[0]) for k, v in window
    }
    total *= num_products(size, kernel, of_out[name], **settings)
  return total


def num_products(
  size: int,
  kernel: int,
  out: int,
  *,
  stride: int = 1,
  pad: int = 0,
  lhs_dilate: int = 1,
  rhs_dilate: int = 1,
) -> int:
  """Return how many (output, kernel) positions of one dim meet an input."""
  o, k = np.ogrid[:out, :kernel]
  place = o * stride + k * rhs_dilate - pad
  inside = (place >= 0) & (place <= (size - 1) * lhs_dilate)
  return int(np.count_nonzero(inside & (place % lhs_dilate == 0)))
