"""Rank, spread, norms and pictures of a representation; no labels."""

import dataclasses
from typing import Any

import jax
import numpy as np

from vit_jax.analysis import embeddings
from vit_jax.data.subsets import View
from vit_jax.evals.collect import COUNTS, Collector, SplitEvaluator
from vit_jax.evals.knn import nearest, neighbours
from vit_jax.io import terminal
from vit_jax.objectives.encode import summarize
from vit_jax.objectives.frozen_teacher import FrozenTeacher
from vit_jax.types import ACCOUNT, Batch, Count, Kind, Kinds, Params

_PATCHES, _QUERIES, _NEAREST = 8, 10, 6  # images in the pictures
_LEAST_SPREAD = 0.01  # our choice, far below that of any useful representation


@dataclasses.dataclass(eq=False, kw_only=True)
class Representation(SplitEvaluator):
  """Rank, spread and norm of the representation of a split.

  A representation has collapsed if all images get nearly the same direction;
  then a line says so. A model that does not pool has the mean over patches.

  Next to a teacher, 'shared_neighbours' is the fraction of the k nearest images
  of an image that are among its k nearest for the teacher, too: 1 if both
  agree, and on average k / (N - 1) of N images if the model has learned
  nothing. The teacher runs in the first evaluation, and for the pictures, where
  the patches of both have colours of their own.
  """

  teacher: FrozenTeacher | None = None  # of a feature distillation
  k: Count = 10

  labelled = False

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.teacher:
      self.teacher = self.teacher.open(self.model)
    self._near: Any = None  # the teacher's neighbours, which never change

  @property
  def metrics(self) -> Kinds:
    shared = {'shared_neighbours': Kind('%', 'higher', main=True)}
    return (shared if self.teacher else {}) | {
      'rank': Kind(better='higher', main=True),
      'spread': Kind(better='higher'),
      'norm': Kind(),
      'norm_std': ACCOUNT,
      **COUNTS,
    }

  def measure(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
    return {'x': self._summarize(params, batch['image'])[0]}

  def _summarize(self, params, images):
    return summarize(self.model, params, self.preprocess(images))

  def run(self, params: Params) -> dict[str, float]:
    """Return {metric: float}, see `describe`."""
    self._columns = columns = self.collect(params)
    found = describe(columns['x'])
    if found['spread'] < _LEAST_SPREAD:
      terminal.say(
        'The representation has collapsed: all images have nearly the same '
        f'direction (spread {found["spread"]:.4f}, rank {found["rank"]:.1f}). '
        'Try a lower learning rate or a larger batch.'
      )
    if self.teacher:
      found['shared_neighbours'] = self._shared(columns['x'])
    return found | self.collect.counts(columns)

  def _shared(self, x):
    """Return the fraction of neighbours that the teacher has, too."""
    if self._near is None:

      def measure(params, batch):
        return {'x': self._of_teacher(params, batch['image'])[0]}

      collect = Collector(measure, data=self.data, mesh=self.mesh)
      near = nearest(collect(self.teacher.load(self.mesh))['x'], self.k)
      self._near = near[1]
    if not np.isfinite(x).all():
      return np.nan
    pairs = zip(nearest(x, self.k)[1], self._near)
    return float(np.mean([len({*a} & {*b}) / max(1, len(b)) for a, b in pairs]))

  def _of_teacher(self, params, images):
    return summarize(self.teacher.model, params, self.teacher.convert(images))

  def pictures(self, params: Params) -> dict[str, list[list[np.ndarray]]]:
    """Return {title: rows of images}; `params` are those of the last run."""
    x, index = self._columns['x'], self._columns['index']
    if not np.isfinite(x).all():
      return {}
    # The nearest image of each is itself.
    _, rows = neighbours(x, x[:_QUERIES], min(len(x), 1 + _NEAREST))
    near = [self._images(index[row]) for row in rows]
    images = self._images(index[:_PATCHES])
    maps = {'': jax.jit(self._summarize)(params, images)}
    if self.teacher:
      other = jax.jit(self._of_teacher)(self.teacher.load(self.mesh), images)
      maps = {'student ': maps[''], 'teacher ': other}
    columns, shares = [images], []
    found = {'An image and its nearest ones': near}
    for name, (_, patches) in jax.device_get(maps).items():
      if patches is None:
        return found
      components, of_each = embeddings.patch_components(patches)
      percent = ', '.join(f'{share:.0%}' for share in of_each)
      shares.append(f'{name}{percent} of the variance')
      colours = embeddings.colours(components)
      columns.append([embeddings.enlarge(x, images.shape[1:]) for x in colours])
    title = f'PCA of patches ({"; ".join(shares)})'
    return {title: [[*row] for row in zip(*columns)], **found}

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
