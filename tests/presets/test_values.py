"""The values of the configs are those of the papers' tables."""

import re

import pytest
from preset_configs import ROOT, VARIANTS, load_config, load_module

from vit_jax.durations import Duration, Timeline, epochs
from vit_jax.optim.schedules import Schedule

# Table 3: file and argument; epochs, learning rate, decay, weight decay,
# dropout, clipping; steps in thousands for that many million images.
TABLE_3 = """
  imagenet    B/16            300  3e-3  cosine  0.3   0.1  1.0    92.9  1.268
  imagenet    B/32            300  3e-3  cosine  0.3   0.1  1.0    92.9  1.268
  imagenet    L/16            300  3e-3  cosine  0.3   0.1  1.0    93.8  1.281
  imagenet    L/32            300  3e-3  cosine  0.3   0.1  1.0    93.8  1.281
  imagenet    H/14            300  3e-3  cosine  0.3   0.1  1.0    93.8  1.281
  imagenet21k B/16             90  1e-3  linear  0.03  0.1  None  312.0  14.2
  imagenet21k B/32             90  1e-3  linear  0.03  0.1  None  312.0  14.2
  imagenet21k L/16             90  1e-3  linear  0.03  0.1  None  312.0  14.2
  imagenet21k L/32,epochs=30   30  1e-3  linear  0.03  0.1  None  104.0  14.2
  jft         B/16              7  8e-4  linear  0.1   0.0  None  517.8  303
  jft         B/32              7  8e-4  linear  0.1   0.0  None  517.8  303
  jft         L/32              7  6e-4  linear  0.1   0.0  None  517.8  303
  jft         L/16,epochs=7     7  4e-4  linear  0.1   0.0  None  517.8  303
  jft         L/16             14  4e-4  linear  0.1   0.0  None 1035.6  303
  jft         H/14             14  3e-4  linear  0.1   0.0  None 1035.6  303
  jft         R50x1             7  1e-3  linear  0.1   0.0  None  517.8  303
  jft         R50x2             7  1e-3  linear  0.1   0.0  None  517.8  303
  jft         R101x1            7  8e-4  linear  0.1   0.0  None  517.8  303
  jft         R152x1            7  6e-4  linear  0.1   0.0  None  517.8  303
  jft         R152x2            7  6e-4  linear  0.1   0.0  None  517.8  303
  jft         R50+B/16          7  8e-4  linear  0.1   0.0  None  517.8  303
  jft         R50+B/32          7  8e-4  linear  0.1   0.0  None  517.8  303
  jft         R50+L/32          7  2e-4  linear  0.1   0.0  None  517.8  303
  jft         R50+L/16,epochs=7 7  4e-4  linear  0.1   0.0  None  517.8  303
  jft         R50+L/16         14  4e-4  linear  0.1   0.0  None 1035.6  303
"""


def timeline(config, num_examples):
  of_data = Timeline(config.data.batch_size, int(num_examples))
  total_steps = of_data.steps(epochs(config.total_epochs))
  return Timeline(config.data.batch_size, int(num_examples), total_steps)


@pytest.mark.parametrize('row', TABLE_3.strip().splitlines())
def test_table_3(row):
  data, argument, *cells, decay, wd, dropout, clip, ksteps, images = row.split()
  config = load_config('pretrain_paper', f'{data},{argument}')
  assert [config.total_epochs, config.schedule.lr] == [float(x) for x in cells]
  assert config.schedule.decay == decay
  assert config.schedule.warmup_steps == 10_000
  assert config.data.batch_size == 4096
  adam = config.optimizer
  assert adam.target == 'optax.adamw' and (adam.b1, adam.b2) == (0.9, 0.999)
  assert adam.weight_decay == float(wd)
  assert config.model.get('dropout', 0.0) == float(dropout)
  assert str(adam.clip_norm) == clip
  assert 'pooling' not in config.model
  steps = timeline(config, float(images) * 1e6).total_steps
  assert steps / 1000 == pytest.approx(float(ksteps), abs=0.06)


