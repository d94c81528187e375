"""The values of the configs are those of the papers' tables."""

import operator
import re

import jax
import pytest
from preset_configs import ROOT, VARIANTS, flat, load_config, load_module

from vit_jax import tree
from vit_jax.config import resolve
from vit_jax.durations import Duration, Timeline, epochs
from vit_jax.models.dense import Normalize
from vit_jax.optim.schedules import Schedule
from vit_jax.zoo import names

# Table 3: data and models; epochs, learning rate, decay, weight decay, dropout,
# clipping; steps in thousands for that many million images.
TABLE_3 = """
  imagenet  B/16,B/32,L/16,L/32,H/14  300 3e-3 cosine 0.3  0.1 1.0   93.8 1.281
  imagenet21k B/16,B/32,L/16,L/32       90 1e-3 linear 0.03 0.1 None  312.0 14.2
  imagenet21k L/32,epochs=30            30 1e-3 linear 0.03 0.1 None  104.0 14.2
  jft         B/16,B/32,R50+B/16         7 8e-4 linear 0.1  0.0 None  517.8 303
  jft         R50+B/32,R101x1            7 8e-4 linear 0.1  0.0 None  517.8 303
  jft         R50x1,R50x2                7 1e-3 linear 0.1  0.0 None  517.8 303
  jft         L/32,R152x1,R152x2         7 6e-4 linear 0.1  0.0 None  517.8 303
  jft         R50+L/32                   7 2e-4 linear 0.1  0.0 None  517.8 303
  jft         L/16,R50+L/16             14 4e-4 linear 0.1  0.0 None 1035.6 303
  jft         H/14                      14 3e-4 linear 0.1  0.0 None 1035.6 303
"""


def timeline(config, num_examples):
  of_data = Timeline(config.data.batch_size, int(num_examples))
  total_steps = of_data.steps(epochs(config.total_epochs))
  return Timeline(config.data.batch_size, int(num_examples), total_steps)


@pytest.mark.parametrize('row', TABLE_3.strip().splitlines())
def test_table_3(row):
  data, models, *cells, decay, wd, dropout, clip, ksteps, images = row.split()
  models = [models] if '=' in models else models.split(',')
  for config in (load_config('pretrain_paper', f'{data},{x}') for x in models):
    assert [config.total_epochs, config.schedule.lr] == [*map(float, cells)]
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
  rates = [float(x) for x in rates.split(',')]
  config = load_config('finetune', f'{data},B/16')
  assert config.data.source.name == config.evals.test.data.source.name == name
  assert config.data.source.split == 'train'
  assert list(config.evals) == ['test']
  assert config.evals.test.data.source.split == test
  assert config.total_steps == int(steps) and config.data.batch_size == 512
  assert config.schedule.decay == 'cosine' and config.schedule.lr in rates
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
  tried = load_config('transfer', f'{data},seeds=1').runs
  tried = {x.schedule.lr for name, x in tried.items() if '_dev_' in name}
  assert tried == set(rates)


def test_rates_that_the_paper_does_not_state():
  with pytest.raises(ValueError, match=r'rate of R200x3\. Give one, lr=RATE'):
    load_config('pretrain_paper', 'jft,R200x3')


