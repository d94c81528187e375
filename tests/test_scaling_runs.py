"""Reports of the scaling studies from what runs leave, and tiny studies.

The TFDS sets have the names and splits of the real ones, with noise as images.
"""

import json

import pytest
from test_configs import load_config
from test_configs_run import compile_fast, prepare_all  # noqa: F401

from vit_jax import config as configs
from vit_jax.runs.metrics import read_records


def write(workdir, name, *records):
  (workdir / name).mkdir()
  lines = [json.dumps({'step': i, **r}) + '\n' for i, r in enumerate(records)]
  (workdir / name / 'metrics.jsonl').write_text(''.join(lines))
  (workdir / name / 'done.json').write_text('{"seconds": 1.0}')


def test_report_of_table_6(tmp_path):
  """The average is of all five data sets by seed, or is not there."""
  config = load_config('scaling_compute', 'B/32,R50x1,seeds=2')
  data = ('imagenet', 'cifar10', 'cifar100', 'pets', 'flowers')
  for model, exaflops in (('B32', 56.0), ('R50x1', 52.0)):
    write(tmp_path, f'pretrain_{model}_7ep', {'exaflops': exaflops})
    for seed in (0, 1):
      for i, name in enumerate(data):
        if (model, seed, name) == ('R50x1', 1, 'pets'):
          continue  # not done
        run = f'finetune_{model}_7ep_{name}_seed{seed}'
        write(tmp_path, run, {'test/accuracy': 0.5 + 0.1 * i + 0.02 * seed})
  measured, published, table = configs.run(config, tmp_path, report_only=True)
  means = {
    (r['panel'], r['line']): (r['x'], r['mean'], r['std'], len(r['values']))
    for r in measured
  }
  vit, resnet = 'Transformer (ViT)', 'ResNet (BiT)'
  assert means == {
    ('Average of 5', vit): pytest.approx((56, 0.71, 0.01, 2)),
    ('Average of 5', resnet): pytest.approx((52, 0.7, 0, 1)),
    ('ImageNet', vit): pytest.approx((56, 0.51, 0.01, 2)),
    ('ImageNet', resnet): pytest.approx((52, 0.51, 0.01, 2)),
  }
  assert len(published) == 36
  assert table['B/32, 7']['Pets']['mean'] == pytest.approx(0.81)
  assert table['B/32, 7 paper']['Pets']['mean'] == 0.934
  assert (tmp_path / 'figure_5_paper.png').exists()


def test_report_of_figure_4_stops_early(tmp_path):
  config = load_config('scaling_data', 'B/32,sizes=9M+all')
  shots = {f'frozen/imagenet/fewshot/5shot_seed{i}': 0.1 * i for i in range(3)}
  later = {key: value + 0.5 for key, value in shots.items()}
  for size, best in (('9M', 0.6), ('all', 0.3)):
    first, last = {'val/accuracy': best} | shots, {'val/accuracy': 0.5} | later
    write(tmp_path, f'pretrain_B32_{size}', first, last)
  (rows,) = configs.run(config, tmp_path, report_only=True)
  assert {r['x']: r['mean'] for r in rows} == pytest.approx(
    {9e6: 0.1, 303e6: 0.6}
  )


def test_report_of_figure_8_is_relative(tmp_path):
  config = load_config('scaling_shape', 'patch')
  for name, exaflops in (('base', 2.0), ('patch_16', 8.0)):
    accuracy = {f'frozen/imagenet/fewshot/5shot_seed{i}': 0.5 for i in range(3)}
    write(tmp_path, f'pretrain_{name}', {'exaflops': exaflops}, accuracy)
  (rows,) = configs.run(config, tmp_path, report_only=True)
  assert {r['name']: r['x'] for r in rows} == {'base': 1.0, 'patch_16': 4.0}


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  return prepare_all(tmp_path_factory.mktemp('tfds'))


@pytest.mark.slow
def test_a_tiny_study_of_two_runs(data_dir, tmp_path):
  config = load_config('scaling_data', 'B/32,sizes=9M+all,tiny')
  config.shared.data_dir = str(data_dir)
  (rows,) = configs.run(config, tmp_path)
  assert [(r['line'], r['x']) for r in rows] == [
    ('ViT-B/32', 9),
    ('ViT-B/32', 303e6),
  ]
  assert all(len(r['values']) == 3 for r in rows)
  records = read_records(tmp_path / 'pretrain_B32_9M')
  (evaluated,) = [r for r in records if 'val/accuracy' in r]
  assert 0 < evaluated['frozen/imagenet/fewshot/1shot'] <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, argument, members, points',
  [
    (
      'scaling_compute',
      'R50+B/32,tiny',
      ('pretrain_R50_B32_7ep', 'finetune_R50_B32_7ep_imagenet_seed0'),
      1,
    ),
    (
      'scaling_data',
      'fig3,B/32,tiny',
      ('pretrain_jft_B32', 'finetune_jft_B32_imagenet_seed0'),
      1,
    ),
    ('scaling_shape', 'all,tiny', ('pretrain_base',), 1),
  ],
)
def test_tiny_studies_run(name, argument, members, points, data_dir, tmp_path):
  config = load_config(name, argument)
  config.shared.data_dir = str(data_dir)
  for member in members:
    rows, *_ = configs.run(config, tmp_path, member=member)
  assert len(rows) == points
  assert all(r['x'] > 0 and 0 <= r['mean'] <= 1 for r in rows)
