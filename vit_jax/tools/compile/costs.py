"""What a compiled program costs, read off the text of its optimized HLO.

    costs(jitted.lower(...).compile().as_text())

The TPU compiler writes its own estimate, in cycles of the chip, beside most
instructions; other compilers write none. Loops are counted as often as they
run, which compilers' own sums (`cost_analysis`) do not do.
"""

import collections
import dataclasses
import math
import re

from vit_jax.analysis.hlo import arrays, num_bytes, parse

COLLECTIVES = (
  'all-reduce',
  'all-gather',
  'reduce-scatter',
  'all-to-all',
  'ragged-all-to-all',
  'collective-permute',
  'collective-broadcast',
)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_KERNEL = 'custom_call_target="tpu_custom_call"'
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass
class Costs:
  """Of one run of a program, on one device.

  Attributes:
    cycles: the compiler's estimates, summed; 0 where it makes none. Copies
      that run beside the arithmetic, and collectives, have none.
    operations: {(where in the model, op): cycles}.
    collectives: {kind: bytes}, the larger of what goes in and what comes out.
    repeated_flops: of the matrix products and convolutions in loops, those
      after the first round: what `cost_analysis` leaves out.
    repeated_bytes: the same of bytes read and written.
    unknown_loops: loops whose number of rounds could not be told; they count
      as one.
    uncounted_kernels: runs of kernels of ours (Pallas) that have no estimate.
  """

  cycles: int = 0
  operations: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  collectives: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  repeated_flops: int = 0
  repeated_bytes: int = 0
  unknown_loops: int = 0
  uncounted_kernels: int = 0


def costs(text):
  """Costs of the text of an HLO module."""
  computations, entry = parse(text)
  found = Costs()
  _visit(computations, entry, 1, found)
  return found


def _visit(module, name, times, found, fused=False):
  """Adds what a computation costs that runs `times` times."""
  computation = module[name]
  for instruction in computation.values():
    op = instruction.op
    if op == 'while':
      body, trips = instruction.attribute('body'), _trips(module, instruction)
      found.unknown_loops += trips is None
      _visit(module, body, times * (trips or 1), found)
    elif op == 'conditional':
      _visit(module, _dearest(module, instruction), times, found)
    elif op in ('call', 'async-start'):
      inner = instruction.attribute('to_apply') or instruction.attribute(
        'calls'
      )
      _visit(module, inner, times, found, fused)
    elif op == 'fusion':
      _visit(module, instruction.attribute('calls'), times, found, True)
    if not fused and (cycles := _CYCLES.search(instruction.rest)):
      found.cycles += times * int(cycles[1])
      found.operations[where(instruction)] += times * int(cycles[1])
    elif _KERNEL in instruction.rest:
      found.uncounted_kernels += times
    if kind := _collective(instruction):
      payload = _payload(instruction, kind, computation)
      found.collectives[kind] += times * payload
    if times > 1:
      found.repeated_flops += (times - 1) * _flops(instruction, computation)
      if not fused:
        moved = _moved(module, instruction, computation)
        found.repeated_bytes += (times - 1) * moved


def where(instruction):
  """(part of the model, kind of operation) by the name that JAX gave it."""
  named = re.search(r'op_name="([^"]*)"', instruction.rest)
  path = named[1] if named else ''
  backward = 'transpose(' in path
  parts = [p for p in path.split('/') if '(' not in p]
  parts = [re.sub(r'_\d+$', '_*', p) for p in parts if '.' not in p]
  skipped = {
    'while',
    'body',
    'closed_call',
    'checkpoint',
    'rematted_computation',
  }
  parts = [p for p in parts if p not in skipped]
  label = '/'.join(parts) or 'other'
  return f'{label}{" (backward)" if backward else ""}', instruction.op


def _dearest(module, conditional):
  """Of a conditional's branches, the one with the most cycles."""
  listed = re.search(r'branch_computations=\{([^}]*)\}', conditional.rest)
  if listed:
    names = re.findall(r'[\w.\-]+', listed[1])
  else:
    sides = ('true_computation', 'false_computation')
    names = [conditional.attribute(side) for side in sides]

  def cycles(name):
    found = Costs()
    _visit(module, name, 1, found)
    return found.cycles

  return max(names, key=cycles)


