"""The recommended checkpoint is the best of those asked for."""

import csv

import pytest

from vit_jax.tools import augreg

NAME = '{}-i21k-300ep-lr_0.001-aug_none-wd_{}-do_0.0-sd_0.0'


def row(
  model, decay, val, adapt='imagenet2012', size=224, adapted=0.5, ds='i21k'
):
  name = NAME.format(model, decay)
  return {
    **{'filename': name, 'ds': ds, 'final_val': val, 'adapt_ds': adapt},
    **{'adapt_resolution': size, 'adapt_final_val': adapted},
    'adapt_filename': f'{name}--{adapt}-steps_20k-lr_0.03-res_{size}',
  }


@pytest.fixture
def index(tmp_path):
  """Two files of B/16, one of which is the best only after fine-tuning."""
  rows = [
    row('B_16', 0.1, 0.4, adapted=0.9),
    row('B_16', 0.1, 0.4, size=384, adapted=0.6),
    row('B_16', 0.03, 0.5, adapted=0.7),
    row('B_16', 0.03, 0.5, size=384, adapted=0.8),
    row('B_16', 0.03, 0.5, adapt='cifar100', size=384, adapted=0.95),
    row('B_16', 0.3, 0.99, ds='i1k'),
    row('R50_L_32', 0.3, ''),
  ]
  path = tmp_path / 'index.csv'
  with path.open('w', newline='') as f:
    writer = csv.DictWriter(f, rows[0])
    writer.writeheader()
    writer.writerows(rows)
  return path


@pytest.mark.parametrize(
  'arguments, accuracy, decay, end',
  [
    ([], '0.5000', 0.03, 'sd_0.0.npz'),
    (['--dataset=i1k'], '0.9900', 0.3, 'sd_0.0.npz'),
    (['--adapted=imagenet2012'], '0.9000', 0.1, 'res_224.npz'),
    (['--adapted=imagenet2012', '--resolution=384'], '0.8', 0.03, '384.npz'),
    (
      ['--resolution=384'],
      '0.9500',
      0.03,
      'cifar100-steps_20k-lr_0.03-res_384.npz',
    ),
  ],
)
def test_the_best_is_first(index, capsys, arguments, accuracy, decay, end):
  augreg.main(['B/16', f'--index={index}', *arguments])
  first = capsys.readouterr().out.splitlines()[0]
  start = f'gs://vit_models/augreg/{NAME.format("B_16", decay)}'
  assert first.startswith(accuracy) and first.endswith(end) and start in first


@pytest.mark.parametrize(
  'arguments, message',
  [
    (['B/8'], r"model=B_8; there is \['B_16', 'R50_L_32'\]"),
    (['B/16', '--adapted=cifar10'], r"adapt_ds=cifar10; .*'cifar100'"),
    (
      ['B/16', '--resolution=512'],
      r"resolution=512; there is \['224', '384'\]",
    ),
  ],
)
def test_errors_list_what_there_is(index, arguments, message):
  with pytest.raises(SystemExit, match=message):
    augreg.main([*arguments, f'--index={index}'])


def test_a_table_of_something_else(tmp_path):
  path = tmp_path / 'index.csv'
  path.write_text('a,b\n1,2\n')
  with pytest.raises(ValueError, match=r'adapt_ds.*filename'):
    augreg.read_index(path)
  path.write_bytes(b'\xff\xfe\x00')
  with pytest.raises(ValueError, match='not a CSV'):
    augreg.read_index(path)
