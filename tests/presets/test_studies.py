"""The studies: their runs, what they differ in, and what reports show."""

import re

import numpy as np
import pytest
from etils import epath
from preset_configs import (
  STUDIES,
  VARIANTS,
  difference,
  flat,
  load_config,
  load_module,
  variants,
)

from vit_jax import config as configs
from vit_jax import study
from vit_jax.config import resolve
from vit_jax.data import vtab
from vit_jax.reports.results import Results

FULL = [x for x in VARIANTS['ablations'] if not re.search('tiny|embedded', x)]


@pytest.mark.parametrize(('name', 'argument'), variants(STUDIES))
def test_is_a_study_that_can_run(name, argument, tmp_path):
  """Runs come after what they need; reports can be filled."""
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
  variants(['scaling']) + [('ablations', x) for x in FULL],
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

# ImageNet, ReaL, CIFAR-10, -100, Pets, Flowers; exaFLOPs.
TABLE_6 = """
  B/32      7  80.73  86.27  98.61  90.49  93.40  99.27    55
  B/16      7  84.15  88.85  99.00  91.87  95.80  99.56   224
  L/32      7  84.37  88.28  99.19  92.52  95.83  99.45   196
  L/16      7  86.30  89.43  99.38  93.46  96.81  99.66   783
  L/16     14  87.12  89.99  99.38  94.04  97.11  99.56  1567
  H/14     14  88.08  90.36  99.50  94.71  97.11  99.71  4262
  R50x1     7  77.54  84.56  97.67  86.07  91.11  94.26    50
  R50x2     7  82.12  87.94  98.29  89.20  93.43  97.02   199
  R101x1    7  80.67  87.07  98.48  89.17  94.08  95.95    96
  R152x1    7  81.88  87.96  98.82  90.22  94.17  96.94   141
  R152x2    7  84.97  89.69  99.06  92.05  95.37  98.62   563
  R152x2   14  85.56  89.89  99.24  91.92  95.75  98.75  1126
  R200x3   14  87.22  90.15  99.34  93.53  96.32  99.04  3306
  R50+B/32  7  84.90  89.15  99.01  92.24  95.75  99.46   106
  R50+B/16  7  85.58  89.65  99.14  92.63  96.65  99.40   274
  R50+L/32  7  85.68  89.04  99.24  92.93  96.97  99.43   246
  R50+L/16  7  86.60  89.72  99.18  93.64  97.03  99.40   859
  R50+L/16 14  87.12  89.76  99.31  93.89  97.36  99.11  1668
"""
ROWS = [
  (model, int(epochs), [float(x) for x in numbers])
  for model, epochs, *numbers in map(str.split, TABLE_6.strip().splitlines())
]


def test_table_6_has_the_settings_of_the_other_configs():
  config = load_config('scaling', 'compute,lr=5e-4,seeds=2')
  assert len(config.order) == 18 * (1 + 2 * 5)
  for model, epochs, _ in ROWS:
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
  splits = {
    '9M': ('train[50000:9050000]', 9e6),
    '30M': ('train[50000:30050000]', 30e6),
    '90M': ('train[50000:90050000]', 90e6),
    'all': ('train[50000:]', 303e6),
  }
  models = ('half_B32', 'B32', 'L16', 'L32', 'R50x1', 'R152x2')
  names = {f'pretrain_{m}_{s}' for m in models for s in splits}
  assert set(config.order) == names
  for name, run in config.runs.items():
    assert run.data.source.split == splits[name.rpartition('_')[2]][0]
    assert run.evals.val.data.source.split == 'train[:50000]'
    # 7 epochs of 303M images, whatever there is.
    assert run.total_steps == 517_822
    frozen = run.evals.frozen
    assert frozen.every_steps == run.evals.val.every_steps == 5000
    imagenet = frozen.data.imagenet
    assert imagenet.train.source.split == 'train[:65000]'
    assert imagenet.test.source.split == 'validation'
    assert [t['size'] for t in imagenet.test.transforms] == [256, 224]
    if 'half' in name:  # all hidden dimensions of B/32
      model = run.model
      assert (model.depth, model.width, model.mlp_dim) == (12, 384, 1536)
      assert (model.num_heads, model.head.representation_size) == (6, 384)
    else:
      model = name.split('_')[1]
      model = model if 'x' in model else f'{model[0]}/{model[1:]}'
      kept = difference(run, 'pretrain_paper', f'jft,{model}')
      assert {k for k in kept if not k.startswith('evals.frozen')} <= {
        *('total_steps', 'total_epochs', 'data.source.split')
      }
  (panel,) = config.report[0]['panels']
  for label, points in panel['lines'].items():
    assert [p['x'] for p in points] == [x for _, x in splits.values()]
    assert {p['y']['best'] for p in points} == {'val/accuracy'}, label


