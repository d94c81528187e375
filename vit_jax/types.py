"""Types of the public API, for readers, type checkers and configs.

Protocols are interfaces: a class of yours needs the methods, not the base
class. Those of data are in data/pipeline.py, that of evaluators in
evals/evaluators.py and that of writers in runs/writers.py.

An annotation is the schema of an argument: `accum_steps: Count = 1` is an int
for type checkers, and a config refuses 0 before anything is built. An argument
that results do not depend on is marked `Annotated[int, HARMLESS]`.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import numpy as np

if TYPE_CHECKING:
  from jax import Array as JaxArray
else:  # processes that read data do not import jax
  JaxArray = Any


class UserError(ValueError):
  """A mistake of the user: commands print its message without a traceback."""


@dataclasses.dataclass(frozen=True)
class Expect:
  """A condition on the value of an argument, in its Annotated."""

  holds: Callable[[Any], bool]
  text: str  # the condition in words, such as 'at least 1'

  def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
    """Return the schema by which a config checks the argument."""
    # Models are imported on machines that have jax, flax and optax only.
    from pydantic_core.core_schema import no_info_after_validator_function

    return no_info_after_validator_function(self._checked, handler(source))

  def _checked(self, value):
    if not self.holds(value):
      raise ValueError(self.text)
    return value


# Marks of arguments that results do not depend on, so that a run may resume
# with another value; MACHINE: hosts of one run may have different values, too.
HARMLESS, MACHINE = 'harmless', 'machine'


def _is_regex(text):
  try:
    re.compile(text)
  except re.error:
    return False
  return True


def _are_sides(value):
  sides = value if isinstance(value, list | tuple) else (value, value)
  return all(1 <= side <= 2**14 for side in sides)


_FLOAT_TYPES = ('float32', 'bfloat16', 'float16')

Count = Annotated[int, Expect(lambda n: n >= 1, 'at least 1')]
Natural = Annotated[int, Expect(lambda n: n >= 0, 'at least 0')]
Positive = Annotated[float, Expect(lambda x: x > 0, 'above 0')]
NonNegative = Annotated[float, Expect(lambda x: x >= 0, 'at least 0')]
Factor = Annotated[float, Expect(lambda x: x >= 1, 'at least 1')]
Fraction = Annotated[float, Expect(lambda x: 0 <= x <= 1, 'in [0, 1]')]
Share = Annotated[float, Expect(lambda x: 0 < x <= 1, 'in (0, 1]')]
Between = Annotated[float, Expect(lambda x: 0 < x < 1, 'in (0, 1)')]
Rate = Annotated[float, Expect(lambda x: 0 <= x < 1, 'in [0, 1)')]
# No rule of optax trains with a larger one: updates overflow.
LearningRate = Annotated[float, Expect(lambda x: 0 <= x <= 1e4, 'in [0, 1e4]')]
Seed = Annotated[int, Expect(lambda n: 0 <= n < 2**64, 'in [0, 2**64)')]
# jax.random.key uses 32 bits: a larger seed would repeat a smaller one.
KeySeed = Annotated[int, Expect(lambda n: 0 <= n < 2**32, 'in [0, 2**32)')]
Side = Annotated[int, Expect(lambda n: 1 <= n <= 2**14, '1 to 16384 pixels')]
Size = Annotated[  # of a square, or (height, width)
  int | tuple[int, int],
  Expect(_are_sides, 'one integer or (height, width), 1 to 16384 pixels each'),
]
# A function of the source of the training, such as those of data/balance.py, in
# a config; a run calls it once, with its own source.
OfSource = Callable[[Any], Any]
# The result of a function of a config, which a user may set to a Size instead.
ComputedSize = Annotated[tuple[int, int], 'computed']
PathRule = Annotated[  # of paths of parameters, see tree.py
  str, Expect(_is_regex, "a regular expression such as 'head/.*'")
]
Dtype = Annotated[
  Any,
  Expect(
    lambda x: str(getattr(x, '__name__', x)) in _FLOAT_TYPES,
    f'one of {", ".join(map(repr, _FLOAT_TYPES))}',
  ),
]

PathLike = str | os.PathLike[str]
Array = JaxArray | np.ndarray
Shape = tuple[int, ...]
PyTree = Any
Params = Mapping[str, Any]  # nested dict of arrays
FlatParams = Mapping[str, Any]  # {path: array}, see tree.py
Batch = Mapping[str, Any]  # arrays [B, ...], by name
Metrics = dict[str, JaxArray]  # scalars


@dataclasses.dataclass(frozen=True)
class Kind:
  """How a metric is shown, and which of its values are better.

  Attributes:
    unit: '%' for a fraction, which pages show in percent; '': none.
    better: 'higher' or 'lower'; '': neither.
    main: whether summaries show it.
    detail: whether only files and tables of details have it.
    group: name of the chart that shows it; '': no chart.
    heading, form: heading ('': its name) and number format on the terminal.
  """

  unit: str = ''
  better: str = ''
  main: bool = False
  detail: bool = False
  group: str = 'Results'
  heading: str = ''
  form: str = '{:.4g}'

  def best(self, values: Mapping[Any, float]) -> Any:
    """Return the first key with the best value, usually the largest."""
    choose = min if self.better == 'lower' else max
    return choose(values, key=values.__getitem__)


Kinds = Mapping[str, Kind]  # by name; 'NAME/' is of all below it
LOSS, RATE = Kind(better='lower'), Kind('%', 'higher')
ACCURACY = Kind('%', 'higher', main=True)
DETAIL, ACCOUNT = Kind(detail=True), Kind(group='')


def kind_of(name: str, kinds: Kinds) -> Kind:
  """Return the kind of a metric; the longest name counts."""
  parts = name.split('/')
  above = ('/'.join([*parts[:i], '']) for i in range(len(parts) - 1, 0, -1))
  return next((kinds[x] for x in (name, *above) if x in kinds), Kind())


# Decoder of the files of a source, see `data.images.Colours`.
Decode = Callable[..., Any]
# Images [..., H, W, C], uint8 or (mixed images) float32 in 0..255, or rasters,
# float32 of any values -> float images of the same shape.
Preprocess = Callable[[Any], JaxArray]
# (params, batch, rng) -> (mean loss, metrics); see step.Objective.
Outputs = tuple[JaxArray, Metrics] | tuple[JaxArray, Metrics, Any]
LossFn = Callable[..., Outputs]
# (model, *, preprocess) -> LossFn; one that wraps another takes that, too. The
# tuple has what callers set, and the keys of the config to use instead.
MakeObjective = Annotated[
  Callable[..., LossFn], (('model', 'model'), ('preprocess', 'preprocess'))
]


class Model(Protocol):
  """A Flax module that maps images [B, H, W, C] to logits [B, K]."""

  @property
  def num_classes(self) -> int | None: ...

  def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
    """Return {'params': ...}."""

  def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the logits, or what the named `method` returns."""

  def clone(self, **updates: Any) -> Any:
    """Return the module with other fields."""

  def __getattr__(self, name: str) -> Any:
    """Return one of its own fields, such as `embedding`."""
