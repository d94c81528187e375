"""The studies: their runs, what they differ in, and what reports show."""

import re

import numpy as np
import preset_configs as presets
import pytest
from etils import epath
from preset_configs import STUDIES, VARIANTS, difference, flat, load_config

from vit_jax import config as configs
from vit_jax import study
from vit_jax.config import resolve
from vit_jax.data import vtab
from vit_jax.reports.results import Results

FULL = [x for x in VARIANTS['ablations'] if not re.search('tiny|embedded', x)]


@pytest.mark.parametrize(('name', 'argument'), presets.variants(STUDIES))
def test_is_a_study_that_can_run(name, argument, tmp_path):
  config = load_config(name, argument)
  workdir = epath.Path(tmp_path)
  runs = study.ordered(config.runs, config.order, workdir)
  assert len({run.lower() for run in runs}) == len(runs)
  for run in runs:
    needed = study.needed_by(run, runs, workdir)  # raises for a later one
    if name in ('scaling', 'ablations'):
      assert bool(needed) == (not run.startswith('pretrain'))
  for report in config.report:
    resolve(report).check(Results(runs, workdir, done=()))


def run_name(model):
  return model.replace('+', '_').replace('/', '')


# What is shared.


@pytest.mark.parametrize(
  ('name', 'argument'),
  presets.variants(['scaling']) + [('ablations', x) for x in FULL],
)
def test_all_runs_follow_what_is_shared(name, argument):
  config = load_config(name, argument)
  values = {'num_workers': 3, 'accum_steps': 2, 'remat': 'full'}
  config.shared.update(values | {'data_dir': '/data', 'label_key': 'kind'})
  for run, of_run in config.runs.items():
    found = flat(of_run)
    assert found['accum_steps'] == 2 and found['model.remat'] == 'full'
    ends = {'data_dir': '/data', 'num_workers': 3}
    for path, value in found.items():
      end = path.rpartition('.')[2]
      assert value == ends.get(end, value), (run, path)
    sources = [p for p in found if p.endswith('source.target')]
    assert len(sources) == sum(p.endswith('source.data_dir') for p in found)
    is_jft = of_run.data.source.name in ('jft', 'my_set')
    key = of_run.data.source.label_key
    assert key == ('kind' if is_jft else 'label')


def test_what_transfer_studies_share():
  config = load_config('vtab', 'dtd,seeds=1,sweep')
  pooling = 'shared.model.pooling.target=vit_jax.models.pooling.Mean'
  more = ('shared.num_workers=3', 'shared.accum_steps=4', 'shared.weights=w')
  configs.override(config, (pooling, *more, 'shared.data_dir=/data'))
  for run in config.runs.values():
    assert run.model.pooling.target.endswith('.Mean')
    assert (run.accum_steps, run.init_from.path) == (4, 'w')
    (evaluator,) = run.evals.values()
    for part in (run, evaluator):
      assert part.data.num_workers == 3
      assert part.data.source.data_dir == '/data'


# Figure 5 and table 6.


def test_table_6_has_the_settings_of_the_other_configs():
  config = load_config('scaling', 'compute,lr=5e-4,seeds=2')
  assert len(config.order) == 18 * (1 + 2 * 5)
  for model, epochs in presets.load_module('published').TABLE_6:
    name = f'{run_name(model)}_{epochs}ep'
    argument = f'jft,{model},epochs={epochs}'
    argument += ',lr=5e-4' if model == 'R200x3' else ''
    run = config.runs[f'pretrain_{name}']
    assert difference(run, 'pretrain_paper', argument) == {}
    for data in ('imagenet', 'cifar10', 'cifar100', 'pets', 'flowers'):
      run = config.runs[f'finetune_{name}_{data}_seed1']
      weights = f'{{workdir}}/pretrain_{name}'
      expected = {'init_from.path': weights, 'seed': 1}
      assert difference(run, 'finetune', f'{data},{model}') == expected
  order = load_config('scaling', 'compute').order
  assert not [x for x in order if 'R200' in x]


# Figures 3, 4 and 8.


