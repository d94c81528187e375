"""Exact FLOP counts of JAX functions, read from the jaxpr."""

import jax
import numpy as np


def count(fn, *args):
  """Return the FLOPs of the matrix products and convolutions in fn(*args).

  A multiply-add is two FLOPs. The body of a scan counts once per iteration.
  Element-wise operations are not counted, as in the paper's numbers (Table 6)
  and in published MFUs. Nothing is computed: args may be abstract.
  """
  return _count(jax.make_jaxpr(fn)(*args).jaxpr)


def forward(model, images):
  """Return the FLOPs of model.apply on a ShapeDtypeStruct of images."""
  variables = jax.eval_shape(model.init, jax.random.key(0), images)
  return count(model.apply, variables, images)


def _count(jaxpr):
  return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(eqn):
  name = eqn.primitive.name
  if name == 'dot_general':
    (contract, _), _ = eqn.params['dimension_numbers']
    lhs = eqn.invars[0].aval.shape
    return 2 * _size(eqn.outvars[0]) * int(np.prod([lhs[d] for d in contract]))
  if name == 'conv_general_dilated':
    kernel = eqn.invars[1].aval.shape
    out_dim = eqn.params['dimension_numbers'].rhs_spec[0]
    return 2 * _size(eqn.outvars[0]) * int(np.prod(kernel)) // kernel[out_dim]
  if 'dot_product_attention' in name:
    # The fused kernel: q [B, N, h, d] times k, and the result times v.
    (q, k) = (v.aval.shape for v in eqn.invars[:2])
    return 4 * int(np.prod(q)) * k[1]
  if name == 'pallas_call':  # it declares what attention needs
    return eqn.params['cost_estimate'].flops
  inner = sum(_count(j) for j in _inner_jaxprs(eqn))
  return inner * eqn.params['length'] if name == 'scan' else inner


def _inner_jaxprs(eqn):
  # Of the jaxprs of a custom_vjp or a cond, only one runs forward.
  for key in ('call_jaxpr', 'fun_jaxpr'):
    if key in eqn.params:
      yield _open(eqn.params[key])
      return
  if 'branches' in eqn.params:
    yield max((_open(b) for b in eqn.params['branches']), key=_count)
    return
  for value in eqn.params.values():
    for leaf in value if isinstance(value, tuple | list) else [value]:
      if hasattr(leaf, 'eqns') or hasattr(leaf, 'jaxpr'):
        yield _open(leaf)


def _open(jaxpr):
  return jaxpr if hasattr(jaxpr, 'eqns') else jaxpr.jaxpr


def _size(var):
  return int(np.prod(var.aval.shape))
