"""Masked patch prediction on held-out images."""

import functools

import jax
import numpy as np
import pytest
import tiny
from options import all_set
from synthetic import Synthetic

from vit_jax import tree
from vit_jax.data.pipeline import Data
from vit_jax.evals.masked_patches import MaskedPatches, keys_of
from vit_jax.models.dense import Normalize
from vit_jax.models.pooling import NoPooling
from vit_jax.models.vit import PatchEmbedding
from vit_jax.objectives import masked_patches
from vit_jax.objectives.masked_patches import Task
from vit_jax.parallel import sharding

MODEL = tiny.vit(
  embedding=PatchEmbedding(4, mask_token=True),
  pooling=NoPooling(),
  num_classes=8,
)
SOURCE = Synthetic(image_size=8, num_classes=1000, num_examples=21, channels=1)
# Neither with labels nor with a number of classes.
BARE = [{'image': SOURCE[i]['image']} for i in range(21)]


def evaluator(batch_size, source=SOURCE, make=MaskedPatches, **options):
  return make(
    model=MODEL,
    preprocess=Normalize(),
    mesh=sharding.make_mesh(),
    data=Data(source, batch_size),
    **options,
  )


@pytest.fixture(scope='module')
def params():
  return tree.unflatten(tiny.normal_params(MODEL, (8, 8, 1)))


OTHERS = {'seed': 5, 'task': Task(ratio=0.2)}
OTHERS |= {'make': functools.partial(all_set, MaskedPatches)}


@pytest.mark.parametrize('options', [{}, OTHERS])
def test_every_example_once_whatever_the_batches(params, options):
  task = options.get('task', Task())
  fn = masked_patches.MaskedPatches(MODEL, preprocess=Normalize(), task=task)
  images = np.stack([x['image'] for x in BARE])
  keys = keys_of(np.arange(21), options.get('seed', 0))
  expected = jax.jit(fn.predict)(params, images, keys)['metrics']
  found = evaluator(8, BARE, **options).run(params)
  assert found['num_examples'] == 21 and 'skipped' not in found
  for name in ('loss', 'accuracy'):
    mean = float(expected[name].mean())
    assert found[name] == pytest.approx(mean, rel=1e-5)
  other = jax.random.key_data(keys_of(np.arange(21), 1))
  assert (other != jax.random.key_data(keys)).any(axis=1).all()


def test_says_what_does_not_fit(params):
  wrong = evaluator(8, task=Task(predict='pixels'))
  with pytest.raises(ValueError, match='num_classes=8; to predict pixels'):
    wrong.check(params)