def test_own_sizes_of_figure_4():
  argument = 'data,name=my_set,images=5000000,epochs=14,sizes=500k+all,L/16'
  config = load_config('scaling', argument)
  some, everything = (config.runs[name] for name in config.order)
  assert some.data.source.split == 'train[50000:550000]'
  assert everything.total_steps == some.total_steps == 14 * 5_000_000 // 4096
  assert config.report[0]['panels'][0]['ticks'] == {500_000: '500k', 5e6: 'all'}


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


# Figure 8: L, D, MLP, P and heads.
SHAPES = """
  base         8 1024 2048 32 16
  depth_2      2 1024 2048 32 16
  depth_4      4 1024 2048 32 16
  depth_16    16 1024 2048 32 16
  depth_32    32 1024 2048 32 16
  depth_64    64 1024 2048 32 16
  width_256    8  256 2048 32  4
  width_512    8  512 2048 32  8
  width_2048   8 2048 2048 32 32
  mlp_512      8 1024  512 32 16
  mlp_1024     8 1024 1024 32 16
  mlp_4096     8 1024 4096 32 16
  mlp_8192     8 1024 8192 32 16
  patch_56     8 1024 2048 56 16
  patch_16     8 1024 2048 16 16
  patch_8      8 1024 2048  8 16
  all_4        4  512 1024 56  8
  all_16      16 2048 4096 16 32
"""


def test_figure_8():
  config = load_config('scaling', 'shape,classes=10')
  rows = [line.split() for line in SHAPES.strip().splitlines()]
  assert set(config.order) == {f'pretrain_{name}' for name, *_ in rows}
  for name, *numbers in rows:
    run = config.runs[f'pretrain_{name}']
    model, patch = run.model, run.model.embedding.patch_size
    found = model.depth, model.width, model.mlp_dim, *patch, model.num_heads
    depth, width, mlp, patch, heads = map(int, numbers)
    assert found == (depth, width, mlp, patch, patch, heads)
    assert model.head.representation_size == width
    changed = difference(run, 'pretrain_paper', 'jft,L/32,classes=10')
    assert {path.split('.')[0] for path in changed} <= {'model', 'evals'}
    assert (run.schedule.lr, run.total_epochs) == (6e-4, 7)
  (panel,) = config.report[0]['panels']
  lines = [{p['name'] for p in x} for x in panel['lines'].values()]
  assert set.intersection(*lines) == {'base'}
  assert set.union(*lines) == {name for name, *_ in rows}
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
  for run, member in load_module('ablations').MEMBERS[name].items():
    argument = ','.join(['jft', member.model, *member.words, *words])
    run = config.runs[f'pretrain_{run}']
    changed = difference(run, 'pretrain_paper', argument)
    found = {p for p in changed if not p.startswith('evals.frozen')}
    assert found <= allowed
    frozen = run.evals.frozen.data.imagenet
    assert frozen.train.source.split == 'train[:65000]'


