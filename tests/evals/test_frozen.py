"""Features are extracted once, exactly, and shared by all readouts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import splits

from vit_jax.data.pipeline import Data
from vit_jax.evals import frozen
from vit_jax.evals.fewshot import FewShot
from vit_jax.evals.frozen import Frozen
from vit_jax.evals.knn import Knn
from vit_jax.evals.linear_probe import LinearProbe
from vit_jax.parallel import sharding


class Source:
  """Noisy images whose brightness in some pixels tells the class."""

  num_classes, class_names = 3, None

  def __init__(self, count, seed, labels=None):
    rng = np.random.default_rng(seed)
    self._labels = np.arange(count) % 3 if labels is None else labels
    pattern = np.random.default_rng(99).normal(size=(3, 4, 4, 1))
    noise = rng.normal(size=(count, 4, 4, 1))
    images = 128 + 30 * pattern[np.arange(count) % 3] + 30 * noise
    self.images = np.clip(images, 0, 255).astype(np.uint8)
    self.reads = 0

  def __len__(self):
    return len(self._labels)

  def __getitem__(self, i):
    self.reads += 1
    return {'image': self.images[i], 'label': self._labels[i]}

  def labels(self):
    return np.asarray(self._labels, np.int32)

  def describe(self, i):
    return f'image {i}'


class Features:
  num_classes = 5

  def apply(self, variables, images, *, method):
    assert method == 'features'
    flat = images.reshape(len(images), -1)
    x = flat @ variables['params']
    return {'pre_logits': x, 'tokens': jnp.stack([x, 2 * x], axis=1)}


class Spy:
  """A readout that keeps what it is given."""

  def check(self, labels_train, labels_test, *, labels_val=None):
    self.labels = labels_train, labels_test, labels_val

  def __call__(self, train, test, *, val=None, mesh):
    self.splits = train, test, val
    return {'count': float(len(test.y))}


KERNEL = np.random.default_rng(2).normal(size=(16, 8)).astype(np.float32)


def scaled(images):
  return images.astype(jnp.float32) / 255


def make(readouts, num_devices=8, batch_size=8, data=None, **kwargs):
  mesh = splits.mesh_of(num_devices)
  data = data or {'made': {'train': Source(31, 0), 'test': Source(29, 1)}}
  evaluator = Frozen(
    Features(),
    preprocess=scaled,
    mesh=mesh,
    data={
      name: {
        split: Data(source, batch_size) for split, source in of_name.items()
      }
      for name, of_name in data.items()
    },
    readouts=readouts,
    **kwargs,
  )
  return evaluator, jax.device_put(KERNEL, sharding.replicated(mesh))


@pytest.mark.parametrize(
  'features, num_devices', [('pre_logits', 8), ('tokens', 1), ('pixels', 8)]
)
def test_readouts_get_the_features_in_order(features, num_devices):
  spy, sources = Spy(), {'train': Source(31, 0), 'test': Source(29, 1)}
  for batch_size in (8, 40):
    evaluator, params = make(
      {'spy': spy},
      num_devices,
      batch_size,
      {'made': sources},
      features=features,
    )
    with jax.transfer_guard('disallow'):
      assert evaluator.run(params) == {'made/spy/count': 29.0}
    for split, source in zip(spy.splits, sources.values()):
      expected = source.images.reshape(len(source), -1) / np.float32(255)
      if features != 'pixels':
        expected = expected @ KERNEL
      if features == 'tokens':
        expected = np.concatenate([expected, 2 * expected], axis=1)
      np.testing.assert_allclose(split.x, expected, rtol=1e-5, atol=1e-5)
      np.testing.assert_array_equal(split.y, source.labels())
      assert split.x.dtype == np.float32
  assert spy.splits[2] is None


def test_each_image_is_read_once_for_all_readouts():
  data = {
    'one': {'train': Source(31, 0), 'test': Source(29, 1)},
    'two': {'train': Source(30, 2), 'val': Source(9, 3), 'test': Source(12, 4)},
  }
  spies = {'a': Spy(), 'b': Spy()}
  evaluator, params = make(spies, data=data)
  sources = [s for of_name in data.values() for s in of_name.values()]
  opened = [source.reads for source in sources]
  evaluator.check(params)
  evaluator.check(params)
  assert [source.reads for source in sources] == opened
  np.testing.assert_array_equal(spies['a'].labels[2], np.arange(9) % 3)
  found = evaluator.run(params)
  read = [source.reads - before for source, before in zip(sources, opened)]
  assert read == [31, 29, 30, 9, 12]
  assert spies['a'].splits == spies['b'].splits
  assert len(spies['a'].splits[2].y) == 9
  assert found == {
    'one/a/count': 29,
    'one/b/count': 29,
    'two/a/count': 12,
    'two/b/count': 12,
    'mean/a/count': 20.5,
    'mean/b/count': 20.5,
  }


def test_all_readouts_under_the_guard_of_training():
  readouts = {
    'fewshot': FewShot(shots=(2, 5)),
    'knn': Knn(k=(1, 5), held_out=0.3),
    'probe': LinearProbe(lr=(0.1, 0.01), epochs=20),
  }
  evaluator, params = make(readouts)
  evaluator.check(params)
  with jax.transfer_guard('disallow'):
    found = evaluator.run(params)
    assert evaluator.run(params) == found  # any number of times
  assert all(isinstance(value, float) for value in found.values())
  for metric in ('fewshot/5shot', 'knn/chosen', 'probe/accuracy'):
    assert 0.5 < found[f'made/{metric}'] < 1


def test_an_unknown_feature_is_an_error_before_training():
  evaluator, params = make({'spy': Spy()}, features='token')
  with pytest.raises(
    ValueError, match=r"'token' must be one of \['pre_logits', 'tok.*pixels"
  ):
    evaluator.check(params)


def test_errors_of_readouts_name_the_data():
  evaluator, params = make({'few': FewShot(shots=(11,))})
  with pytest.raises(ValueError, match=r'made/few: 11 shots .* class 1 has 10'):
    evaluator.check(params)


def test_labels_must_be_single_classes():
  many = Source(31, 0, labels=np.eye(3, dtype=np.float32)[np.arange(31) % 3])
  data = {'made': {'train': many, 'test': Source(29, 1)}}
  evaluator, params = make({'spy': Spy()}, data=data)
  with pytest.raises(ValueError, match=r'made/train: .*one class number'):
    evaluator.check(params)


def test_features_that_are_not_finite():
  evaluator, params = make({'spy': Spy()})
  with pytest.raises(ValueError, match=r'made/train: 31 of 248 feature values'):
    evaluator.run(params.at[0, 0].set(jnp.nan))


@pytest.mark.parametrize(
  'data, readouts, message',
  [
    ({}, {'spy': Spy()}, r'needs at least .* but has data \[\]'),
    (
      {'a': {'train': Source(9, 0)}},
      {'s': Spy()},
      r"a has splits \['train'\]",
    ),
    ({'mean': {}}, {'s': Spy()}, r"cannot be named 'mean'"),
    ({'a': {}}, {'s/t': Spy()}, r"cannot be named 's/t'"),
  ],
)
def test_wrong_settings(data, readouts, message):
  data = {
    name: {k: Data(v, 8) for k, v in of_name.items()}
    for name, of_name in data.items()
  }
  mesh = sharding.make_mesh()
  with pytest.raises(ValueError, match=message):
    Frozen(
      Features(), preprocess=scaled, mesh=mesh, data=data, readouts=readouts
    )


def test_a_batch_must_divide_over_the_devices():
  with pytest.raises(ValueError, match=r'made/train batch_size=12 is global'):
    make({'spy': Spy()}, batch_size=12)


def test_held_out_rows_are_stratified():
  labels = np.repeat([5, 2, 9], [20, 3, 1])
  kept, held = frozen.Tuned(held_out=0.2, seed=0).rows(labels)
  np.testing.assert_array_equal(np.sort([*kept, *held]), np.arange(24))
  np.testing.assert_array_equal(np.sort(labels[held]), [2, 5, 5, 5, 5])
  other = frozen.Tuned(held_out=0.2, seed=1).rows(labels)[1]
  assert list(other) != list(held)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Biases(frozen.TunedLinear):
  """Each setting is the class that is always predicted."""

  settings: tuple
  fitted: list = dataclasses.field(default_factory=list)

  def fit(self, train, settings, mesh):
    self.fitted.append(len(train.y))
    zeros, bias = np.zeros((1, 2)), np.eye(2)
    return [
      frozen.Linear(zeros, bias[i], np.arange(2), np.zeros(1), np.ones(1))
      for i in settings
    ]


@pytest.mark.parametrize('given_val', [True, False])
def test_the_best_setting_is_chosen_on_val_or_on_held_out_examples(given_val):
  x = np.zeros((24, 1), np.float32)
  train = frozen.Split(x, np.repeat([0, 1], 12))
  val = frozen.Split(x, 1 - train.y[::-1]) if given_val else None
  ones = frozen.Split(x[:3], np.array([1, 1, 1]))

  def best(settings, val):
    readout = Biases(held_out=0.25, settings=settings)
    setting, linear = readout.best(train, val, None)
    np.testing.assert_array_equal(linear.predict(x), setting)
    return setting, readout.fitted

  # Both settings are right for half of the examples: the first is chosen.
  assert best((1, 0), val) == (1, [24 if given_val else 18, 24])
  assert best((0, 1), ones) == (1, [24, 24])
  assert best((1,), val) == (1, [24])
