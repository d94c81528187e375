"""AugReg's file names and index."""

import csv

import pytest

from vit_jax.models import names
from vit_jax.weights import augreg
from vit_jax.weights.augreg import Name

TUNED = (
  'R26_S_32-i21k-300ep-lr_0.001-aug_light0-wd_0.03-do_0.1-sd_0.1'
  '--imagenet2012-steps_20k-lr_0.03-res_384.npz'
)


def test_names_are_parsed():
  assert augreg.parse(f'gs://vit_models/augreg/{TUNED}') == Name(
    model='R26+ViT-S/32',
    dataset='i21k',
    epochs=300,
    lr=0.001,
    aug='light0',
    wd=0.03,
    dropout=0.1,
    stochastic_depth=0.1,
    adapt_dataset='imagenet2012',
    adapt_steps=20_000,
    adapt_lr=0.03,
    resolution=384,
  )
  name = augreg.parse(
    'R_Ti_16-i21k_30-30ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0'
  )
  assert (name.model, name.dataset) == ('R+ViT-Ti/16', 'i21k_30')
  assert name.epochs == 30 and name.resolution is None


@pytest.mark.parametrize('name', [TUNED, TUNED.split('--')[0] + '.npz'])
def test_names_come_back(name):
  assert augreg.file_name(augreg.parse(name)) == name


@pytest.mark.parametrize(
  'name',
  [
    'ViT-B_16.npz',
    TUNED.replace('R26_S_32', 'R26_S_64'),
    TUNED.replace('-wd_0.03', ''),
    TUNED.replace('-res_384', ''),
    TUNED.replace('wd_0.03', 'wd_...'),
  ],
)
def test_other_names_are_errors(name):
  with pytest.raises(ValueError, match='file name of AugReg'):
    augreg.parse(name)


def test_recommended_models():
  assert len(augreg.RECOMMENDED) == 9
  for model, (name, top1) in augreg.RECOMMENDED.items():
    assert augreg.parse(augreg.file_name(name)) == name
    assert 75 < top1 < 86 and name.model == model
  files = [augreg.file_name(n) for n, _ in augreg.RECOMMENDED.values()]
  expected = (  # from the paper's tables, put together by hand
    'L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0.npz',
    'R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1.npz',
    'Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0.npz',
  )
  assert set(expected) <= set(files)


def test_models_are_ours():
  for model in augreg.MODELS.values():
    assert names.settings(model)


def record(model, wd, val, adapt='imagenet2012', size=224, adapted=0.5, **more):
  name = Name(model, more.get('ds', 'i21k'), 300, 0.001, 'none', wd, 0.0, 0.0)
  filename = augreg.file_name(name).removesuffix('.npz')
  return {
    'filename': filename,
    'ds': name.dataset,
    'final_val': val,
    'adapt_ds': adapt,
    'adapt_resolution': size,
    'adapt_final_val': adapted,
    'adapt_filename': f'{filename}--{adapt}-steps_20k-lr_0.03-res_{size}',
  }


@pytest.fixture
def index(tmp_path):
  """Two files of B/16, one of which was best after fine-tuning only."""
  b, l = 'ViT-B/16', 'R50+ViT-L/32'
  rows = [
    record(b, 0.1, 0.4, adapted=0.9),
    record(b, 0.1, 0.4, size=384, adapted=0.6),
    record(b, 0.03, 0.5, adapted=0.7),
    record(b, 0.03, 0.5, size=384, adapted=0.8),
    record(b, 0.03, 0.5, adapt='cifar100', size=384, adapted=0.95),
    record(b, 0.3, 0.99, ds='i1k'),
    record(l, 0.1, 0.3),
    record(l, 0.3, ''),
  ]
  path = tmp_path / 'index.csv'
  with path.open('w', newline='') as f:
    writer = csv.DictWriter(f, rows[0])
    writer.writeheader()
    writer.writerows(rows)
  return augreg.read_index(path)


def picked(path):
  assert path.startswith('gs://vit_models/augreg/') and path.endswith('.npz')
  name = augreg.parse(path)
  return name.wd, name.adapt_dataset, name.resolution


def test_the_best_file_is_picked(index):
  best = augreg.best
  assert picked(best(index, 'B/16')) == (0.03, None, None)
  assert picked(best(index, 'ViT-B/16', dataset='i1k'))[0] == 0.3
  assert picked(best(index, 'R50+L/32')) == (0.1, None, None)
  assert picked(best(index, 'B/16', adapt_dataset='imagenet2012')) == (
    *(0.1, 'imagenet2012'),
    224,
  )
  assert picked(
    best(index, 'B/16', adapt_dataset='imagenet2012', resolution=384)
  ) == (0.03, 'imagenet2012', 384)
  assert picked(best(index, 'B/16', resolution=384))[1] == 'cifar100'


def test_errors_say_what_there_is(index):
  with pytest.raises(ValueError, match=r'model: B/16, R50\+L/32'):
    augreg.best(index, 'B/8')
  with pytest.raises(ValueError, match=r'adapt_dataset: imagenet2012\b'):
    augreg.best(index, 'R50+L/32', adapt_dataset='cifar10')
  with pytest.raises(ValueError, match=r'resolution: 224, 384'):
    augreg.best(index, 'B/16', adapt_dataset='imagenet2012', resolution=512)


def test_a_table_of_something_else(tmp_path):
  path = tmp_path / 'index.csv'
  path.write_text('a,b\n1,2\n')
  with pytest.raises(ValueError, match=r'adapt_ds.*filename'):
    augreg.read_index(path)
  path.write_bytes(b'\xff\xfe\x00')
  with pytest.raises(ValueError, match='no table'):
    augreg.read_index(path)
  with pytest.raises(ValueError, match='does not exist'):
    augreg.read_index(tmp_path / 'other.csv')
