"""Errors of predicted grades, classes in an order, on a whole split."""

from typing import ClassVar

import numpy as np

from vit_jax.evals.classification import Classification
from vit_jax.types import Kind, Kinds, Params


class Grades(Classification):
  """Metrics of Classification, and errors by the order of the classes.

  Class numbers are the order, and the predicted grade is the most probable one.
  mean_absolute_error is in grades; quadratic_weighted_kappa is Cohen's kappa
  with squared errors as weights: 1 if all are right, 0 if not above chance.
  """

  metrics: ClassVar[Kinds] = {
    **Classification.metrics,
    'mean_absolute_error': Kind(better='lower', main=True),
    'quadratic_weighted_kappa': Kind(better='higher', main=True),
  }

  def run(self, params: Params) -> dict[str, float]:
    found = super().run(params)
    assert self.predictions  # of this run
    x = self.predictions.true.astype(np.float64)
    y = self.predictions.predicted.astype(np.float64)
    # The mean squared error if both were independent.
    chance = np.mean(x**2) + np.mean(y**2) - 2 * x.mean() * y.mean()
    kappa = 1 - np.mean((x - y) ** 2) / chance if chance else np.nan
    return found | {
      'mean_absolute_error': float(np.mean(np.abs(x - y))),
      'quadratic_weighted_kappa': float(kappa),
    }