def test_rates_of_figure_9():
  config = load_config('ablations', 'pooling')
  runs = [config.runs[name] for name in config.order]
  found = [('pooling' in run.model, run.schedule.lr) for run in runs]
  assert found == [(False, 8e-4), (True, 8e-4), (True, 3e-4)]
  assert runs[1].model.pooling.target.endswith('.Mean')


def test_rules_of_table_7():
  runs = load_config('ablations', 'optimizer,seeds=2').runs
  assert len(runs) == 4 + 4 * 5 * 2
  rules = {'adam': 'optax.adamw', 'sgd': 'vit_jax.optim.optimizers.sgd'}
  for name, run in runs.items():
    if name.startswith('pretrain'):
      assert run.optimizer.target == rules[name.rpartition('_')[2]]
      assert run.total_epochs == 7
    else:
      path = re.fullmatch(r'finetune_(\w+?)_[a-z0-9]+_seed\d', name)[1]
      assert run.init_from.path == f'{{workdir}}/pretrain_{path}'


def test_embedded_members_start_alike():
  """One seed has the same images and order for all members."""
  config = load_config('ablations', 'positions,embedded,steps=300,seeds=3')
  assert len(config.runs) == 24
  of_seed = {}
  for name, run in config.runs.items():
    of_seed.setdefault(name[-1], set()).add((run.seed, str(run.data)))
  assert all(len(x) == 1 for x in of_seed.values())
  assert len(set.union(*of_seed.values())) == 3


# Transfer.

RATES = dict.fromkeys(
  ('imagenet', 'cifar10', 'cifar100', 'pets', 'flowers'),
  (0.001, 0.003, 0.01, 0.03),
)
RATES['imagenet'] = (0.003, 0.01, 0.03, 0.06)


def test_transfer_selects_on_dev_and_tests_the_best():
  config = load_config('transfer', 'L/16,jft')
  config.shared.weights = '/weights.npz'
  assert len(config.runs) == 5 * (4 + 3)
  for data, rates in RATES.items():
    grid = [x for n, x in config.runs.items() if n.startswith(f'{data}_dev')]
    assert tuple(sorted(x.schedule.lr for x in grid)) == rates
    for x in grid:
      assert x.data.source.split.startswith('train[:')
      assert list(x.evals) == ['dev']
    for seed in (0, 1, 2):
      final = config.runs[f'{data}_final_seed{seed}']
      assert final.seed == seed and final.data.source.split == 'train'
      assert final.init_from.path == '/weights.npz'
      assert re.fullmatch(final.best_of.runs, f'{data}_dev_lr1e-03')
      assert final.best_of.metric == 'dev/accuracy'
      assert final.best_of.take == ('schedule.lr',)
  assert all(
    re.fullmatch(config.discard, x) for x in config.order if 'dev' in x
  )
  assert not re.fullmatch(config.discard, 'pets_final_seed0')


def test_real_labels():
  config = load_config('transfer', 'imagenet,seeds=1')
  run = config.runs.imagenet_final_seed0
  source, test = run.evals.real.data.source, run.evals.test.data
  assert (source.name, source.split) == ('imagenet2012_real', 'validation')
  assert source.label_key == 'real_label' and 'every_fraction' not in (
    run.evals.real
  )
  assert test.source.name == 'imagenet2012' and 'label_fn' not in test.source
  assert run.evals.real.data.transforms == test.transforms
  assert 'real' not in config.runs['imagenet_dev_lr3e-03'].evals