def test_figure_4():
  config = load_config('scaling', 'data')
  splits = {'9M': ':9050000', '30M': ':30050000', '90M': ':90050000'}
  assert len(config.order) == 6 * 4
  changes = {'total_steps', 'total_epochs', 'data.source.split'}
  for name, run in config.runs.items():
    _, model, size = re.fullmatch('(.*)_(.*)_(.*)', name).groups()
    assert run.data.source.split == f'train[50000{splits.get(size, ":")}]'
    assert run.evals.val.data.source.split == 'train[:50000]'
    assert run.total_steps == 517_822  # 7 epochs of all 303M images
    assert run.evals.frozen.every_steps == run.evals.val.every_steps == 5000
    if 'half' in name:  # all hidden dimensions of B/32
      model = run.model
      assert (model.depth, model.width, model.mlp_dim) == (12, 384, 1536)
      continue
    model = model if 'x' in model else f'{model[0]}/{model[1:]}'
    kept = difference(run, 'pretrain_paper', f'jft,{model}')
    assert {k for k in kept if not k.startswith('evals.frozen')} <= changes
  (panel,) = config.report[0]['panels']
  for points in panel['lines'].values():
    assert [p['x'] for p in points] == [9e6, 30e6, 90e6, 303e6]
    assert {p['y']['best'] for p in points} == {'val/accuracy'}


def test_own_sizes_of_figure_4():
  argument = 'data,name=my_set,images=5000000,epochs=14,sizes=500k+all,L/16'
  config = load_config('scaling', argument)
  some, everything = (config.runs[name] for name in config.order)
  assert some.data.source.split == 'train[50000:550000]'
  assert everything.total_steps == some.total_steps == 14 * 5_000_000 // 4096
  assert config.report[0]['panels'][0]['ticks'] == {500_000: '500k', 5e6: 'all'}
  with pytest.raises(ValueError, match=r'1\.5'):
    load_config('scaling', 'data,sizes=9+1.5M')


def test_figure_3_has_the_settings_of_the_other_configs():
  config = load_config('scaling', 'data,fig3')
  data = {'imagenet1k': 'imagenet', 'imagenet21k': 'imagenet21k', 'jft': 'jft'}
  expected = {('jft', 'H/14'): ('pretrain_paper', 'jft,H/14')}
  for name, word in data.items():
    for model in ('B/32', 'B/16', 'L/32', 'L/16'):
      expected[name, model] = 'pretrain_paper', f'{word},{model}'
    for model in ('R50x1', 'R152x2'):
      expected[name, model] = 'pretrain_bit', f'{word},{model}'
      if name == 'jft':
        expected[name, model] = 'pretrain_paper', f'jft,{model},sgd'
  assert len(config.order) == 2 * len(expected)
  for (data, model), (file, argument) in expected.items():
    name = f'{data}_{run_name(model)}'
    assert not difference(config.runs[f'pretrain_{name}'], file, argument)
    words = f'imagenet,{model}' + (',bit' if 'x' in model else '')
    run = config.runs[f'finetune_{name}_imagenet_seed0']
    assert difference(run, 'finetune', words) == {
      'init_from.path': f'{{workdir}}/pretrain_{name}'
    }


def test_figure_8():
  """Shapes are around a common one, and trained alike."""
  config = load_config('scaling', 'shape,classes=10')
  base = 8, 1024, 2048, (32, 32)
  for name, run in config.runs.items():
    model = run.model
    shape = model.depth, model.width, model.mlp_dim, model.embedding.patch_size
    differing = sum(x != y for x, y in zip(shape, base, strict=True))
    families = {'base': 0, 'all': 4}
    assert differing == families.get(name.split('_')[1], 1), name
    assert model.num_heads == model.width // 64
    assert model.head.representation_size == model.width
    changed = difference(run, 'pretrain_paper', 'jft,L/32,classes=10')
    assert {path.split('.')[0] for path in changed} <= {'model', 'evals'}
  (panel,) = config.report[0]['panels']
  assert panel['relative_to']['runs'] == 'pretrain_base'


# Ablations.


