"""A representation next to that of the teacher it was distilled from."""

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np

from vit_jax.evals.collect import Collector
from vit_jax.evals.knn import neighbours
from vit_jax.evals.representation import Representation
from vit_jax.objectives.encode import summarize
from vit_jax.objectives.frozen_teacher import FrozenTeacher
from vit_jax.types import Batch, Count, Kind, Kinds, Params


@dataclasses.dataclass(eq=False, kw_only=True)
class AgainstTeacher(Representation):
  """Representation, and how well neighbours agree with a teacher's.

  'shared_neighbours' is the fraction of the k nearest images of an image that
  are among its k nearest for the teacher, too: 1 if both agree, and on average
  k / (N - 1) of N images if the student has learned nothing. The pictures show
  the principal components of patches of both, each with its own colours.

  The teacher runs in the first evaluation, and for the pictures.

  Attributes:
    teacher: the one of the objective.
    k: number of neighbours; fewer if there are fewer other images.
  """

  teacher: FrozenTeacher
  k: Count = 10

  metrics: ClassVar[Kinds] = {
    'shared_neighbours': Kind('%', 'higher', main=True),
    **Representation.metrics,
  }

  def __post_init__(self) -> None:
    super().__post_init__()
    self.teacher.open(self.model)
    self._near: Any = None  # the teacher's, which never change

  def run(self, params: Params) -> dict[str, float]:
    """Return {metric: float}."""
    found, x = super().run(params), self._columns['x']
    if self._near is None:
      collect = Collector(self._of_teacher, data=self.data, mesh=self.mesh)
      self._near = _nearest(collect(self._load())['x'], self.k)
    shared = np.nan
    if np.isfinite(x).all():
      pairs = zip(_nearest(x, self.k), self._near)
      shared = np.mean([len({*a} & {*b}) / max(1, len(b)) for a, b in pairs])
    return {'shared_neighbours': float(shared), **found}

  def maps(self, params: Params, images: np.ndarray) -> dict[str, np.ndarray]:
    student = jax.jit(
      lambda params, x: summarize(self.model, params, self.preprocess(x))[1]
    )
    teacher = jax.jit(lambda params, x: self._summarize(params, x)[1])
    found = {
      'student ': student(params, images),
      'teacher ': teacher(self._load(), images),
    }
    return jax.device_get(found)

  def _load(self):
    """Return the teacher's parameters; they stay on the devices while used."""
    return self.teacher.load(self.teacher.abstract_params(self.mesh))

  def _summarize(self, params, images):
    images = self.teacher.convert(images)
    return summarize(self.teacher.model, params, images)

  def _of_teacher(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
    return {'x': self._summarize(params, batch['image'])[0]}


def _nearest(x, k):
  """Return the k nearest other rows of each row of x [N, D]."""
  _, rows = neighbours(x, x, min(len(x), 1 + k))
  return [[j for j in row if j != i][:k] for i, row in enumerate(rows)]
