"""An anchor for a model that continues from published weights.

`Anchored` wraps an objective of views (LeJEPA, VISReg, DINO, DINOv2) or feature
distillation. It adds

    weight * mean over pairs of patches of (x_i · x_j - y_i · y_j)^2

where x are the tokens of the patches of an image, divided by their lengths, and
y are those of the frozen start: the Gram anchoring of DINOv3 (arXiv 2508.10104)
within each image, whose patches stay as alike as they were.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.durations import Timeline
from vit_jax.models.vit import VisionTransformer
from vit_jax.objectives.encode import encode
from vit_jax.objectives.frozen_teacher import FrozenModel
from vit_jax.objectives.terms import Features, patches_of
from vit_jax.objectives.views import OfViews
from vit_jax.objectives.wrapper import Around
from vit_jax.step import OfFeatures, Seen
from vit_jax.types import NonNegative, Outputs, UserError
from vit_jax.weights.surgery import InitFrom


def gram_difference(features: Features, others: Features) -> jax.Array:
  """Return the squared differences of cosines of patches: [..., n, n]."""
  return (_cosines(features) - _cosines(others)) ** 2


def _cosines(features):
  x = patches_of(features)
  x /= jnp.linalg.norm(x, axis=-1, keepdims=True)
  return jnp.einsum('...id,...jd->...ij', x, x, precision='highest')


@dataclasses.dataclass(eq=False)  # see FrozenTeacher
class Start(FrozenModel):
  """The weights that a run starts from, as the model of the run reads them."""

  init_from: InitFrom  # of the run


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Anchored(OfFeatures, Around):
  """An objective of views with an anchor, whose value is a metric.

  Attributes:
    weight: 0: the anchor is a metric only. DINOv3 has 0, then 2, in its Gram
      anchoring and 1.5 in its adaptation to large images. Its teacher also sees
      larger crops: 512 px for the student's 256.
    difference: of the features of the model and of the start; its mean counts.
      `terms.kernel_difference` is PaKA's.
  """

  start: Start
  weight: NonNegative = 1.0
  difference: Callable[..., Any] = gram_difference

  def __post_init__(self) -> None:
    super().__post_init__()
    is_vit = isinstance(self.model, VisionTransformer)
    if not (is_vit and isinstance(self.inner, OfViews)):
      raise UserError(
        f'An anchor holds patches, but the model is a '
        f'{type(self.model).__name__} and the objective '
        f'{type(self.inner).__name__}. Use a VisionTransformer and LeJepa, '
        'Dino, DinoV2 or FeatureDistillation.'
      )

  @property
  def teachers(self) -> dict[str, Any]:  # type: ignore[override]
    return {**self.inner.teachers, 'start': self.start}

  def of_run(
    self, timeline: Timeline, images: jax.ShapeDtypeStruct, choose: Any = None
  ) -> 'Anchored':
    made: Any = super().of_run(timeline, images, choose)
    start = self.start.opened(model=self.model, images=images)
    return dataclasses.replace(made, start=start)

  def encode(self, seen: Seen) -> Seen:
    return self.inner.encode(seen)

  def loss(self, seen: Seen) -> Outputs:
    loss, metrics, *carried = self.inner.loss(seen)
    images, params = seen.batch['image'], seen.context.teachers['start']
    start = encode(self.model, params, self.preprocess(images))
    anchor = jnp.mean(self.difference(seen.features['image'], start))
    loss += self.weight * anchor
    return loss, metrics | {'loss': loss, 'anchor': anchor}, *carried