def _trips(module, loop):
  """How often a loop runs: as the compiler knows it, or for i < constant.

  i begins at 0. Its step need not be 1: of the loops that multiply what is
  being gathered every other round is unrolled.
  """
  if known := _TRIPS.search(loop.rest):
    return int(known[1])
  condition = module[loop.attribute('condition')]
  compare = _root(condition)
  bound = _constant(condition, compare.operands)
  places = (condition[name].rest for name in compare.operands)
  places = [re.search(r'index=(\d+)', rest) for rest in places]
  counter = next((int(found[1]) for found in places if found), None)
  if compare.op == 'fusion':
    bound = bound or _constant(condition, condition)
    compare = _root(module[compare.attribute('calls')])
  if compare.op != 'compare' or 'direction=LT' not in compare.rest:
    return None
  step = _step(module, module[loop.attribute('body')], counter)
  return math.ceil(bound / step) if bound and step else None


def _step(module, body, counter):
  """What a round adds to an element of its state, or None."""
  result = _root(body)
  if counter is None or result.op != 'tuple':
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
  """The one whole number among them, or None."""
  found = [computation[name] for name in names if name in computation]
  found = [i.text for i in found if i.op == 'constant' and i.text.isdecimal()]
  return int(found[0]) if len(found) == 1 else None


def _collective(instruction):
  op = instruction.op.removesuffix('-start')
  return op if op in COLLECTIVES else None


def _payload(instruction, kind, computation):
  given = _operand_bytes(instruction, computation)
  made = num_bytes(instruction.shape)
  if instruction.op.endswith('-start') and kind != 'all-reduce':
    made -= given  # the shape holds the operands, too
  return max(given, made)


def _operand_bytes(instruction, computation):
  return sum(num_bytes(computation[o].shape) for o in instruction.operands)


_FREE = {'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast'}
_FREE |= {'while', 'conditional', 'call', 'after-all', 'partition-id'}


def _moved(module, instruction, computation):
  """Bytes that an instruction reads and writes; of slices, those alone."""
  if instruction.op in _FREE or instruction.op.endswith('-done'):
    return 0
  if instruction.op == 'dynamic-slice':
    return 2 * num_bytes(instruction.shape)
  if instruction.op == 'dynamic-update-slice':
    return 2 * num_bytes(computation[instruction.operands[1]].shape)
  if instruction.op != 'fusion':
    given = _operand_bytes(instruction, computation)
    return given + num_bytes(instruction.shape)
  inner = module[instruction.attribute('calls')]
  return _fusion_reads(inner) + _fusion_writes(inner, instruction)


def _fusion_reads(inner):
  total = 0
  for parameter in inner.values():
    if parameter.op != 'parameter':
      continue
    users = [i for i in inner.values() if parameter.name in i.operands]
    first = all(u.operands[0] == parameter.name for u in users)
    ops = {u.op for u in users} if first else set()
    if ops == {'dynamic-slice'}:
      total += sum(num_bytes(u.shape) for u in users)
    elif ops != {'dynamic-update-slice'}:
      total += num_bytes(parameter.shape)
  return total


def _fusion_writes(inner, fusion):
  (root,) = (i for i in inner.values() if i.is_root)
  if root.op == 'dynamic-update-slice':
    return num_bytes(inner[root.operands[1]].shape)
  return num_bytes(fusion.shape)


def _flops(instruction, computation):
  """2 for each multiply-add of a matrix product or convolution."""
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
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', rest).groups()
  window = re.search(r'window=\{([^}]*)\}', rest)
  fields = dict(f.split('=') for f in window[1].split()) if window else {}
  total = 2 * out[labels[2].index('b')] * out[labels[2].index('f')]
  total *= rhs[labels[1].index('i')]

  def field(name, dim, default):
    values = fields.get(name)
    return values.split('x')[dim] if values else default

  for dim in range(len(lhs) - 2):
    total *= _products(
      lhs[labels[0].index(str(dim))],
      rhs[labels[1].index(str(dim))],
      out[labels[2].index(str(dim))],
      stride=int(field('stride', dim, 1)),
      pad=int(field('pad', dim, '0_0').split('_')[0]),
      lhs_dilate=int(field('lhs_dilate', dim, 1)),
      rhs_dilate=int(field('rhs_dilate', dim, 1)),
    )
  return total


def _products(size, kernel, out, *, stride, pad, lhs_dilate, rhs_dilate):
  """How many pairs of places, in output and kernel, meet an input."""
  count = 0
  for k in range(kernel):
    for o in range(out):
      place = o * stride + k * rhs_dilate - pad
      inside = 0 <= place <= (size - 1) * lhs_dilate
      count += inside and place % lhs_dilate == 0
  return count
