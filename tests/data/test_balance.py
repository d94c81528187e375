"""Weights of the loss for classes of different sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.data import balance
from vit_jax.objectives.classification import sigmoid_xent, softmax_xent

COUNTS = (50, 7, 1, 0, 3)  # of each class; one is empty
LABELS = np.repeat(np.arange(5), COUNTS)


class Labelled:
  """A source of which only the labels are read."""

  num_classes = 5

  def __len__(self):
    return len(LABELS)

  def labels(self):
    return LABELS.astype(np.int32)


def test_class_weights():
  weights = balance.class_weights(Labelled())
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