@pytest.mark.parametrize('argument', FULL)
def test_ablations_are_pretrainings_with_one_change(argument):
  name, *words = argument.split(',')
  allowed = {
    'positions': {'model.posemb', 'model.posemb.target', 'model.posemb.at'},
    'pooling': {'model.pooling.target', 'schedule.lr'},
    'head': {'model.head.representation_size'},
    'axial': {'model.target'},
    'optimizer': set(),
  }[name]
  words = [x for x in words if not re.match('seeds', x)]
  config = load_config('ablations', argument)
  for run, member in presets.load_module('ablations').MEMBERS[name].items():
    argument = ','.join(['jft', member.model, *member.words, *words])
    run = config.runs[f'pretrain_{run}']
    changed = difference(run, 'pretrain_paper', argument)
    found = {p for p in changed if not p.startswith('evals.frozen')}
    assert found <= allowed
    frozen = run.evals.frozen.data.imagenet
    assert frozen.train.source.split == 'train[:65000]'


def test_embedded_members_start_alike():
  config = load_config('ablations', 'positions,embedded,steps=300,seeds=3')
  assert len(config.runs) == 24
  of_seed = {}
  for name, run in config.runs.items():
    of_seed.setdefault(name[-1], set()).add((run.seed, str(run.data)))
  assert all(len(x) == 1 for x in of_seed.values())
  assert len(set.union(*of_seed.values())) == 3


# Transfer.


def test_transfer_selects_on_dev_and_tests_the_best():
  config = load_config('transfer', 'L/16,jft')
  config.shared.weights = '/weights.npz'
  assert len(config.runs) == 5 * (4 + 3)
  for name, run in config.runs.items():
    data, part, number = name.split('_')
    assert run.init_from.path == '/weights.npz'
    assert bool(re.fullmatch(config.discard, name)) == (part == 'dev')
    if part == 'dev':
      assert run.data.source.split.startswith('train[:')
      assert list(run.evals) == ['dev']
      continue
    assert number == f'seed{run.seed}' and run.data.source.split == 'train'
    best = run.best_of
    tried = [x for x in config.runs if re.fullmatch(best.runs, x)]
    assert len(tried) == 4 and {x.split('_')[0] for x in tried} == {data}
    assert best.metric == 'dev/accuracy' and best.take == ('schedule.lr',)


def test_real_labels():
  config = load_config('transfer', 'imagenet,seeds=1')
  run = config.runs.imagenet_final_seed0
  source, test = run.evals.real.data.source, run.evals.test.data
  assert (source.name, source.split) == ('imagenet2012_real', 'validation')
  assert source.label_key == 'real_label'
  assert 'every_fraction' not in run.evals.real
  assert test.source.name == 'imagenet2012' and 'label_fn' not in test.source
  assert run.evals.real.data.transforms == test.transforms
  assert 'real' not in config.runs['imagenet_dev_lr3e-03'].evals


def test_bit_and_polyak_of_transfer():
  runs = load_config('transfer', 'R50x1,jft,flowers,pets,bit,seeds=2').runs
  assert len(runs) == 2 * (4 + 2 + 2)
  run = runs.pets_bit_seed1
  assert run.schedule.decay == 'step' and run.seed == 1
  assert 'best_of' not in run
  config = load_config('transfer', 'L/16,jft,imagenet,pets,polyak')
  for name, run in config.runs.items():
    is_imagenet = name.startswith('imagenet')
    assert flat(run).get('ema.decay') == (0.9999 if is_imagenet else None)
    size = 512 if is_imagenet else 384
    assert run.data.transforms[0]['size'] == size


# VTAB.


def test_vtab():
  config = load_config('vtab', 'L/16')
  assert len(config.runs) == len(config.order) == 57
  for name, run in config.runs.items():
    task, _, seed = name.rpartition('_seed')
    assert run.seed == int(seed)
    assert run.total_steps == 2500 and run.data.batch_size == 512
    schedule = {'lr': 0.01, 'decay': 'cosine', 'warmup_steps': 200}
    assert run.schedule.to_dict() == schedule and 'best_of' not in run
    assert run.optimizer.clip_norm == 1 and run.optimizer.momentum == 0.9
    assert 'weight_decay' not in run.optimizer
    check_source(run.data.source, task, 'train800val200')
    check_source(run.evals.test.data.source, task, 'test')
    assert run.evals.test.data.transforms[-1]['size'] == 384
    assert run.data.transforms == vtab.transforms(task, train=True)
  config = load_config('vtab', 'specialized,kitti,seeds=1')
  tasks = ['camelyon', 'eurosat', 'resisc45', 'retinopathy', 'kitti']
  assert [x.split('_')[0] for x in config.order] == tasks


