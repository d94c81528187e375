"""Rank, spread, norms and pictures of a representation; no labels."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.analysis import embeddings
from vit_jax.data.views import View
from vit_jax.evals.collect import COUNTS, SplitEvaluator
from vit_jax.evals.knn import neighbours
from vit_jax.io import terminal
from vit_jax.models.vit import VisionTransformer
from vit_jax.types import ACCOUNT, Batch, Kind, Kinds, Params

_PATCHES, _QUERIES, _NEAREST = 8, 10, 6  # images in the pictures
_LEAST_SPREAD = 0.01  # our choice, far below that of any useful representation


@dataclasses.dataclass(eq=False, kw_only=True)
class Representation(SplitEvaluator):
  """Rank, spread and norm of the representation of a split.

  A representation has collapsed if all images get nearly the same direction;
  then a line says so.

  Attributes:
    features: name of an output of `model.features` that is one vector for each
      image.
  """

  features: str = 'pre_logits'

  labelled = False
  metrics: ClassVar[Kinds] = {
    'rank': Kind(better='higher', main=True),
    'spread': Kind(better='higher'),
    'norm': Kind(),
    'norm_std': ACCOUNT,
    **COUNTS,
  }

  def measure(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
    out = self._features(params, batch['image'])
    x = out[self.features].astype(jnp.float32)
    return {'x': x if x.ndim == 2 else x.mean(axis=1)}  # over patches

  def _features(self, params, images, **options):
    images, options = self.preprocess(images), {'method': 'features', **options}
    return self.model.apply({'params': params}, images, **options)

  def run(self, params: Params) -> dict[str, float]:
    """Return {metric: float}, see `describe`."""
    self._columns = columns = self._collect(params)
    found = describe(columns['x'])
    if found['spread'] < _LEAST_SPREAD:
      terminal.say(
        'The representation has collapsed: all images have nearly the same '
        f'direction (spread {found["spread"]:.4f}, rank {found["rank"]:.1f}). '
        'Try a lower learning rate or a larger batch.'
      )
    return found | self._collect.counts(columns)

  def pictures(self, params: Params) -> dict[str, list[list[np.ndarray]]]:
    """Return {title: rows of images}: patches in colours, nearest images.

    `params` are those of the last run, whose features are used.
    """
    x, index = self._columns['x'], self._columns['index']
    if not np.isfinite(x).all():
      return {}
    # The nearest image of each is itself.
    _, rows = neighbours(x, x[:_QUERIES], min(len(x), 1 + _NEAREST))
    near = [self._images(index[row]) for row in rows]
    found = {'An image and its nearest ones': near}
    images = self._images(index[:_PATCHES])
    columns: list[Any] = [images]
    shares = []
    for name, maps in self.maps(params, images).items():
      components, of_each = embeddings.patch_components(maps)
      percent = ', '.join(f'{share:.0%}' for share in of_each)
      shares.append(f'{name}{percent} of the variance')
      colours = embeddings.colours(components)
      columns.append([embeddings.enlarge(x, images.shape[1:]) for x in colours])
    if not shares:
      return found
    title = f'PCA of patches ({"; ".join(shares)})'
    return {title: [[*row] for row in zip(*columns)], **found}

  def maps(self, params: Params, images: np.ndarray) -> dict[str, np.ndarray]:
    """Return maps of patches to draw, {title: [n, gh, gw, D]}."""
    if not isinstance(self.model, VisionTransformer):
      terminal.say('No picture of patches: the model is not a ViT.')
      return {}
    fn = functools.partial(self._features, maps=(-1,), per_layer=False)
    return {'': jax.device_get(jax.jit(fn)(params, images)['map_-1'])}

  def _images(self, index):
    """Return the examples with these numbers, as the model gets them."""
    chosen = View(self.data.source, index)
    data = dataclasses.replace(
      self.data, source=chosen, batch_size=len(index), num_workers=0
    )
    (batch,) = data.eval_batches()
    return batch['image']


def describe(x: np.ndarray) -> dict[str, Any]:
  """Return the metrics of vectors [N, D], NaN if any number is NaN or Inf.

  rank: RankMe, exp of the entropy of the singular values (Garrido et al., 2023;
    from memory): from 1 to the smaller of N and D.
  spread: root mean square distance of the vectors, divided by their lengths,
    from their mean: 1 if all directions are equally likely, 0 if there is one.
  norm, norm_std: mean and standard deviation of the lengths.
  """
  x = np.asarray(x, np.float64)
  if not np.isfinite(x).all():
    return dict.fromkeys(('rank', 'spread', 'norm', 'norm_std'), np.nan)
  singular = np.linalg.svd(x, compute_uv=False)
  shares = singular / max(singular.sum(), 1e-30) + 1e-7
  norms = np.linalg.norm(x, axis=1)
  unit = x / np.maximum(norms, 1e-30)[:, None]
  return {
    'rank': float(np.exp(-np.sum(shares * np.log(shares)))),
    'spread': float(np.sqrt(unit.var(axis=0).sum())),
    'norm': float(norms.mean()),
    'norm_std': float(norms.std()),
  }
