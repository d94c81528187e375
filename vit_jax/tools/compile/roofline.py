"""The least time of a compiled GPU program, read from its optimized HLO.

Each kernel takes the longer of two times: that of its operands and results at
the bandwidth of the memory, and that of its products at the peak of the matrix
units. docs/compile.md lists what is left out.
"""

import dataclasses
import math
import re
from collections import Counter
from typing import Any

from vit_jax.tools.compile import hlo
from vit_jax.tools.compile.hlo import Computation, Instruction, Module

# Triton's products are fusions whose FLOPs cannot be read. Those of cuBLAS are
# calls; without a GPU nothing is measured to choose between them.
COMPILER_OPTIONS = {'xla_gpu_enable_triton_gemm': False}
_SLICES, _UPDATE = ('slice', 'dynamic-slice', 'gather'), 'dynamic-update-slice'
_NO_KERNEL = {
  *('parameter', 'constant', 'bitcast', 'get-tuple-element', 'tuple'),
  *('partition-id', 'replica-id', 'after-all', 'opt-barrier'),
  *('while', 'call', 'conditional', 'async-start'),
}
_WORKSPACE = re.compile(r'[su]8\[\d*\]')  # of a library's kernel
_CONTRACTED = re.compile(
  r'lhs_contracting_dim(?:ension)?s"?[:=]\s*[\[{]([\d", ]+)[\]}]'
)
_SCORES = re.compile(r'"intermediate_tensor_shape".*?"dimensions":\s*\[(.*?)\]')


@dataclasses.dataclass
class Roofline:
  """The least time of a run on one device."""

  # Counter {(part of the model, op): seconds}
  seconds: Any = dataclasses.field(default_factory=Counter)
  kernels: int = 0
  without_flops: int = 0  # library kernels of which only memory is counted


def roofline(text: str, flops_per_s: float, bytes_per_s: float) -> Roofline:
  """Return the Roofline of an HLO module on a GPU with those peak rates."""
  module, entry = hlo.parse(text)
  found = Roofline()
  for times, instruction, computation, fused in hlo.executed(module, entry):
    op = instruction.op
    is_kernel = op not in _NO_KERNEL and not hlo.COLLECTIVE.fullmatch(op)
    if fused or not is_kernel or op.endswith('-done'):
      continue
    flops = products(instruction, computation)
    if op == 'custom-call':
      found.without_flops += times * (flops is None)
    moved = num_moved(module, instruction, computation)
    seconds = max(moved / bytes_per_s, (flops or 0) / flops_per_s)
    found.seconds[hlo.where(instruction)] += times * seconds
    found.kernels += times
  return found


def num_moved(module: Module, kernel: Instruction, outer: Computation) -> int:
  """Return the bytes that a kernel reads and writes, only those of slices."""
  size = hlo.num_bytes
  if kernel.op != 'fusion':
    inner, last = outer, kernel
    parameters, users = kernel.operands, [kernel]
  else:
    inner = module[kernel.called('calls') or '']
    (last,) = (x for x in inner.values() if x.root)
    parameters = [x.name for x in inner.values() if x.op == 'parameter']
    users = [*inner.values()]

  def read(name):
    parts = []
    for user in users:
      if name in user.operands:
        is_first = user.operands[0] == name
        if user.op in _SLICES and is_first:
          parts.append(size(user.shape))
        elif user.op != _UPDATE or not is_first:
          return size(inner[name].shape)
    return min(sum(parts), size(inner[name].shape))

  def written(x):
    while x.op == 'bitcast':
      x = inner[x.operands[0]]
    if x.op == 'tuple':
      return sum(written(inner[name]) for name in x.operands)
    updated = inner[x.operands[1]].shape if x.op == _UPDATE else x.shape
    return size(_WORKSPACE.sub('', updated))

  return sum(map(read, parameters)) + written(last)


def products(instruction: Instruction, computation: Computation) -> int | None:
  """Return the FLOPs of the matrix products of a kernel, None: not known."""
  if scores := _SCORES.search(instruction.attributes):
    # Attention: two products with [B, h, Q, N], and five in the backward pass.
    head_dim = hlo.dimensions(instruction.shape)[-1]
    backward = 'Backward' in instruction.attributes
    sizes = [int(n) for n in re.findall(r'\d+', scores[1])]
    return 2 * (5 if backward else 2) * math.prod(sizes) * head_dim
  is_product = instruction.op == 'dot' or 'cublas' in instruction.attributes
  if is_product and (contracted := _CONTRACTED.search(instruction.attributes)):
    left = hlo.dimensions(computation[instruction.operands[0]].shape)
    inner = [left[int(i)] for i in re.findall(r'\d+', contracted[1])]
    return 2 * math.prod(hlo.dimensions(instruction.shape)) * math.prod(inner)
  return None
