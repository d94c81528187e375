"""Accuracy, calibration and loss of a classifier, exact over any hosts."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data import pipeline
from vit_jax.evals import statistics
from vit_jax.evals.collect import Collector
from vit_jax.objectives import classification

LOSSES = {
  'softmax': classification.softmax_loss,
  'sigmoid': classification.sigmoid_loss,
}


class Classification:
  """Top-1, top-5 (of more than 5 classes), calibration and loss of a split.

  Every example counts once, on any number of devices and hosts. Labels are
  class numbers, or vectors [K] with a weight above 0 for every right class, any
  of which is a hit; the loss is then that against the vector as it is.
  Examples whose vector has no right class are left out of everything, as
  ImageNet-ReaL asks for.

  Args:
    model: has apply({'params': p}, images) -> logits [B, K].
    preprocess: uint8 images -> float images.
    mesh: of `sharding.make_mesh`.
    data: arguments of `pipeline.eval_batches`; batch_size is global.
    loss: 'softmax' or 'sigmoid'; also says what makes probabilities of logits.
    restrict: the classes to choose among; logits of all others are left out
      before anything is computed. 'present': those that the split's labels
      have, which is how ImageNet-A and -R (200 of 1,000) are evaluated; or
      their numbers. None: all.
    per_class: whether to tell the accuracy of each class, too.
    calibration_bins: of the expected calibration error; None or 0: do without.
    confidence: 95% intervals: 'binomial' of accuracies (Wilson's score
      interval), 'bootstrap' (percentiles of 1,000 resamples) of loss and
      calibration error, too; None: do without.
    same_classes: whether the names of the data's classes must be those of the
      training. False trusts that both number the same classes alike, whatever
      they call them: WordNet ids or words.

  Attributes:
    class_names: of the data where it says and they are to be compared, or None.
    transforms: of the data.

  Raises:
    ValueError: an argument that makes no sense, or not with this data.
  """

  def __init__(
    self,
    model,
    *,
    preprocess,
    mesh,
    data,
    loss='softmax',
    restrict=None,
    per_class=False,
    calibration_bins=15,
    confidence=None,
    same_classes=True,
  ):
    _check('loss', loss, tuple(LOSSES))
    _check('confidence', confidence, (None, 'binomial', 'bootstrap'))
    source = data['source']
    self.transforms = tuple(data.get('transforms', ()))
    self.class_names = names_to_compare(source, model, same_classes)
    if per_class:
      _check_one_label(source)
    self._per_class, self._names = per_class, unique_names(source)
    self._bins, self._confidence = calibration_bins, confidence

    def of_examples(params, batch):
      logits = model.apply({'params': params}, preprocess(batch['image']))
      targets = classification.soft_targets(batch['label'], logits.shape[-1])
      if classes is not None:
        logits, targets = logits[:, classes], targets[:, classes]
      out = _measure(logits, targets, loss)
      if batch['label'].ndim == 2:  # the vectors stay where they are
        out['label'] = jnp.any(batch['label'] > 0, axis=-1)
      return out

    self._collect = Collector(
      of_examples, data=data, mesh=mesh, num_classes=model.num_classes
    )
    classes = _choices(restrict, self._collect, model.num_classes)

  def check(self, params):
    """Raises the model's error if it cannot take these images; no compute."""
    self._collect.check(params)

  def run(self, params):
    """{name: float} of

    accuracy, top5_accuracy, loss: means over the examples.
    mean_per_class_accuracy: over the classes that occur; of class numbers only.
    ece: expected calibration error of the likeliest class, see `statistics`.
    NAME_low, NAME_high: intervals of the above, on demand, see `confidence`.
    class_accuracy/CLASS: on demand; by number where names are not unique.
    num_examples: that count; num_unlabelled: that do not, of vectors only;
    skipped: that could not be read, if any.
    """
    columns = self._collect(params)
    skipped = len(self._collect.source) - len(columns['index'])
    labels, counts = columns['label'], {}
    if labels.dtype == bool:
      counts['num_unlabelled'] = int(np.sum(~labels))
      columns = {name: x[labels] for name, x in columns.items()}
    count = len(columns['index'])
    if not count:
      raise ValueError(
        f'The evaluation has no example to count: {skipped} were unreadable, '
        f'{counts.get("num_unlabelled", 0)} had no label.'
      )
    results = self._means(columns)
    if labels.dtype != bool:
      results |= self._of_classes(columns)
    results |= self._intervals(columns)
    if skipped:
      counts['skipped'] = skipped
    return results | {'num_examples': count} | counts

  def _means(self, columns):
    hits = columns['hits']
    means = {'accuracy': float(np.mean(hits[:, 0]))}
    if hits.shape[1] > 1:
      means['top5_accuracy'] = float(np.mean(hits[:, 1]))
    means['loss'] = float(np.mean(columns['loss'], dtype=np.float64))
    if self._bins:
      means['ece'] = statistics.calibration_error(
        columns['confidence'], hits[:, 0], self._bins
      )
    return means

  def _of_classes(self, columns):
    found = statistics.per_class_accuracy(
      columns['label'], columns['hits'][:, 0]
    )
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
      kept = {k: columns[k] for k in ('hits', 'loss', 'confidence')}
      found = statistics.bootstrap(self._means, kept)
    else:
      hits = columns['hits']
      found = {
        name: statistics.wilson(int(np.sum(column)), len(column))
        for name, column in zip(('accuracy', 'top5_accuracy'), hits.T)
      }
    out = {}
    for name, (low, high) in found.items():
      out |= {f'{name}_low': low, f'{name}_high': high}
    return out


