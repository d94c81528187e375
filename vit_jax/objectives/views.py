"""Objectives of views, which `data.transforms.MultiCrop` cuts out of images."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.objectives.colours import Views
from vit_jax.objectives.encode import encode
from vit_jax.step import Context, OfFeatures, Seen, Terms
from vit_jax.types import Array, Batch, Params, Preprocess


@dataclasses.dataclass(frozen=True)
class OfViews(OfFeatures):
  """Base of the objectives that compare views of an image.

  A subclass has the `loss`. A wrapper can use the same features, as anchor.py
  does.
  """

  model: Any
  _: dataclasses.KW_ONLY
  preprocess: Preprocess
  views: Views = Views()
  terms: Terms = dataclasses.field(default_factory=dict, hash=False)

  def prepare(self, batch: Batch, rng: jax.Array) -> dict[str, Any]:
    return self.views.prepare(batch, rng)

  def large(self, batch: Batch) -> dict[str, Any]:
    """Return options of `encode.encode` for the large views."""
    return {}

  def encode(
    self, params: Params, batch: Batch, rng: Array, context: Context
  ) -> Seen:
    """Return the features of 'image', the large views, and of 'local'."""
    options: dict[str, Any] = {'image': self.large(batch), 'local': {}}
    found = {
      name: encode(
        self.model, params, self.preprocess(batch[name]), key, **options[name]
      )
      for name, key in zip(options, jax.random.split(rng))
      if name in batch
    }
    return Seen(params, batch, rng, context, found)

  def pictures(
    self, params: Params, batch: Batch, rng: jax.Array
  ) -> dict[str, jax.Array]:
    """Return the views of 8 images, a row each; small ones are enlarged."""
    batch = self.prepare({k: x[:8] for k, x in batch.items()}, rng)
    views = [batch[name] for name in ('image', 'local') if name in batch]
    views = [x.reshape(len(x), -1, *x.shape[-3:]) for x in views]
    size = views[0].shape[2:]
    rows = [
      jax.image.resize(x, (*x.shape[:2], *size), 'nearest') for x in views
    ]
    return {'Views of images': jnp.concatenate(rows, 1).astype(jnp.uint8)}
