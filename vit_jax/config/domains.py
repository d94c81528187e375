"""Domains: annotations that say which values an argument takes.

An annotation is the schema of an argument, in a config and in Python:

    def train(..., accum_steps: Count = 1, ema_decay: Rate | None = None)

`Count` is `Annotated[int, Range(1)]`: type checkers read `int`. A config checks
all arguments before anything is called, with their paths in it; `checked` makes
a class or a function of Python do the same. Beyond the domains of this file,
the types in an annotation are checked: numbers, bools, texts, None, lists,
dicts, classes, protocols. A float has to be finite and not to be lost in
float32. What an annotation leaves open (Any, arrays) is not checked.
"""

import collections.abc
import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeVar

T = TypeVar('T')

# Of float32: a smaller number is rounded to 0, a larger one to infinity.
SMALLEST, LARGEST = 1.1754944e-38, 3.4028235e38


class Domain(Protocol):
  """Restriction of the values of a type, in an Annotated."""

  def holds(self, value: Any) -> bool:
    """Return whether a value of the type is in the domain."""

  def describe(self, kind: str, value: Any = None) -> str:
    """Return what is expected, such as 'an integer of at least 1'."""


@dataclasses.dataclass(frozen=True)
class Range:
  """Numbers or Durations from `low` to `high`.

  Attributes:
    low, high: bounds, in the domain unless excluded.
    above, below: whether `low` and `high` are excluded.
  """

  low: float = -math.inf
  high: float = math.inf
  above: bool = False
  below: bool = False

  def holds(self, value: Any) -> bool:
    value = getattr(value, 'value', value)  # of a Duration
    low = self.low < value if self.above else self.low <= value
    return bool(
      low and (value < self.high if self.below else value <= self.high)
    )

  def describe(self, kind: str, value: Any = None) -> str:
    low, high = f'{self.low:.15g}', f'{self.high:.20g}'
    if self.high == math.inf:
      return f'{kind} {"above" if self.above else "of at least"} {low}'
    if kind == _NAMES[int]:
      too_large = _is_number(value, int) and value > self.high
      return f'{kind} of at {f"most {high}" if too_large else f"least {low}"}'
    if self.above != self.below:
      ends = f'{"[("[self.above]}{low}, {high}{"])"[self.below]}'
      return f'{kind} in {ends}'
    return f'{kind} between {low} and {high}'


@dataclasses.dataclass(frozen=True)
class Sides:
  """One integer, or a pair (height, width), from 1 to `high`."""

  high: int = 2**14

  def holds(self, value: Any) -> bool:
    sides = value if isinstance(value, list | tuple) else (value, value)
    return all(1 <= side <= self.high for side in sides)

  def describe(self, kind: str, value: Any = None) -> str:
    return (
      f'an integer or (height, width), each at least 1 pixel and at most '
      f'{self.high}'
    )


class OneOf:
  """The values that are listed."""

  def __init__(self, *values: Any) -> None:
    self.values = values

  def holds(self, value: Any) -> bool:
    return value in self.values

  def describe(self, kind: str, value: Any = None) -> str:
    return f'one of {", ".join(map(repr, self.values))}'


class Regex:
  """Regular expressions."""

  def holds(self, value: Any) -> bool:
    try:
      re.compile(value)
    except re.error:
      return False
    return True

  def describe(self, kind: str, value: Any = None) -> str:
    return "a regular expression such as 'head/.*'"


class FloatType:
  """Names and types of the floating-point numbers that models compute in."""

  names = ('float32', 'bfloat16', 'float16')

  def holds(self, value: Any) -> bool:
    return str(getattr(value, '__name__', value)) in self.names

  def describe(self, kind: str, value: Any = None) -> str:
    return f'one of {", ".join(map(repr, self.names))}'


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
NonNegative = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Share = Annotated[float, Range(0, 1, above=True)]  # (0, 1]
Between = Annotated[float, Range(0, 1, above=True, below=True)]
Rate = Annotated[float, Range(0, 1, below=True)]
# A larger one is a mistake: no rule of optax trains with it, and updates of
# parameters of size 1 overflow.
LearningRate = Annotated[float, Range(0, 1e4)]
Seed = Annotated[int, Range(0, 2**64 - 1)]
# jax.random.key uses 32 bits: a larger seed would repeat a smaller one.
KeySeed = Annotated[int, Range(0, 2**32 - 1)]
Side = Annotated[int, Range(1, 2**14)]  # of an image, in pixels
Size = Annotated[int | tuple[int, int], Sides()]  # of a square, or (H, W)
PathRule = Annotated[str, Regex()]  # of paths of parameters, see tree.py
Dtype = Annotated[Any, FloatType()]


class Deferred:
  """Base of what stands for an object that is made later."""

  def makes(self, annotation: Any) -> bool:
    """Return whether the object will fit the annotation."""
    raise NotImplementedError