# Table 4 and B.1.1: TFDS name; steps; learning rates; dev split; test split.
TABLE_4 = """
  imagenet imagenet2012      20000 .003,.01,.03,.06  99 validation
  cifar10  cifar10           10000 .001,.003,.01,.03 98 test
  cifar100 cifar100          10000 .001,.003,.01,.03 98 test
  pets     oxford_iiit_pet     500 .001,.003,.01,.03 90 test
  flowers  oxford_flowers102   500 .001,.003,.01,.03 90 test
"""


@pytest.mark.parametrize('row', TABLE_4.strip().splitlines())
def test_table_4(row):
  data, name, steps, rates, percent, test = row.split()
  config = load_config('finetune', f'{data},B/16')
  assert config.data.source.name == config.evals.test.data.source.name == name
  assert config.data.source.split == 'train'
  assert list(config.evals) == ['test']
  assert config.evals.test.data.source.split == test
  assert config.total_steps == int(steps) and config.data.batch_size == 512
  assert config.schedule.decay == 'cosine'
  assert config.schedule.lr in [float(x) for x in rates.split(',')]
  sgd = config.optimizer
  assert sgd.target.endswith('.sgd') and 'weight_decay' not in sgd
  assert (sgd.momentum, sgd.clip_norm) == (0.9, 1.0)
  assert config.data.transforms[0]['size'] == 384
  assert 'ema' not in config
  dev = load_config('finetune', f'{data},dev,lr=.001,L/16,polyak')
  assert dev.data.source.split == f'train[:{percent}%]'
  assert list(dev.evals) == ['dev']
  assert dev.evals.dev.data.source.split == f'train[{percent}%:]'
  assert dev.schedule.lr == 0.001 and dev.ema.decay == 0.9999
  assert dev.data.transforms[0]['size'] == 512


def test_rates_that_the_paper_does_not_state():
  """R200x3 is in table 6 only."""
  with pytest.raises(ValueError, match=r'rate of R200x3\. Give one, lr=RATE'):
    load_config('pretrain_paper', 'jft,R200x3')
  config = load_config('pretrain_paper', 'jft,R200x3,lr=5e-4')
  assert (config.schedule.lr, config.total_epochs) == (5e-4, 14)


def _rates(config, num_examples, epochs):
  """Return the learning rates in the middle of these epochs."""
  schedule = dict(config.schedule)
  warmup = Duration(schedule.pop('warmup_steps'), 'steps')
  schedule = Schedule(**schedule, warmup=warmup)
  rate = schedule(timeline(config, num_examples))
  steps = [int((e + 0.5) * num_examples / 4096) for e in epochs]
  return [float(rate(step)) for step in steps]


def _check_bit_sgd(config):
  sgd = config.optimizer
  assert sgd.target.endswith('.sgd') and 'clip_norm' not in sgd
  assert (sgd.momentum, sgd.weight_decay) == (0.9, 1e-4)
  assert config.data.batch_size == 4096
  assert config.schedule.warmup_steps == 5000
  assert config.schedule.lr == pytest.approx(0.03 * 16)


def test_table_7():
  """SGD on JFT: BiT-L's, which at 40 epochs would fall at 10, 23, 30, 37."""
  config = load_config('pretrain_paper', 'jft,R50x1,sgd,epochs=40')
  _check_bit_sgd(config)
  rates = _rates(config, 303_000_000, [9, 10, 22, 23, 29, 30, 36, 37])
  levels = [0, 1, 1, 2, 2, 3, 3, 4]
  assert rates == pytest.approx([0.48 * 0.1**n for n in levels])
  assert load_config('pretrain_paper', 'jft,R152x2,sgd').total_epochs == 7
  assert (
    load_config('pretrain_paper', 'jft,R152x2,sgd,lr=.1').schedule.lr == 0.1
  )


