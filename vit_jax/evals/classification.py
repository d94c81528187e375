"""Accuracy, calibration and loss of a classifier on a whole split."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import types
from vit_jax.data import subsets
from vit_jax.evals.collect import COUNTS, SplitEvaluator, means
from vit_jax.models.vit import grid_of
from vit_jax.objectives import classification
from vit_jax.reports.confusion import Predictions
from vit_jax.reports.results import wilson

BOUND = types.Kind('%', group='')
_RATES = 'accuracy', 'top5_accuracy'  # fractions of examples
_MEANS = (*_RATES, 'loss')
_LOG_P = {'softmax': jax.nn.log_softmax, 'sigmoid': jax.nn.log_sigmoid}


@dataclasses.dataclass(eq=False, kw_only=True)
class Classification(SplitEvaluator):
  """Top-1 and top-5 accuracy, calibration error and loss of a split.

  A label is a class number, or a vector [K] that is above 0 for each correct
  class. Predicting any correct class is a hit; the loss is that of the vector.
  Examples without a correct class do not count, as ImageNet-ReaL requires.

  Attributes:
    loss: 'softmax' or 'sigmoid'; also how logits become probabilities.
    restrict: 'present' drops the logits of classes that do not occur in the
      labels, as for ImageNet-A and -R (200 of 1,000).
    intervals: whether to report 95% intervals of accuracies (Wilson score).
    per_class: whether to report the accuracy of each class (class numbers).
    same_classes: whether class names of data and training must be equal. False:
      class numbers are equal, names are not, such as WordNet ids and words.
    flip: whether to average the probabilities of an image and its mirror image.
  """

  loss: Literal['softmax', 'sigmoid'] = 'softmax'
  restrict: Literal['present'] | None = None
  intervals: bool = False
  per_class: bool = False
  same_classes: bool = True
  flip: bool = False

  def __post_init__(self) -> None:
    self.for_grids = not self.flip
    super().__post_init__()
    wanted = self.model.num_classes
    found = getattr(self.data.source, 'num_classes', None) or wanted
    if not self.same_classes and found != wanted:
      raise types.UserError(
        f'The data has {found} classes and the model {wanted}, so their class '
        f'numbers cannot agree. Use a model with {found} classes.'
      )
    self._names = getattr(self.data.source, 'class_names', None)
    self.class_names = self._names if self.same_classes else None
    self._classes: slice | np.ndarray = slice(None)  # to choose among: all
    if self.restrict:
      labels = subsets.labels(self.data.source)
      occur = labels if labels.ndim == 1 else np.nonzero(labels > 0)[1]
      self._classes = np.unique(occur)
    self.predictions: Predictions | None = None

  metrics: ClassVar[types.Kinds] = {
    'accuracy': types.ACCURACY,
    'top5_accuracy': types.RATE,
    'loss': types.LOSS,
    'ece': types.LOSS,
    'mean_per_class_accuracy': types.ACCURACY,
    'majority_accuracy': types.Kind('%', main=True, group=''),
    'class_accuracy/': dataclasses.replace(types.RATE, detail=True),
    **{f'{name}_{end}': BOUND for name in _RATES for end in ('low', 'high')},
    **COUNTS,
    'num_unlabelled': types.DETAIL,
  }

  def measure(
    self, params: types.Params, batch: types.Batch
  ) -> dict[str, jax.Array]:
    images, labels = batch['image'], batch['label']
    logits = self._logits(params, images, **grid_of(self.model, batch))
    if self.flip:
      mirrored = self._logits(params, images[:, :, ::-1])
      logits = _average(jnp.stack([logits, mirrored]), self.loss)
    targets = classification.soft_targets(labels, logits.shape[-1])
    logits, targets = logits[:, self._classes], targets[:, self._classes]
    num_classes = logits.shape[-1]
    top5 = jax.lax.top_k(logits, min(5, num_classes))[1]
    hits = jnp.take_along_axis(targets, top5, axis=-1) > 0
    log_p = _LOG_P[self.loss](logits)
    correct = jnp.where(targets > 0, log_p, -jnp.inf)
    out = {
      'accuracy': hits[:, 0],
      'loss': classification.LOSSES[self.loss](logits, targets),
      'confidence': jnp.exp(jnp.max(log_p, axis=-1)),
      'predicted': top5[:, 0],
      'true': jnp.argmax(correct, axis=-1),
      'true_log_probability': jnp.max(correct, axis=-1),
    }
    if num_classes >= 20:  # with fewer, it says little
      out['top5_accuracy'] = hits.any(-1)
    if labels.ndim == 2:  # do not copy the vectors to the host
      out['label'] = jnp.any(labels > 0, axis=-1)
    return out

  def _logits(self, params, images, **grid):
    images = self.preprocess(images)
    logits = self.model.apply({'params': params}, images, **grid)
    if logits.ndim != 2:
      raise types.UserError(
        f'The model has logits of shape {logits.shape}; expected one row for '
        'each image. A model of masked patches has no classes: fine-tune it.'
      )
    return logits

  def run(self, params: types.Params) -> dict[str, float]:
    """Return {metric: float}.

    mean_per_class_accuracy: over the classes that occur (class numbers). It
    comes first if they differ in size, as accuracy alone then misleads.
    majority_accuracy: the accuracy of always guessing the largest class.
    top5_accuracy: only with 20 classes or more.
    ece: see `calibration_error`.
    NAME_low, NAME_high: see `intervals`; class_accuracy/CLASS: see `per_class`.
    num_examples, num_unlabelled, skipped: numbers of examples that count, label
    vectors without a correct class, and unreadable examples.
    """
    columns = self.collect(params)
    counts = self.collect.counts(columns)
    labels, results, is_uneven = columns['label'], {}, False
    if labels.dtype == bool:
      columns = {name: x[labels] for name, x in columns.items()}
      counts['num_examples'] = len(columns['label'])
      counts['num_unlabelled'] = int(np.sum(~labels))
    else:
      count = np.bincount(labels)
      hits = np.bincount(labels, columns['accuracy'])
      found = {int(c): float(hits[c] / count[c]) for c in np.flatnonzero(count)}
      results['mean_per_class_accuracy'] = float(np.mean([*found.values()]))
      results['majority_accuracy'] = float(count.max() / count.sum())
      is_uneven = count.max() > min(count[c] for c in found)
      if self.per_class:
        names = [*(self._names or range(len(count)))]
        if len({*names}) < len(names):  # not unique
          names = [*range(len(count))]
        results |= {f'class_accuracy/{names[c]}': x for c, x in found.items()}
    found = means(columns, _MEANS)
    found['ece'] = calibration_error(columns['confidence'], columns['accuracy'])
    for name in _RATES:
      if self.intervals and name in columns:
        low, high = wilson(found[name], len(columns[name]))
        found |= {f'{name}_low': low, f'{name}_high': high}
    classes = np.arange(self.model.num_classes)[self._classes]
    self.predictions = Predictions(
      index=columns['index'],
      true=classes[columns['true']],
      predicted=classes[columns['predicted']],
      true_log_probability=columns['true_log_probability'],
      predicted_probability=columns['confidence'],
      classes=classes,
      class_names=self._names,
    )
    parts = (results, found) if is_uneven else (found, results)
    return parts[0] | parts[1] | counts


def _average(logits, activation):
  """Return logits [B, K] of the mean probabilities of logits [V, B, K]."""

  def log_mean(x):
    return jax.nn.logsumexp(x, axis=0) - jnp.log(x.shape[0])

  if activation == 'softmax':
    return log_mean(jax.nn.log_softmax(logits))
  on, off = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
  return log_mean(on) - log_mean(off)


def calibration_error(
  confidence: np.ndarray, hit: np.ndarray, bins: int = 15
) -> float:
  """Return the expected calibration error (Guo et al., 2017, equation 3).

  This is the mean of |accuracy - mean confidence| over bins of equal width,
  weighted by the number of examples. A bin includes its upper edge only.
  """
  confidence = np.asarray(confidence, np.float64)
  # Float32 can round a probability to above 1, which is in the last bin.
  index = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
  gaps = np.bincount(index, hit - confidence, bins)
  return float(np.abs(gaps).sum() / len(confidence))