@pytest.mark.parametrize(
  ('name', 'argument', 'milestones'),
  [
    ('pretrain_paper', 'jft,R50x1,sgd,epochs=40', (10, 23, 30, 37)),
    ('pretrain_bit', 'imagenet,R101x1', (30, 60, 80)),
    ('pretrain_bit', 'imagenet21k,R101x1', (30, 60, 80)),
  ],
)
def test_bit(name, argument, milestones):
  """The learning rate falls to a tenth at these epochs."""
  config = load_config(name, argument)
  sgd, schedule = config.optimizer, dict(config.schedule)
  assert sgd.target.endswith('.sgd') and 'clip_norm' not in sgd
  assert (sgd.momentum, sgd.weight_decay) == (0.9, 1e-4)
  assert config.data.batch_size == 4096
  assert schedule['warmup_steps'] == 5000
  assert config.total_epochs == (40 if 'epochs=40' in argument else 90)
  num_examples = 303_000_000 if 'jft' in argument else 1_281_167
  warmup = Duration(schedule.pop('warmup_steps'), 'steps')
  rate = Schedule(**schedule, warmup=warmup)(timeline(config, num_examples))
  for level, epoch in enumerate(milestones):
    before, after = (
      float(rate(int((epoch + half) * num_examples / 4096)))
      for half in (-0.5, 0.5)
    )
    assert before == pytest.approx(0.03 * 16 * 0.1**level)
    assert after == pytest.approx(0.1 * before)
  loss = 'softmax' if argument.startswith('imagenet,') else 'sigmoid'
  assert config.objective.target.endswith(f'.{loss}_xent')
  assert {x.get('loss', 'softmax') for x in config.evals.values()} == {loss}
  bias = config.model.get('head', {}).get('bias_init', 0)
  assert bias == (-10 if loss == 'sigmoid' else 0)


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
    if part == 'dev':
      assert 'test' not in run.evals
      seen.add((run.schedule.lr, str(run.total_steps)))
    else:
      assert 'dev' not in run.evals and 'total_steps' in run.best_of.take
  grid = {(float(x), y) for x in rates.split(',') for y in warmup}
  assert seen == grid and sum('final' in key for key in runs) == 3


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


@pytest.mark.parametrize('row', AUGREG.strip().splitlines())
def test_augreg_levels(row):
  level, *cells = row.split()
  layers, magnitude, mixup = (None if x == '-' else float(x) for x in cells)
  words = f'imagenet21k,L/16,{level},reg=0.1'
  config = load_config('pretrain_augreg', words)
  *_, augment = (None, *config.data.transforms[2:])
  assert _names(config.data.transforms[:2]) == ['InceptionCrop', 'FlipLR']
  found = augment and (augment['num_layers'], augment['magnitude'])
  assert found == (None if layers is None else (layers, magnitude))
  mixed = config.objective.target.endswith('.Mixed')
  assert (config.objective.mixer.alpha if mixed else None) == mixup
  model, adam = config.model, config.optimizer
  assert (model.dropout, model.stochastic_depth) == (0.1, 0.1)
  assert (adam.weight_decay, adam.clip_norm) == (0.1, 1.0)
  assert (config.schedule.lr, config.schedule.warmup_steps) == (1e-3, 10_000)
  assert (config.total_epochs, config.data.batch_size) == (300, 4096)


def test_augreg_defaults_are_the_best_of_figure_4():
  module = load_module('pretrain_augreg')
  page = (ROOT / 'docs' / 'augreg.md').read_text()
  titles = 'ImageNet, 300', 'ImageNet-21k, 30', 'ImageNet-21k, 300'
  for title, settings in zip(titles, zip(*module.BEST.values())):
    table = page.split(f'### {title} epochs\n\n')[1].split('\n\n')[0]
    best = dict(zip(module.BEST, settings))
    cells = {}
    for line in table.splitlines()[2:]:
      model, *pairs = (x.strip() for x in line.strip('|').split('|'))
      for level, pair in zip(module.LEVELS, pairs, strict=True):
        for reg, value in zip((0.0, 0.1), pair.split(', '), strict=True):
          cells[model, level, reg] = int(value)
    assert {model for model, _, _ in cells} == set(best)
    for model, setting in best.items():
      highest = max(cells[key] for key in cells if key[0] == model)
      assert cells[model, *setting] == highest


def _names(transforms):
  return [x['target'].rpartition('.')[2] for x in transforms]


# Stages of DeiT III. Data; epochs, learning rate, weight decay; stochastic
# depth of S/16, B/16, L/16 and H/14; augmentations; loss.
DEIT3 = """
  deit3          imagenet    800 3e-3 0.05 .05 .2  .45 .6   two bce
  deit3          imagenet21k 240 1e-3 0.02 .05 .1  .3  .5   two ce
  deit3_finetune imagenet     20 1e-5 0.1  0   .2  .45 .55  one ce
  deit3_finetune imagenet21k  50 3e-4 0.02 .05 .15 .4  .45  two ce
"""