def check_source(source, task, split):
  assert source.to_dict() == vtab.settings(task, split, data_dir=None)


def test_sweep_of_vtab():
  """4 rates and 2 durations on part of the examples; the best on all."""
  runs = load_config('vtab', 'clevr_count,seeds=2,sweep').runs
  best = runs.clevr_count_seed1.best_of
  tried = [runs[x] for x in runs if re.fullmatch(best.runs, x)]
  grid = {(x.schedule.lr, x.total_steps) for x in tried}
  rates = (0.001, 0.003, 0.01, 0.03)
  assert grid == {(lr, steps) for lr in rates for steps in (500, 2500)}
  for run in tried:
    check_source(run.data.source, 'clevr_count', 'train800')
    check_source(run.evals.val.data.source, 'clevr_count', 'val200')
  assert best.metric == 'val/accuracy'
  take = {'schedule.lr', 'schedule.warmup_steps', 'total_steps'}
  assert set(best.take) == take


# Studies on embedded data.


def test_runs_of_scaling_embedded():
  config = load_config('scaling_embedded', '')
  assert len(config.runs) == 3 * 5 * 3
  same = set()
  for name, run in config.runs.items():
    _, size, seed = re.fullmatch(r'(\w+)_(\d+)_seed(\d)', name).groups()
    run = run.to_dict()
    source = run['data']['source']
    assert source.pop('num_examples') == int(size)
    # Held-out images are of seed 0.
    assert source.pop('seed') == run.pop('seed') + 1 == int(seed) + 1
    assert run['evals']['val']['data']['source']['seed'] == 0
    del run['model']
    same.add(repr(run))
  assert len(same) == 1
  sizes = {int(name.split('_')[1]) for name in config.runs}
  run = config.runs.ViT_480_seed0
  assert max(sizes) == run.total_steps * run.data.batch_size  # each image once
  assert min(sizes) == 480


def changed(run, baseline):
  one, other = flat(run), flat(baseline)
  return {
    key.split('.')[0]
    for key in one.keys() | other.keys()
    if one.get(key) != other.get(key)
    and not key.startswith('evals.during')
    and not key.endswith('seed')
  }


def test_runs_of_recipes_embedded():
  runs, seen = load_config('recipes_embedded', '').runs, set()
  for name, run in runs.items():
    if not (parts := re.fullmatch(r'([a-z]+)_(\w+)_seed(\d)', name)):
      continue
    task, recipe, seed = parts.groups()
    baseline = runs[f'{task}_baseline_seed{seed}']
    is_rule = recipe in ('nadamw', 'muon', 'sgd')
    parts = changed(run, baseline)
    assert ('best_of' in parts) == is_rule, name
    assert len(parts - {'best_of'}) == (recipe != 'baseline'), name
    assert ('optimizer' in parts) == is_rule, name
    assert run.seed == int(seed)
    seen.add((task, recipe))
    tried = [runs[x] for x in runs if re.fullmatch(run.best_of.runs, x)]
    assert len({x.schedule.lr for x in tried}) == (3 if 'sgd' in name else 4)
    if task == 'glyphs':
      sources = {x.data.source.seed for x in tried}
      sources |= {x.evals.val.data.source.seed for x in tried}
      assert sources == {100, 101}
      assert run.data.source.seed == int(seed) + 1
      assert run.evals.val.data.source.seed == 0
  assert len(seen) == 3 * 8 + 3  # all recipes for each task, and three rules


@pytest.mark.slow
def test_rates_of_digits_are_tried_on_digits_of_no_result():
  def rows(source):
    source = resolve(source.to_dict())
    return {source[i]['image'].tobytes() for i in range(len(source))}

  runs = load_config('recipes_embedded', '').runs
  trial, run = (runs[f'scratch_baseline_{x}'] for x in ('lr1e-03', 'seed0'))
  held_out = rows(trial.evals.val.data.source)
  assert len(held_out) > 500
  for each in (trial, run):
    assert not held_out & rows(each.data.source)
  assert not held_out & rows(run.evals.val.data.source)


# Published numbers.


def printed(report):
  """Return {(row, column): percent} of the published values in a report."""
  return {
    (cell['row'], cell['column']): 100 * np.ravel(cell['value'])[0]
    for cell in report['cells']
    if 'value' in cell
  }


