"""Weights of masked patch prediction, which does not pool: readouts of them."""

import functools

import jax
import numpy as np
import pytest

from vit_jax import pretrained
from vit_jax.data.embedded.digits import Synthetic
from vit_jax.data.pipeline import Data
from vit_jax.evals.classification import Classification
from vit_jax.evals.fewshot import FewShot
from vit_jax.evals.frozen import Frozen
from vit_jax.evaluate import evaluate
from vit_jax.models.layers import PatchEmbedding
from vit_jax.models.pooling import ClassToken, Mean, NoPooling
from vit_jax.models.vit import VisionTransformer
from vit_jax.weights import bundle, formats, surgery
from vit_jax.weights.bundle import Weights
from vit_jax.weights.surgery import InitFrom

DATA = Data(Synthetic(image_size=8, num_classes=4, num_examples=32), 16)


@pytest.fixture
def path(tmp_path):
  return written(tmp_path, NoPooling(class_token=True, num_registers=1))


def written(folder, pooling, **fields):
  """Return the path of random weights."""
  model = VisionTransformer(
    width=16,
    depth=1,
    mlp_dim=32,
    num_heads=2,
    embedding=PatchEmbedding(4, mask_token=True),
    pooling=pooling,
    num_classes=512,
  )
  rng = np.random.default_rng(0)
  params = {
    name: rng.normal(0, 0.2, x.shape).astype(np.float32)
    for name, x in bundle.shapes(model, (8, 8, 3)).items()
  }
  weights = Weights(model, params, (8, 8, 3))
  formats.write(weights, folder / 'weights', 'vit_jax')
  return str(folder / 'weights')


def run(workdir, evaluator, path, **fields):
  init_from = InitFrom(path=path, **fields)
  return evaluate(workdir, init_from=init_from, evals={'test': evaluator})


def readout(**fields):
  return functools.partial(
    Frozen,
    data={'made': {'train': DATA, 'test': DATA}},
    readouts={'fewshot': FewShot(shots=(5,), seeds=(0,))},
    **fields,
  )


def test_a_readout_of_all_patches_is_refused(path, tmp_path):
  for features, numbers in (('pooled', 16), ('logits', 512)):
    with pytest.raises(ValueError) as caught:
      run(tmp_path / 'run', readout(features=features), path)
    assert features in str(caught.value) and str(numbers) in str(caught.value)
    assert 'init_from.pooling=gap' in str(caught.value)
  evaluator = functools.partial(Classification, data=DATA)
  with pytest.raises(ValueError, match=r'\(16, 4, 512\)'):
    run(tmp_path / 'run', evaluator, path)


@pytest.mark.parametrize(
  ('fields', 'kind', 'dim'),
  [
    ({'pooling': 'gap'}, Mean, 16),
    pytest.param({'pooling': 'token'}, ClassToken, 16, marks=pytest.mark.slow),
  ],
)
def test_a_readout_of_pooled_patches(fields, kind, dim, path, tmp_path):
  seen = {}

  class Spy(FewShot):
    def __call__(self, train, test, *, val=None):
      seen['x'] = test.x
      return {'count': float(len(test.y))}

  evaluator = functools.partial(
    Frozen,
    data={'made': {'train': DATA, 'test': DATA}},
    readouts={'spy': Spy(shots=(5,), seeds=(0,))},
  )
  found = run(tmp_path / 'run', evaluator, path, **fields)
  assert found == {'test/made/spy/count': 32.0}
  weights = surgery.read(InitFrom(path=path, **fields))
  pooling = weights.model.pooling
  assert pooling == kind(
    num_registers=1, **({'class_token': True} if kind is Mean else {})
  )
  model, params = pretrained.build(weights)
  images = np.stack([DATA.source[i]['image'] for i in range(32)])
  tokens = jax.jit(functools.partial(model.apply, method='features'))(
    {'params': params}, weights.preprocess(images)
  )['tokens']
  expected = tokens[:, 2:].mean(axis=1) if kind is Mean else tokens[:, 0]
  np.testing.assert_allclose(seen['x'], expected, rtol=1e-5, atol=1e-5)
  assert seen['x'].shape == (32, dim)


def test_the_model_that_is_fine_tuned_has_the_pooling(path):
  models = [
    pretrained.from_weights(InitFrom(path=path, pooling=name))
    for name in (None, 'gap', 'token')
  ]
  kinds = [type(model.pooling) for model in models]
  assert kinds == [ClassToken, Mean, ClassToken]
  assert not any(model.embedding.mask_token for model in models)


def test_a_class_token_that_weights_do_not_have(tmp_path):
  path = written(tmp_path, NoPooling())
  with pytest.raises(ValueError, match='the weights have no class token'):
    surgery.read(InitFrom(path=path, pooling='token'))
