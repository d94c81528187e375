"""Accuracy, calibration and loss of a classifier on a whole split."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.checks import one_of
from vit_jax.data import pipeline
from vit_jax.data.pipeline import Data
from vit_jax.evals.collect import Collector
from vit_jax.objectives import classification

LOSSES = {
  'softmax': classification.softmax_loss,
  'sigmoid': classification.sigmoid_loss,
}


class Classification:
  """Top-1 and top-5 accuracy, calibration error and loss of a split.

  Every example counts once, on any number of devices and hosts. A label is a
  class number, or a vector [K] that is above 0 for each correct class.
  Predicting any correct class is a hit; the loss is computed against the vector
  itself. Examples without a correct class are excluded from all metrics, as
  ImageNet-ReaL requires.

  Args:
    model: has apply({'params': p}, images) -> logits [B, K], and num_classes.
    preprocess: uint8 images -> float images.
    mesh: from `sharding.make_mesh`.
    data: the split.
    loss: 'softmax' or 'sigmoid'; also how logits become probabilities.
    restrict: class numbers to choose among; the logits of all other classes are
      dropped first. 'present': the classes that occur in the labels, as for
      ImageNet-A and -R (200 of 1,000). None: all classes.
    per_class: whether to report the accuracy of each class.
    calibration_bins: number of bins of the expected calibration error; None or
      0 disables it.
    confidence: 95% intervals: 'binomial' for accuracies (Wilson score), or
      'bootstrap' for all metrics but those of single classes (percentiles of
      1,000 resamples); None disables them.
    same_classes: whether class names of data and training must be equal. False
      assumes that both use the same class numbers with different names, such as
      WordNet ids and words.

  Attributes:
    class_names: of the data, to compare with those of the training; or None.
    transforms: of the data.

  Raises:
    ValueError: an argument is invalid or does not fit the data.
  """

  def __init__(
    self,
    model,
    *,
    preprocess,
    mesh,
    data: Data,
    loss='softmax',
    restrict=None,
    per_class=False,
    calibration_bins=15,
    confidence=None,
    same_classes=True,
  ):
    one_of('loss', loss, tuple(LOSSES))
    one_of('confidence', confidence, (None, 'binomial', 'bootstrap'))
    self.transforms = data.transforms
    self.class_names = names_to_compare(data.source, model, same_classes)
    if per_class and np.ndim(pipeline.first_example(data.source)['label']):
      raise ValueError(
        'per_class=True needs one class number per example; the labels are '
        'vectors. Remove per_class.'
      )
    classes = _choices(restrict, data.source, model.num_classes)
    self._per_class, self._names = per_class, unique_names(data.source)
    self._bins, self._confidence = calibration_bins, confidence

    def per_example(params, batch):
      logits = model.apply({'params': params}, preprocess(batch['image']))
      targets = classification.soft_targets(batch['label'], logits.shape[-1])
      if classes is not None:
        logits, targets = logits[:, classes], targets[:, classes]
      out = _measure(logits, targets, loss)
      if batch['label'].ndim == 2:  # do not copy the vectors to the host
        out['label'] = jnp.any(batch['label'] > 0, axis=-1)
      return out

    self._collect = Collector(
      per_example, data=data, mesh=mesh, num_classes=model.num_classes
    )

  def check(self, params):
    """Raise the model's error if it does not accept the images. No compute."""
    self._collect.check(params)

  def run(self, params):
    """Return {metric: float}.

    accuracy, loss, and with more than 5 classes top5_accuracy: means over
    examples.
    mean_per_class_accuracy: mean over the classes that occur (class numbers).
    ece: see `calibration_error`.
    NAME_low, NAME_high: intervals, see `confidence`.
    class_accuracy/CLASS: see `per_class`; by number if names are not unique.
    num_examples: number of examples that count; num_unlabelled: number of label
    vectors without a correct class; skipped: number of unreadable examples, if
    any.
    """
    columns = self._collect(params)
    counts = self._collect.counts(columns)
    labels, results = columns['label'], {}
    if labels.dtype == bool:
      columns = {name: x[labels] for name, x in columns.items()}
      counts['num_examples'] = len(columns['label'])
      counts['num_unlabelled'] = int(np.sum(~labels))
      if not counts['num_examples']:
        raise ValueError(
          f'All {len(labels)} examples are unlabelled, so there is nothing to '
          'evaluate. Use another split.'
        )
    else:
      results = self._each_class(labels, columns['accuracy'])
    return self._means(columns) | results | self._intervals(columns) | counts

  def _means(self, columns):
    means = {
      name: float(np.mean(columns[name], dtype=np.float64))
      for name in ('accuracy', 'top5_accuracy', 'loss')
      if name in columns
    }
    if self._bins:
      means['ece'] = calibration_error(
        columns['confidence'], columns['accuracy'], self._bins
      )
    return means

  def _each_class(self, labels, hits):
    count, hits = np.bincount(labels), np.bincount(labels, hits)
    found = {int(c): float(hits[c] / count[c]) for c in np.flatnonzero(count)}
    out = {'mean_per_class_accuracy': float(np.mean(list(found.values())))}
    if self._per_class:
      for number, accuracy in found.items():
        name = self._names[number] if self._names else number
        out[f'class_accuracy/{name}'] = accuracy
    return out

  def _intervals(self, columns):
    if not self._confidence:
      return {}
    if self._confidence == 'bootstrap':
      kept = {k: x for k, x in columns.items() if k not in ('label', 'index')}
      found = bootstrap(self._means, kept)
    else:
      found = {
        name: wilson(columns[name])
        for name in ('accuracy', 'top5_accuracy')
        if name in columns
      }
    return {
      f'{name}_{end}': value
      for name, interval in found.items()
      for end, value in zip(('low', 'high'), interval)
    }