# Sums of the columns of the paper's tables.
SUMS = {
  'TABLE_2': '261.61 269.88 298.07 281.70 289.55 299.03 226.63',
  'TABLE_5': '1139.91 1204.60 1382.68 1274.27 1320.63 1345.26',
  'TABLE_6': '1520.59 1597.76 1781.84 1654.58 1720.05 1774.59 15721',
}


@pytest.mark.parametrize('name', SUMS)
def test_published_numbers(name):
  columns = zip(*(x.values() for x in _published(name).values()))
  means = [sum(np.ravel(x)[0] for x in column) for column in columns]
  assert means == pytest.approx([float(x) for x in SUMS[name].split()])


def _published(name):
  return getattr(presets.load_module('published'), name)


def test_published_numbers_of_figure_5():
  *_, published, table = load_config('scaling', 'compute,lr=5e-4').report
  cells, (average, imagenet) = printed(table), published['panels']
  points = {
    p['name']: (p['x'], 100 * p['y']['value'], 100 * q['y']['value'])
    for kind, line in average['lines'].items()
    for p, q in zip(line, imagenet['lines'][kind], strict=True)
  }
  for (model, epochs), row in _published('TABLE_6').items():
    *numbers, exaflops = (row[name] for name in row if name != 'real')
    mean, name = sum(numbers) / 5, f'{model}, {epochs}'
    found = [x for (row, _), x in cells.items() if row == f'{name} paper']
    assert found == pytest.approx([*numbers, mean])
    assert points[name] == pytest.approx((exaflops, mean, numbers[0]))
  assert len(cells) == 18 * 6 and len(points) == 18


def test_published_numbers_of_ablations():
  (report,) = load_config('ablations', 'optimizer').report
  found = printed(report)
  averages = [v for (_, column), v in found.items() if column == 'Average']
  expected = [89.33, 88.79, 94.01, 93.72]
  assert averages == pytest.approx(expected, abs=0.005)
  (report,) = load_config('ablations', 'positions').report
  found = {row.split()[0]: [] for row, _ in printed(report)}
  for (row, _), value in printed(report).items():
    found[row.split()[0]].append(round(value, 3))
  assert found == {
    'none': [61.382],
    '1-D': [64.206, 63.964, 64.292],
    '2-D': [64.001, 64.046, 64.022],
    'relative': [64.032],
  }


@pytest.mark.parametrize(
  ('argument', 'columns'),
  [
    ('B/16,imagenet1k', {'table 5': 77.91}),
    ('L/16,imagenet21k', {'table 5': 85.15, 'table 2': 85.30}),
    ('R50+L/16,jft', {'table 6, 14 epochs': 87.12}),
    ('S/16', {}),
    ('L/16,augreg,size=224', {'AugReg, 30': 82.05, 'AugReg, 300': 83.98}),
  ],
)
def test_published_numbers_of_transfer(argument, columns):
  report = load_config('transfer', argument).report[0]
  cells = printed(report)
  found = {x.removesuffix(' epochs') for r, x in cells if r == 'ImageNet'}
  assert found == {x.removesuffix(' epochs') for x in columns}
  for column, value in columns.items():
    column = column if 'table' in column else f'{column} epochs'
    assert cells['ImageNet', column] == pytest.approx(value)


# Means of the groups and of all tasks; table 2 has the last line.
VTAB = {
  'Natural (7)': (86.69, 85.56, 83.27),
  'Specialized (4)': (87.00, 86.72, 84.65),
  'Structured (8)': (65.03, 62.96, 57.50),
  'Mean of 19': (77.63, 76.28, 72.72),
}


def test_published_numbers_of_vtab():
  cells = printed(load_config('vtab', 'L/16').report[0])
  columns = ('H/14 JFT', 'L/16 JFT', 'L/16 I21k')
  for row, means in VTAB.items():
    for column, mean in zip(columns, means):
      assert cells[row, column] == pytest.approx(mean, abs=0.011)
      if 'Mean' in row:
        of_tasks = [cells[x.title, column] for x in vtab.TASKS.values()]
        assert np.mean(of_tasks) == pytest.approx(mean, abs=0.011)
  assert cells['KITTI-Dist', 'H/14 JFT'] == pytest.approx(84.5)
