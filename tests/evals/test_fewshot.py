"""The closed form against other solvers, and the protocol around it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from sklearn.linear_model import Ridge

from vit_jax import sharding
from vit_jax.evals import fewshot
from vit_jax.evals.fewshot import FewShot, choose, predict, solve

RNG = np.random.default_rng(0)


def problem(n, dim, num_classes=4):
  x = RNG.normal(size=(n, dim)) * RNG.uniform(0.1, 10, dim) + 3
  y = np.arange(n) % num_classes
  x[:, 0] += 5 * y
  return x.astype(np.float32), 10 * y + 7  # labels need not be 0 .. K-1


def whitened(x):
  x = x.astype(np.float64)
  x = (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-5)
  return np.concatenate([x, np.full((len(x), 1), 100.0)], axis=1)


@pytest.mark.parametrize('l2', [2.0**10, 0.5])
@pytest.mark.parametrize(
  ('n', 'dim'), [(40, 6), (12, 30), (16, 15)], ids=['primal', 'dual', 'equal']
)
def test_the_solution_is_that_of_other_solvers(n, dim, l2):
  x, y = problem(n, dim)
  solution = solve(x, y, l2=l2)
  features = whitened(x)
  targets = np.where(y[:, None] == np.unique(y), 1.0, -1.0)
  # Least squares on the data extended by sqrt(l2) I: no normal equations.
  extended = np.vstack([features, np.sqrt(l2) * np.eye(dim + 1)])
  zeros = np.zeros((dim + 1, 4))
  expected = scipy.linalg.lstsq(extended, np.vstack([targets, zeros]))[0]
  np.testing.assert_allclose(solution['weights'], expected, atol=1e-9)
  ridge = Ridge(alpha=l2, fit_intercept=False, solver='svd')
  ridge.fit(features, targets)
  np.testing.assert_allclose(solution['weights'], ridge.coef_.T, atol=1e-9)
  predicted = np.unique(y)[ridge.predict(features).argmax(axis=1)]
  np.testing.assert_array_equal(predict(solution, x), predicted)
  assert np.mean(predicted == y) > 0.3


def test_constant_features_do_no_harm():
  x, y = problem(40, 6)
  x[:, 3] = 2.0
  assert np.isfinite(solve(x, y, l2=1.0)['weights']).all()


def test_choice():
  labels = np.repeat([3, 5, 9], [4, 6, 5])
  chosen = choose(labels, 4, seed=0)
  np.testing.assert_array_equal(labels[chosen], np.repeat([3, 5, 9], 4))
  assert len(set(chosen)) == 12
  np.testing.assert_array_equal(choose(labels, 4, seed=0), chosen)
  assert set(choose(labels, 4, seed=1)) != set(chosen)
  with pytest.raises(ValueError, match=r'5 shots: class 3 has 4 training exam'):
    choose(labels, 5, seed=0)


class Source:
  """Noisy images whose brightness in some pixels tells the class."""

  num_classes, class_names = 3, None

  def __init__(self, count, seed):
    rng = np.random.default_rng(seed)
    self.labels = np.arange(count) % 3
    pattern = np.random.default_rng(99).normal(size=(3, 4, 4, 1))
    noise = rng.normal(size=(count, 4, 4, 1))
    images = 128 + 20 * pattern[self.labels] + 30 * noise
    self.images = np.clip(images, 0, 255).astype(np.uint8)

  def __len__(self):
    return len(self.labels)

  def __getitem__(self, i):
    return {'image': self.images[i], 'label': int(self.labels[i])}

  def describe(self, i):
    return f'image {i}'


class Features:
  def apply(self, variables, images, *, method):
    assert method == 'features'
    flat = images.reshape(len(images), -1)
    return {'pre_logits': flat @ variables['params']}


TRAIN, TEST = Source(30, seed=0), Source(29, seed=1)
KERNEL = np.random.default_rng(2).normal(size=(16, 8)).astype(np.float32)


def scaled(images):
  return images.astype(jnp.float32) / 255


def make(num_devices=8, batch_size=8, **kwargs):
  mesh = sharding.make_mesh()
  if num_devices == 1:
    auto = (jax.sharding.AxisType.Auto,)
    devices = jax.devices()[:1]
    mesh = jax.make_mesh((1,), ('data',), devices=devices, axis_types=auto)
  evaluator = FewShot(
    Features(),
    preprocess=scaled,
    mesh=mesh,
    train={'source': TRAIN, 'batch_size': batch_size},
    test={'source': TEST, 'batch_size': batch_size},
    shots=(2, 5),
    **kwargs,
  )
  return evaluator, jax.device_put(KERNEL, sharding.replicated(mesh))


def reference(shots, seed, features):
  """Accuracy on the test images, in numpy, with all of them at once."""
  x_train, x_test = (
    features(s.images.reshape(len(s), -1) / 255) for s in (TRAIN, TEST)
  )
  chosen = choose(TRAIN.labels, shots, seed)
  x, y = x_train[chosen], TRAIN.labels[chosen]
  mean, std = x.mean(axis=0), x.std(axis=0) + 1e-5
  ridge = Ridge(alpha=2.0**10, fit_intercept=False, solver='svd')
  ridge.fit(whitened(x), 2 * np.eye(3)[y] - 1)
  x_test = (x_test - mean) / std
  x_test = np.concatenate([x_test, np.full((len(x_test), 1), 100.0)], axis=1)
  return np.mean(ridge.predict(x_test).argmax(axis=1) == TEST.labels)


@pytest.mark.parametrize('num_devices', [1, 8])
def test_accuracy_counts_each_test_image_once(num_devices):
  for batch_size in (8, 32):  # 29 images: both end in padding
    evaluator, params = make(num_devices, batch_size)
    result = evaluator.run(params)
    for shots in (2, 5):
      each = [
        reference(shots, seed, lambda x: x @ KERNEL) for seed in (0, 1, 2)
      ]
      assert result[f'{shots}shot'] == pytest.approx(np.mean(each))
      for seed in (0, 1, 2):
        assert result[f'{shots}shot_seed{seed}'] == each[seed]
  assert len(result) == 8
  assert 0.4 < result['5shot'] < 1


def test_pixels_need_no_model():
  evaluator, params = make(features='pixels', seeds=(4,))
  assert evaluator.run(params) == {
    f'{shots}shot{seed}': reference(shots, 4, lambda x: x)
    for shots in (2, 5)
    for seed in ('_seed4', '')
  }


def test_an_unknown_feature_names_those_there_are():
  evaluator, params = make(features='tokens')
  with pytest.raises(ValueError, match=r"'tokens'.*has \['pre_logits'\] \(and"):
    evaluator.run(params)


def test_labels_must_be_classes():
  with pytest.raises(ValueError, match=r'one class per example'):
    fewshot.choose(np.eye(3), 1, seed=0)
