"""HuggingFace: saved data sets, folders of images and of parquet files."""

import concurrent.futures
import pickle
import sys

import numpy as np
import packed
import pytest

from vit_jax.data import fingerprints, pipeline
from vit_jax.data.folder import Folder
from vit_jax.data.hugging_face import HuggingFace

datasets = pytest.importorskip('datasets')

FILES = packed.images()
LABELS = [packed.NAMES.index(name.split('/')[0]) for name in FILES]


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
  monkeypatch.setattr(datasets.config, 'HF_HUB_OFFLINE', True)
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
  cache = str(tmp_path / 'cache')
  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', cache)


def dataset(kind=None, **columns):
  kind = kind or datasets.ClassLabel(names=[*packed.NAMES])
  values = {
    'image': [{'bytes': x, 'path': None} for x in FILES.values()],
    'label': LABELS,
    **columns,
  }
  features = datasets.Features(image=datasets.Image(), label=kind)
  return datasets.Dataset.from_dict(values, features=features)


def test_saved_to_disk(tmp_path):
  datasets.DatasetDict(
    train=dataset(), test=dataset().select(range(3))
  ).save_to_disk(tmp_path / 'saved')
  source = HuggingFace(tmp_path / 'saved', split='train')
  assert packed.contents(source) == packed.expected(FILES)
  assert (source.num_classes, len(source)) == (3, 12)
  assert source.labels().tolist() == LABELS
  assert source.labels().dtype == np.int32
  assert source.describe(3) == f'{tmp_path}/saved train[3]'
  part = HuggingFace(tmp_path / 'saved', split='train[50%:]+test[:1]')
  everything = packed.all_of(source)
  assert packed.all_of(part) == [*everything[6:], everything[0]]
  with pytest.raises(ValueError, match=r"split='val': Unknown split"):
    HuggingFace(tmp_path / 'saved', split='val')
  dataset().save_to_disk(tmp_path / 'one')
  one = HuggingFace(tmp_path / 'one', split='train[:4]')
  assert packed.all_of(one) == everything[:4]


def test_folders_that_load_dataset_understands(tmp_path):
  packed.write_folder(tmp_path / 'images' / 'train', FILES)
  source = HuggingFace(tmp_path / 'images', split='train')
  assert packed.contents(source) == packed.expected(FILES)
  assert source.file_name(0) == '000.png'
  assert source.describe(0).endswith('images train[0] (000.png)')
  path = tmp_path / 'parquet' / 'data' / 'train-00000-of-00001.parquet'
  path.parent.mkdir(parents=True)
  dataset().to_parquet(path)
  source = HuggingFace(tmp_path / 'parquet', split='train')
  assert packed.contents(source) == packed.expected(FILES)
  assert len(HuggingFace(tmp_path / 'parquet', split='train[:25%]')) == 3
  same = HuggingFace('parquet', data_dir=tmp_path / 'parquet', split='train')
  assert packed.all_of(same) == packed.all_of(source)


@pytest.mark.parametrize(
  ('label', 'values', 'expected', 'names'),
  [
    (datasets.Value('int64'), LABELS, LABELS, None),
    (
      datasets.Value('string'),
      [packed.NAMES[x] for x in LABELS],
      LABELS,
      [*packed.NAMES],
    ),
    (
      datasets.Sequence(datasets.Value('float32'), 2),
      [[x, 1] for x in LABELS],
      [[x, 1] for x in LABELS],
      None,
    ),
  ],
)
def test_kinds_of_labels(tmp_path, label, values, expected, names):
  dataset(label, label=values).save_to_disk(tmp_path / 'x')
  source = HuggingFace(tmp_path / 'x', split='train')
  np.testing.assert_array_equal(source.labels(), expected)
  np.testing.assert_array_equal(source[1]['label'], expected[1])
  assert source.class_names == names


def test_unusable_data(tmp_path):
  path = tmp_path / 'x'
  dataset().save_to_disk(path)
  with pytest.raises(ValueError, match=r"no column 'fine'.* image, label. Set"):
    HuggingFace(path, split='train', label_key='fine')
  with pytest.raises(ValueError, match=r"column 'label' of .*Expected images"):
    HuggingFace(path, split='train', image_key='label')
  assert HuggingFace(path, split='train', label_key='').num_classes is None
  dataset(label=[-1] * 12).save_to_disk(tmp_path / 'test')
  with pytest.raises(ValueError, match='-1 often means that a split has no'):
    HuggingFace(tmp_path / 'test', split='train')
  with pytest.raises(ValueError, match=r"data set 'no/such', split='train'"):
    HuggingFace('no/such', split='train')
  with pytest.raises(ValueError, match='split=None must be text'):
    HuggingFace('no/such', split=None)


def test_threads_copies_and_batches(tmp_path):
  dataset().save_to_disk(tmp_path / 'x')
  source = HuggingFace(tmp_path / 'x', split='train')
  copy = pickle.loads(pickle.dumps(source))
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    found = list(pool.map(copy.__getitem__, [*range(12)] * 10))
  assert found == packed.all_of(source) * 10
  folder = Folder(packed.write_folder(tmp_path / 'folder', FILES))
  one, two = (pipeline.Data(x, 4).train_batches() for x in (folder, copy))
  for _ in range(5):
    x, y = next(one), next(two)
    np.testing.assert_array_equal(x['image'], y['image'])
    np.testing.assert_array_equal(x['label'], y['label'])
  one.close(), two.close()


def test_fingerprints(tmp_path):
  found = []
  for i, labels in enumerate((LABELS, LABELS, LABELS[::-1])):
    dataset(label=labels).save_to_disk(tmp_path / str(i) / 'x')
    source = HuggingFace(tmp_path / str(i) / 'x', split='train')
    found.append(fingerprints.fingerprint(source))
  assert found[0] == found[1] != found[2]


def test_the_package_is_missing(monkeypatch):
  monkeypatch.setitem(sys.modules, 'datasets', None)
  with pytest.raises(ValueError, match=r"pip install 'vit_jax\[huggingface\]'"):
    HuggingFace('x', split='train')
