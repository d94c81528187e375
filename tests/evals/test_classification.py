"""Evaluation counts every example once, over padding and devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import splits

from vit_jax.data.pipeline import Data
from vit_jax.evals import classification
from vit_jax.evals.classification import Classification
from vit_jax.parallel import sharding

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (21, 2, 2, 3), np.uint8)
KERNEL = RNG.normal(size=(12, 7)).astype(np.float32)
LABELS = RNG.integers(0, 7, 21)


class Source:
  class_names = None

  def __init__(self, labels=LABELS, num_classes=7, broken=()):
    self._labels, self.num_classes, self.broken = labels, num_classes, broken

  def __len__(self):
    return len(self._labels)

  def __getitem__(self, i):
    if i in self.broken:
      raise ValueError('unreadable')
    return {'image': IMAGES[i], 'label': self._labels[i]}

  def describe(self, i):
    return f'image {i}'


class Linear:
  def __init__(self, num_classes=7):
    self.num_classes = num_classes

  def apply(self, variables, images):
    return images.reshape(len(images), -1) @ variables['params']


def scaled(images):
  return images.astype(jnp.float32) / 255


SETTINGS = ('source', 'batch_size', 'on_error')


def make(kernel=KERNEL, num_devices=8, **kw):
  data = {'source': Source(), 'batch_size': 16}
  data |= {name: kw.pop(name) for name in SETTINGS if name in kw}
  return Classification(
    Linear(kernel.shape[1]),
    preprocess=scaled,
    mesh=splits.mesh_of(num_devices),
    data=Data(**data),
    **kw,
  )


def evaluate(kernel=KERNEL, num_devices=8, **kw):
  evaluator = make(kernel, num_devices, **kw)
  mesh = splits.mesh_of(num_devices)
  params = jax.device_put(kernel, sharding.replicated(mesh))
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
  return {
    'num_examples': len(rows),
    'accuracy': (rank == 0).mean(),
    'top5_accuracy': (rank < 5).mean(),
    'mean_per_class_accuracy': pytest.approx(np.mean(recalls), rel=1e-12),
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
  assert result == expected(np.arange(21), loss=loss)
  again = evaluator.run(jnp.asarray(KERNEL))
  assert again == result  # an evaluator can be run any number of times


def test_fewer_than_five_classes():
  labels, kernel = LABELS % 3, KERNEL[:, :3]
  _, result = evaluate(kernel, source=Source(labels, num_classes=3))
  wanted = expected(np.arange(21), labels, kernel)
  del wanted['top5_accuracy']  # which would always be 1
  assert result == wanted


def test_skipped_examples_do_not_count():
  rows = np.array([i for i in range(21) if i not in (3, 20)])
  _, result = evaluate(source=Source(broken=(3, 20)), on_error='skip')
  assert result == expected(rows) | {'skipped': 2}
  with pytest.raises(ValueError, match='21 unreadable'):
    evaluate(source=Source(broken=range(21)), on_error='skip')


def _vectors():
  labels = np.zeros((21, 7), np.float32)
  labels[np.arange(21), LABELS] = labels[:, 2] = 1
  return labels


def test_several_right_labels():
  """Any of them counts as a hit; the loss is that against the vector."""
  labels, logits = _vectors(), logits_of()
  _, result = evaluate(source=Source(labels))
  best = logits.argmax(axis=1)
  assert result['accuracy'] == np.mean((best == LABELS) | (best == 2))
  losses = -np.sum(labels * scipy.special.log_softmax(logits, axis=1), axis=1)
  assert result['loss'] == pytest.approx(losses.mean(), rel=1e-6)
  assert result['num_unlabelled'] == 0
  assert 'mean_per_class_accuracy' not in result
  with pytest.raises(ValueError, match=r'per_class=True needs .* vectors'):
    make(source=Source(labels), per_class=True)


def test_examples_without_any_label_never_count():
  """As in ImageNet-ReaL: the result is that of the others alone."""
  labels, rows = _vectors(), np.array([0, 7, 15, 16, 20])
  labels[rows] = 0
  _, result = evaluate(source=Source(labels), intervals=True)
  others = Source(labels, broken=rows)
  _, alone = evaluate(source=others, on_error='skip', intervals=True)
  assert result.pop('num_unlabelled') == alone.pop('skipped') == 5
  assert alone.pop('num_unlabelled') == 0
  assert result == alone and result['num_examples'] == 16
  with pytest.raises(ValueError, match=r'All 21 examples are unlabelled'):
    evaluate(source=Source(np.zeros((21, 7), np.float32)))


@pytest.mark.parametrize('vectors', [False, True])
def test_restricted_to_classes(vectors):
  """The model of these classes alone gives the same."""
  some = np.array([0, 2, 3, 4, 5, 6])
  place = LABELS % 6
  labels = some[place]
  if vectors:
    labels = np.eye(7, dtype=np.float32)[labels]
    place = np.eye(6, dtype=np.float32)[place]
  _, alone = evaluate(KERNEL[:, some], source=Source(place, 6))
  _, result = evaluate(source=Source(labels), restrict='present')
  assert result == alone
  _, result = evaluate(source=Source(labels))
  assert result['loss'] != alone['loss']
  _, few = evaluate(source=Source(LABELS % 4), restrict='present')
  assert 'top5_accuracy' not in few


def test_predictions():
  evaluator, _ = evaluate(source=Source(broken=(3,)), on_error='skip')
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
  assert found.describe(4) == 'image 4'


def test_predictions_of_several_right_labels():
  """The class that counts is the most probable one of the correct classes."""
  labels, some = _vectors(), [0, 2, 3, 4, 5, 6]
  labels[:, 1] = 0
  labels[5] = 0
  assert labels[:, some].any(axis=0).all()
  evaluator, result = evaluate(
    source=Source(labels), restrict='present', loss='sigmoid'
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
  source = Source(labels)
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
  _, plain = evaluate()
  evaluator, found = evaluate(intervals=True)
  assert found.items() >= plain.items()
  assert {k for k in found if k not in plain} == {
    *('accuracy_low', 'accuracy_high'),
    *('top5_accuracy_low', 'top5_accuracy_high'),
  }
  for name in ('accuracy', 'top5_accuracy'):
    hits = np.arange(21) < round(21 * found[name])
    interval = found[f'{name}_low'], found[f'{name}_high']
    assert interval == classification.wilson(hits)
  assert found.keys() - {'mean_per_class_accuracy'} <= {*evaluator.metrics}


def test_without_calibration():
  _, plain = evaluate()
  _, result = evaluate(calibration_bins=0)
  assert result == {k: v for k, v in plain.items() if k != 'ece'}
  assert evaluate(calibration_bins=3)[1]['ece'] != plain['ece']


class Many:
  """A source whose size nothing divides, and rough calibration."""

  num_classes, class_names = 10, None

  def __len__(self):
    return 517

  def __getitem__(self, i):
    rng = np.random.default_rng(i)
    image = rng.integers(0, 256, (8, 8, 3), np.uint8)
    return {'image': image, 'label': int(rng.integers(10))}

  def describe(self, i):
    return f'image {i}'


def test_the_same_digits_on_any_devices_and_batches():
  kernel = np.random.default_rng(1).normal(size=(192, 10)).astype(np.float32)
  results = []
  for num_devices, batch_size in ((1, 32), (8, 64), (1, 517)):
    settings = {'source': Many(), 'batch_size': batch_size}
    found = evaluate(kernel / 10, num_devices, per_class=True, **settings)
    results.append(found[1])
  first = results[0]
  assert first['num_examples'] == 517 and 0 < first['ece'] < 1
  for result in results[1:]:
    for name, value in result.items():
      # Matrix products of other shapes may sum in another order.
      tolerance = 1e-6 if name.startswith(('loss', 'ece')) else 0
      assert value == pytest.approx(first[name], rel=tolerance, abs=0), name


def test_classes_of_other_names():
  """Same_classes=False: no names to compare, but as many classes there are."""
  source = Source()
  source.class_names = list('abcdefg')
  assert make(source=source).class_names == source.class_names
  assert make(source=source, same_classes=False).class_names is None
  with pytest.raises(ValueError, match=r'data has 7 classes and the model 9'):
    wide = np.concatenate([KERNEL, KERNEL[:, :2]], axis=1)
    make(wide, source=source, same_classes=False)


@pytest.mark.parametrize('loss', ['softmax', 'sigmoid'])
def test_probabilities_of_mirror_images_are_averaged(loss):
  to_probabilities = {
    'softmax': lambda z: scipy.special.softmax(z, axis=1),
    'sigmoid': scipy.special.expit,
  }[loss]
  evaluator, found = evaluate(loss=loss, flip=True)
  flipped = IMAGES[:, :, ::-1].reshape(21, -1) / 255.0 @ KERNEL
  p = (to_probabilities(logits_of()) + to_probabilities(flipped)) / 2
  target = np.eye(7)[LABELS]
  losses = -np.log(p[target > 0])
  if loss == 'sigmoid':
    losses = -(target * np.log(p) + (1 - target) * np.log1p(-p)).sum(-1)
  assert found['accuracy'] == np.mean(p.argmax(axis=1) == LABELS)
  assert found['loss'] == pytest.approx(losses.mean(), rel=1e-5)
  np.testing.assert_allclose(
    evaluator.predictions.predicted_probability, p.max(axis=1), rtol=1e-5
  )


def test_a_batch_must_divide_over_the_devices():
  with pytest.raises(ValueError, match='batch_size=12'):
    make(batch_size=12)


@pytest.mark.parametrize('count', [1, 7, 50_000])
def test_wilson_interval(count):
  for hits in {0, 1, count // 3, count}:
    low, high = classification.wilson(np.arange(count) < hits)
    # The bounds are the shares whose score test just rejects these hits.
    for share in (low, high):
      z = (hits / count - share) / np.sqrt(max(share * (1 - share), 1e-12))
      z *= np.sqrt(count)
      assert abs(z) < 1e-3 or abs(z) == pytest.approx(1.959964, rel=1e-4)
    assert 0 <= low <= hits / count <= high <= 1


def test_calibration_error():
  confidence = RNG.random(1000)
  hit = RNG.random(1000) < confidence**2
  expected = 0
  for i in range(15):
    rows = (confidence > i / 15) & (confidence <= (i + 1) / 15)
    gap = abs(hit[rows].mean() - confidence[rows].mean())
    expected += rows.mean() * gap
  found = classification.calibration_error(confidence, hit, 15)
  assert found == pytest.approx(expected, rel=1e-12)
  assert found > 0.1  # such examples are overconfident


def test_calibration_at_the_edges_of_bins():
  ones, yes = np.ones(4), np.ones(4, bool)
  assert classification.calibration_error(ones, yes, 15) == 0
  assert classification.calibration_error(ones, ~yes, 15) == 1
  # The edge between two bins belongs to the lower one: 0.5 +- errors cancel.
  edge, mixed = np.array([0.5, 0.25]), np.array([True, False])
  found = classification.calibration_error(edge, mixed, 2)
  assert found == pytest.approx(abs(0.5 - 0.25) / 2)
