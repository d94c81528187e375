"""Against scikit-learn, on scores that numpy computes."""

import numpy as np
import pytest
import scipy.special
import sklearn.metrics
import splits

from vit_jax.data.pipeline import Data
from vit_jax.evals.multilabel import MultiLabel

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (37, 2, 2, 3), np.uint8)
KERNEL = (RNG.normal(size=(12, 6)) / 2).astype(np.float32)
LOGITS = IMAGES.reshape(37, -1) / 255.0 @ KERNEL.astype(np.float64)
# Right but for some noise, so that some examples are right altogether.
LABELS = (LOGITS + RNG.normal(size=(37, 6)) / 3 > 0.1).astype(np.float32)
LABELS[10:16] = np.eye(6)
LABELS[:, 2] = 0  # a class without examples
LABELS[5] = 0  # an example without classes


def source_of(labels=LABELS, broken=(), num_classes=6):
  source = splits.Source(IMAGES, labels, num_classes, broken)
  source.class_names = tuple('abcdef')
  return source


def evaluate(num_devices=8, source=None, on_error='raise', kernel=KERNEL, **kw):
  data = Data(source or source_of(), 16, on_error=on_error)
  evaluator, params = splits.make(MultiLabel, data, kernel, num_devices, **kw)
  evaluator.check(params)
  return evaluator.run(params)


def expected(rows=slice(None)):
  positive = LABELS[rows] > 0
  scores = scipy.special.expit(LOGITS[rows])
  predicted = scores >= 0.5
  have = positive.any(axis=0)
  loss = np.logaddexp(0, LOGITS[rows]) - LOGITS[rows] * positive
  f1 = {
    f'f1_{name}': sklearn.metrics.f1_score(
      positive, predicted, average=name, zero_division=0
    )
    for name in ('micro', 'macro')
  }
  values = f1 | {
    'mAP': sklearn.metrics.average_precision_score(
      positive[:, have], scores[:, have], average='macro'
    ),
    'hamming': sklearn.metrics.hamming_loss(positive, predicted),
    'exact_match': sklearn.metrics.accuracy_score(positive, predicted),
    'loss': loss.sum(axis=1).mean(),
    'num_examples': len(positive),
  }
  return {k: pytest.approx(v, rel=1e-6) for k, v in values.items()}


@pytest.mark.parametrize('num_devices', [1, 8])
def test_is_that_of_scikit_learn(num_devices):
  found = evaluate(num_devices)
  assert found == expected()
  assert 0 < found['exact_match'] < 1 and 0 < found['f1_macro'] < 1


def test_a_single_class():
  labels = (LOGITS[:, :1] + LABELS[:, :1] > 0.3).astype(np.float32)
  source = source_of(labels, num_classes=1)
  found = evaluate(source=source, kernel=KERNEL[:, :1])
  score = sklearn.metrics.f1_score(labels[:, 0], LOGITS[:, 0] > 0)
  assert found['f1_micro'] == found['f1_macro'] == pytest.approx(score)


def test_skipped_examples_do_not_count():
  rows = np.array([i for i in range(37) if i not in (0, 36)])
  found = evaluate(source=source_of(broken=(0, 36)), on_error='skip')
  assert found == expected(rows) | {'skipped': 2}


def test_precision_of_each_class():
  found = evaluate(per_class=True)
  each = {
    f'average_precision/{name}': sklearn.metrics.average_precision_score(
      LABELS[:, c], LOGITS[:, c]
    )
    for c, name in enumerate('abcdef')
    if name != 'c'
  }
  assert found.items() >= {k: pytest.approx(v) for k, v in each.items()}.items()
  assert 'average_precision/c' not in found
  assert found['mAP'] == pytest.approx(np.mean(list(each.values())))


def test_class_numbers_are_refused():
  with pytest.raises(ValueError, match=r'label of each .*must be a vector'):
    evaluate(source=source_of(LABELS.argmax(axis=1)))
