"""A teacher that is the EMA of the student, for objectives without labels."""

import dataclasses
from typing import Any

import jax

from vit_jax.durations import Timeline
from vit_jax.optim.schedules import Schedule
from vit_jax.step import Objective
from vit_jax.types import Preprocess, Rate


@dataclasses.dataclass(frozen=True)
class EmaTeacher(Objective):
  """Base of an objective whose teacher is `context.ema`.

  Attributes:
    momentum: weight of the former teacher, which rises to 1 on half a cosine;
      for batches of 256, 0.9995 is advised.
  """

  model: Any
  _: dataclasses.KW_ONLY
  preprocess: Preprocess
  momentum: Rate = 0.996
  timeline: Any = None

  def of_run(
    self, timeline: Timeline, images: jax.ShapeDtypeStruct, choose: Any = None
  ) -> 'EmaTeacher':
    return dataclasses.replace(self, timeline=timeline)

  def ema_weight(self, step: jax.Array) -> jax.Array:  # type: ignore[override]
    return Schedule(1 - self.momentum)(self.timeline)(step)