def _measure(logits, targets, loss):
  """[B, K], [B, K] -> what the numbers of a split are made of, [B, ...]."""
  num_classes = logits.shape[-1]
  top5 = jax.lax.top_k(logits, min(5, num_classes))[1]
  right = jnp.take_along_axis(targets, top5, axis=-1) > 0
  hits = [right[:, 0]]
  if num_classes > 5:
    hits.append(right.any(axis=-1))
  best = jnp.max(logits, axis=-1)
  if loss == 'softmax':
    log_confidence = best - jax.nn.logsumexp(logits, axis=-1)
  else:
    log_confidence = jax.nn.log_sigmoid(best)
  return {
    'hits': jnp.stack(hits, axis=-1),
    'loss': LOSSES[loss](logits, targets),
    'confidence': jnp.exp(log_confidence),
  }


def names_to_compare(source, model, same_classes):
  """The source's class names; None if it has none or they may differ.

  Raises ValueError if they may differ, but in number, too.
  """
  if same_classes:
    return getattr(source, 'class_names', None)
  found = getattr(source, 'num_classes', None)
  if found and model.num_classes and found != model.num_classes:
    raise ValueError(
      f'same_classes=False: the data has {found} classes and the model '
      f'{model.num_classes}, so that they cannot number the same ones alike. '
      'Take a model with a head for these classes.'
    )
  return None


def unique_names(source):
  """The source's class names; None if it has none, or one of them twice."""
  names = getattr(source, 'class_names', None)
  return names if names and len(set(names)) == len(names) else None


def _choices(restrict, collect, num_classes):
  """The numbers of the classes to choose among, int [k], or None."""
  if restrict is None:
    return None
  if isinstance(restrict, str):
    _check('restrict', restrict, (None, 'present', [0, 1, '...']))
  labels = collect.labels()
  labels = labels if labels.ndim == 1 else np.nonzero(labels > 0)[1]
  present = np.unique(labels)
  if restrict == 'present':
    return present
  classes = np.unique(np.asarray(restrict, int))
  limit = num_classes or 2**31
  if not len(classes) or classes[0] < 0 or classes[-1] >= limit:
    raise ValueError(
      f'restrict={restrict!r}: give the numbers of classes, 0 to {limit - 1}, '
      "or 'present'."
    )
  if missing := np.setdiff1d(present, classes).tolist():
    raise ValueError(
      f'restrict leaves out classes {missing[:5]} of the labels, which no '
      "prediction could match. Add them, or set restrict='present'."
    )
  return classes


def _check_one_label(source):
  if np.ndim(pipeline.first_example(source)['label']):
    raise ValueError(
      'per_class=True: the accuracy of a class needs one label for each '
      'example, a number; these are vectors. Leave it out.'
    )


def _check(name, value, allowed):
  if value not in allowed:
    allowed = ', '.join(map(repr, allowed))
    raise ValueError(f'{name}={value!r} must be one of {allowed}.')
