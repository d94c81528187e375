"""Imbalanced classes: the order of training and the weights of the loss."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.data import balance, pipeline
from vit_jax.data.order import BalancedOrder
from vit_jax.objectives.classification import sigmoid_xent, softmax_xent

COUNTS = (50, 7, 1, 0, 3)  # of each class; one is empty
LABELS = np.repeat(np.arange(5), COUNTS)


class Numbers:
  """Images whose pixels are the index of the example."""

  num_classes = 5

  def __len__(self):
    return len(LABELS)

  def __getitem__(self, index):
    image = np.full((2, 2, 1), index, np.uint8)
    return {'image': image, 'label': int(LABELS[index])}

  def labels(self):
    return LABELS.astype(np.int32)


def noise(image, rng):
  """Draw a number that identifies the random stream."""
  return np.stack([image, rng.integers(256, size=image.shape, dtype=np.uint8)])[
    :, 0
  ]


def batches(count, *, start=0, seed=0, **process):
  data = pipeline.Data(Numbers(), 16, (noise,), balanced=True)
  found = data.train_batches(seed=seed, start=start, **process)
  rows = list(itertools.islice(found, count))
  found.close()
  return rows


def test_each_class_is_visited_equally_often():
  order = BalancedOrder(LABELS, seed=3)
  visits = [order(p) for p in range(4 * 100)]
  labels = LABELS[[index for _, index in visits]].reshape(100, 4)
  np.testing.assert_array_equal(np.sort(labels), [[0, 1, 2, 4]] * 100)
  assert len({tuple(row) for row in labels}) > 10  # not in a fixed order
  # No example is visited again before all others of its class.
  times = collections.Counter(index for _, index in visits)
  for label, count in enumerate(COUNTS):
    seen = [times[i] for i in np.flatnonzero(label == LABELS)]
    assert all(n in (100 // count, 100 // count + 1) for n in seen)
  # Visits of one example differ in what their augmentation is drawn from.
  assert len(set(visits)) == len(visits)
  assert visits != [BalancedOrder(LABELS, 4)(p) for p in range(400)]


def test_it_resumes_exactly_on_any_number_of_hosts():
  whole = batches(6)
  assert len({x.tobytes() for x in whole[0]['image']}) == 16
  for a, b in zip(whole[2:], batches(4, start=32), strict=True):
    np.testing.assert_array_equal(a['image'], b['image'])
  halves = [batches(6, process_index=i, process_count=2) for i in (0, 1)]
  for batch, *parts in zip(whole, *halves, strict=True):
    np.testing.assert_array_equal(
      batch['image'], np.concatenate([x['image'] for x in parts])
    )


def test_evaluation_visits_each_example_once():
  data = pipeline.Data(Numbers(), 16, balanced=True)
  index = np.concatenate([x['index'][x['mask']] for x in data.eval_batches()])
  np.testing.assert_array_equal(index, np.arange(len(LABELS)))


def test_balance_needs_one_class_per_example():
  with pytest.raises(ValueError, match=r'one class per example.*\(3, 5\)'):
    BalancedOrder(np.zeros((3, 5), np.float32), 0)


def test_class_weights():
  weights = balance.class_weights(Numbers())
  n, k = len(LABELS), 4
  expected = [n / (k * c) if c else 1 for c in COUNTS]
  np.testing.assert_allclose(weights, expected)
  np.testing.assert_allclose(np.mean(np.take(weights, LABELS)), 1)


class Logits:
  """A model whose logits are its parameters."""

  def apply(self, variables, images, **kwargs):
    return variables['params']


@pytest.mark.parametrize('objective', [softmax_xent, sigmoid_xent])
def test_the_loss_is_the_weighted_mean(objective):
  logits = jax.random.normal(jax.random.key(0), (3, 4))
  weights = (0.5, 2.0, 0.0, 1.0)
  labels = jnp.array([1, 2, 0])

  def loss(labels, images=3, **options):
    made = objective(Logits(), preprocess=lambda x: x, **options)
    batch = {'image': jnp.zeros(images), 'label': labels}
    return made(logits, batch, jax.random.key(0))[0]

  alone = [
    objective(Logits(), preprocess=lambda x: x)(
      logits[i : i + 1],
      {'image': jnp.zeros(1), 'label': labels[i : i + 1]},
      None,
    )[0]
    for i in range(3)
  ]
  expected = (2.0 * alone[0] + 0.0 * alone[1] + 0.5 * alone[2]) / 3
  found = loss(labels, class_weights=weights)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  # One-hot vectors are the same labels.
  vectors = loss(jax.nn.one_hot(labels, 4), class_weights=list(weights))
  np.testing.assert_allclose(vectors, expected, rtol=1e-5)


@pytest.mark.parametrize(
  'weights, message',
  [
    ('balanced', 'word class_weights in the argument'),
    ((1.0, -1.0), '0 or more'),
    ((1.0, 2.0), 'has 2 numbers, but the model has 4 classes'),
  ],
)
def test_wrong_class_weights(weights, message):
  batch = {'image': jnp.zeros(3), 'label': jnp.zeros(3, int)}
  with pytest.raises(ValueError, match=message):
    softmax_xent(Logits(), preprocess=lambda x: x, class_weights=weights)(
      jnp.zeros((3, 4)), batch, None
    )
