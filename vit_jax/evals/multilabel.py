"""Average precision and F1 for examples with any number of labels."""

import math

import jax.numpy as jnp
import numpy as np

from vit_jax.data import pipeline
from vit_jax.data.pipeline import Data
from vit_jax.evals.classification import names_to_compare, unique_names
from vit_jax.evals.collect import Collector
from vit_jax.objectives import classification


class MultiLabel:
  """Ranking and decision metrics of a sigmoid model on a whole split.

  Every example counts once, including examples without a label. A class is
  predicted if its probability, sigmoid(logit), is at least `threshold`.

  Args:
    model: has apply({'params': p}, images) -> logits [B, K], and num_classes.
    preprocess: uint8 images -> float images.
    mesh: from `sharding.make_mesh`.
    data: the split; labels are vectors [K], above 0 for each correct class.
    threshold: between 0 and 1.
    per_class: whether to report the average precision of each class.
    same_classes: see `Classification`.
    max_gb: largest size of the scores of all examples (N * K * 4 bytes), which
      every host keeps; sorting them takes about three times that.

  Attributes:
    class_names: of the data, to compare with those of the training; or None.
    transforms: of the data.

  Raises:
    ValueError: labels are not vectors, or the scores exceed `max_gb`.
  """

  def __init__(
    self,
    model,
    *,
    preprocess,
    mesh,
    data: Data,
    threshold=0.5,
    per_class=False,
    same_classes=True,
    max_gb=8.0,
  ):
    if not 0 < threshold < 1:
      raise ValueError(f'threshold={threshold!r} must be between 0 and 1.')
    _check_labels(data.source, max_gb)
    self.transforms = data.transforms
    self.class_names = names_to_compare(data.source, model, same_classes)
    self._names, self._per_class = unique_names(data.source), per_class
    # Compare logits: float32 rounds large probabilities to 1, which are ties.
    self._threshold = math.log(threshold / (1 - threshold))

    def per_example(params, batch):
      logits = model.apply({'params': params}, preprocess(batch['image']))
      return {
        'label': batch['label'] > 0,
        'loss': classification.sigmoid_loss(logits, batch['label']),
        'scores': logits.astype(jnp.float32),
      }

    self._collect = Collector(
      per_example, data=data, mesh=mesh, num_classes=model.num_classes
    )

  def check(self, params):
    """Raise the model's error if it does not accept the images. No compute."""
    self._collect.check(params)

  def run(self, params):
    """Return {metric: float}.

    mAP: mean average precision over the classes that occur.
    f1_micro: F1 of all N * K decisions together; f1_macro: mean over classes,
    where a class that neither occurs nor is predicted counts 0.
    hamming: fraction of wrong decisions among all N * K.
    exact_match: fraction of examples whose decisions are all correct.
    loss: sigmoid cross-entropy, summed over classes, mean over examples.
    average_precision/CLASS: see `per_class`; by number if names are not unique.
    num_examples; skipped: number of unreadable examples, if any.
    """
    from sklearn import metrics  # takes a second

    columns = self._collect(params)
    scores, positive = columns['scores'], columns['label']
    each = {
      c: float(metrics.average_precision_score(positive[:, c], scores[:, c]))
      for c in np.flatnonzero(positive.any(axis=0)).tolist()
    }
    if not each:
      raise ValueError(
        f'None of the {len(positive)} examples has a label, so average '
        'precision is undefined. Use another split.'
      )
    predicted = scores >= self._threshold
    wrong = predicted != positive
    # scikit-learn takes one column for two classes, of which 1 is positive.
    labels = [1] if positive.shape[1] == 1 else None
    f1 = {
      f'f1_{average}': float(
        metrics.f1_score(
          positive, predicted, labels=labels, average=average, zero_division=0
        )
      )
      for average in ('micro', 'macro')
    }
    results = f1 | {
      'mAP': float(np.mean(list(each.values()))),
      'hamming': float(wrong.mean()),
      'exact_match': float(np.mean(~wrong.any(axis=1))),
      'loss': float(np.mean(columns['loss'], dtype=np.float64)),
    }
    if self._per_class:
      for c, precision in each.items():
        name = self._names[c] if self._names else c
        results[f'average_precision/{name}'] = precision
    return results | self._collect.counts(columns)


def _check_labels(source, max_gb):
  label = np.asarray(pipeline.first_example(source)['label'])
  if label.ndim != 1:
    raise ValueError(
      f'MultiLabel: the label of an example is {label!r}; it must be a vector '
      'that is above 0 for each correct class. For class numbers use '
      'vit_jax.evals.classification.Classification.'
    )
  needed = len(source) * len(label) * 4 / 1e9
  if needed > max_gb:
    raise ValueError(
      f'MultiLabel: the scores of {len(source)} examples and {len(label)} '
      f'classes take {needed:.3g} GB on every host, more than max_gb={max_gb}. '
      'Evaluate a part of the split, or raise max_gb; sorting them takes three '
      'times that.'
    )