@pytest.mark.parametrize('row', DEIT3.strip().splitlines())
def test_deit3(row):
  stage, data, epochs, lr, decay, *depths, augmentations, loss = row.split()
  for model, depth in zip(('S/16', 'B/16', 'L/16', 'H/14'), depths):
    config = load_config('deit', f'{stage},{data},{model}')
    assert config.model.stochastic_depth == (float(depth), float(depth))
    assert config.model.block.layerscale_init == 1e-4
    size = config.data.transforms[0]['size']
    (evaluator, *_) = config.evals.values()
    assert {x['size'] for x in evaluator.data.transforms} == {size}
  config = load_config('deit', f'{stage},{data},B/16')
  assert config.total_epochs == float(epochs)
  assert config.schedule.lr == float(lr)
  assert config.schedule.warmup_epochs == 5
  assert config.optimizer.weight_decay == float(decay)
  rules = {'one': 'optax.adamw', 'two': 'vit_jax.optim.optimizers.lamb'}
  assert config.optimizer.target == rules[augmentations]
  _, _, *others = _names(config.data.transforms)
  two = ['ThreeAugment', 'ColorJitter']
  assert others == {'one': ['rand_augment'], 'two': two}[augmentations]
  assert ('order' in config.data) == (loss == 'bce')  # repeats
  inner = config.objective.objective.target.rpartition('.')[2]
  assert inner == {'bce': 'sigmoid_xent', 'ce': 'softmax_xent'}[loss]


@pytest.mark.parametrize('model', ['S/16', 'B/16', 'L/16'])
@pytest.mark.parametrize(
  ('stage', 'deit'), [('', 'deit3,'), ('finetune,', 'deit3_finetune,size=224,')]
)
def test_vit5_is_the_recipe_of_deit3_with_another_model(stage, deit, model):
  expected = load_config('deit', f'{deit}{model}').to_dict()
  config = load_config('pretrain_vit5', f'{stage}{model}').to_dict()
  assert config.pop('ema') == {'decay': 0.99996}
  assert config['model']['posemb']['registers'] == 100
  rates = {'S/16': (0.05, 0.05), 'B/16': (0.2, 0.25), 'L/16': (0.35, 0.5)}
  rate = rates[model][bool(stage)]
  assert config.pop('model')['stochastic_depth'] == (rate, rate)
  if (model, stage) == ('L/16', ''):
    expected['total_epochs'] = 400.0
  del expected['model']
  assert config == expected


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
    ('jft,name=', "'name=': expected a name"),
    ('tensor=0', 'expected a whole number above 0'),
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


