"""The picture of masked patch prediction, and its numbers."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

sys.path.append(str(pathlib.Path(__file__).parents[1] / 'weights'))
from small import random_weights

from vit_jax import pretrained, tree
from vit_jax.models.layers import PatchEmbedding
from vit_jax.models.pooling import NoPooling
from vit_jax.models.vit import VisionTransformer
from vit_jax.objectives import patch_targets
from vit_jax.runs import workdirs
from vit_jax.runs.checkpoint import Checkpointer
from vit_jax.step import TrainState
from vit_jax.tools import masked_patches
from vit_jax.weights import formats

pytestmark = pytest.mark.slow

TASK = {'predict': 'downsampled', 'downsampled_to': 2, 'ratio': 0.75}
SOURCE = {
  'target': 'vit_jax.data.embedded.digits.Synthetic',
  'image_size': (8, 12),
  'num_classes': 9999,  # more than the model has outputs
  'num_examples': 20,
}
MODEL = VisionTransformer(
  width=8,
  depth=1,
  mlp_dim=8,
  num_heads=2,
  embedding=PatchEmbedding(4, mask_token=True),
  pooling=NoPooling(class_token=True),
  num_classes=4 * 512,
)


@pytest.fixture(scope='module', autouse=True)
def fast_compilation():
  """Little is computed here, so XLA's optimizations would not pay off."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """The workdir of a run, without the run."""
  path = tmp_path_factory.mktemp('run')
  weights = random_weights(MODEL, (8, 12, 3))
  params = jax.tree.map(jnp.asarray, tree.unflatten(weights.params))
  checkpointer = Checkpointer(path)
  state = TrainState(jnp.int32(1), params, (), jax.random.key(0))
  checkpointer.save(1, state, {})
  checkpointer.close()
  workdirs.record_model(
    path,
    model=MODEL,
    preprocess=weights.preprocess,
    transforms=None,
    image_shape=weights.image_shape,
    class_names=None,
    activation='softmax',
  )
  evaluator = {
    'target': 'vit_jax.evals.masked_patches.MaskedPatches',
    'data': {'source': SOURCE | {'seed': 1}, 'batch_size': 8},
    'task': TASK,
  }
  objective = 'vit_jax.objectives.masked_patches.masked_patches'
  config = {
    'objective': {'target': objective, 'task': TASK},
    'data': {'source': SOURCE, 'batch_size': 8, 'labels': False},
    'evals': {'val': evaluator},
  }
  (path / 'config.json').write_text(json.dumps(config))
  return path


def run(workdir, output, *more):
  arguments = [f'--workdir={workdir}', f'--output={output}', *more]
  masked_patches.main([str(x) for x in arguments])
  return dict(np.load(output.with_suffix('.npz')))


def test_images_of_the_run(workdir, tmp_path, capsys):
  found = run(workdir, tmp_path / 'a.png', '--examples=3')
  assert 'loss of 3 images' in capsys.readouterr().out
  with Image.open(tmp_path / 'a.png') as picture:
    assert picture.width > 400 and picture.height > 600
  assert found['images'].shape == found['predicted'].shape == (3, 8, 12, 3)
  corrupted = found['is_corrupted']
  assert corrupted.shape == (3, 6) and (corrupted.sum(axis=1) == 4).all()
  cut = {
    name: np.asarray(patch_targets.cut(found[name], 4))
    for name in ('images', 'corrupted', 'predicted', 'truth')
  }
  images = cut['images']
  for b, n in np.ndindex(3, 6):
    source = found['sources'][b, n]
    expected = 128 if source < 0 else images[b, source]
    assert (cut['corrupted'][b, n] == expected).all()
    if not corrupted[b, n]:
      for name in ('predicted', 'truth'):
        assert (cut[name][b, n] == images[b, n]).all()
  difference = cut['truth'] - images.astype(float)
  # A cell's mean is within half a level of its colour.
  means = difference.reshape(3, 6, 2, 2, 2, 2, 3).mean(axis=(3, 5))
  assert np.abs(means).max() <= 16
  assert (cut['predicted'] % 32 == 16)[corrupted].all()


def test_other_images(workdir, tmp_path):
  image = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
  Image.fromarray(image).save(tmp_path / 'x.png')
  # The run has no transforms of its own, so that the default ones apply.
  found = run(workdir, tmp_path / 'b.pdf', tmp_path / 'x.png', '--seed=1')
  assert found['images'].shape == (1, 8, 12, 3)
  assert (tmp_path / 'b.pdf').read_bytes().startswith(b'%PDF')
  other = run(workdir, tmp_path / 'c.png', tmp_path / 'x.png', '--seed=2')
  assert (found['sources'] != other['sources']).any()


def test_errors(workdir, tmp_path):
  for arguments, message in (
    ([workdir, tmp_path / 'a.jpg'], r'must end with \.png or \.pdf'),
    ([tmp_path, tmp_path / 'a.png'], r'no config\.json'),
  ):
    with pytest.raises(SystemExit, match=message):
      run(*arguments)


def test_weights_for_others(workdir, tmp_path):
  """The mask vector is left out where the model is to have none."""
  message = r'npz cannot hold mask_token=True.*--set pooling=token'
  with pytest.raises(ValueError, match=message):
    formats.write(formats.read(workdir), tmp_path / 'x.npz', 'npz')
  model, params = pretrained.load(
    workdir, pooling='token', mask_token=False, num_classes=7, report=None
  )
  assert 'mask' not in params
  logits = model.apply({'params': params}, np.zeros((2, 8, 12, 3)))
  assert logits.shape == (2, 7)
