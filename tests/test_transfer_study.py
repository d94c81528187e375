"""The transfer to table 5's data sets as a study: its runs and its table."""

import importlib
import sys

import pytest
from test_configs import ROOT, load_config, load_module
from test_configs_run import compile_fast  # noqa: F401
from test_vtab_study import write_weights

from vit_jax import config as configs
from vit_jax import study
from vit_jax.runs.metrics import Writer, read_records

sys.path.append(str(ROOT / 'tests' / 'data'))
made_up = importlib.import_module('made_up')

# Table 4.
RATES = {
  'imagenet': (0.003, 0.01, 0.03, 0.06),
  'cifar10': (0.001, 0.003, 0.01, 0.03),
  'cifar100': (0.001, 0.003, 0.01, 0.03),
  'pets': (0.001, 0.003, 0.01, 0.03),
  'flowers': (0.001, 0.003, 0.01, 0.03),
}


run = configs.run  # also when `fake_runs` has replaced it


@pytest.fixture
def fake_runs(monkeypatch):
  """Replace runs: they record their configs; the second rate is the best."""
  seen = {}

  def fake(config, workdir, **options):
    name = workdir.rpartition('/')[2]
    seen[name] = config.to_dict()
    data = name.split('_')[0]
    study.epath.Path(workdir).mkdir()
    writer = Writer(workdir)
    for evaluator in config.evals:
      accuracy = 0.9 + 0.01 * config.get('seed', 0)
      if evaluator == 'dev':
        accuracy = float(config.schedule.lr == RATES[data][1])
      accuracy += 0.01 * (evaluator == 'real')
      writer.write(1, {f'{evaluator}/accuracy': accuracy})
    writer.close()

  monkeypatch.setattr(configs, 'run', fake)
  monkeypatch.setattr(study, '_check_sources', lambda *args: None)
  monkeypatch.setattr(study.eta, 'costs', lambda runs: None)
  monkeypatch.setattr(study.formats, 'find', lambda path: None)
  return seen


def test_the_best_rate_is_rerun_and_stands_beside_the_published(
  fake_runs, tmp_path, capsys, monkeypatch
):
  monkeypatch.setenv('COLUMNS', '80')
  config = load_config('transfer', 'L/16,jft')
  config.shared.weights = '/weights.npz'
  made, _ = run(config, tmp_path)
  assert len(fake_runs) == 5 * (4 + 3)
  for data, rates in RATES.items():
    grid = [x for n, x in fake_runs.items() if n.startswith(f'{data}_dev')]
    assert tuple(x['schedule']['lr'] for x in grid) == rates
    for x in grid:
      assert x['data']['source']['split'].startswith('train[:')
      assert list(x['evals']) == ['dev'] and 'seed' not in x
    for seed in (0, 1, 2):
      final = fake_runs[f'{data}_final_seed{seed}']
      assert final['schedule']['lr'] == rates[1] and final['seed'] == seed
      assert final['data']['source']['split'] == 'train'
      assert final['init_from']['path'] == '/weights.npz'
  assert made['Flowers']['ours']['mean'] == pytest.approx(0.91)
  assert made['Flowers']['ours']['values'] == pytest.approx((0.9, 0.91, 0.92))
  assert made['ImageNet-ReaL']['ours']['mean'] == pytest.approx(0.92)
  shown = capsys.readouterr().out
  row = next(x for x in shown.splitlines() if 'CIFAR-100' in x)
  cells = [x.strip() for x in row.strip('│ ').split('│')]
  assert cells == ['CIFAR-100', '91.00 ± 0.82', '94.04', '93.90 ± 0.05']
  row = next(x for x in shown.splitlines() if 'ImageNet-ReaL' in x)
  assert '89.99' in row and '90.54 ± 0.03' in row
  assert (tmp_path / 'curves.png').exists()


def test_real_labels():
  config = load_config('transfer', 'imagenet,seeds=1')
  config.shared.data_dir = '/data'
  run = config.runs.imagenet_final_seed0
  source, test = run.evals.real.data.source, run.evals.test.data
  assert (source.name, source.split) == ('imagenet2012_real', 'validation')
  assert (source.label_key, source.data_dir) == ('real_label', '/data')
  assert test.source.name == 'imagenet2012' and 'label_fn' not in test.source
  assert run.evals.real.data.transforms == test.transforms
  assert 'real' not in config.runs['imagenet_dev_lr3e-03'].evals


