"""The scripts that make the figures and facts of the documents."""

import csv
import json
import pathlib
import sys

import numpy as np
import pytest
import tiny
from nightly import nightly
from PIL import Image

sys.path.append(str(pathlib.Path(__file__).parents[2] / 'docs'))
import draw_augmentations
import draw_features
import draw_masked_patches
import find_augreg

from vit_jax.data import augment
from vit_jax.models.dense import Normalize
from vit_jax.models.pooling import NoPooling
from vit_jax.models.vit import PatchEmbedding
from vit_jax.objectives.masked_patches import Pixels, cut

TASK = {'predict': 'downsampled', 'downsampled_to': 2, 'ratio': 0.75}
SOURCE = {
  'target': 'synthetic.Synthetic',
  'image_size': (8, 12),
  'num_classes': 9999,  # more than the model has outputs
  'num_examples': 20,
}
MODEL = tiny.vit(
  width=8,
  embedding=PatchEmbedding(4, mask_token=True),
  pooling=NoPooling(class_token=True),
  num_classes=4 * 512,
)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """The workdir of a run, without the run."""
  path = tmp_path_factory.mktemp('run')
  tiny.save_run(path, tiny.weights(MODEL, (8, 12, 3)))
  evaluator = {
    'target': 'vit_jax.evals.masked_patches.MaskedPatches',
    'data': {'source': SOURCE | {'seed': 1}, 'batch_size': 8},
    'task': TASK,
  }
  objective = 'vit_jax.objectives.masked_patches.MaskedPatches'
  config = {
    'objective': {'target': objective, 'task': TASK},
    'data': {'source': SOURCE, 'batch_size': 8, 'labels': False},
    'evals': {'val': evaluator},
  }
  (path / 'config.json').write_text(json.dumps(config))
  return path


@pytest.fixture
def drawn(monkeypatch):
  """Check the drawn images, and not only the figure."""
  found, draw = [], draw_masked_patches.draw

  def spy(result, *arguments):
    found.append(result)
    draw(result, *arguments)

  monkeypatch.setattr(draw_masked_patches, 'draw', spy)

  def run(workdir, output, *more):
    arguments = [f'--weights={workdir}', f'--output={output}', *more]
    arguments += ['--trust=synthetic']
    draw_masked_patches.main([str(x) for x in arguments])
    return found[-1]

  return run


@pytest.mark.slow
def test_images_of_the_run(workdir, tmp_path, drawn):
  found = drawn(workdir, tmp_path / 'a.png', '--examples=3')
  assert found['metrics']['loss'].shape == (3,)
  with Image.open(tmp_path / 'a.png') as picture:
    assert picture.width > 400 and picture.height > 600
  assert found['images'].shape == found['predicted'].shape == (3, 8, 12, 3)
  corrupted = found['is_corrupted']
  assert corrupted.shape == (3, 6) and (corrupted.sum(axis=1) == 4).all()
  patches = {
    name: np.asarray(cut(found[name], 4))
    for name in ('images', 'corrupted', 'predicted', 'truth')
  }
  images = patches['images']
  for b, n in np.ndindex(3, 6):
    source = found['sources'][b, n]
    expected = 128 if source < 0 else images[b, source]
    assert (patches['corrupted'][b, n] == expected).all()
    if not corrupted[b, n]:
      for name in ('predicted', 'truth'):
        assert (patches[name][b, n] == images[b, n]).all()
  difference = patches['truth'] - images.astype(float)
  # A cell's mean is within half a level of its colour.
  means = difference.reshape(3, 6, 2, 2, 2, 2, 3).mean(axis=(3, 5))
  assert np.abs(means).max() <= 16
  assert (patches['predicted'] % 32 == 16)[corrupted].all()


def test_pictures_undo_preprocessing():
  images = np.random.default_rng(0).integers(0, 256, (2, 8, 12, 3), np.uint8)
  patches = cut(images, 4)
  preprocess = Normalize((1, 2, 3), (50, 60, 70))
  outputs = preprocess(patches).reshape(2, 6, -1)
  drawn = draw_masked_patches.picture(Pixels(preprocess), outputs, patches)
  np.testing.assert_array_equal(drawn, patches)


