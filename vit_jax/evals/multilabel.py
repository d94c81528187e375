"""Average precision and F1 for examples with any number of labels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.evals.collect import LabelEvaluator, means
from vit_jax.objectives import classification
from vit_jax.types import Batch, Params, UserError


@dataclasses.dataclass(eq=False, kw_only=True)
class MultiLabel(LabelEvaluator):
  """Ranking and decision metrics of a sigmoid model on a whole split.

  Labels are vectors [K], above 0 for each correct class; examples without a
  label count too. A class is predicted if its probability is at least 0.5.
  """

  def __post_init__(self) -> None:
    if np.ndim(self.data.first_example()['label']) != 1:
      raise UserError(
        'MultiLabel: the label of each example must be a vector that is above '
        '0 for each correct class. For class numbers use '
        'vit_jax.evals.classification.Classification.'
      )
    super().__post_init__()

  @property
  def metrics(self) -> list[str]:
    names = ['mAP', 'f1_micro', 'f1_macro', 'hamming', 'exact_match', 'loss']
    return [*names, 'average_precision/', 'num_examples', 'skipped']

  def measure(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
    logits, labels = self.logits(params, batch['image']), batch['label']
    return {
      'label': labels > 0,
      'loss': classification.sigmoid_loss(logits, labels),
      'scores': logits.astype(jnp.float32),
    }

  def run(self, params: Params) -> dict[str, float]:
    """Return {metric: float}.

    mAP: mean average precision over the classes that occur.
    f1_micro: F1 of all N * K decisions together; f1_macro: mean over classes,
    where a class that neither occurs nor is predicted counts 0.
    hamming: fraction of wrong decisions among all N * K.
    exact_match: fraction of examples whose decisions are all correct.
    loss: sigmoid cross-entropy, summed over classes, mean over examples.
    average_precision/CLASS: see `per_class`.
    num_examples, skipped: numbers of readable and of unreadable examples.
    """
    from sklearn import metrics  # takes a second

    columns = self._collect(params)
    scores, positive = columns['scores'], columns['label']
    each = {
      c: float(metrics.average_precision_score(positive[:, c], scores[:, c]))
      for c in np.flatnonzero(positive.any(axis=0)).tolist()
    }
    predicted = scores >= 0
    wrong = predicted != positive
    results = {
      'mAP': float(np.mean(list(each.values()))),
      'hamming': float(wrong.mean()),
      'exact_match': float(np.mean(~wrong.any(axis=1))),
    }
    # scikit-learn takes one column for two classes, of which 1 is positive.
    labels = [1] if positive.shape[1] == 1 else None
    options = {'labels': labels, 'zero_division': 0}
    for average in ('micro', 'macro'):
      f1 = metrics.f1_score(positive, predicted, average=average, **options)
      results[f'f1_{average}'] = float(f1)
    return (
      results
      | means(columns, ['loss'])
      | self.of_each_class('average_precision', each)
      | self._collect.counts(columns)
    )
