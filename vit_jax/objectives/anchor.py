"""An anchor for a model that continues from published weights.

`anchored` wraps an objective of views (LeJEPA, VISReg, DINO, DINOv2). It adds

    weight * mean over pairs of patches of (x_i · x_j - y_i · y_j)^2

where x are the tokens of the patches of an image, divided by their lengths, and
y are those of the frozen start: the Gram anchoring of DINOv3 (arXiv
2508.10104), within each image. So the patches of an image stay as alike as they
were, and may turn together.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.durations import Timeline
from vit_jax.models.vit import VisionTransformer
from vit_jax.objectives.encode import encode
from vit_jax.objectives.frozen_teacher import FrozenModel
from vit_jax.objectives.views import OfViews
from vit_jax.objectives.wrapper import Around
from vit_jax.step import Context, OfFeatures, Seen
from vit_jax.types import (
  Array,
  Batch,
  FlatParams,
  MakeObjective,
  Model,
  NonNegative,
  Outputs,
  Params,
  Preprocess,
  UserError,
)
from vit_jax.weights import surgery
from vit_jax.weights.surgery import InitFrom


@dataclasses.dataclass(eq=False)  # see FrozenTeacher
class Start(FrozenModel):
  """The weights that a run starts from, as the model of the run reads them.

  Attributes:
    init_from: that of the run.
  """

  init_from: InitFrom

  def read(self) -> FlatParams:
    return surgery.read(self.init_from).params

  def fitted(self, shapes: FlatParams) -> FlatParams:
    found, _ = surgery.adapt(self.read(), shapes, self.model, self.init_from)
    # A new mask vector or head has no part in the tokens of patches.
    return {
      k: x if isinstance(x, np.ndarray) else np.zeros(x.shape, x.dtype)
      for k, x in found.items()
    }


def anchored(
  model: Model,
  *,
  preprocess: Preprocess,
  objective: MakeObjective,
  start: Start,
  weight: NonNegative = 1.0,
) -> 'Anchored':
  """Return the `objective` with an anchor, whose value is a metric.

  Args:
    weight: 0: the anchor is a metric only. DINOv3 has 0, then 2, in its Gram
      anchoring and 1.5 in its adaptation to large images. Its teacher also sees
      larger crops: 512 px for the student's 256.
  """
  inner = objective(model, preprocess=preprocess)
  is_vit = isinstance(model, VisionTransformer)
  if not (is_vit and isinstance(inner, OfViews)):
    raise UserError(
      f'An anchor holds the patches of views, but the model is a '
      f'{type(model).__name__} and the objective {type(inner).__name__}. Use a '
      'VisionTransformer with LeJepa, Dino or DinoV2, or leave the anchor out.'
    )
  return Anchored(inner=inner, start=start, weight=weight)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Anchored(OfFeatures, Around):
  """See `anchored`."""

  inner: OfViews
  start: Start
  weight: float

  @property
  def teachers(self) -> dict[str, Any]:  # type: ignore[override]
    return {**self.inner.teachers, 'start': self.start}

  def of_run(
    self, timeline: Timeline, images: jax.ShapeDtypeStruct, choose: Any = None
  ) -> 'Anchored':
    made: Any = super().of_run(timeline, images, choose)
    start = self.start.opened(model=self.inner.model, images=images)
    return dataclasses.replace(made, start=start)

  def encode(
    self, params: Params, batch: Batch, rng: Array, context: Context
  ) -> Seen:
    return self.inner.encode(params, batch, rng, context)

  def loss(self, seen: Seen) -> Outputs:
    loss, metrics, *carried = self.inner.loss(seen)
    images, params = seen.batch['image'], seen.context.teachers['start']
    start = encode(self.inner.model, params, self.inner.preprocess(images))
    change = similarities(seen.features['image']) - similarities(start)
    anchor = jnp.mean(change**2)
    loss += self.weight * anchor
    return loss, metrics | {'loss': loss, 'anchor': anchor}, *carried


def similarities(features: dict[str, Any]) -> jax.Array:
  """Return the cosines of the patches of images or views: [..., n, n]."""
  patches = features['tokens'][..., -features['patches'].shape[-2] :, :]
  x = patches.astype(jnp.float32)
  x /= jnp.linalg.norm(x, axis=-1, keepdims=True)
  return jnp.einsum('...id,...jd->...ij', x, x, precision='highest')