def _measure(logits, targets, loss):
  """[B, K], [B, K] -> {name: [B]}, from which all metrics are computed."""
  num_classes = logits.shape[-1]
  top5 = jax.lax.top_k(logits, min(5, num_classes))[1]
  hits = jnp.take_along_axis(targets, top5, axis=-1) > 0
  best = jnp.max(logits, axis=-1)
  if loss == 'softmax':
    log_confidence = best - jax.nn.logsumexp(logits, axis=-1)
  else:
    log_confidence = jax.nn.log_sigmoid(best)
  out = {
    'accuracy': hits[:, 0],
    'loss': LOSSES[loss](logits, targets),
    'confidence': jnp.exp(log_confidence),
  }
  return out | ({'top5_accuracy': hits.any(-1)} if num_classes > 5 else {})


def calibration_error(confidence, hit, bins):
  """Return the expected calibration error (Guo et al., 2017, equation 3).

  This is the mean of |accuracy - mean confidence| over bins of equal width,
  weighted by the number of examples. A bin includes its upper edge only.

  Args:
    confidence: [n] in [0, 1], the probability of the predicted class.
    hit: bool [n], whether the prediction was correct.
    bins: number of bins.
  """
  confidence = np.asarray(confidence, np.float64)
  # Float32 can round a probability to above 1, which is in the last bin.
  index = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
  gaps = np.bincount(index, hit - confidence, bins)
  return float(np.abs(gaps).sum() / len(confidence))


def wilson(hits):
  """Return (low, high), the 95% Wilson score interval of mean(hits)."""
  import scipy.stats  # takes half a second

  test = scipy.stats.binomtest(int(np.sum(hits)), len(hits))
  interval = test.proportion_ci(0.95, method='wilson')
  return float(interval.low), float(interval.high)


def bootstrap(statistic, columns, *, resamples=1000, seed=0):
  """Return {name: (low, high)}, 95% percentile intervals.

  In numpy: `scipy.stats.bootstrap` does not take several metrics of the same
  resampled examples.

  Args:
    statistic: {name: [n, ...]} -> {name: float}.
    columns: {name: [n, ...]}; the same rows are drawn from all columns.
    resamples: number of draws.
    seed: of the draws.
  """
  count = len(next(iter(columns.values())))
  rng = np.random.default_rng(seed)
  found = []
  for _ in range(resamples):
    rows = rng.integers(count, size=count)
    found.append(statistic({name: x[rows] for name, x in columns.items()}))
  return {
    name: tuple(np.percentile([x[name] for x in found], (2.5, 97.5)).tolist())
    for name in found[0]
  }


def names_to_compare(source, model, same_classes):
  """Return the source's class names, or None if they need not be compared.

  Raises ValueError if `same_classes` is False and the numbers of classes of
  source and model differ.
  """
  if same_classes:
    return getattr(source, 'class_names', None)
  found = getattr(source, 'num_classes', None)
  if found and model.num_classes and found != model.num_classes:
    raise ValueError(
      f'same_classes=False: the data has {found} classes and the model '
      f'{model.num_classes}, so their class numbers cannot agree. Use a model '
      f'with {found} classes.'
    )
  return None


def unique_names(source):
  """Return the source's class names; None without names or with duplicates."""
  names = getattr(source, 'class_names', None)
  return names if names and len(set(names)) == len(names) else None


def _choices(restrict, source, num_classes):
  """Return the class numbers to choose among, int [k], or None for all."""
  if restrict is None:
    return None
  if isinstance(restrict, str):
    one_of('restrict', restrict, (None, 'present', [0, 1, '...']))
  labels = pipeline.labels(source)
  present = np.unique(labels if labels.ndim == 1 else np.nonzero(labels > 0)[1])
  if restrict == 'present':
    return present
  classes = np.unique(np.asarray(restrict, int))
  limit = num_classes or 2**31
  if not len(classes) or classes[0] < 0 or classes[-1] >= limit:
    raise ValueError(
      f'restrict={restrict!r} must be class numbers from 0 to {limit - 1}, or '
      "'present'."
    )
  if missing := np.setdiff1d(present, classes).tolist():
    raise ValueError(
      f'restrict excludes classes {missing[:5]}, which occur in the labels and '
      "could never be predicted. Add them, or set restrict='present'."
    )
  return classes