# Of the released code: model, batch, epochs, epochs of warm-up, peak rate, std
# of initial kernels, and parts of the config.
WITHOUT_LABELS = {
  'dino': ('S/16', 1024, 300, 10, 5e-4 * 4, 0.02, {
    'objective.teacher_temperature': 0.07,
    'objective.teacher_warmup_epochs': 30,
    'objective.head.last_layer': 'lengths',
  }),
  'simdino': ('B/16', 512, 100, 10, 5e-4 * 2, 0.02, {}),
  'dinov2': ('L/16', 2048, 200, 20, 4e-3 * 2**0.5, 0.02, {
    'objective.teacher_temperature': 0.07,
    'objective.momentum': 0.992,
    'objective.teacher_warmup_epochs': 60,
    'objective.freeze_last_layer_epochs': 2,
    'objective.patch_head': None,
    'objective.centre.target': 'vit_jax.objectives.dino.Centre',
    'model.stochastic_depth': (0.3, 0.3),
    'optimizer.final_weight_decay': 0.4,
    'optimizer.layer_decay.rate': 0.9,
    'optimizer.lr_multipliers': (('embedding/.*', 0.2),),
  }),
  'dinov3': ('L/16', 2048, 200, 20, 1e-3 * 2**0.5, 0.02, {
    'objective.teacher_temperature': 0.07,
    'objective.momentum': 0.992,
    'objective.teacher_warmup_epochs': 60,
    'objective.freeze_last_layer_epochs': 2,
    'objective.head.last_layer': 'linear',
    'objective.patch_head.last_layer': 'linear',
    'model.posemb.target': 'vit_jax.models.rotary.RotaryDino',
    'model.posemb.rescale': 1,
    'model.stochastic_depth': (0.3, 0.3),
    'optimizer.weight_decay': 0.04,
    'optimizer.final_weight_decay': 0.4,
    'optimizer.clip_norm': 3,
    'optimizer.layer_decay.rate': 0.9,
    'optimizer.lr_multipliers': (('embedding/.*', 0.2),),
    'schedule.end_lr': 1e-6,
  }),
  'mae': ('B/16', 4096, 1600, 40, 1.5e-4 * 16, None, {}),
  'lejepa': ('L/14', 512, 100, 5, 5e-4, 0.02, {
    'objective.regularizer.weight': 0.05,
    'objective.regularizer.slices': 1000,
    'objective.projector.outputs': 512,
  }),
}  # fmt: skip


def test_flexivit_of_imagenet21k():
  config = load_config('flexivit', 'imagenet21k')
  for part in config.model.embedding, config.model.posemb:
    assert part.init_std == pytest.approx(config.model.width**-0.5)
  assert {x.every_steps for x in config.evals.values()} == {5000}


@pytest.mark.parametrize('method', WITHOUT_LABELS)
def test_learning_without_labels(method):
  name, *values, lr, std, parts = WITHOUT_LABELS[method]
  config = load_config('pretrain_folder', f'{method},imagenet')
  size, patch = name.split('/')
  assert config.model.width == names.SIZES[size][0]
  assert config.model.embedding.patch_size == (int(patch),) * 2
  warmup = config.schedule.warmup_epochs
  assert [config.data.batch_size, config.total_epochs, warmup] == values
  assert config.schedule.lr == pytest.approx(lr)
  block = {'mlp': {'form': 'exact'}, 'init_std': std}
  block |= {'layerscale_init': 1e-5} if method[:-1] == 'dinov' else {}
  assert config.model.block.to_dict() == block
  assert config.model.embedding.init_std == std
  assert config.preprocess.std == (58.395, 57.12, 57.375)
  assert {x: operator.attrgetter(x)(config) for x in parts} == parts
  crop = config.data.transforms[0]
  counts = {'dino': 8, 'dinov2': 8, 'dinov3': 8, 'simdino': 10, 'lejepa': 6}
  assert crop.get('local_count') == counts.get(method)
  assert crop.get('method') == ('torch' if method == 'mae' else None)
  # A longer run has the same warm-up, another model is built if it is named.
  other = load_config('pretrain_folder', f'{method},imagenet,L/16,epochs=900')
  assert other.schedule.warmup_epochs == warmup and other.model.depth == 24


@pytest.mark.parametrize('method', ['dino', 'mae'])
def test_all_but_biases_and_norms_decay(method):
  """As in the released codes: arrays of PyTorch with several dimensions."""
  config = load_config('pretrain_folder', f'{method},S/16')
  model = resolve(config.model)
  objective = resolve(config.objective)(model, preprocess=Normalize())
  images = jax.ShapeDtypeStruct((1, 32, 32, 3), 'float32')
  made = {
    'objective/': jax.eval_shape(objective.init, jax.random.key(0), images),
    '': jax.eval_shape(model.init, jax.random.key(0), images)['params'],
  }
  paths = {start + x for start in made for x in tree.flatten(made[start])}
  rules = config.optimizer.decay_mask
  decayed = {x for x in paths if tree.first_match(rules, x) == 0}
  assert {x.split('/')[-1] for x in paths - decayed} == {'bias', 'scale'}
  assert not any(x.endswith(('bias', 'scale')) for x in decayed)


