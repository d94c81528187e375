"""Objectives of labels around others."""

import dataclasses
from typing import Any

import jax

from vit_jax.step import Labelled, as_objective
from vit_jax.types import Batch, LossFn, Outputs, UserError


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Wrapper(Labelled):
  """An objective of labels around another; a subclass changes a part."""

  inner: LossFn

  def __post_init__(self) -> None:
    inner = as_objective(self.inner)
    if not isinstance(inner, Labelled):
      raise UserError(
        f'{type(self).__name__} changes an objective with labels, and '
        f'{type(inner).__name__} has none. Leave the wrapper out.'
      )
    object.__setattr__(self, 'inner', inner)

  activation = property(lambda self: self.inner.activation)  # type: ignore
  kinds = property(lambda self: self.inner.kinds)  # type: ignore
  teacher = property(lambda self: self.inner.teacher)
  whole_batch = property(lambda self: self.inner.whole_batch)  # type: ignore

  def __call__(self, *args: Any, **kwargs: Any) -> Outputs:
    return self.inner(*args, **kwargs)

  def prepare(self, batch: Batch, rng: jax.Array) -> Batch:
    return as_objective(self.inner).prepare(batch, rng)