@pytest.mark.parametrize('data', ['imagenet', 'imagenet21k'])
def test_bit(data):
  config = load_config('pretrain_bit', f'{data},R101x1')
  _check_bit_sgd(config)
  assert config.total_epochs == 90
  rates = _rates(config, 1_281_167, [29, 30, 59, 60, 79, 80])
  levels = [0, 1, 1, 2, 2, 3]
  assert rates == pytest.approx([0.48 * 0.1**n for n in levels])
  loss, bias = ('sigmoid', -10) if data == 'imagenet21k' else ('softmax', 0)
  assert config.objective.target.endswith(f'.{loss}_xent')
  assert {x.get('loss', 'softmax') for x in config.evals.values()} == {loss}
  assert config.model.get('head', {}).get('bias_init', 0) == bias


# BiT-HyperRule: steps, of which warm-up; resize, crop.
HYPER_RULE = """
  imagenet  20000  500  448  384
  cifar10   10000  500  160  128
  cifar100  10000  500  160  128
  pets        500  100  448  384
  flowers     500  100  448  384
  folder      500  100  448  384
"""


@pytest.mark.parametrize('row', HYPER_RULE.strip().splitlines())
def test_bit_hyper_rule(row):
  data, *numbers = row.split()
  steps, warmup, load_size, size = map(int, numbers)
  config = load_config('finetune', f'{data},R50x1,bit')
  schedule, sgd = config.schedule, config.optimizer
  assert (config.total_steps, schedule.warmup_steps) == (steps, warmup)
  assert (schedule.lr, schedule.decay) == (0.003, 'step')
  assert schedule.milestones == (0.3, 0.6, 0.9)
  assert sgd.to_dict() == {
    'target': 'vit_jax.optim.optimizers.sgd',
    'momentum': 0.9,
  }
  assert config.data.batch_size == 512
  transforms = [
    (x['target'].rpartition('.')[2], x.get('size'))
    for x in config.data.transforms
  ]
  assert transforms == [
    ('Resize', load_size),
    ('RandomCrop', size),
    ('FlipLR', None),
  ]
  (test,) = config.evals.test.data.transforms
  assert test['target'].endswith('.Resize') and test['size'] == size
  if data in ('imagenet', 'cifar10', 'cifar100'):  # 20k images and more
    assert config.objective.mixer.alpha == 0.1
  else:
    assert config.objective.target.endswith('.softmax_xent')


# Section 3.3 of AugReg: name; rates; steps: warm-up; dev and test splits.
AUGREG_TRANSFER = """
  imagenet imagenet2012    .01,.03         20000:500           train[:99%]
  cifar100 cifar100        .001,.003,.01   2500:200,10000:500  train[:98%]
  pets     oxford_iiit_pet .001,.003,.01   500:100,2500:200    train[:90%]
  resisc45 resisc45        .001,.003,.01   2500:200,10000:500  train[:60%]
  kitti    kitti           .001,.003,.01   500:100,2500:200    train
"""


@pytest.mark.parametrize('row', AUGREG_TRANSFER.strip().splitlines())
def test_augreg_transfer(row):
  data, name, rates, steps, train = row.split()
  runs = load_config('transfer', f'B/16,augreg,{data}').runs
  warmup = dict(x.split(':') for x in steps.split(','))
  seen = set()
  for key, run in runs.items():
    part = 'dev' if '_dev_' in key else 'test'
    assert run.data.source.name == name and run.data.source.split == train
    held_out = run.evals[part].data.source
    assert (held_out.name, held_out.split) != (name, train)
    assert str(run.schedule.warmup_steps) == warmup[str(run.total_steps)]
    sgd = run.optimizer
    assert sgd.target.endswith('.sgd') and 'weight_decay' not in sgd
    assert (sgd.momentum, sgd.clip_norm) == (0.9, 1.0)
    assert (run.data.batch_size, run.schedule.decay) == (512, 'cosine')
    if part == 'dev':
      assert 'test' not in run.evals
      seen.add((run.schedule.lr, str(run.total_steps)))
    else:
      assert 'dev' not in run.evals and 'total_steps' in run.best_of.take
  grid = {(float(x), y) for x in rates.split(',') for y in warmup}
  assert seen == grid and sum('final' in key for key in runs) == 3