CONTRADICTIONS = {  # the error names the last word
  'finetune': """
    folder,dev pets,epochs=3 R50x1,bit,resize kitti augreg,cifar10
    pets,augreg,bit pets,augreg,steps=400 pets,steps=500 imagenet,augreg,v2
    kitti,augreg,resize pets,number=a folder,order=a<b,labels=a
  """,
  'train_folder': 'number=a,balanced labels=a,balanced number=a,class_weights',
  'transfer': 'augreg,cifar10 kitti',
  'pretrain_paper': 'imagenet21k,H/14 jft,R50+B/16,sgd imagenet21k,folder',
  'pretrain_bit': 'imagenet21k,R50x1,folder',
  'pretrain_augreg': 'imagenet21k,folder imagenet,L/16,none,faults',
  'masked_patches': 'folder',
  'pretrain_folder': """
    mae,local=96 dino,imagenet,labels lejepa,folder lejepa,anchor
    mae,from_weights,anchor
  """,
  'deit': 'deit,L/16',
  'scaling': 'data,fig3,b/32 data,B/16 compute,R200x3',
  'evaluate': 'accuracy,layers=6 patches,flip patches,labels=a+b',
}


@pytest.mark.parametrize('name', CONTRADICTIONS)
def test_words_that_contradict(name):
  for argument in CONTRADICTIONS[name].split():
    named = argument.split(',')[-1].split('=')[0]
    with pytest.raises(ValueError, match=re.escape(named)):
      load_config(name, argument)


def test_evaluators_follow_the_source():
  config = load_config('pretrain_paper', 'jft,B/16,name=my_set')
  config.data.source.data_dir, config.data.source.label_key = '/data', 'kind'
  source = config.evals.val.data.source
  assert (source.name, source.data_dir) == ('my_set', '/data')
  assert source.label_key == 'kind'
  assert source.split != config.data.source.split


def test_an_evaluator_has_the_task_of_masked_patches():
  for argument in VARIANTS['masked_patches']:
    config = load_config('masked_patches', argument)
    for evaluator in config.evals.values():  # the same task, on other data
      assert evaluator.task == config.objective.task
      assert evaluator.data.source.split != config.data.source.split


