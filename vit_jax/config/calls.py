"""Calls that a config describes: checked, then made."""

import dataclasses
import functools
from typing import Any

from vit_jax.config import domains, signatures
from vit_jax.config.errors import ConfigError
from vit_jax.config.signatures import (
  full_name,
  lacks_text,
  missing_of,
  parameters_of,
)


class Partial(functools.partial):
  """A target that still lacks required arguments; called when they are known.

  Two of them are equal if they would call the same function in the same way.

  Raises:
    ConfigError: on a call that leaves some of them out, or sets one twice.
  """

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Partial) and self._key == other._key

  def __hash__(self) -> int:
    return hash((self.func, self.args, tuple(sorted(self.keywords.items()))))

  @property
  def _key(self):
    return self.func, self.args, self.keywords

  def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
    if twice := sorted(self.keywords.keys() & kwargs.keys()):
      raise ConfigError(
        f'{full_name(self.func)}: {", ".join(twice)} is set by the code that '
        'calls it. Remove it from the config.'
      )
    parameters = parameters_of(self.func)
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    if not takes_any and (unknown := sorted(kwargs.keys() - parameters)):
      raise ConfigError(
        f'{full_name(self.func)} cannot be used here: the code that calls it '
        f'passes {", ".join(unknown)}, which it does not take. It takes: '
        f'{", ".join(parameters)}. Name another target.'
      )
    if missing := missing_of(self.func, self.keywords | kwargs, len(args)):
      raise ConfigError(lacks_text(self.func, missing))
    return super().__call__(*args, **kwargs)


@dataclasses.dataclass
class Call(domains.Deferred):
  """A target with its arguments, checked but not yet called.

  Attributes:
    fn: what the target names.
    kwargs: its arguments; calls within them are not made yet either.
    where: dotted path in the config.
    hidden: arguments that the config cannot set.
    later: whether the code makes the call itself, even if nothing is missing.
  """

  fn: Any
  kwargs: dict[str, Any]
  where: str = ''
  hidden: tuple[str, ...] = ()
  later: bool = False

  def make(self, *args: Any, **supplied: Any) -> Any:
    """Make all calls, innermost first, and return the result of this one."""
    kwargs = {name: make(value) for name, value in self.kwargs.items()}
    if self.later or missing_of(self.fn, kwargs | supplied, len(args)):
      return Partial(self.fn, *args, **kwargs, **supplied)
    return self.fn(*args, **kwargs, **supplied)

  def makes(self, annotation: Any) -> bool:
    """Return whether the result, or the Partial, fits an annotation."""
    lacks = self.later or missing_of(self.fn, self.kwargs, 0)
    return signatures.makes(self.fn, annotation, is_partial=bool(lacks))


def make(value: Any) -> Any:
  """Return the value with every Call in it made, innermost first."""
  if isinstance(value, Call):
    return value.make()
  if isinstance(value, dict):
    return {k: make(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(make(v) for v in value)
  return value


def has_calls(value: Any) -> bool:
  """Return whether there is a Call in a list, tuple or dict, at any depth."""
  if isinstance(value, dict):
    value = value.values()
  elif not isinstance(value, list | tuple):
    return False
  return any(isinstance(x, Call) or has_calls(x) for x in value)
