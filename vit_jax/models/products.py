"""Products of bfloat16 inputs with float32 parameters, and their gradients.

Kernels are float32 parameters and are rounded to the dtype of the inputs, so
that products are bfloat16. Without more, the gradient of a kernel is rounded to
bfloat16 too, before it is summed over devices and micro-batches. Within

    with gradients_in('float32'): ...

it is the float32 sum that the matrix unit makes of bfloat16 factors. This is
for the forward pass of a function that is differentiated; all other results are
the same. Float32 inputs are not affected.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from vit_jax.models.mesh import platform

_DTYPE = contextvars.ContextVar('dtype of gradients', default='bfloat16')


@contextlib.contextmanager
def gradients_in(dtype: str) -> Iterator[None]:
  """Context manager for the dtype of kernels' gradients if inputs are bfloat16.

  Args:
    dtype: 'float32', or 'bfloat16', which is also the default outside.
  """
  token = _DTYPE.set(dtype)
  try:
    yield
  finally:
    _DTYPE.reset(token)


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Return x [..., i] @ kernel [i, o], [..., o] in the dtype of x."""
  if _as_usual(x, kernel):
    return x @ _round(kernel, x.dtype)
  return _matmul(x, kernel)


def convolve(x: jax.Array, kernel: jax.Array, **options: Any) -> jax.Array:
  """Return jax.lax.conv_general_dilated(x, kernel) in the dtype of x.

  A float32 gradient of the kernel is computed from float32 copies of its
  factors, because JAX's derivative of a convolution has one dtype throughout.
  TPUs round them to bfloat16 again, without loss.
  """
  product: Callable[..., jax.Array] = functools.partial(
    jax.lax.conv_general_dilated, **options
  )
  if _as_usual(x, kernel):
    return product(x, kernel.astype(x.dtype))
  return _convolve(product, x, kernel)


def _as_usual(x, kernel):
  return _DTYPE.get() != 'float32' or x.dtype == kernel.dtype


def _round(kernel, dtype):
  """Return the kernel in a dtype; TPUs round it before products.

  Their compiler would do so within each product, which then reads float32, and
  reads it again for each tile of the result.
  """
  rounded = kernel.astype(dtype)
  if platform() != 'tpu' or kernel.dtype == dtype:
    return rounded
  return jax.lax.optimization_barrier(rounded)


@jax.custom_vjp
def _matmul(x, kernel):
  return x @ _round(kernel, x.dtype)


def _matmul_forward(x, kernel):
  # Not _matmul, inside which policies of rematerialization find no product.
  return x @ _round(kernel, x.dtype), (x, kernel)


def _matmul_backward(saved, gradient):
  x, kernel = saved
  rows, last = tuple(range(x.ndim - 1)), (x.ndim - 1,)
  of_x = _dot(gradient, _round(kernel, x.dtype), last, (1,), x.dtype)
  return of_x, _dot(x, gradient, rows, rows, kernel.dtype)


def _dot(a, b, a_dims, b_dims, dtype):
  dims = (a_dims, b_dims), ((), ())
  return jax.lax.dot_general(a, b, dims, preferred_element_type=dtype)


_matmul.defvjp(_matmul_forward, _matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(product, x, kernel):
  return product(x, kernel.astype(x.dtype))


def _convolve_forward(product, x, kernel):
  return _convolve(product, x, kernel), (x, kernel)


def _convolve_backward(product, saved, gradient):
  x, kernel = saved
  rounded = kernel.astype(x.dtype)
  (of_x,) = jax.linear_transpose(lambda x: product(x, rounded), x)(gradient)
  exact = x.astype(kernel.dtype)
  (of_kernel,) = jax.linear_transpose(lambda k: product(exact, k), kernel)(
    gradient.astype(kernel.dtype)
  )
  return of_x, of_kernel


_convolve.defvjp(_convolve_forward, _convolve_backward)