# A config with arguments, and values that it sets; of a class its name.
VALUES = """
  pretrain_scaling_vit:G/14 data.batch_size=16384 total_steps=1000000
    schedule.lr=0.0008 schedule.decay=rsqrt schedule.warmup_steps=10000
    schedule.cooldown_steps=50000 optimizer.target=adafactor
    optimizer.weight_decay=0.03 optimizer.clip_norm=1.0
    optimizer.decay_multipliers=(('head/.*',100.0),) model.pooling.target=Map
    model.num_classes=29593 model.head.bias_init=-10.0
  finetune:folder,R50x1,bit total_steps=500 data.batch_size=512
    schedule.lr=0.003 schedule.decay=step schedule.milestones=(0.3,0.6,0.9)
    schedule.warmup_steps=100 optimizer.target=sgd optimizer.momentum=0.9
    optimizer.clip_norm=None optimizer.weight_decay=None
    data.transforms.0.target=Resize data.transforms.0.size=448
    data.transforms.0.antialias=True data.transforms.1.target=RandomCrop
    data.transforms.1.size=384 data.transforms.2.target=FlipLR
    evals.test.data.transforms.0.target=Resize objective.mixer.target=None
    evals.test.data.transforms.0.size=384
  finetune:cifar100,R50x1,bit total_steps=10000 data.transforms.0.size=160
    data.transforms.0.antialias=None data.transforms.1.size=128
    evals.test.data.transforms.0.size=128 objective.mixer.alpha=0.1
  finetune:imagenet,R50x1,bit total_steps=20000 data.transforms.0.size=448
    objective.mixer.alpha=0.1
  finetune:imagenet,augreg,dev,v2 evals.dev.data.source.split=test
    evals.dev.data.source.name=imagenet_v2/matched-frequency
  transfer:B/16,augreg,imagenet,imagenet21k
    runs.imagenet_dev_lr1e-02_steps20000.evals.dev.data.source.split=test
  transfer:B/16,augreg,imagenet,imagenet1k
    runs.imagenet_dev_lr1e-02_steps20000.evals.dev.data.source.split=train[99%:]
  pretrain_better_plain:S/16 data.source.split=train[:99%] data.batch_size=1024
    total_epochs=90.0 schedule.lr=0.001 schedule.warmup_steps=10000
    optimizer.weight_decay=0.1 optimizer.clip_norm=1.0 objective.mixer.alpha=0.2
    data.transforms.2.num_layers=2 data.transforms.2.magnitude=10.0
    data.transforms.2.faults=False model.head.representation_size=384
    model.pooling.target=Mean model.dropout=None model.posemb.target=SinCos2d
    model.stochastic_depth=None
  deit:S/16,distilled data.transforms.2.policy=rand-m9-mstd0.5-inc1
    data.transforms.3.probability=0.25 data.order.times=3 schedule.lr=0.001
    objective.mixer.mixers.0.alpha=0.8 objective.mixer.mixers.1.alpha=1.0
    objective.mixer.probabilities=(0.5,0.5) objective.objective.kind=hard
    objective.objective.weight=0.5 model.stochastic_depth=0.1 ema.decay=0.99996
    objective.objective.objective.label_smoothing=0.1 data.batch_size=1024
    optimizer.weight_decay=0.05
  deit:S/16 objective.objective.label_smoothing=0.1 model.pooling.target=None
  pretrain_paper:jft,R200x3,lr=5e-4 schedule.lr=0.0005 total_epochs=14.0
  masked_patches total_steps=1000000 data.batch_size=4096 schedule.lr=0.0002
    optimizer.target=adamw optimizer.b2=0.999 schedule.warmup_steps=10000
    optimizer.weight_decay=0.0 model.width=768 objective.task.ratio=0.5
    objective.task.predict=mean_colour model.embedding.patch_size=(16,16)
    schedule.decay=cosine optimizer.b1=0.9
  flexivit:imagenet21k data.batch_size=4096 total_epochs=90.0
    data.transforms.2.magnitude=10.0 model.embedding.kernel_size=8
    model.head.bias_init=-10.0 model.posemb.prefix=False schedule.lr=0.001
    objective.mixer.alpha=0.2 schedule.warmup_steps=10000
    variants.patch_sizes=(48,40,30,24,20,16,15,12,10,8)
    evals.val_patch48.change.patch_size=48 optimizer.weight_decay=0.1
  flexivit:imagenet21k,distilled data.batch_size=4096 schedule.lr=0.0001
    model.embedding.kernel_size=8 objective.mixer.alpha=1.0
  flexivit:imagenet data.batch_size=1024 model.embedding.kernel_size=16
    objective.mixer.alpha=1.0 schedule.warmup_steps=5000 init_from.head=keep
    init_from.posemb_resize=paper init_from.patch_resize=bilinear
    evals.val_patch8.data.transforms.0.target=Resize
  distill_patient total_epochs=1200.0 objective.mixer.alpha=1.0 schedule.lr=0.03
    optimizer.weight_decay=0.01 data.source.split=train[:98%]
    schedule.warmup_steps=5000 evals.minival.data.source.split=train[99%:]
  distill_features:batch=384 schedule.lr=0.00025 schedule.warmup_fraction=0.05
    data.labels=False data.transforms.0.area=(0.14,1.0) data.batch_size=384
    optimizer.weight_decay=0.04 optimizer.clip_norm=1.0 total_epochs=200.0
  train_folder:balanced data.order.target=Balanced data.order.power=None
    checkpoints.best_metric=test/mean_per_class_accuracy data.batch_size=32
    data.transforms.0.antialias=True evals.test.data.transforms.0.antialias=True
  finetune:folder,resize,class_weights checkpoints.every_fraction=0.1
    checkpoints.best_metric=test/mean_per_class_accuracy data.order.target=None
    data.transforms.0.antialias=True evals.test.data.transforms.0.antialias=None
  train_folder:labels=a+b,class_weights data.source.targets.columns=('a','b')
    data.source.targets.target=Labels evals.test.train.split=[:90%]
    evals.test.target=MultiLabel data.order.target=None
    objective.target=labels_xent
    objective.positive_weights.target=positive_weights
    objective.class_weights.target=None data.source.stratified=True
    checkpoints.best_metric=test/mean_average_precision schedule.lr=0.004
    optimizer.target=muon optimizer.weight_decay=0.05 optimizer.clip_norm=1.0
    schedule.warmup_fraction=0.1 total_epochs=30.0
  train_folder:order=2<1,Ti/16,max_patches=9 data.order.power=0.5
    data.source.targets.target=Grades schedule.lr=0.001
    data.source.targets.order=('2','1') evals.test.target=Grades
    model.head.target=OrdinalHead
    checkpoints.best_metric=test/quadratic_weighted_kappa
    model.pooling.target=Mean data.transforms.1.max_patches=9
    data.transforms.1.area=(0.6,1.0) evals.test.data.transforms.0.area=None
  finetune:folder,number=a,max_patches=9 data.source.targets.columns=('a',)
    data.source.targets.target=Numbers data.source.stratified=False
    evals.test.target=Regression model.keep_aspect=True
    objective.target=squared_error model.head.target=ScaledHead
    checkpoints.best_metric=test/r2 model.head.moments.target=moments
    data.transforms.max_patches=9 data.transforms.area=(0.05,1.0)
    evals.test.data.transforms.area=None data.batch_size=64 schedule.lr=0.01
    schedule.warmup_fraction=0.1
  finetune:folder,B/16,adam,polyak optimizer.weight_decay=0.05 schedule.lr=0.001
    optimizer.clip_norm=1.0 ema.decay=0.9999 data.batch_size=512
    data.transforms.0.antialias=True checkpoints.best_metric=None
    data.order.target=None
  pretrain_folder:dinov2,S/16,batch=1024 schedule.lr=0.004
  pretrain_folder:dinov2,from_weights,batch=1024 schedule.lr=0.0004
    schedule.warmup_fraction=0.1 optimizer.thaw_fraction=0.05
    optimizer.freeze=('(?!objective/|mask$).*',)
  evaluate:folder,logistic,layers=1+2,flip,size=96 image_shape=(96,96,3)
    evals.frozen.features=('block_0','block_1') evals.frozen.flip=True
    evals.frozen.statistics=('mean','max','std')
    evals.frozen.readouts.logistic.standardize=True
    evals.frozen.readouts.logistic.C=(0.001,0.01,0.1,1.0)
  evaluate:patches,layers=6+9 image_shape=(224,224,3)
    evals.patches.data.train.transforms.0.size=224
    evals.patches.data.test.source.split=test
    evals.patches.readouts.linear.features=('map_-1',)
    evals.patches.readouts.near_6.features=('map_5',)
    evals.patches.readouts.linear_layers.features=('map_5','map_8')
  pretrain_folder:dino,patches evals.patches.every_fraction=0.25
  evaluate:tfds,labels=a+b,flip evals.test.target=MultiLabel
    evals.test.flip=True evals.test.data.source.targets.target=Labels
  fewshot:knn evals.frozen.readouts.fewshot.shots=(1,5,10,25)
    evals.frozen.readouts.fewshot.l2=(1024.0,)
    evals.frozen.readouts.knn.k=(1,5,10,20)
"""


@pytest.mark.parametrize('row', re.split(r'\n  (?=\S)', VALUES)[1:])
def test_values(row):
  config, *values = row.split()
  name, _, argument = config.partition(':')
  found = flat(load_config(name, argument))
  for path, value in (x.split('=', 1) for x in values):
    shown = str(found.get(path)).replace(' ', '')
    is_class = path.endswith('target')
    assert (shown.split('.')[-1] if is_class else shown) == value, path