@pytest.mark.parametrize(
  'argument, columns',
  [
    ('B/16', {'table 5': 83.97}),
    ('B/16,imagenet1k', {'table 5': 77.91}),
    ('L/16,imagenet21k', {'table 5': 85.15, 'table 2': 85.30}),
    ('R50+L/16,jft', {'table 6, 14 epochs': 87.12}),
    ('R50x1,jft', {'table 6, 7 epochs': 77.54}),
    ('S/16', {}),
    ('H/14,imagenet1k', {}),
  ],
)
def test_published_columns(argument, columns):
  config = load_config('transfer', argument)
  found = {
    x['column']: x['value']
    for x in config.report[0]['cells']
    if x['row'] == 'ImageNet' and 'value' in x
  }
  first = {k: v[0] if isinstance(v, tuple) else v for k, v in found.items()}
  assert first == pytest.approx({k: v / 100 for k, v in columns.items()})


def test_tables_agree_where_they_repeat_each_other():
  published = load_module('published')
  for model, epochs in (('B/16', 7), ('B/32', 7), ('L/32', 7), ('L/16', 14)):
    row = dict(published.TABLE_6[model, epochs])
    row.pop('exaflops')
    assert row == published.TABLE_5['jft', model]
  for numbers in published.TABLE_5.values():
    assert numbers['real'] > numbers['imagenet']
    assert numbers['cifar10'] > numbers['cifar100']


def test_bit_has_a_column_of_its_own(fake_runs, tmp_path):
  config = load_config('transfer', 'R50x1,jft,flowers,pets,bit,seeds=2')
  config.shared.weights = '/weights.npz'
  made, _ = run(config, tmp_path)
  assert len(fake_runs) == 2 * (4 + 2 + 2)
  for data in ('flowers', 'pets'):
    for seed in (0, 1):
      config = fake_runs[f'{data}_bit_seed{seed}']
      assert config['schedule']['decay'] == 'step' and config['seed'] == seed
      assert config['schedule']['lr'] == 0.003
  assert made['Pets']['ours, BiT-HyperRule']['mean'] == pytest.approx(0.905)


def test_polyak_is_for_imagenet_alone():
  config = load_config('transfer', 'L/16,jft,imagenet,pets,polyak')
  for name, run in config.runs.items():
    is_imagenet = name.startswith('imagenet')
    assert run.get('ema_decay') == (0.9999 if is_imagenet else None)
    size = 512 if is_imagenet else 384
    assert run.data.transforms[0]['size'] == size


def test_unprepared_data_is_found_at_once(tmp_path):
  config = load_config('transfer', 'tiny')
  config.shared.weights, config.shared.data_dir = 'x', str(tmp_path)
  with pytest.raises(ValueError) as info:
    run(config, tmp_path / 'study')
  text = str(info.value)
  assert text.count('.download_and_prepare()"') == 6
  for name in ('cifar10', 'oxford_iiit_pet', 'imagenet2012_real'):
    assert f"tfds.builder('{name}', data_dir='{tmp_path}'" in text


@pytest.mark.slow
def test_tiny_study_runs(compile_fast, tmp_path):  # noqa: F811
  data_dir = tmp_path / 'data'
  held_out = {'validation': 20}
  made_up.prepare(data_dir, 'imagenet2012', {'train': 200} | held_out)
  made_up.prepare(data_dir, 'imagenet2012_real', held_out)
  config = load_config('transfer', 'imagenet,seeds=2,size=224,tiny')
  config.shared.weights = write_weights(tmp_path / 'tiny.npz')
  config.shared.data_dir = str(data_dir)
  config.shared.model.dtype = 'float32'
  made, _ = run(config, tmp_path / 'study')
  assert list(made) == ['ImageNet', 'ImageNet-ReaL']
  for row in made.values():
    assert len(row['ours']['values']) == 2
  records = read_records(tmp_path / 'study' / 'imagenet_final_seed1')
  last = [r for r in records if 'test/num_examples' in r][-1]
  assert last['test/num_examples'] == 20
  assert last['real/num_examples'] + last['real/num_unlabelled'] == 20