def test_bit_and_polyak_of_transfer():
  runs = load_config('transfer', 'R50x1,jft,flowers,pets,bit,seeds=2').runs
  assert len(runs) == 2 * (4 + 2 + 2)
  for data in ('flowers', 'pets'):
    for seed in (0, 1):
      run = runs[f'{data}_bit_seed{seed}']
      assert (run.schedule.decay, run.schedule.lr) == ('step', 0.003)
      assert run.seed == seed and 'best_of' not in run
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
  for task in vtab.TASKS:
    runs = [config.runs[f'{task}_seed{seed}'] for seed in (0, 1, 2)]
    assert [run.seed for run in runs] == [0, 1, 2]
    for run in runs:
      assert run.total_steps == 2500 and run.data.batch_size == 512
      schedule = {'lr': 0.01, 'decay': 'cosine', 'warmup_steps': 200}
      assert run.schedule.to_dict() == schedule and 'best_of' not in run
      assert run.optimizer.clip_norm == 1 and run.optimizer.momentum == 0.9
      assert 'weight_decay' not in run.optimizer
      source = vtab.settings(task, 'train800val200', data_dir=None)
      assert run.data.source.to_dict() == source
      test = run.evals.test.data
      source = vtab.settings(task, 'test', data_dir=None)
      assert test.source.to_dict() == source
      assert test.transforms[-1]['size'] == 384
      assert run.data.transforms == vtab.transforms(task, train=True)
  config = load_config('vtab', 'specialized,kitti,seeds=1')
  tasks = ['camelyon', 'eurosat', 'resisc45', 'retinopathy', 'kitti']
  assert [x.split('_')[0] for x in config.order] == tasks


def test_sweep_of_vtab():
  runs = load_config('vtab', 'clevr_count,seeds=2,sweep').runs
  tried = {
    (x.schedule.lr, x.total_steps, x.schedule.warmup_steps)
    for name, x in runs.items()
    if name.startswith('clevr_count_lr')
  }
  rates = (0.001, 0.003, 0.01, 0.03)
  assert tried == {(lr, *x) for lr in rates for x in ((500, 100), (2500, 200))}
  dev = runs['clevr_count_lr1e-02_steps500']
  for source, split in (
    (dev.data.source, 'train800'),
    (dev.evals.val.data.source, 'val200'),
  ):
    expected = vtab.settings('clevr_count', split, data_dir=None)
    assert source.to_dict() == expected
  best = runs.clevr_count_seed1.best_of
  assert re.fullmatch(best.runs, 'clevr_count_lr1e-02_steps500')
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


PARTS = {  # what a recipe or an optimizer changes in a run
  'baseline': '',
  'randaugment': 'data',
  'mixup': 'objective',
  'cutmix': 'objective',
  'erasing': 'data',
  'depth': 'model',
  'ema': 'ema',
  'smoothing': 'objective',
  'nadamw': 'optimizer best_of',
  'muon': 'optimizer best_of',
  'sgd': 'optimizer best_of',
}


def changed(run, baseline):
  one, other = flat(run), flat(baseline)
  return {
    key.split('.')[0]
    for key in one.keys() | other.keys()
    if one.get(key) != other.get(key)
    and not key.startswith('evals.progress')
    and not key.endswith('seed')
  }


def test_runs_of_recipes_embedded():
  """They differ in one part; rates are tried on other data."""
  runs, seen = load_config('recipes_embedded', '').runs, set()
  for name, run in runs.items():
    if not (parts := re.fullmatch(r'([a-z]+)_(\w+)_seed(\d)', name)):
      continue
    task, recipe, seed = parts.groups()
    baseline = runs[f'{task}_baseline_seed{seed}']
    assert changed(run, baseline) == set(PARTS[recipe].split()), name
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
  recipes, rules = list(PARTS)[:8], list(PARTS)[8:]
  expected = {
    (x, y) for x in ('glyphs', 'finetune', 'scratch') for y in recipes
  }
  assert seen == expected | {('glyphs', x) for x in rules}


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