def expected(value: Any, annotation: Any) -> str:
  """Return what is expected in place of the value; '' if it fits."""
  if fits(value, annotation):
    return ''
  text, hint = describe(annotation, value), ''
  if isinstance(value, str):
    near = difflib.get_close_matches(value, _choices(annotation), n=1)
    hint = f' (did you mean {near[0]!r}?)' if near else ''
  elif isinstance(value, Mapping):
    near = difflib.get_close_matches('target', map(str, value), n=1)
    hint = f" (did you mean 'target' by {near[0]!r}?)" if near else ''
  elif _is_number(value, float):  # the reader knows that it is one
    text = re.sub('^a number (?=in|between)', '', text)
  return text + hint


def check(fn: Any, arguments: Mapping[str, Any]) -> None:
  """Raise ValueError unless the arguments fit the annotations of `fn`."""
  hints = hints_of(fn)
  for name, value in arguments.items():
    if what := expected(value, hints.get(name, Any)):
      value = getattr(value, 'value', value)  # of a Duration
      raise ValueError(f'{fn.__name__}: {name}={shown(value)} must be {what}.')


def shown(value: Any) -> str:
  """Return the value as an error message shows it."""
  text = repr(value)
  return text if len(text) <= 100 else f'{text[:97]}...'


def check_fields(value: Any) -> None:
  """Raise ValueError unless the fields of a dataclass fit their annotations."""
  fields = (f.name for f in dataclasses.fields(value) if f.init)
  check(type(value), {name: getattr(value, name) for name in fields})


def checked(fn: T) -> T:
  """Decorator of a dataclass or a function whose arguments are checked.

  Raises:
    ValueError: on a call, for an argument that does not fit its annotation.
  """
  call: Any = fn.__init__ if inspect.isclass(fn) else fn
  signature = inspect.signature(call)

  @functools.wraps(call)
  def checking(*args, **kwargs):
    try:
      given = signature.bind(*args, **kwargs).arguments
    except TypeError:
      given = {}  # the call says it better
    check(fn, given)
    return call(*args, **kwargs)

  if not inspect.isclass(fn):
    return typing.cast(T, checking)
  setattr(fn, '__init__', checking)  # noqa: B010 (mypy refuses the other)
  return fn


@functools.cache
def hints_of(fn: Any) -> Mapping[str, Any]:
  """Return {name: annotation} of the arguments of a class or function.

  Those that cannot be resolved are left out.
  """
  fn = fn.__init__ if inspect.isclass(fn) else fn
  try:
    return typing.get_type_hints(fn, include_extras=True)
  except (NameError, TypeError, AttributeError):
    each = {k: _hint(fn, v) for k, v in _annotations(fn).items()}
    return {name: hint for name, hint in each.items() if hint is not None}


def _annotations(fn):
  return getattr(fn, '__annotations__', {})


def _hint(fn, annotation):
  """Return an annotation without forward references, None if it has others."""
  alone = types.SimpleNamespace(__annotations__={'it': annotation})
  names = getattr(inspect.unwrap(fn), '__globals__', {})
  try:
    return typing.get_type_hints(alone, names, include_extras=True)['it']
  except (NameError, TypeError, AttributeError):
    return None


# Values that fit.

_UNIONS = (typing.Union, types.UnionType)


def fits(value: Any, annotation: Any) -> bool:
  """Return whether a value fits an annotation."""
  if isinstance(value, Deferred):
    return any(value.makes(each) for each in _plain(annotation))
  return any(_fits(value, each) for each in alternatives(annotation))


def alternatives(annotation: Any) -> tuple[Any, ...]:
  """Return the members of a union, else the annotation itself."""
  if typing.get_origin(annotation) in _UNIONS:
    return typing.get_args(annotation)
  return (annotation,)


def _plain(annotation):
  """Return the alternatives of an annotation without domains."""
  found = []
  for each in alternatives(annotation):
    inner = getattr(each, '__origin__', each)
    has_domains = hasattr(each, '__metadata__')
    found += _plain(inner) if has_domains else [each]
  return found


def _fits(value, annotation):
  if domains := domains_of(annotation):
    inner = annotation.__origin__
    return fits(value, inner) and all(each.holds(value) for each in domains)
  if hasattr(annotation, '__metadata__'):
    return fits(value, annotation.__origin__)
  if annotation is Any:
    return True
  if annotation is None or annotation is type(None):
    return value is None
  if annotation in (bool, int, float):
    return _is_number(value, annotation)
  origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is typing.Literal:
    return value in inner
  kind = origin or annotation
  if kind is collections.abc.Callable:
    return callable(value)
  if getattr(kind, '_is_protocol', False):
    # An object of a class may have less, where that is all that is used.
    is_object = type(value).__module__ != 'builtins'
    is_plain = inspect.isclass(value) or isinstance(value, dict)
    return is_object or (not is_plain and has(value, *members(kind)))
  if not inspect.isclass(kind):
    return True
  if issubclass(kind, Mapping):
    return isinstance(value, Mapping) and all(
      fits(x, (*inner, Any, Any)[1]) for x in value.values()
    )
  if kind is not str and issubclass(kind, Sequence):
    return _is_sequence(value, kind, inner)
  # A class with `duck_typed` stands for anything that is called like it.
  is_like = getattr(kind, 'duck_typed', False) and callable(value)
  return isinstance(value, kind) or is_like


