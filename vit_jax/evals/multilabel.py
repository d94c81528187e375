"""Mean average precision and F1 where an example has any number of labels."""

import math

import jax.numpy as jnp
import numpy as np

from vit_jax.data import pipeline
from vit_jax.evals import statistics
from vit_jax.evals.classification import names_to_compare, unique_names
from vit_jax.evals.collect import Collector
from vit_jax.objectives import classification


class MultiLabel:
  """Ranking and decisions of a sigmoid model over a whole split.

  Every example counts once, those without any label, too. A class is predicted
  where its probability, sigmoid(logit), is at least `threshold`.

  Args:
    model: has apply({'params': p}, images) -> logits [B, K].
    preprocess: uint8 images -> float images.
    mesh: of `sharding.make_mesh`.
    data: arguments of `pipeline.eval_batches`, with labels [K], above 0 for the
      right classes; batch_size is global.
    threshold: between 0 and 1.
    per_class: whether to tell the average precision of each class, too.
    same_classes: see `Classification`.
    max_gb: every host keeps the scores of all examples, N * K * 4 bytes (about
      three times that while they are put in order); more than this is refused.

  Attributes:
    class_names: of the data where it says and they are to be compared, or None.
    transforms: of the data.

  Raises:
    ValueError: labels that are no vectors; too many scores.
  """

  def __init__(
    self,
    model,
    *,
    preprocess,
    mesh,
    data,
    threshold=0.5,
    per_class=False,
    same_classes=True,
    max_gb=8.0,
  ):
    if not 0 < threshold < 1:
      raise ValueError(f'threshold={threshold!r} must lie between 0 and 1.')
    source = data['source']
    _check_labels(source, max_gb)
    self.transforms = tuple(data.get('transforms', ()))
    self.class_names = names_to_compare(source, model, same_classes)
    self._names, self._per_class = unique_names(source), per_class
    # Logits tell scores apart where float32 probabilities are all 1.
    self._threshold = math.log(threshold / (1 - threshold))

    def of_examples(params, batch):
      logits = model.apply({'params': params}, preprocess(batch['image']))
      return {
        'label': batch['label'] > 0,
        'loss': classification.sigmoid_loss(logits, batch['label']),
        'scores': logits.astype(jnp.float32),
      }

    self._collect = Collector(
      of_examples, data=data, mesh=mesh, num_classes=model.num_classes
    )

  def check(self, params):
    """Raises the model's error if it cannot take these images; no compute."""
    self._collect.check(params)

  def run(self, params):
    """{name: float} of

    mAP: mean average precision, over the classes that have an example.
    f1_micro, f1_macro: see `statistics.f1`.
    hamming: share of wrong decisions among all N * K.
    exact_match: share of the examples whose decisions are all right.
    loss: sigmoid cross-entropy, summed over classes, mean over examples.
    average_precision/CLASS: on demand; by number where names are not unique.
    num_examples: that count; skipped: that could not be read, if any.
    """
    columns = self._collect(params)
    scores, positive = columns['scores'], columns['label']
    predicted = scores >= self._threshold
    each = {
      int(c): statistics.average_precision(scores[:, c], positive[:, c])
      for c in np.flatnonzero(positive.any(axis=0))
    }
    if not each:
      raise ValueError(
        f'None of {len(positive)} examples has a label, so that there is no '
        'average precision. Take another split.'
      )
    wrong = predicted != positive
    f1 = statistics.f1(predicted, positive)
    results = {
      'mAP': float(np.mean(list(each.values()))),
      'f1_micro': f1['micro'],
      'f1_macro': f1['macro'],
      'hamming': float(wrong.mean()),
      'exact_match': float(np.mean(~wrong.any(axis=1))),
      'loss': float(np.mean(columns['loss'], dtype=np.float64)),
    }
    if self._per_class:
      for c, precision in each.items():
        name = self._names[c] if self._names else c
        results[f'average_precision/{name}'] = precision
    if skipped := len(self._collect.source) - len(positive):
      results['skipped'] = skipped
    return results | {'num_examples': len(positive)}


def _check_labels(source, max_gb):
  label = np.asarray(pipeline.first_example(source)['label'])
  if label.ndim != 1:
    raise ValueError(
      f'MultiLabel: the label of an example is {label!r}; it needs vectors '
      'with an entry above 0 for each right class. For class numbers there is '
      'vit_jax.evals.classification.Classification.'
    )
  needed = len(source) * len(label) * 4 / 1e9
  if needed > max_gb:
    raise ValueError(
      f'MultiLabel: the scores of {len(source)} examples and {len(label)} '
      f'classes take {needed:.3g} GB on every host, more than max_gb={max_gb}. '
      'Evaluate a part of the split, or raise max_gb: while they are put in '
      'order they take three times that.'
    )