@pytest.mark.parametrize('channels', [1, *nightly([3])])
def test_augmentations_are_drawn_at_three_strengths(channels, tmp_path):
  rng = np.random.default_rng(0)
  image = rng.integers(0, 256, (40, 40, channels), dtype=np.uint8)
  rows = draw_augmentations.of_policies(image)
  for policy, columns in (
    (augment.RandAugment, slice(0, 3)),
    (augment.TimmRandAugment, slice(3, 6)),
    (augment.TrivialAugment, slice(6, 9)),
  ):
    drawn = {k for k, v in rows.items() if v[columns][0] is not None}
    assert drawn == set(policy.names) - {'Identity'}
  assert len({x.tobytes() for x in rows['Rotate']}) == 9
  rows |= draw_augmentations.of_others(image)
  cells = [x for row in rows.values() for x in row if x is not None]
  assert {x.shape for x in cells} == {image.shape}
  mixed = rows['CutMix 0.1, 0.4, 1'], rows['mixup 0.1, 0.4, 1']
  assert all(len({x.tobytes() for x in row}) > 3 for row in mixed)
  Image.fromarray(image.repeat(3, 2)[..., :3]).save(tmp_path / 'image.png')
  draw_augmentations.main(tmp_path / 'sheet.png', tmp_path / 'image.png')
  with Image.open(tmp_path / 'sheet.png') as sheet:
    assert sheet.width > 10 * 112 and sheet.height > 25 * 112


def test_the_best_checkpoint_of_augreg_is_first(tmp_path, capsys):
  def row(model, decay, val, adapt='imagenet2012', size=224, adapted=0.5):
    name = f'{model}-i21k-wd_{decay}'
    return {
      **{'filename': name, 'ds': 'i21k', 'final_val': val, 'adapt_ds': adapt},
      **{'adapt_resolution': size, 'adapt_final_val': adapted},
      'adapt_filename': f'{name}--{adapt}-res_{size}',
    }

  rows = [
    row('B_16', 0.1, 0.4, adapted=0.9),
    row('B_16', 0.1, 0.4, size=384, adapted=0.6),
    row('B_16', 0.03, 0.5, adapted=0.7),
    row('B_16', 0.03, 0.5, size=384, adapted=0.8),
    row('B_16', 0.03, 0.5, adapt='cifar100', size=384, adapted=0.95),
    row('B_16', 0.3, 0.99) | {'ds': 'i1k'},
    row('R50_L_32', 0.3, ''),
  ]
  with (tmp_path / 'index.csv').open('w', newline='') as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
  for arguments, accuracy, name in (
    ([], '0.5000', 'B_16-i21k-wd_0.03'),
    (['--dataset=i1k'], '0.9900', 'B_16-i21k-wd_0.3'),
    (['--adapted=imagenet2012'], '0.9000', 'wd_0.1--imagenet2012-res_224'),
    (['--resolution=384'], '0.9500', 'wd_0.03--cifar100-res_384'),
  ):
    find_augreg.main(['B/16', f'--index={tmp_path}/index.csv', *arguments])
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f'{accuracy}  gs://vit_models/augreg/B_16')
    assert first.endswith(f'{name}.npz')


def test_features_of_photographs():
  rng = np.random.default_rng(0)
  image = rng.integers(0, 256, (40, 60, 3), np.uint8)
  patches = np.eye(4)[[[0, 0, 0, 0], [0, 1, 1, 1], [2, 2, 3, 1]]]
  maps = np.zeros((2, 2, 3, 4))
  maps[1, 0, 0, 3] = 1  # of one head of the last layer
  look = {'patches': patches, 'maps': maps}
  ((photo, pca, fourth, third, heat),), places = draw_features.columns(
    [look], [image]
  )
  assert photo is image and pca.shape == (3, 4, 3)
  np.testing.assert_allclose(places, [[[5 / 6, 5 / 8], [5 / 6, 1 / 8]]])
  for shown, group in ((fourth, 3), (third, 2)):
    np.testing.assert_array_equal(shown[..., 0] > 200, patches[..., group] == 1)
  light = heat.sum(-1) - image.mean(-1) * 3 * 0.45
  row, column = np.unravel_index(light.argmax(), light.shape)
  assert row < 14 and column >= 45
