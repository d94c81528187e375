"""Base classes of objectives that wrap another."""

import dataclasses
import operator
from typing import Any

import jax

from vit_jax.durations import Timeline
from vit_jax.step import Labelled, Objective, Terms, as_objective
from vit_jax.types import MakeObjective, Outputs, Preprocess, UserError


@dataclasses.dataclass(frozen=True, eq=False)
class Around(Objective):
  """Base of objectives around `inner`, which `objective` makes.

  It has the attributes of `inner`, which those of Objective would hide.
  """

  model: Any
  _: dataclasses.KW_ONLY
  preprocess: Preprocess
  objective: MakeObjective
  inner: Any = dataclasses.field(init=False)

  def __post_init__(self) -> None:
    inner = self.objective(self.model, preprocess=self.preprocess)
    object.__setattr__(self, 'inner', as_objective(inner))

  def __call__(self, *args: Any, **kwargs: Any) -> Outputs:
    return self.inner(*args, **kwargs)

  def of_run(
    self, timeline: Timeline, images: jax.ShapeDtypeStruct, choose: Any = None
  ) -> 'Around':
    inner = self.inner.of_run(timeline, images, choose)
    # The copy makes its `inner` again, so `objective` now returns this one.
    return dataclasses.replace(self, objective=lambda *_, **__: inner)

  def with_terms(self, terms: Terms) -> 'Around':
    inner = self.inner.with_terms(terms)
    return dataclasses.replace(self, objective=lambda *_, **__: inner)


for _name in (
  *('activation', 'kinds', 'teachers', 'terms', 'whole_batch', 'ema_weight'),
  *('init', 'carried', 'prepare', 'shown', 'pictures'),
):
  setattr(Around, _name, property(operator.attrgetter(f'inner.{_name}')))


class Wrapper(Around, Labelled):
  """Base of objectives of labels around another; a subclass changes a part."""

  def __post_init__(self) -> None:
    super().__post_init__()
    if not isinstance(self.inner, Labelled):
      raise UserError(
        f'{type(self).__name__} changes an objective with labels, and '
        f'{type(self.inner).__name__} has none. Leave the wrapper out.'
      )
