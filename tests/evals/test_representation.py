"""Rank, spread and pictures of a representation."""

import functools

import jax
import numpy as np
import pytest
import tiny
from flax import linen as nn
from synthetic import Synthetic

from vit_jax import tree
from vit_jax.data.pipeline import Data
from vit_jax.evals.representation import Representation, describe
from vit_jax.models import pooling, resnet
from vit_jax.models.dense import Normalize
from vit_jax.parallel import sharding
from vit_jax.reports import attention_figures

RNG = np.random.default_rng(0)
MODEL = tiny.vit(width=8, mlp_dim=8, num_heads=1, num_classes=0)
SOURCE = Synthetic(image_size=8, num_classes=3, num_examples=21)


def evaluator(model=MODEL, source=SOURCE):
  given = {'data': Data(source, 8), 'mesh': sharding.make_mesh()}
  return Representation(model=model, preprocess=Normalize(), **given)


@pytest.fixture(scope='module')
def params():
  return tree.unflatten(tiny.normal_params(MODEL, (8, 8, 3)))


@pytest.mark.parametrize('rank', [1, 4, 16])
def test_rank_of_equal_singular_values_is_their_number(rank):
  basis, _ = np.linalg.qr(RNG.normal(size=(50, rank)))
  other, _ = np.linalg.qr(RNG.normal(size=(16, rank)))
  found = describe(3 * basis @ other.T)
  assert found['rank'] == pytest.approx(rank, rel=1e-3)


def test_spread_and_norms():
  x = RNG.normal(size=(4000, 64))
  found = describe(x)
  assert found['spread'] == pytest.approx(1, abs=0.01)
  assert found['norm'] == pytest.approx(8, abs=0.1)
  assert found['norm_std'] == pytest.approx(np.sqrt(0.5), abs=0.03)
  same = describe(np.outer(np.arange(1, 9), np.ones(64)))
  assert same['spread'] < 1e-7 and same['rank'] == pytest.approx(1, 1e-4)


def test_each_example_counts_once_and_collapse_is_said(params, capsys):
  found = evaluator().run(params)
  assert found['num_examples'] == 21 and found['rank'] > 2
  assert 'collapsed' not in capsys.readouterr().out
  flat = tree.flatten(params)
  # Nothing but the class token and its position is left.
  dead = {k: np.zeros_like(v) if 'out' in k else v for k, v in flat.items()}
  dead = {k: np.zeros_like(v) if 'fc2' in k else v for k, v in dead.items()}
  evaluator().run(tree.unflatten(dead))
  assert 'has collapsed: all images' in capsys.readouterr().out


def test_features_that_are_not_finite_have_no_metrics(params):
  watch = evaluator()
  flat = tree.flatten(params)
  flat['embedding/bias'] = np.full_like(flat['embedding/bias'], np.inf)
  huge = tree.unflatten(flat)
  wanted = dict.fromkeys(('rank', 'spread', 'norm', 'norm_std'), np.nan)
  np.testing.assert_equal(watch.run(huge), wanted | {'num_examples': 21})
  assert watch.pictures(huge) == {}


def test_a_model_that_does_not_pool():
  """Its representation is the mean of its patches."""
  model = MODEL.clone(pooling=pooling.NoPooling())
  params = tree.unflatten(tiny.normal_params(model, (8, 8, 3)))
  images = np.stack([SOURCE[i]['image'] for i in range(21)])
  features = jax.jit(functools.partial(model.apply, method='features'))
  out = jax.device_get(features({'params': params}, Normalize()(images)))
  wanted = describe(out['tokens'].mean(axis=1)) | {'num_examples': 21}
  found = evaluator(model).run(params)
  assert found == pytest.approx(wanted, rel=1e-4)


def test_pictures(params, tmp_path):
  watch = evaluator()
  watch.run(params)
  found = watch.pictures(params)
  (_, patches), (_, near) = found.items()
  assert len(patches) == 8 and len(near) == 10
  np.testing.assert_array_equal(patches[3][0], SOURCE[3]['image'])
  assert patches[3][1].shape == (8, 8, 3)
  colours = patches[3][1]  # one for each patch
  np.testing.assert_array_equal(
    colours[:4, :4], colours[:1, :1] + np.zeros((4, 4, 1), 'u1')
  )
  for i, row in enumerate(near):  # itself first, then six others
    np.testing.assert_array_equal(row[0], SOURCE[i]['image'])
    assert len({x.tobytes() for x in row}) == 7
  attention_figures.write_sheets(tmp_path, found)
  names = sorted(x.name for x in tmp_path.iterdir())
  assert names == [
    'sheet-1-pca-of-patches.png',
    'sheet-2-an-image-and-its-nearest-ones.png',
  ]


def test_patches_of_a_resnet_are_the_cells_of_its_last_map():
  model = resnet.ResNet(stages=(1,), width_factor=1, num_classes=0)
  params = tree.unflatten(tiny.normal_params(model, (16, 16, 3)))
  source = Synthetic(image_size=16, num_classes=3, num_examples=21)
  watch = evaluator(model, source)
  assert watch.run(params)['rank'] > 1
  rows = next(iter(watch.pictures(params).values()))
  # Cells of 4 px: 7x7 convolutions and a pooling, each of stride 2.
  blocks = rows[0][1].reshape(4, 4, 4, 4, 3)
  np.testing.assert_array_equal(
    blocks, blocks[:, :1, :, :1] + np.zeros_like(blocks)
  )


class Own(nn.Module):
  """A model of a user, which has a representation and no tokens."""

  num_classes = None

  @nn.compact
  def features(self, images, **options):
    return {'pre_logits': nn.Dense(6)(images.reshape(len(images), -1))}

  def __call__(self, images):
    return self.features(images)['pre_logits']


def test_a_model_without_patches_has_no_picture_of_them():
  images = np.zeros((1, 8, 8, 3), np.float32)
  params = Own().init(jax.random.key(0), images)['params']
  watch = evaluator(Own())
  assert watch.run(params)['rank'] > 1
  assert [*watch.pictures(params)] == ['An image and its nearest ones']