def _is_number(value, kind):
  if getattr(value, 'ndim', None) == 0:  # a scalar of numpy or JAX
    value = value.item()
  if kind is bool or isinstance(value, bool):
    return isinstance(value, bool) and kind is bool
  if kind is int:
    return isinstance(value, numbers.Integral)
  return isinstance(value, numbers.Real) and (
    value == 0 or SMALLEST <= abs(value) <= LARGEST
  )


def _is_sequence(value, kind, inner):
  if isinstance(value, str | bytes | Mapping) or not hasattr(value, '__len__'):
    return False
  if issubclass(kind, tuple) and inner and inner[-1] is not Ellipsis:
    if len(value) != len(inner):
      return False
    return all(fits(x, each) for x, each in zip(value, inner))
  return all(fits(x, (*inner, Any)[0]) for x in value)


def members(protocol: Any) -> list[str]:
  """Return the names of the methods of a protocol."""
  return [
    name
    for name, value in vars(protocol).items()
    if inspect.isfunction(value)
    and name not in ('__init__', '__getattr__', '__subclasshook__')
    and not name.startswith('_no_init')
  ]


def has(value: Any, *names: str) -> bool:
  """Return whether the objects of a class, or an object, have the methods."""
  if inspect.isclass(value):  # a class itself has more, such as __call__
    found = {name for each in value.__mro__ for name in vars(each)}
    return found.issuperset(names)
  return all(hasattr(value, name) for name in names)


def is_opaque(cls: Any) -> bool:
  """Return whether a class is of an extension module: its methods may hide."""
  attributes = [x for each in cls.__mro__ for x in vars(each).values()]
  written = any(map(inspect.isfunction, attributes))
  return not written


def domains_of(annotation: Any) -> list[Any]:
  """Return the domains of an Annotated."""
  metadata = getattr(annotation, '__metadata__', ())
  return [each for each in metadata if hasattr(each, 'holds')]


# Expected values, in words.

_NAMES = {
  bool: 'True or False',
  int: 'an integer',
  float: 'a number',
  str: 'text',
  None: 'None',
  type(None): 'None',
}


def describe(annotation: Any, value: Any = None) -> str:
  """Return what an annotation expects, such as 'a number of at least 0'.

  Of a Range the bound is named that the value violates.
  """
  each = (_describe(x, value) for x in alternatives(annotation))
  return ' or '.join(dict.fromkeys(each))


def _describe(annotation, value=None):
  if hasattr(annotation, '__metadata__'):
    text = describe(annotation.__origin__)
    for domain in domains_of(annotation):
      if hasattr(domain, 'describe'):
        text = domain.describe(text, value)
      else:
        text = f'{text} {domain.text}'
    return text
  if annotation in _NAMES:
    return _NAMES[annotation]
  origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is typing.Literal:
    return f'one of {", ".join(map(repr, inner))}'
  kind = origin or annotation
  if kind is collections.abc.Callable:
    made = inner[-1] if inner else Any
    if made is Any or not inspect.isclass(made):
      return 'a function or a class'
    return f'what makes {describe(made)}'
  if hasattr(kind, 'in_words'):
    return kind.in_words
  name = getattr(kind, '__name__', str(kind))
  article = 'an' if name[0] in 'AEIOU' else 'a'
  if getattr(kind, '_is_protocol', False):
    methods = ', '.join(members(kind))
    return f'{article} {name}, which has {methods}'
  if not inspect.isclass(kind):
    return name
  if issubclass(kind, Mapping):
    of = f' of {describe(inner[1])}' if inner and inner[1] is not Any else ''
    return f'a dict{of}'
  if kind is not str and issubclass(kind, Sequence):
    if issubclass(kind, tuple) and inner and inner[-1] is not Ellipsis:
      return f'({", ".join(map(describe, inner))})'
    if not inner or inner[0] is Any:
      return 'a list or tuple'
    return f'a list or tuple, each item {describe(inner[0])}'
  return f'{article} {name}'


def _choices(annotation):
  """Return the texts that an annotation lists."""
  found = []
  for each in alternatives(annotation):
    for domain in domains_of(each):
      found += [
        x
        for x in getattr(domain, 'values', getattr(domain, 'names', ()))
        if isinstance(x, str)
      ]
  return found


def is_known(annotation: Any) -> bool:
  """Return whether an annotation says more than Any."""
  return all(
    each in _NAMES or domains_of(each) for each in alternatives(annotation)
  )