def test_published_numbers_of_figure_5():
  config = load_config('scaling', 'compute,lr=5e-4')
  measured, published, table = config.report
  columns = ('ImageNet', 'CIFAR-10', 'CIFAR-100', 'Pets', 'Flowers')
  cells = printed(table)
  panels = [
    {(kind, p['name']): p for kind, ps in panel['lines'].items() for p in ps}
    for panel in published['panels']
  ]
  for model, epochs, (top1, _, *others, exaflops) in ROWS:
    row = f'{model}, {epochs} paper'
    for column, number in zip(columns, (top1, *others), strict=True):
      assert cells[row, column] == pytest.approx(number)
    mean = (top1 + sum(others)) / 5
    assert cells[row, 'Average'] == pytest.approx(mean)
    kind = 'Transformer (ViT)' if '/' in model else 'ResNet (BiT)'
    key = ('Hybrid' if '+' in model else kind, f'{model}, {epochs}')
    for panel, value in zip(panels, (mean, top1)):
      assert panel[key]['x'] == exaflops
      assert 100 * panel[key]['y']['value'] == pytest.approx(value)
  assert len(cells) == 18 * 6 and [len(p) for p in panels] == [18, 18]
  lines = measured['panels'][0]['lines']
  drawn = [(kind, p['name']) for kind, ps in lines.items() for p in ps]
  assert sorted(drawn) == sorted(panels[0])


# ImageNet, ImageNet-21k and JFT; table 5, for ResNets table 7.
FIGURE_3 = """
  B/32   73.38 81.28 80.73
  B/16   77.91 83.97 84.15
  L/32   71.16 80.99 84.37
  L/16   76.53 85.15 87.12
  H/14       - 85.13 88.04
  R50x1      -     - 78.24
  R152x2     -     - 84.37
"""


def test_published_numbers_of_figure_3():
  (panel,) = load_config('scaling', 'data,fig3').report[1]['panels']
  found = {
    label.removeprefix('ViT-').removesuffix(' (BiT)'): points
    for label, points in panel['lines'].items()
  }
  for line in FIGURE_3.strip().splitlines():
    model, *cells = line.split()
    cells = dict(zip((1.28e6, 14.2e6, 303e6), cells, strict=True))
    numbers = {x: float(cell) for x, cell in cells.items() if cell != '-'}
    drawn = {p['x']: 100 * p['y']['value'] for p in found.pop(model)}
    assert drawn == pytest.approx(numbers)
  assert not found


# Tables 8 and 7; the last number of the latter is the average.
ABLATIONS = {
  'positions': """
    none         61.382
    1-D          64.206 63.964 64.292
    2-D          64.001 64.046 64.022
    relative     64.032
  """,
  'optimizer': """
    R50x1, Adam   77.54 97.67 86.07 91.11 94.26 89.33
    R50x1, SGD    78.24 97.46 85.17 91.00 92.06 88.79
    R152x2, Adam  84.97 99.06 92.05 95.37 98.62 94.01
    R152x2, SGD   84.37 99.07 91.06 94.79 99.32 93.72
  """,
}


@pytest.mark.parametrize('name', ABLATIONS)
def test_published_numbers_of_ablations(name):
  (report,) = load_config('ablations', name).report
  found = printed(report)
  for line in ABLATIONS[name].strip().splitlines():
    row, numbers = re.split('  +', line.strip())
    values = [v for (r, _), v in found.items() if r == f'{row} paper']
    numbers = [float(x) for x in numbers.split()]
    assert values == pytest.approx(numbers, abs=0.005)


@pytest.mark.parametrize(
  ('argument', 'columns'),
  [
    ('B/16', {'table 5': 83.97}),
    ('B/16,imagenet1k', {'table 5': 77.91}),
    ('L/16,imagenet21k', {'table 5': 85.15, 'table 2': 85.30}),
    ('R50+L/16,jft', {'table 6, 14 epochs': 87.12}),
    ('R50x1,jft', {'table 6, 7 epochs': 77.54}),
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


def test_tables_agree_where_they_repeat_each_other():
  published = load_module('published')
  for model, epochs in (('B/16', 7), ('B/32', 7), ('L/32', 7), ('L/16', 14)):
    row = dict(published.TABLE_6[model, epochs])
    row.pop('exaflops')
    assert row == published.TABLE_5['jft', model]
  for numbers in published.TABLE_5.values():
    assert numbers['real'] > numbers['imagenet']
    assert numbers['cifar10'] > numbers['cifar100']


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