def test_augreg_selects_on_imagenet_v2():
  """For weights that have seen ImageNet's training images only."""
  name = 'imagenet_dev_lr1e-02_steps20000'
  for pretrained, source in (
    ('imagenet21k', ('imagenet_v2/matched-frequency', 'test')),
    ('imagenet1k', ('imagenet2012', 'train[99%:]')),
  ):
    config = load_config('transfer', f'B/16,augreg,imagenet,{pretrained}')
    dev = config.runs[name].evals.dev.data.source
    assert (dev.name, dev.split) == source


@pytest.mark.parametrize('name, width', [('S/16', 384), ('B/16', 768)])
def test_better_plain_vit(name, width):
  config = load_config('pretrain_better_plain', name)
  model, adam = config.model, config.optimizer
  assert model.pooling.target.endswith('.Mean')
  assert model.posemb.target.endswith('.SinCos2d')
  assert 'dropout' not in model and 'stochastic_depth' not in model
  assert config.total_epochs == 90 and config.data.batch_size == 1024
  assert (config.schedule.lr, config.schedule.warmup_steps) == (1e-3, 10_000)
  assert (adam.weight_decay, adam.clip_norm) == (0.1, 1.0)
  assert (model.width, model.head.representation_size) == (width, width)
  *_, augment = config.data.transforms
  assert dict(augment) == {
    'target': 'vit_jax.data.augment.RandAugment',
    'num_layers': 2,
    'magnitude': 10.0,
    'faults': False,
  }
  published = load_config('pretrain_better_plain', f'{name},faults')
  assert published.data.transforms[-1]['faults']
  assert config.objective.mixer.alpha == 0.2
  steps = timeline(config, 1_281_167 * 99 // 100).total_steps
  assert steps == pytest.approx(111_476, abs=1)


# Section 3 of AugReg: RandAugment's layers and magnitude, mixup.
AUGREG = """
  none     -   -   -
  light1   2   0   -
  light2   2  10  0.2
  medium1  2  15  0.2
  medium2  2  15  0.5
  strong1  2  20  0.5
  strong2  2  20  0.8
"""


@pytest.mark.parametrize('data', ['imagenet', 'imagenet21k'])
@pytest.mark.parametrize('row', AUGREG.strip().splitlines())
def test_augreg_levels(row, data):
  level, *cells = row.split()
  layers, magnitude, mixup = (None if x == '-' else float(x) for x in cells)
  words = f'{data},L/16,{level},reg=0.1'
  config = load_config('pretrain_augreg', words)
  crop, flip, *augment = config.data.transforms
  assert crop['target'].endswith('.InceptionCrop') and crop['size'] == 224
  assert flip['target'].endswith('.FlipLR')
  assert [(x['num_layers'], x['magnitude'], x['faults']) for x in augment] == (
    [] if layers is None else [(layers, magnitude, False)]
  )
  objective = config.objective
  mixed = objective.target.endswith('.mixed')
  assert (objective.mixer.alpha if mixed else None) == mixup
  loss = objective.objective if mixed else objective
  assert loss.target.endswith('.sigmoid_xent')
  model, adam = config.model, config.optimizer
  assert (model.dropout, model.stochastic_depth) == (0.1, 0.1)
  assert (adam.weight_decay, adam.clip_norm) == (0.1, 1.0)
  assert (config.schedule.lr, config.schedule.warmup_steps) == (1e-3, 10_000)
  assert (config.total_epochs, config.data.batch_size) == (300, 4096)
  if augment:
    faulty = load_config('pretrain_augreg', f'{words},faults')
    assert faulty.data.transforms[-1]['faults']


def test_augreg_defaults_are_the_best_of_figure_4():
  module = load_module('pretrain_augreg')
  page = (ROOT / 'docs' / 'augreg.md').read_text()
  titles = 'ImageNet, 300', 'ImageNet-21k, 30', 'ImageNet-21k, 300'
  for title, settings in zip(titles, zip(*module.BEST.values())):
    table = page.split(f'### {title} epochs\n\n')[1].split('\n\n')[0]
    best = dict(zip(module.BEST, settings))
    cells = {}
    for line in table.splitlines()[2:]:
      model, reg, *values = (x.strip() for x in line.strip('|').split('|'))
      for level, value in zip(module.LEVELS, values, strict=True):
        cells[model, level, float(reg)] = int(value)
    assert {model for model, _, _ in cells} == set(best)
    for model, setting in best.items():
      highest = max(cells[key] for key in cells if key[0] == model)
      assert cells[model, *setting] == highest


def _names(transforms):
  return [x['target'].rpartition('.')[2] for x in transforms]


def test_deit():
  config = load_config('deit', 'S/16,distilled')
  crop, _, policy, erasing = config.data.transforms
  assert policy['policy'] == 'rand-m9-mstd0.5-inc1'
  assert (crop['size'], erasing['probability']) == (224, 0.25)
  assert config.data.order.times == 3 and config.data.batch_size == 1024
  # Mixing is outside of the distillation.
  mixer, distillation = config.objective.mixer, config.objective.objective
  assert [x['alpha'] for x in mixer.mixers] == [0.8, 1.0]
  assert mixer.probabilities == (0.5, 0.5)
  assert (distillation.kind, distillation.weight) == ('hard', 0.5)
  assert distillation.objective.label_smoothing == 0.1
  assert config.model.stochastic_depth == 0.1 and config.ema.decay == 0.99996
  assert (config.schedule.lr, config.optimizer.weight_decay) == (1e-3, 0.05)
  assert list(config.evals) == ['val'] and config.data.source.split == 'train'
  plain = load_config('deit', 'S/16')
  assert 'pooling' not in plain.model
  assert plain.objective.objective == distillation.objective
  soft = load_config('deit', 'soft')
  assert soft.objective.objective.temperature == 3


# DeiT III's commands. Pre-training: data, model; epochs, learning rate, weight
# decay, pixels, stochastic depth. Fine-tuning: the same.
DEIT3 = """
  deit3 imagenet    S/16 800 4e-3 0.05 224 0.05
  deit3 imagenet    B/16 800 3e-3 0.05 192 0.2
  deit3 imagenet    L/16 800 3e-3 0.05 192 0.45
  deit3 imagenet    H/14 800 3e-3 0.05 154 0.6
  deit3 imagenet21k S/16 240 1e-3 0.02 224 0.05
  deit3 imagenet21k B/16 240 1e-3 0.02 224 0.1
  deit3 imagenet21k L/16 240 1e-3 0.02 224 0.3
  deit3 imagenet21k H/14  90 1e-3 0.02 126 0.5
  deit3_finetune imagenet    S/16  20 1e-5 0.1  384 0.0
  deit3_finetune imagenet    B/16  20 1e-5 0.1  224 0.2
  deit3_finetune imagenet    L/16  20 1e-5 0.1  224 0.45
  deit3_finetune imagenet    H/14  20 1e-5 0.1  224 0.55
  deit3_finetune imagenet    B/16,size=384  20 1e-5 0.1  384 0.15
  deit3_finetune imagenet    L/16,size=384  20 1e-5 0.1  384 0.4
  deit3_finetune imagenet21k S/16  50 3e-4 0.02 224 0.05
  deit3_finetune imagenet21k B/16  50 3e-4 0.02 224 0.15
  deit3_finetune imagenet21k L/16  50 3e-4 0.02 224 0.4
  deit3_finetune imagenet21k H/14  50 3e-4 0.02 224 0.45
"""


@pytest.mark.parametrize('row', DEIT3.strip().splitlines())
def test_deit3(row):
  stage, data, model, *numbers = row.split()
  epochs, lr, decay, size, depth = map(float, numbers)
  config = load_config('deit', f'{stage},{data},{model}')
  assert (config.total_epochs, config.schedule.lr) == (epochs, lr)
  assert config.schedule.warmup_epochs == 5
  assert config.schedule.decay == 'timm_cosine'
  assert config.optimizer.weight_decay == decay
  resolution = (stage, data) == ('deit3_finetune', 'imagenet')
  rule = 'optax.adamw' if resolution else 'vit_jax.optim.optimizers.lamb'
  assert config.optimizer.target == rule
  assert config.data.batch_size == (512 if resolution else 2048)
  assert config.data.transforms[0]['size'] == size
  small, crop = config.evals[next(iter(config.evals))].data.transforms
  assert small['size'] == crop['size'] == size
  assert config.model.stochastic_depth == (depth, depth)
  assert config.model.block.layerscale_init == 1e-4
  crop, _, *others = _names(config.data.transforms)
  from_scratch = (stage, data) == ('deit3', 'imagenet')
  assert ('order' in config.data) == from_scratch
  if resolution:
    assert others == ['rand_augment'] and config.init_from.head == 'keep'
  else:
    assert others == ['ThreeAugment', 'ColorJitter']
    simple = data == 'imagenet21k'
    assert crop == ('SimpleRandomCrop' if simple else 'InceptionCrop')
  objective = config.objective
  alphas = [x['alpha'] for x in objective.mixer.get('mixers', ())]
  assert (alphas or objective.mixer.alpha) == (
    1.0 if data == 'imagenet21k' else [0.8, 1.0]
  )
  inner = objective.objective.target.rpartition('.')[2]
  assert inner == ('sigmoid_xent' if from_scratch else 'softmax_xent')


@pytest.mark.parametrize('model', ['g/14', 'G/14', 'So400m/14'])
def test_scaling_vit(model):
  config = load_config('pretrain_scaling_vit', model)
  assert config.data.batch_size == 16_384
  seen = config.get('total_examples') or config.total_steps * 16_384
  assert seen == (40e9 if model == 'So400m/14' else 16_384_000_000)
  schedule, optimizer = config.schedule, config.optimizer
  assert (schedule.lr, schedule.decay) == (8e-4, 'rsqrt')
  assert (schedule.warmup_steps, schedule.cooldown_steps) == (10_000, 50_000)
  assert optimizer.target == 'vit_jax.optim.optimizers.adafactor'
  assert optimizer.weight_decay == 0.03 and optimizer.clip_norm == 1
  assert optimizer.decay_multipliers == (('head/.*', 100.0),)
  assert config.model.num_classes == 29_593
  assert config.model.head.bias_init == -10


@pytest.mark.parametrize('name', VARIANTS)
def test_arguments_are_documented_and_others_refused(name):
  module = load_module(name)
  known = load_module('finetune')
  text = module.__doc__ + known.__doc__ * (name in ('transfer', 'vtab'))
  for argument in VARIANTS[name]:
    for word in filter(None, argument.split(',')):
      assert word in known.MODELS or word.split('=')[0] in text, word
  with pytest.raises(ValueError, match=r"(?s)argument 'B/61'"):
    module.get_config('B/61')


@pytest.mark.parametrize(
  ('argument', 'named'),
  [
    ('B/16,L/16', "'B/16' and 'L/16' both set 'model'"),
    ('epochs=many', "'epochs=many'"),
    ('epochs=nan', "'epochs=nan'"),
    ('epochs=-3', "'epochs=-3'"),
    ('epochs', "'epochs'"),
    ('tiny=1', "did you mean 'tiny'?"),
    ('model=B/16', "did you mean 'B/16'?"),
    ('b/16', "did you mean 'B/16'?"),
    ('folder,tinny', "did you mean 'tiny'?"),
  ],
)
def test_words_that_no_option_takes(argument, named):
  with pytest.raises(ValueError, match=re.escape(named)):
    load_config('pretrain_paper', argument)


@pytest.mark.parametrize(
  ('name', 'argument', 'named'),
  [
    ('finetune', 'folder,dev', 'dev'),
    ('finetune', 'pets,epochs=3', 'epochs'),
    ('finetune', 'R50x1,bit,resize', 'resize'),
    ('finetune', 'kitti', 'kitti'),
    ('finetune', 'cifar10,augreg', 'cifar10'),
    ('finetune', 'pets,augreg,bit', 'bit'),
    ('finetune', 'pets,augreg,steps=400', 'steps'),
    ('finetune', 'pets,steps=500', 'steps'),
    ('finetune', 'imagenet,augreg,v2', 'v2'),
    ('finetune', 'kitti,augreg,resize', 'resize'),
    ('transfer', 'cifar10,augreg', 'cifar10'),
    ('transfer', 'kitti', 'kitti'),
    ('pretrain_paper', 'imagenet21k,H/14', 'H/14'),
    ('pretrain_paper', 'jft,R50+B/16,sgd', 'sgd'),
    ('pretrain_paper', 'imagenet21k,folder', 'folder'),
    ('pretrain_bit', 'imagenet21k,R50x1,folder', 'folder'),
    ('pretrain_augreg', 'imagenet21k,folder', 'folder'),
    ('pretrain_augreg', 'imagenet,L/16,none,faults', 'faults'),
    ('masked_patches', 'folder', 'folder'),
    ('pretrain_folder', 'mae,local=96', 'local'),
    ('pretrain_folder', 'dino,imagenet,labels', 'labels'),
    ('pretrain_folder', 'lejepa,folder', 'folder'),
    ('deit', 'deit,L/16', 'L/16'),
    ('scaling', 'data,fig3,b/32', 'b/32'),
    ('scaling', 'data,B/16', 'B/16'),
    ('scaling', 'data,sizes=9+1.5M', '1.5'),
    ('scaling', 'compute,R200x3', 'R200x3'),
    ('evaluate', 'fewshot,flip', 'flip'),
  ],
)
def test_words_that_contradict(name, argument, named):
  with pytest.raises(ValueError, match=re.escape(named)):
    load_config(name, argument)


def test_evaluators_follow_the_source():
  config = load_config('pretrain_paper', 'jft,B/16,name=my_set')
  config.data.source.data_dir, config.data.source.label_key = '/data', 'kind'
  source = config.evals.val.data.source
  assert (source.name, source.data_dir) == ('my_set', '/data')
  assert source.label_key == 'kind'
  assert source.split != config.data.source.split


def test_masked_patches():
  """B.1.2."""
  config = load_config('masked_patches')
  assert config.total_steps == 1_000_000 and config.data.batch_size == 4096
  adam, schedule = config.optimizer, config.schedule
  assert adam.target == 'optax.adamw' and (adam.b1, adam.b2) == (0.9, 0.999)
  assert adam.weight_decay == 0
  assert (schedule.lr, schedule.decay) == (2e-4, 'cosine')
  assert schedule.warmup_steps == 10_000
  assert config.model.embedding.patch_size == (16, 16)
  assert config.model.width == 768
  task = config.objective.task
  assert (task.predict, task.ratio) == ('mean_colour', 0.5)
  for argument in VARIANTS['masked_patches']:
    config = load_config('masked_patches', argument)
    for evaluator in config.evals.values():  # the same task, on other data
      assert evaluator.task == config.objective.task
      assert evaluator.data.source.split != config.data.source.split
