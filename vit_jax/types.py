"""Types of the public API, for readers and type checkers.

Protocols are interfaces: a class of yours needs the methods, not the base
class. Those of data are in data/pipeline.py, that of evaluators in
evaluators.py and that of writers in writers.py.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

Array = jax.Array | np.ndarray
Shape = tuple[int, ...]
Size = int | tuple[int, int]  # of a square, or (height, width)
PyTree = Any
Params = Mapping[str, Any]  # nested dict of arrays
FlatParams = Mapping[str, Any]  # {path: array}, see tree.py
Batch = Mapping[str, Any]  # arrays [B, ...], by name
Metrics = dict[str, jax.Array]  # scalars

# Images [..., H, W, C] in 0..255, uint8 or (mixed images) float32 -> float
# images of the same shape.
Preprocess = Callable[[Any], jax.Array]
# (params, batch, rng) -> (mean loss, metrics). It may have these attributes:
# `activation` converts logits to probabilities: 'softmax' or 'sigmoid';
# `prepare` is a function (batch, rng) -> batch that `train_step` applies to the
# whole batch, before it is cut into micro-batches;
# `frozen` lists arrays that it uses but that are not trained, see frozen.py;
# `class_names` are those of a teacher.
LossFn = Callable[[Any, Any, jax.Array], tuple[jax.Array, Metrics]]
# (model, *, preprocess) -> LossFn. One that wraps another also takes the inner
# objective.
Objective = Callable[..., LossFn]


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
