"""Labels of examples, as predicted from the other examples of a set."""

import warnings
from typing import Any

import numpy as np
import threadpoolctl
from sklearn import (
  exceptions,
  linear_model,
  model_selection,
  pipeline,
  preprocessing,
)

from vit_jax.data.subsets import ranks
from vit_jax.evals.knn import nearest

_FOLDS = 5
_STRENGTHS = 1e-3, 1e-2, 1e-1, 1.0  # C of logistic regressions
_MOST = 5_000_000  # examples x classes that they are fitted to
_TEMPERATURE = 0.07  # of votes, as in knn.py
_LEAST = 1e-3  # probability in the likelihood: no example decides alone


def classes(
  x: np.ndarray, y: np.ndarray, near: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Return (probability of the given class, most probable class), [N] each.

  Predictions are votes of the nearest examples, or those of a logistic
  regression on the others: whatever makes the given classes most likely. The
  probability is the self-confidence of Northcutt et al. 2021, arXiv:1911.00068.

  Args:
    x: features [N, D].
    y: class numbers, float [N], NaN if missing. Missing ones, and examples
      alone in their class, or all in one class, have the probability NaN.
    near, rows: by `nearest`.
  """
  _, labels, counts = np.unique(y, return_inverse=True, return_counts=True)
  kept = np.flatnonzero(~np.isnan(y) & (counts[labels] > 1))
  probability, likeliest = np.full(len(y), np.nan), y.copy()
  known, labels = np.unique(y[kept], return_inverse=True)
  if len(known) < 2:
    return probability, likeliest
  if len(kept) < len(y):
    x, (near, rows) = x[kept], nearest(x[kept], near.shape[1])
  weights = np.exp((near - near[:, :1]) / _TEMPERATURE)
  votes = np.zeros((len(kept), len(known)), np.float32)
  np.add.at(votes, (np.arange(len(kept))[:, None], labels[rows]), weights)
  found = [votes / votes.sum(axis=1, keepdims=True)]
  if votes.size <= _MOST:
    models = (linear_model.LogisticRegression(C=C) for C in _STRENGTHS)
    found += [_by_others(x, labels, m, method='predict_proba') for m in models]
  own = np.array([p[np.arange(len(p)), labels] for p in found])
  best = np.log(np.maximum(own, _LEAST)).mean(axis=1).argmax()
  probability[kept] = own[best]
  likeliest[kept] = known[found[best].argmax(axis=1)]
  return probability, likeliest


def numbers(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """Return estimates of numbers y [N] by ridge regressions on the others.

  Missing numbers, and all of fewer than ten, have the estimate NaN.
  """
  kept, found = np.flatnonzero(~np.isnan(y)), np.full(len(y), np.nan)
  if len(kept) >= 2 * _FOLDS:
    model = linear_model.RidgeCV(np.logspace(0, 5, 6))
    found[kept] = _by_others(x[kept], y[kept], model)
  return found


def _by_others(x: np.ndarray, y: np.ndarray, model: Any, **options: Any) -> Any:
  """Return cross-validated predictions; each class is in several folds."""
  order, fold = np.random.default_rng(0).permutation(len(y)), np.empty(len(y))
  is_class = y.dtype.kind == 'i'
  fold[order] = ranks(y[order] if is_class else np.zeros(len(y))) % _FOLDS
  options['cv'] = model_selection.PredefinedSplit(fold)
  model = pipeline.make_pipeline(preprocessing.StandardScaler(), model)
  # More threads than free cores make small products 100 times slower.
  with threadpoolctl.threadpool_limits(1), warnings.catch_warnings():
    warnings.simplefilter('ignore', exceptions.ConvergenceWarning)
    return model_selection.cross_val_predict(model, x, y, **options)
