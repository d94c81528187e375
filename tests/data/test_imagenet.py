"""ImageNet's class ids and ReaL's labels, on made-up data sets and files."""

import json
import pickle

import made_up
import numpy as np
import pytest
from PIL import Image

from vit_jax import config as config_lib
from vit_jax.data import imagenet, pipeline
from vit_jax.data.folder import Folder
from vit_jax.data.tfds import Tfds

_NAME = 'ILSVRC2012_val_{:08d}.JPEG'


def _real(number):
  """The made-up labels of image `number`, which counts from 1."""
  return [number % 1000, (7 * number) % 1000][: number % 3]


def _multi_hot(ids):
  return np.array([float(i in ids) for i in range(1000)], np.float32)


@pytest.fixture(scope='module')
def real_json(tmp_path_factory):
  path = tmp_path_factory.mktemp('real') / 'real.json'
  path.write_text(json.dumps([_real(i + 1) for i in range(50_000)]))
  return path


# Numbers of the images, shuffled as TFDS does.
_ORDER = [31, 50_000, 1, 2, 17, 48_999, 3]


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  """ImageNet and ReaL, of seven images in another order than their numbers."""

  def example(number, place, features):
    out = made_up.example(number, place, features)
    out['file_name'] = _NAME.format(_ORDER[number])
    if 'real_label' in features:
      out['real_label'] = _real(_ORDER[number])
    return out

  path = tmp_path_factory.mktemp('tfds')
  for name in ('imagenet2012', 'imagenet2012_real'):
    sizes = {'validation': len(_ORDER)}
    made_up.prepare(path, name, sizes, make_example=example, distinct=7)
  return str(path)


def test_wnids():
  ids = imagenet.wnids()
  assert len(set(ids)) == 1000 and list(ids) == sorted(ids)
  assert ids[0] == 'n01440764' and ids[999] == 'n15075141'
  assert ids[282] == 'n02123159'  # tiger cat


def test_wnids_number_a_folder_with_few_classes(tmp_path):
  for wnid in ('n02123159', 'n15075141'):
    (tmp_path / wnid).mkdir()
    Image.new('RGB', (4, 4)).save(tmp_path / wnid / 'x.png')
  config = {
    'target': 'vit_jax.data.folder.Folder',
    'path': str(tmp_path),
    'class_names': {'target': 'vit_jax.data.imagenet.wnids'},
  }
  source = config_lib.resolve(config)
  assert [source[i]['label'] for i in range(2)] == [282, 999]
  assert source.num_classes == 1000


def test_real_labels():
  label_fn = imagenet.RealLabels()
  for ids in ([], [0], [999, 3], [5, 5]):
    label = label_fn(np.array(ids, np.int64))
    assert label.dtype == np.float32
    np.testing.assert_array_equal(label, _multi_hot(ids))
  for ids in ([1000], [-1, 4]):
    with pytest.raises(ValueError, match=r'class ids \[.*in \[0, 1000\)'):
      label_fn(np.array(ids))


def test_tfds_and_file_agree(data_dir, real_json):
  """The two ways to ReaL label each image alike, by number and by content."""
  of_tfds = Tfds(
    'imagenet2012_real',
    split='validation',
    data_dir=data_dir,
    label_key='real_label',
    label_fn=imagenet.RealLabels(),
  )
  of_file = config_lib.resolve(
    {
      'target': 'vit_jax.data.imagenet.Real',
      'json': str(real_json),
      'source': {
        'target': 'vit_jax.data.tfds.Tfds',
        'name': 'imagenet2012',
        'split': 'validation',
        'data_dir': data_dir,
      },
    }
  )
  expected = np.stack([_multi_hot(_real(number)) for number in _ORDER])
  assert not expected[6].any() and expected[3].sum() == 2
  for source in (of_tfds, of_file):
    assert len(source) == 7 and source.num_classes == 1000
    assert source.class_names == list(imagenet.wnids())
    assert source.channels == 3
    np.testing.assert_array_equal(source.labels(), expected)
    np.testing.assert_array_equal(pipeline.labels(source), expected)
    copy = pickle.loads(pickle.dumps(source))
    for i, number in enumerate(_ORDER):
      np.testing.assert_array_equal(copy[i]['label'], expected[i])
      assert _NAME.format(number) in source.describe(i)
  assert of_file[3]['image'] == of_tfds[3]['image']
  (batch,) = pipeline.Data(of_file, batch_size=8).eval_batches()
  np.testing.assert_array_equal(batch['label'][:7], expected)


def _folder(path, names):
  (path / 'n01440764').mkdir()
  for name in names:
    Image.new('RGB', (4, 4)).save(path / 'n01440764' / name)
  return Folder(str(path))


def test_real_of_a_folder(tmp_path, real_json):
  numbers = [4, 40_001, 5]
  folder = _folder(tmp_path, [_NAME.format(x) for x in numbers])
  source = imagenet.Real(folder, json=real_json)
  expected = [_multi_hot(_real(number)) for number in sorted(numbers)]
  np.testing.assert_array_equal(source.labels(), expected)
  assert source.describe(0).endswith(_NAME.format(4))


@pytest.mark.parametrize(
  'name', ['cat.png', _NAME.format(0), _NAME.format(50_001)]
)
def test_names_without_a_number(tmp_path, real_json, name):
  folder = _folder(tmp_path, [name])
  with pytest.raises(ValueError, match=r'ILSVRC2012_val_00000001 to \.\.\.000'):
    imagenet.Real(folder, json=real_json)


@pytest.mark.parametrize(
  'content, message',
  [
    ('{"a": 1}', r'is a dict of 1\. Expected a list of 50000 lists'),
    ('[[1], [2]]', r'is a list of 2\. Expected a list of 50000 lists'),
    ('7', r'is a int\. Expected'),
    ('[[1', 'cannot read .*JSONDecodeError'),
    ([[1]] * 49_999 + [3], r'entry 49999 is 3\. Expected a list of class ids'),
    ([[1000]] + [[1]] * 49_999, r'entry 0 is \[1000\]\. Expected .* 0 to 999'),
    ([[-1]] + [[1]] * 49_999, r'entry 0 is \[-1\]'),
    ([[0.5]] + [[1]] * 49_999, r'entry 0 is \[0.5\]'),
  ],
)
def test_errors_of_the_file(tmp_path, content, message):
  folder = _folder(tmp_path, [_NAME.format(1)])
  text = content if isinstance(content, str) else json.dumps(content)
  (tmp_path / 'real.json').write_text(text)
  with pytest.raises(ValueError, match=message):
    imagenet.Real(folder, json=tmp_path / 'real.json')


def test_absent_file(tmp_path):
  folder = _folder(tmp_path, [_NAME.format(1)])
  with pytest.raises(ValueError, match=r'cannot read .*reassessed-imagenet'):
    imagenet.Real(folder, json=tmp_path / 'nowhere.json')
  with pytest.raises(ValueError, match=r'to the path of real\.json'):
    imagenet.Real(folder, json=None)
