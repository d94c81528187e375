"""Evaluation counts every example once, over padding and devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from vit_jax import sharding
from vit_jax.build import ConfigError
from vit_jax.evals.classification import Classification

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (21, 2, 2, 3), np.uint8)
KERNEL = RNG.normal(size=(12, 7)).astype(np.float32)
LABELS = RNG.integers(0, 7, 21)


class Source:
  class_names = None

  def __init__(self, labels=LABELS, num_classes=7, broken=()):
    self.labels, self.num_classes, self.broken = labels, num_classes, broken

  def __len__(self):
    return len(self.labels)

  def __getitem__(self, i):
    if i in self.broken:
      raise ValueError('unreadable')
    return {'image': IMAGES[i], 'label': self.labels[i]}

  def describe(self, i):
    return f'image {i}'


class Linear:
  def __init__(self, num_classes=7):
    self.num_classes = num_classes

  def apply(self, variables, images):
    return images.reshape(len(images), -1) @ variables['params']


def scaled(images):
  return images.astype(jnp.float32) / 255


def mesh_of(num_devices):
  if num_devices == 8:
    return sharding.make_mesh()
  auto = (jax.sharding.AxisType.Auto,)
  devices = jax.devices()[:1]
  return jax.make_mesh((1,), ('data',), devices=devices, axis_types=auto)


def evaluate(kernel=KERNEL, num_devices=8, batch_size=16, loss='softmax', **kw):
  source = kw.pop('source', Source())
  mesh = mesh_of(num_devices)
  evaluator = Classification(
    Linear(kernel.shape[1]),
    preprocess=scaled,
    mesh=mesh,
    data={'source': source, 'batch_size': batch_size, **kw},
    loss=loss,
  )
  params = jax.device_put(kernel, sharding.replicated(mesh))
  return evaluator, evaluator.run(params)


def expected(rows, labels=LABELS, kernel=KERNEL, loss='softmax'):
  logits = (IMAGES.reshape(21, -1) / 255.0 @ kernel.astype(np.float64))[rows]
  labels = labels[rows]
  rank = (logits > logits[np.arange(len(rows)), labels][:, None]).sum(axis=1)
  target = np.eye(kernel.shape[1])[labels]
  if loss == 'softmax':
    losses = scipy.special.logsumexp(logits, axis=1) - (logits * target).sum(1)
  else:
    losses = np.logaddexp(0, np.where(target == 1, -logits, logits)).sum(1)
  return {
    'num_examples': len(rows),
    'accuracy': (rank == 0).mean(),
    'top5_accuracy': (rank < 5).mean(),
    'loss': pytest.approx(losses.mean(), rel=1e-6),
  }


@pytest.mark.parametrize('num_devices', [1, 8])
@pytest.mark.parametrize('loss', ['softmax', 'sigmoid'])
def test_exact_on_any_devices_and_batches(num_devices, loss):
  # 21 examples: with 8 there is a remainder of 5, with 32 only padding more.
  for batch_size in (8, 32):
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
  with pytest.raises(ValueError, match=r'gave up after 21 unreadable'):
    evaluate(source=Source(broken=range(21)), on_error='skip')


def test_several_right_labels():
  """Any of them counts as a hit."""
  labels = np.zeros((21, 7), np.float32)
  labels[np.arange(21), LABELS] = labels[:, 2] = 1
  _, result = evaluate(source=Source(labels))
  best = (IMAGES.reshape(21, -1) / 255.0 @ KERNEL).argmax(axis=1)
  assert result['accuracy'] == np.mean((best == LABELS) | (best == 2))


def test_mistakes():
  with pytest.raises(ConfigError, match=r'eval batch_size=12 is global and mu'):
    evaluate(batch_size=12)
  with pytest.raises(ValueError, match=r"loss='hinge' must be one of"):
    evaluate(loss='hinge')
