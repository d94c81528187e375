"""Features are extracted once, exactly, and shared by all readouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import splits

from vit_jax.data.pipeline import Data
from vit_jax.data.subsets import Subset
from vit_jax.evals.fewshot import FewShot
from vit_jax.evals.frozen import Few, Frozen
from vit_jax.evals.knn import Knn
from vit_jax.evals.logistic import Logistic
from vit_jax.parallel import sharding


def source_of(count, seed, labels=None):
  """Noisy images whose brightness in some pixels tells the class."""
  pattern = np.random.default_rng(99).normal(size=(3, 4, 4, 1))
  noise = np.random.default_rng(seed).normal(size=(count, 4, 4, 1))
  images = 128 + 30 * pattern[np.arange(count) % 3] + 30 * noise
  images = np.clip(images, 0, 255).astype(np.uint8)
  labels = np.arange(count) % 3 if labels is None else labels
  return splits.Source(images, labels, 3)


class Features:
  num_classes = 5

  def apply(self, variables, images, *, method):
    assert method == 'features'
    flat = images.reshape(len(images), -1)
    x = flat @ variables['params']
    patches = jnp.stack([x, 2 * x], axis=1)
    tokens = jnp.concatenate([100 + patches[:, :1], patches], axis=1)
    return {
      **{'pre_logits': x, 'tokens': patches, 'pooled': patches},
      **{'patches': patches, 'block_1': tokens},
    }


class Spy:
  """A readout that keeps what it is given."""

  def check(self, labels):
    self.labels = labels

  def __call__(self, train, test, val=None):
    self.splits = train, test, val
    return {'count': float(len(test.y))}


KERNEL = np.random.default_rng(2).normal(size=(16, 8)).astype(np.float32)


def scaled(images):
  return images.astype(jnp.float32) / 255


def make(readouts, num_devices=8, batch_size=8, data=None, **kwargs):
  mesh = sharding.make_mesh(jax.devices()[:num_devices])
  data = data or {'made': {'train': source_of(31, 0), 'test': source_of(29, 1)}}
  evaluator = Frozen(
    Features(),
    preprocess=scaled,
    mesh=mesh,
    data={
      name: {split: Data(x, batch_size) for split, x in of_name.items()}
      for name, of_name in data.items()
    },
    readouts=readouts,
    **kwargs,
  )
  return evaluator, jax.device_put(KERNEL, sharding.replicated(mesh))


@pytest.mark.parametrize(
  'features, num_devices',
  [('pre_logits', 8), ('tokens', 1), ('pixels', 8), ('pooled', 8)],
)
def test_readouts_get_the_features_in_order(features, num_devices):
  spy, sources = Spy(), {'train': source_of(31, 0), 'test': source_of(29, 1)}
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
      if features == 'pooled':  # of patches that are not pooled: their mean
        expected = 1.5 * expected
      np.testing.assert_allclose(split.x, expected, rtol=1e-5, atol=1e-5)
      np.testing.assert_array_equal(split.y, np.arange(len(source)) % 3)
      assert split.x.dtype == np.float32
  assert spy.splits[2] is None


def test_statistics_are_over_patches_of_an_image_and_its_mirror_image():
  spy, sources = Spy(), {'train': source_of(31, 0), 'test': source_of(29, 1)}
  fields = {'features': ('block_1', 'pre_logits', 'pixels'), 'flip': True}
  fields['statistics'] = 'max', 'std'
  evaluator, params = make({'spy': spy}, data={'made': sources}, **fields)
  evaluator.run(params)
  expected = 0
  for images in (sources['test'].images, sources['test'].images[:, :, ::-1]):
    x = images.reshape(29, -1) / np.float32(255) @ KERNEL
    parts = [np.maximum(x, 2 * x), np.abs(x) / 2, x]
    places = images.reshape(29, -1, images.shape[-1]) / np.float32(255)
    parts += [places.max(axis=1), places.std(axis=1)]
    expected += np.concatenate(parts, axis=1) / 2
  np.testing.assert_allclose(spy.splits[1].x, expected, rtol=1e-4, atol=1e-5)


def test_each_image_is_read_once_for_all_readouts():
  data = {
    'one': {'train': source_of(31, 0), 'test': source_of(29, 1)},
    'two': {
      'train': source_of(30, 2),
      'val': source_of(9, 3),
      'test': source_of(12, 4),
    },
  }
  spies = {'a': Spy(), 'b': Spy()}
  evaluator, params = make(spies, data=data)
  sources = [s for of_name in data.values() for s in of_name.values()]
  opened = [source.reads for source in sources]
  evaluator.check(params)
  evaluator.check(params)
  assert [source.reads for source in sources] == opened
  np.testing.assert_array_equal(spies['a'].labels['val'], np.arange(9) % 3)
  found = evaluator.run(params)
  read = [source.reads - before for source, before in zip(sources, opened)]
  assert read == [31, 29, 30, 9, 12]
  assert spies['a'].splits == spies['b'].splits
  assert len(spies['a'].splits[2].y) == 9
  assert [*evaluator.metrics] == [
    f'{name}/{key}/' for name in ('one', 'two', 'mean') for key in 'ab'
  ]
  assert found == {
    'one/a/count': 29,
    'one/b/count': 29,
    'two/a/count': 12,
    'two/b/count': 12,
    'mean/a/count': 20.5,
    'mean/b/count': 20.5,
  }


def test_a_readout_of_few_examples_is_that_of_a_subset():
  source, spies = source_of(31, 0), {'few': Spy(), 'all': Spy()}
  readouts = {'few': Few(readout=spies['few'], per_class=4, seed=1)}
  subset = Subset(source, per_class=4, seed=1)
  for data, given in ((source, readouts), (subset, {'all': spies['all']})):
    splits = {'train': data, 'test': source_of(9, 1), 'val': source_of(9, 2)}
    evaluator, params = make(given, data={'made': splits})
    evaluator.check(params)
    assert evaluator.run(params) == {f'made/{next(iter(given))}/count': 9}
  labels = (spy.labels['train'] for spy in spies.values())
  np.testing.assert_array_equal(*labels)
  for few, wanted in zip(spies['few'].splits, spies['all'].splits):
    np.testing.assert_array_equal(few.x, wanted.x)
    np.testing.assert_array_equal(few.y, wanted.y)


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_features_that_are_not_finite_have_no_metrics(bad):
  """A readout would fail, or return an accuracy that means nothing."""
  readouts = {'few': FewShot(shots=(5,)), 'knn': Knn(k=(5,))}
  split = {'train': source_of(31, 0), 'test': source_of(29, 1)}
  evaluator, params = make(
    readouts | {'logistic': Logistic()}, data={'a': split, 'b': split}
  )
  found = evaluator.run(params.at[0, 0].set(bad))
  assert found.keys() == evaluator.metrics.keys() and 'mean/few/5shot' in found
  assert np.isnan([*found.values()]).all()


def test_all_readouts_in_the_context_of_a_mesh():
  readouts = {
    'fewshot': FewShot(shots=(2, 5)),
    'knn': Knn(k=(1, 5)),
    'logistic': Logistic(C=(1.0, 0.01)),
  }
  evaluator, params = make(readouts)
  evaluator.check(params)
  with jax.set_mesh(sharding.make_mesh()):
    found = evaluator.run(params)
    assert evaluator.run(params) == found  # any number of times
  assert all(isinstance(value, float) for value in found.values())
  for metric in ('fewshot/5shot', 'knn/k5_t0.07', 'logistic/accuracy'):
    assert 0.5 < found[f'made/{metric}'] < 1


MANY = np.eye(3, dtype=np.float32)[np.arange(31) % 3]


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (
      {'features': 'token'},
      r"'token' must be one of .*'pixels', 'pooled', 'pre_logits', 'tokens'",
    ),
    ({'readouts': {'few': FewShot(shots=(11,))}}, r'made/few: 11 .* 1 has 10'),
    ({'train': source_of(31, 0, MANY)}, 'Expected one class for each'),
    ({'test': None}, r"made .*\['train'\]"),
  ],
)
def test_mistakes(options, message):
  splits = {'train': source_of(31, 0), 'test': source_of(29, 1)}
  splits |= {k: options.pop(k) for k in ('train', 'test') if k in options}
  data = {'made': {k: source for k, source in splits.items() if source}}
  with pytest.raises(ValueError, match=message):
    evaluator, params = make(
      **{'readouts': {'a': Spy()}, 'data': data, **options}
    )
    evaluator.check(params)
