"""ImageNet's class ids and ReaL's labels, on a made-up data set."""

import pickle

import made_up
import numpy as np
import packed
import pytest

from vit_jax import config as config_lib
from vit_jax.data import imagenet, pipeline

_NAME = 'ILSVRC2012_val_{:08d}.JPEG'


def _real(number):
  """The made-up labels of image `number`, which counts from 1."""
  return [number % 1000, (7 * number) % 1000][: number % 3]


def _multi_hot(ids):
  return np.array([float(i in ids) for i in range(1000)], np.float32)


# Numbers of the images, shuffled as TFDS does.
_ORDER = [31, 50_000, 1, 2, 17, 48_999, 3]


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  """ReaL, of seven images in another order than their numbers."""

  def example(number, features):
    out = made_up.example(number, features)
    out['file_name'] = _NAME.format(_ORDER[number])
    out['real_label'] = _real(_ORDER[number])
    return out

  path = tmp_path_factory.mktemp('tfds')
  sizes = {'validation': len(_ORDER)}
  made_up.prepare(path, 'imagenet2012_real', sizes, make_example=example)
  return str(path)


def test_wnids():
  ids = imagenet.wnids()
  assert len(set(ids)) == 1000 and list(ids) == sorted(ids)
  assert ids[0] == 'n01440764' and ids[999] == 'n15075141'
  assert ids[282] == 'n02123159'  # tiger cat


def test_wnids_number_a_folder_with_few_classes(tmp_path):
  files = 'n02123159/x.png', 'n15075141/x.png'
  packed.write_folder(tmp_path, dict.fromkeys(files, b''))
  config = {
    'target': 'vit_jax.data.sources.folder.Folder',
    'path': str(tmp_path),
    'class_names': {'target': 'vit_jax.data.imagenet.wnids'},
  }
  source = config_lib.resolve(config)
  assert [source[i]['label'] for i in range(2)] == [282, 999]
  assert source.num_classes == 1000


def test_real_labels_of_tfds(data_dir):
  source = config_lib.resolve(
    {
      'target': 'vit_jax.data.sources.tfds.Tfds',
      'name': 'imagenet2012_real',
      'split': 'validation',
      'data_dir': data_dir,
      'label_key': 'real_label',
      'label_fn': {'target': 'vit_jax.data.imagenet.RealLabels'},
    }
  )
  expected = np.stack([_multi_hot(_real(number)) for number in _ORDER])
  assert not expected[6].any() and expected[3].sum() == 2
  assert len(source) == 7 and source.num_classes == 1000
  assert source.class_names == list(imagenet.wnids())
  np.testing.assert_array_equal(source.labels(), expected)
  copy = pickle.loads(pickle.dumps(source))
  for i, number in enumerate(_ORDER):
    np.testing.assert_array_equal(copy[i]['label'], expected[i])
    assert _NAME.format(number) in source.describe(i)
  (batch,) = pipeline.Data(source, batch_size=8).eval_batches()
  np.testing.assert_array_equal(batch['label'][:7], expected)
