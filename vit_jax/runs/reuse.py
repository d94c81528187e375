"""Results of functions, kept for the next call with equal arguments.

Consecutive runs of a study often train the same model in the same way, on other
data or from other weights. They then share their compiled programs.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax


def call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
  """Return fn(*args, **kwargs), or the same object as an equal call did.

  Only the last calls are kept. Arguments that cannot be hashed are equal to
  nothing.
  """
  try:
    hash((fn, args, tuple(kwargs.values())))
  except TypeError:
    return fn(*args, **kwargs)
  return _call(fn, *args, **kwargs)


@functools.lru_cache(maxsize=8)
def _call(fn, *args, **kwargs):
  return fn(*args, **kwargs)


def clear() -> None:
  """Release the results, and everything that JAX has compiled."""
  _call.cache_clear()
  jax.clear_caches()


def programs(config: Any) -> str:
  """Return a text that is equal for runs which compile the same programs.

  It is the config without seeds and without the weights to start from.
  """
  values = config.to_dict()
  values.pop('init_from', None)
  return repr(_without_seeds(values))


def _without_seeds(value):
  if isinstance(value, dict):
    return {k: _without_seeds(v) for k, v in value.items() if k != 'seed'}
  if isinstance(value, list | tuple):
    return [_without_seeds(v) for v in value]
  return value
