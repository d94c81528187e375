"""Exact FLOP counts of JAX functions, read from the jaxpr."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from vit_jax.types import Model


def count(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
  """Return the FLOPs of the matrix products and convolutions in a call of fn.

  A multiply-add is two FLOPs. Element-wise operations are not counted, as in
  the paper's numbers (Table 6) and published MFUs. Arguments may be abstract.
  """
  return _count(jax.make_jaxpr(fn)(*args, **kwargs).jaxpr)


def forward(model: Model, images: jax.ShapeDtypeStruct) -> int:
  """Return the FLOPs of a training forward pass; attention counts as einsum."""
  if hasattr(model, 'attention'):
    model = model.clone(attention='einsum')
  variables = jax.eval_shape(model.init, jax.random.key(0), images)
  method = 'features' if hasattr(model, 'features') else None
  return count(functools.partial(model.apply, method=method), variables, images)


def _count(jaxpr):
  return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(eqn):
  name = eqn.primitive.name
  if name == 'dot_general':
    (contract, _), _ = eqn.params['dimension_numbers']
    lhs = eqn.invars[0].aval.shape
    return 2 * eqn.outvars[0].aval.size * math.prod(lhs[d] for d in contract)
  if name == 'conv_general_dilated':
    kernel = eqn.invars[1].aval
    out_dim = eqn.params['dimension_numbers'].rhs_spec[0]
    return 2 * eqn.outvars[0].aval.size * kernel.size // kernel.shape[out_dim]
  if 'dot_product_attention' in name:
    # The fused kernel: q [B, N, h, d] times k, and the result times v.
    q, k = (v.aval for v in eqn.invars[:2])
    return 4 * q.size * k.shape[1]
  if name == 'pallas_call':
    if stated := eqn.params['cost_estimate']:
      return stated.flops
    programs = math.prod(eqn.params['grid_mapping'].grid)
    return programs * _count(eqn.params['jaxpr'])
  # Without the other jaxprs of a custom derivative.
  keys = eqn.params.keys() & {'call_jaxpr', 'fun_jaxpr'} or eqn.params
  params = {key: eqn.params[key] for key in keys}
  inner = [_count(jaxpr) for jaxpr in core.jaxprs_in_params(params)]
  if name == 'cond':
    return max(inner)
  if name == 'shard_map':  # each device computes it
    return sum(inner) * eqn.params['mesh'].size
  return sum(inner) * (eqn.params['length'] if name == 'scan' else 1)
