"""Weights and images that the tests of all tools share."""

import jax
import numpy as np
import packed
import pytest
import tiny
from PIL import Image

from vit_jax import tree
from vit_jax.data.transforms import CentralCrop, ResizeSmall
from vit_jax.models.dense import Normalize
from vit_jax.weights import formats
from vit_jax.zoo import names

SHAPE = (32, 48, 3)  # 2 x 3 patches
NAMES = ['cat', 'dog', 'owl', 'ant', 'bee', 'a, b']


@pytest.fixture(scope='session')
def model():
  return names.create('ViT-mu/16', num_classes=len(NAMES)).clone(depth=2)


@pytest.fixture(scope='session')
def make_weights():
  """Function (model, image_shape) -> Weights with random parameters."""
  return lambda model, shape=SHAPE, **more: tiny.weights(model, shape, **more)


@pytest.fixture(scope='session')
def weights(model, make_weights):
  return make_weights(
    model,
    preprocess=Normalize(mean=90.0),
    transforms=(ResizeSmall(40), CentralCrop(SHAPE[:2])),
    class_names=NAMES,
  )


@pytest.fixture(scope='session')
def file(weights, tmp_path_factory):
  """Path of a file with the weights."""
  path = tmp_path_factory.mktemp('weights') / 'tiny.npz'
  formats.write(weights, path, 'vit_jax')
  return path


@pytest.fixture(scope='session')
def gallery(tmp_path_factory):
  """Folder with images in class folders; the smaller side needs no resize."""
  files, rng = {}, np.random.default_rng(1)
  for i in range(11):
    pixels = rng.integers(0, 256, (40, 50 + i, 3), np.uint8)
    files[f'{"ab"[i // 6]}/{i:02}.png'] = tiny.encode(pixels)
  return packed.write_folder(tmp_path_factory.mktemp('gallery'), files)


@pytest.fixture(scope='session')
def paths(gallery):
  return [str(path) for path in sorted(gallery.rglob('*.png'))]


@pytest.fixture(scope='session')
def expected(weights, paths):
  """{path: {layer: output of the model for this image alone}}."""

  @jax.jit
  def features(images):
    params = {'params': tree.unflatten(weights.params)}
    return weights.model.apply(params, images, method='features')

  found = {}
  for path in paths:
    pixels = np.asarray(Image.open(path))
    left = (pixels.shape[1] - 48) // 2
    crop = pixels[None, 4:36, left : left + 48].astype(np.float32)
    layers = features((crop - 90) / 127.5)
    found[path] = {name: np.asarray(x[0]) for name, x in layers.items()}
  return found


@pytest.fixture
def bad(tmp_path):
  """Path of a file that is no image."""
  path = tmp_path / 'bad.png'
  path.write_bytes(b'no image')
  return str(path)
