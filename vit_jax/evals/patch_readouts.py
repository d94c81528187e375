"""Readouts of patches, see patches.py: linear, and by the nearest patches."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from vit_jax.evals.knn import neighbours
from vit_jax.evals.logistic import Logistic
from vit_jax.evals.patches import Score, Shares, metrics
from vit_jax.types import Count, Positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
  """Logistic regression on the shares of the classes, see `Logistic`.

  Attributes:
    features: see `Patches`.
    C: strengths. That with the best mIoU on the patches of a held-out tenth of
      the images, each of the class with the largest score, is fitted to all.
  """

  features: Sequence[str] = ('map_-1',)
  C: Sequence[Positive] = (1e-4, 1e-3, 1e-2, 1e-1)
  max_iter: Count = 300

  def __call__(self, train: Shares) -> tuple[Score, dict[str, float]]:
    best, *others = strengths = sorted(self.C)
    fit = Logistic(max_iter=self.max_iter, standardize=True).fit
    if others:
      drawn = np.random.default_rng(0).permutation(np.unique(train.image))
      is_held = np.isin(train.image, drawn[: -(-len(drawn) // 10)])
      held, names = train[is_held], [*range(train.y.shape[1])]
      found = []
      for linear, _ in fit(train[~is_held], strengths):
        chosen = np.eye(len(names))[linear.logits(held.x).argmax(axis=1)]
        found.append(metrics(held.y.T @ chosen, names)['miou'])
      best = strengths[int(np.argmax(found))]
    ((linear, converged),) = fit(train, [best])
    return linear.logits, {'C': float(best), 'converged': float(converged)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Neighbours:
  """Shares of the classes of the k nearest patches, weighted as by `Knn`.

  The retrieval of patches of Balazevic et al. (2023), with its k and T [M].
  """

  features: Sequence[str] = ('map_-1',)
  k: Count = 30
  temperature: Positive = 0.02

  def __call__(self, train: Shares) -> tuple[Score, dict[str, float]]:
    def score(x):
      queries = x.reshape(-1, x.shape[-1])
      near, rows = neighbours(train.x, queries, min(self.k, len(train.x)))
      weights = np.exp((near - near[:, :1]) / self.temperature)
      votes = np.einsum('qk,qkc->qc', weights, train.y[rows])
      votes /= weights.sum(axis=1, keepdims=True)
      return votes.reshape(*x.shape[:-1], -1)

    return score, {}
