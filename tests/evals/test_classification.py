"""Evaluation counts every example once, over padding and devices."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import splits
from options import all_set

from vit_jax.data.pipeline import Data
from vit_jax.evals import classification
from vit_jax.evals.classification import Classification

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (21, 2, 2, 3), np.uint8)
KERNEL = RNG.normal(size=(12, 7)).astype(np.float32)
LABELS = RNG.integers(0, 7, 21)
WIDE = RNG.normal(size=(12, 20)).astype(np.float32)


def source_of(labels=LABELS, num_classes=7, broken=()):
  return splits.Source(IMAGES, labels, num_classes, broken)


SETTINGS = ('source', 'batch_size', 'on_error')


def make(kernel=KERNEL, num_devices=8, **kw):
  data = {'source': source_of(), 'batch_size': 16}
  data |= {name: kw.pop(name) for name in SETTINGS if name in kw}
  cls = kw.pop('cls', Classification)
  return splits.make(cls, Data(**data), kernel, num_devices, **kw)


def evaluate(*args, **kw):
  evaluator, params = make(*args, **kw)
  return evaluator, evaluator.run(params)


def logits_of(kernel=KERNEL):
  return IMAGES.reshape(21, -1) / 255.0 @ kernel.astype(np.float64)


def expected(rows, labels=LABELS, kernel=KERNEL, loss='softmax'):
  logits, labels = logits_of(kernel)[rows], labels[rows]
  rank = (logits > logits[np.arange(len(rows)), labels][:, None]).sum(axis=1)
  target = np.eye(kernel.shape[1])[labels]
  if loss == 'softmax':
    losses = scipy.special.logsumexp(logits, axis=1) - (logits * target).sum(1)
    sure = scipy.special.softmax(logits, axis=1).max(axis=1)
  else:
    losses = np.logaddexp(0, np.where(target == 1, -logits, logits)).sum(1)
    sure = scipy.special.expit(logits).max(axis=1)
  gaps = 0.0
  for i in range(15):
    inside = (sure > i / 15) & (sure <= (i + 1) / 15)
    gaps += abs(np.sum((rank == 0)[inside]) - np.sum(sure[inside]))
  recalls = [np.mean((rank == 0)[labels == c]) for c in np.unique(labels)]
  top5 = {'top5_accuracy': (rank < 5).mean()} if len(target[0]) >= 20 else {}
  return top5 | {
    'num_examples': len(rows),
    'accuracy': (rank == 0).mean(),
    'mean_per_class_accuracy': pytest.approx(np.mean(recalls), rel=1e-12),
    'majority_accuracy': np.bincount(labels).max() / len(rows),
    'ece': pytest.approx(gaps / len(rows), rel=1e-6),
    'loss': pytest.approx(losses.mean(), rel=1e-6),
  }


# 21 examples: with batches of 8 a remainder of 5; batches of 32 are padded.
@pytest.mark.parametrize(
  'num_devices, batch_size, loss',
  [(1, 8, 'softmax'), (8, 8, 'sigmoid'), (8, 32, 'softmax')],
)
def test_exact_on_any_devices_and_batches(num_devices, batch_size, loss):
  evaluator, result = evaluate(
    num_devices=num_devices, batch_size=batch_size, loss=loss
  )
  assert result == expected(np.arange(21), loss=loss)  # top-5 says little
  assert next(iter(result)) == 'mean_per_class_accuracy'  # classes differ
  again = evaluator.run(jnp.asarray(KERNEL))
  assert again == result  # an evaluator can be run any number of times


@pytest.mark.parametrize('count', [3, 20])
def test_few_and_many_classes(count):
  labels, kernel = LABELS % count, WIDE[:, :count]
  _, result = evaluate(kernel, source=source_of(labels, num_classes=count))
  assert result == expected(np.arange(21), labels, kernel)


def test_skipped_examples_do_not_count():
  rows = np.array([i for i in range(21) if i not in (3, 20)])
  _, result = evaluate(source=source_of(broken=(3, 20)), on_error='skip')
  assert result == expected(rows) | {'skipped': 2}
  with pytest.raises(ValueError, match='21 unreadable'):
    evaluate(source=source_of(broken=range(21)), on_error='skip')


def _vectors():
  labels = np.zeros((21, 7), np.float32)
  labels[np.arange(21), LABELS] = labels[:, 2] = 1
  return labels


def test_several_right_labels():
  """Each is a hit; the loss is computed against the vector."""
  labels, logits = _vectors(), logits_of()
  _, result = evaluate(source=source_of(labels))
  best = logits.argmax(axis=1)
  assert result['accuracy'] == np.mean((best == LABELS) | (best == 2))
  losses = -np.sum(labels * scipy.special.log_softmax(logits, axis=1), axis=1)
  assert result['loss'] == pytest.approx(losses.mean(), rel=1e-6)
  assert result['num_unlabelled'] == 0
  assert 'mean_per_class_accuracy' not in result


def test_examples_without_any_label_never_count():
  """As in ImageNet-ReaL: the result equals a run on the others alone."""
  labels, rows = _vectors(), np.array([0, 7, 15, 16, 20])
  labels[rows] = 0
  _, result = evaluate(source=source_of(labels), intervals=True)
  others = source_of(labels, broken=rows)
  _, alone = evaluate(source=others, on_error='skip', intervals=True)
  assert result.pop('num_unlabelled') == alone.pop('skipped') == 5
  assert alone.pop('num_unlabelled') == 0
  assert result == alone and result['num_examples'] == 16


@pytest.mark.parametrize('vectors', [False, True])
def test_restricted_to_classes(vectors):
  some = np.array([0, 2, 3, 4, 5, 6])
  place = LABELS % 6
  labels = some[place]
  if vectors:
    labels = np.eye(7, dtype=np.float32)[labels]
    place = np.eye(6, dtype=np.float32)[place]
  _, alone = evaluate(KERNEL[:, some], source=source_of(place, 6))
  _, result = evaluate(source=source_of(labels), restrict='present')
  assert result == alone
  _, result = evaluate(source=source_of(labels))
  assert result['loss'] != alone['loss']


def test_predictions():
  evaluator, _ = evaluate(source=source_of(broken=(3,)), on_error='skip')
  found, rows = evaluator.predictions, np.delete(np.arange(21), 3)
  logs = scipy.special.log_softmax(logits_of(), axis=1)[rows]
  np.testing.assert_array_equal(found.index, rows)
  np.testing.assert_array_equal(found.true, LABELS[rows])
  np.testing.assert_array_equal(found.predicted, logs.argmax(1))
  np.testing.assert_allclose(
    found.true_log_probability, logs[np.arange(20), LABELS[rows]], rtol=1e-5
  )
  np.testing.assert_allclose(
    found.predicted_probability, np.exp(logs.max(1)), rtol=1e-5
  )
  assert found.classes.tolist() == list(range(7))


def test_predictions_of_several_right_labels():
  labels, some = _vectors(), [0, 2, 3, 4, 5, 6]
  labels[:, 1] = 0
  labels[5] = 0
  assert labels[:, some].any(axis=0).all()
  evaluator, result = evaluate(
    source=source_of(labels), restrict='present', loss='sigmoid'
  )
  found, rows = evaluator.predictions, np.delete(np.arange(21), 5)
  np.testing.assert_array_equal(found.index, rows)
  correct = np.where(labels > 0, logits_of(), -np.inf)[rows]
  np.testing.assert_array_equal(found.true, correct.argmax(1))
  np.testing.assert_array_equal(
    found.predicted, np.array(some)[logits_of()[rows][:, some].argmax(1)]
  )
  np.testing.assert_allclose(
    np.exp(found.true_log_probability),
    scipy.special.expit(correct.max(1)),
    rtol=1e-5,
  )
  assert found.classes.tolist() == some
  assert result['accuracy'] == np.mean(found.true == found.predicted)


def test_accuracy_of_each_class():
  labels = LABELS % 6  # the last class does not occur
  source = source_of(labels)
  hit = logits_of().argmax(axis=1) == labels
  wanted = {c: hit[labels == c].mean() for c in range(6)}
  for names in (None, list('abcdefg'), list('abcdefa')):
    source.class_names = names
    _, result = evaluate(source=source, per_class=True)
    found = {k: v for k, v in result.items() if k.startswith('class_accuracy')}
    unique = names and len(set(names)) == 7
    assert found == {
      f'class_accuracy/{names[c] if unique else c}': x
      for c, x in wanted.items()
    }
    mean = np.mean(list(wanted.values()))
    assert result['mean_per_class_accuracy'] == pytest.approx(mean, rel=1e-12)


def test_intervals():
  given = {'kernel': WIDE, 'source': source_of(num_classes=20)}
  _, plain = evaluate(**given)
  evaluator, found = evaluate(**given, intervals=True)
  assert found.items() >= plain.items()
  assert {k for k in found if k not in plain} == {
    *('accuracy_low', 'accuracy_high'),
    *('top5_accuracy_low', 'top5_accuracy_high'),
  }
  for name in ('accuracy', 'top5_accuracy'):
    # The score test of a share at the ends of the interval has |z| = 1.96.
    shares = np.array([found[f'{name}_low'], found[f'{name}_high']])
    z = (found[name] - shares) / np.sqrt(shares * (1 - shares) / 21)
    np.testing.assert_allclose(z, [1.959964, -1.959964], rtol=1e-4)
  assert found.keys() - {'mean_per_class_accuracy'} <= {*evaluator.metrics}


def test_classes_of_other_names():
  source = source_of()
  source.class_names = list('abcdefg')
  assert make(source=source)[0].class_names == source.class_names
  evaluator, _ = evaluate(source=source, same_classes=False)
  assert evaluator.class_names is None
  assert evaluator.predictions.class_names == source.class_names


def test_labels_without_names_fit_the_model():
  with pytest.raises(ValueError, match=r'is 7 .*num_classes=7'):
    evaluate(source=source_of(np.full(21, 7), num_classes=None))


REST = {'restrict': 'present', 'intervals': True, 'per_class': True}
REST |= {'same_classes': False, 'cls': partial(all_set, Classification)}


@pytest.mark.parametrize('loss, others', [('softmax', {}), ('sigmoid', REST)])
def test_probabilities_of_mirror_images_are_averaged(loss, others):
  to_probabilities = {
    'softmax': lambda z: scipy.special.softmax(z, axis=1),
    'sigmoid': scipy.special.expit,
  }[loss]
  labels = LABELS % 6  # the last class does not occur
  evaluator, found = evaluate(
    source=source_of(labels), loss=loss, flip=True, **others
  )
  flipped = IMAGES[:, :, ::-1].reshape(21, -1) / 255.0 @ KERNEL
  p = (to_probabilities(logits_of()) + to_probabilities(flipped)) / 2
  p = p[:, : 6 if others else 7]
  target = np.eye(7)[labels, : p.shape[1]]
  losses = -np.log(p[target > 0])
  if loss == 'sigmoid':
    losses = -(target * np.log(p) + (1 - target) * np.log1p(-p)).sum(-1)
  assert found['accuracy'] == np.mean(p.argmax(axis=1) == labels)
  assert found['loss'] == pytest.approx(losses.mean(), rel=1e-5)
  assert ('accuracy_low' in found) == ('class_accuracy/0' in found)
  assert ('accuracy_low' in found) == bool(others)
  np.testing.assert_allclose(
    evaluator.predictions.predicted_probability, p.max(axis=1), rtol=1e-5
  )


def test_calibration_at_the_edges_of_bins():
  ones, yes = np.ones(4), np.ones(4, bool)
  assert classification.calibration_error(ones, yes, 15) == 0
  assert classification.calibration_error(ones, ~yes, 15) == 1
  # The edge between two bins belongs to the lower one: 0.5 +- errors cancel.
  edge, mixed = np.array([0.5, 0.25]), np.array([True, False])
  found = classification.calibration_error(edge, mixed, 2)
  assert found == pytest.approx(abs(0.5 - 0.25) / 2)
