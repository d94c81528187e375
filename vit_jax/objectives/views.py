"""Objectives of views, which `data.transforms.MultiCrop` cuts out of images."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.objectives.colours import Views
from vit_jax.objectives.encode import encode
from vit_jax.step import OfFeatures, Seen, Terms
from vit_jax.types import Batch, Params, Preprocess


@dataclasses.dataclass(frozen=True)
class OfViews(OfFeatures):
  """Base of the objectives that compare views; a subclass has the `loss`."""

  model: Any
  _: dataclasses.KW_ONLY
  preprocess: Preprocess
  views: Views = Views()
  terms: Terms = dataclasses.field(default_factory=dict, hash=False)

  def prepare(self, batch: Batch, rng: jax.Array) -> dict[str, Any]:
    return self.views.prepare(batch, rng)

  def with_terms(self, terms: Terms) -> 'OfViews':
    return dataclasses.replace(self, terms=terms)

  def large(self, batch: Batch) -> dict[str, Any]:
    """Return options of `encode.encode` for the large views."""
    return {}

  def encode(self, seen: Seen) -> Seen:
    """Return the features of 'image', the large views, and of 'local'."""
    batch, found = seen.batch, {}
    options: Any = {'image': self.large(batch), 'local': {}}
    for key, (name, more) in zip(jax.random.split(seen.rng), options.items()):
      if name in batch:
        images = self.preprocess(batch[name])
        found[name] = encode(self.model, seen.params, images, key, **more)
    return seen._replace(features=found)

  def pictures(self, params: Params, batch: Batch, rng: jax.Array) -> Any:
    """Return the views of 8 images, a row each; small ones are enlarged."""
    dtype = batch['image'].dtype
    batch = self.prepare({k: x[:8] for k, x in batch.items()}, rng)
    views = [batch[name] for name in ('image', 'local') if name in batch]
    views = [x.reshape(len(x), -1, *x.shape[-3:]) for x in views]
    size = views[0].shape[2:]
    rows = [
      jax.image.resize(x, (*x.shape[:2], *size), 'nearest') for x in views
    ]
    return {'Views of images': jnp.concatenate(rows, 1).astype(dtype)}
