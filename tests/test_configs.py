"""Every file in configs/, with every argument of config_variants.py.

Here the configs are loaded and traced, in shapes only, and their values are
compared with the paper's tables. test_configs_run.py runs tiny ones.
"""

import importlib
import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from config_variants import VARIANTS
from ml_collections import ConfigDict

from vit_jax import config as configs
from vit_jax import train as train_lib
from vit_jax.data import pipeline, vtab
from vit_jax.models import names
from vit_jax.optim import optimizers as optim
from vit_jax.optim.durations import Duration, Timeline, epochs
from vit_jax.runs import dry_runs
from vit_jax.weights import bundle, formats

ROOT = pathlib.Path(__file__).parents[1]
CLASSES = {
  'imagenet2012': 1000,
  'imagenet21k': 21_843,
  'jft': 18_291,
  'jft_3b': 29_593,
  'my_set': 7,
  'cifar10': 10,
  'cifar100': 100,
  'oxford_iiit_pet': 37,
  'oxford_flowers102': 102,
  'resisc45': 45,
  'kitti': 4,
  'folder': 5,
}


def load_module(name):
  # Users start in the root of the repository and import configs from there.
  if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
  return importlib.import_module(f'configs.{name}')


def load_config(name, argument=''):
  return load_module(name).get_config(argument)


TRAINING = [
  name for name in VARIANTS if load_config(name).run == 'vit_jax.train.train'
]


def test_every_config_is_covered():
  """Every file has variants, and every kind of config has a test."""
  files = {
    path.stem
    for path in (ROOT / 'configs').glob('*.py')
    if 'def get_config(' in path.read_text()
  }
  assert files == set(VARIANTS)
  assert files == {
    *TRAINING,
    *('evaluate', 'evaluate_imagenet', 'fewshot', 'quickstart'),
    *('scaling_compute', 'scaling_data', 'scaling_shape'),
    *('ablations', 'scaling_embedded', 'transfer', 'vtab'),
    *('masked_patches_embedded', 'recipes_embedded', 'gradient_precision'),
  }


def variants(tiny):
  for name in TRAINING:
    for argument in VARIANTS[name]:
      if argument.endswith('tiny') == tiny:
        yield name, argument


def replace_data(config, **fields):
  """Replace the data by noise with the right number of classes."""
  source = {
    'target': 'vit_jax.data.embedded.digits.Synthetic',
    'image_size': (30, 40),
    'num_classes': CLASSES[config.data.source.get('name', 'folder')],
    'num_examples': 1_000_000_000,
    **fields,
  }
  config.data.source = ConfigDict(source)
  if 'class_weights' in config.objective:  # of the user's data
    del config.objective.class_weights
    config.objective.class_weights = (1.0,) * source['num_classes']
  for evaluator in config.evals.values():
    evaluator.data.source = ConfigDict(source | {'num_examples': 2})
  return config


def write_teacher(folder, num_classes):
  """Write a small ViT of zeros for images of 8 pixels; return its path."""
  model = names.create('mu/8', num_classes=num_classes)
  shapes = bundle.shapes(model, (8, 8, 3)).items()
  params = {path: np.zeros(x.shape, x.dtype) for path, x in shapes}
  path = folder / 'teacher.npz'
  formats.write(bundle.Weights(model, params, (8, 8, 3)), path, 'vit_jax')
  return str(path)


def find_distillation(config):
  """Return the distillation in the objective, or None."""
  objective = config.objective
  while objective is not None and 'teacher' not in objective:
    objective = objective.get('objective')
  return objective


def assert_documented(module, argument, *more):
  text = module.__doc__ + ''.join(x.__doc__ for x in more)
  models = load_module('finetune').MODELS
  for word in filter(None, argument.split(',')):
    assert word in models or word.split('=')[0] in text


_traced = set()  # models, and everything else
_params = {}  # of models, by their text and the shape of images


@pytest.fixture
def trace(monkeypatch, tmp_path):
  """A function that initialises a run in shapes, and returns its parameters.

  It does all that training does before the first step, and traces the step. If
  both the kind of model and the rest were traced before, except for sizes and
  other numbers, it checks the keys and initialises the model only.
  """
  made = {}

  def report(model, state, step_fn, data, image_shape, mesh, timeline):
    del model, mesh, timeline
    made['params'] = state.params
    batch = {
      'image': jax.ShapeDtypeStruct((data.batch_size, *image_shape), jnp.uint8),
      'label': jax.ShapeDtypeStruct((data.batch_size,), jnp.int32),
    }
    after, metrics = jax.eval_shape(step_fn, state, batch)
    assert metrics['loss'].shape == () and metrics['loss'].dtype == jnp.float32
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (state, after))
    assert shapes[0] == shapes[1]

  monkeypatch.setattr(dry_runs, 'report_training', report)
  # The weights of init_from are not there.
  monkeypatch.setattr(train_lib.formats, 'find', lambda *args: None)

  def trace(config):
    config.data.batch_size -= config.data.batch_size % 8  # devices
    if config.get('init_from'):  # not read, see above
      config.init_from.path = '/weights'
    if distilled := find_distillation(config):
      classes = config.data.source.num_classes
      distilled.teacher.path = write_teacher(tmp_path, classes)
    kinds = _kinds(config)
    if kinds <= _traced:
      configs.plan_run(config)  # every key
      return _initialise(config)
    _traced.update(kinds)
    configs.run(config, tmp_path, dry_run=True)
    return made['params']

  return trace


def _initialise(config):
  """Return the shapes of a model's parameters."""
  data = pipeline.Data(**configs.resolve(config.data))
  example = data.first_example()
  image_shape = example['image'].shape
  model = configs.resolve(config.model)
  model = train_lib.with_num_classes(model, data.source)
  key = repr(model), image_shape
  if key not in _params:
    images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    _params[key] = shapes['params']
  return _params[key]


def _kinds(config):
  """Return texts for the model of a run, and for the rest, without numbers."""
  config = json.loads(config.to_json_best_effort())

  def names_only(value):
    if isinstance(value, dict):
      return {k: names_only(v) for k, v in sorted(value.items())}
    return value if isinstance(value, str | bool) else None

  parts = ('objective', 'optimizer', 'schedule', 'mesh')
  rest = [names_only(config.get(part)) for part in parts]
  rest += [x['target'] for x in config['evals'].values()]
  rest += [config.get('mesh'), 'ema_decay' in config]
  return {str(names_only(config['model'])), str(rest)}


# Parameters of the bare backbones at 224 px, class token included, and width;
# of hybrids, those of the released models less heads of 1000 classes.
BARE = {
  'Ti/16': (5_524_416, 192),
  # M/16 and So400m/14 by the closed formula.
  'M/16': (38_324_736, 512),
  'So400m/14': (412_444_656, 1152),
  'S/32': (22_493_952, 384),
  'S/16': (21_665_664, 384),
  'B/32': (87_455_232, 768),
  'B/16': (85_798_656, 768),
  'L/32': (305_510_400, 1024),
  'L/16': (303_301_632, 1024),
  'H/14': (630_764_800, 1280),
  'g/14': (1_011_202_432, 1408),
  'G/14': (1_842_775_680, 1664),
  'R50+B/16': (98_659_112 - 769_000, 768),
  'R50+B/32': (110_945_832 - 769_000, 768),
  'R50+L/16': (316_483_624 - 1_025_000, 1024),
  'R50+L/32': (328_994_856 - 1_025_000, 1024),
  'R26+S/32': (36_431_912 - 385_000, 384),
  'R26+B/32': (101_383_976 - 769_000, 768),
  'R+Ti/16': (6_337_704 - 193_000, 192),
}
MIXERS = {  # with 1000 classes, and width
  'Mixer-B/16': (59_880_472, 768),
  'Mixer-B/32': (60_293_428, 768),
  'Mixer-L/16': (208_196_168, 1024),
}
RESNETS = {
  '50': (3, 4, 6, 3),
  '101': (3, 4, 23, 3),
  '152': (3, 8, 36, 3),
  '200': (3, 24, 36, 3),
}


def _count(model, *, classes, pixels=224, hidden=False):
  if model in MIXERS:
    count, width = MIXERS[model]
    return count + (classes - 1000) * (width + 1)
  bare, width = BARE[model]
  # Despite its name R+Ti/16 reduces images by 32.
  patch = 32 if model == 'R+Ti/16' else int(model.split('/')[1])
  grown = (pixels // patch) ** 2 - (224 // patch) ** 2
  hidden = width * width + width if hidden else 0
  return bare + grown * width + hidden + width * classes + classes


def _count_resnet(model, *, classes, postact=False):
  depth, factor = model[1:].split('x')
  c = 64 * int(factor)
  count = 7 * 7 * 3 * c + 2 * c * postact
  for stage, units in enumerate(RESNETS[depth]):
    inside = 64 * int(factor) * 2**stage
    outside = 4 * inside
    for unit in range(units):
      count += c * inside + 9 * inside**2 + inside * outside
      count += 2 * (2 * inside + (outside if postact else c))  # norms
      if unit == 0:  # projection
        count += c * outside + 2 * outside * postact
      c = outside
  return count + 2 * c * (not postact) + (c + 1) * classes


def test_counts_are_those_of_the_paper():
  """Released models; with tanh layer and 21,843 classes; at 384 and 518 px."""
  # ResNets: those of timm.
  assert _count_resnet('R50x1', classes=1000) == 25_549_352
  assert _count_resnet('R101x3', classes=1000) == 387_934_888
  assert _count_resnet('R152x4', classes=1000) == 936_533_224
  assert _count('B/16', classes=1000) == 86_567_656
  assert _count('S/32', classes=21_843, hidden=True) == 31_051_347
  assert _count('L/16', classes=1000, pixels=384) == 304_715_752
  assert _count('H/14', classes=1000, pixels=518) == 633_470_440


def _expected_count(name, argument):
  words = argument.split(',')
  default = {
    'train_folder': 'Ti/16',
    'pretrain_deit': 'S/16',
    'distill_patient': 'R50x1',
    'algoperf': 'S/16',
  }.get(name, 'B/16')
  model = next((x for x in words if re.search(r'/\d|^R\d+x', x)), default)
  data = {
    'pretrain_imagenet': 'imagenet2012',
    'pretrain_imagenet21k': 'imagenet21k',
    'pretrain_jft': 'my_set' if 'my_set' in argument else 'jft',
    'pretrain_bit': 'imagenet21k' if 'imagenet21k' in words else 'imagenet2012',
    'pretrain_better_plain': 'imagenet2012',
    'algoperf': None if 'synthetic' in words else 'imagenet2012',
    'pretrain_augreg': (
      'imagenet21k' if 'imagenet21k' in words else 'imagenet2012'
    ),
    'pretrain_deit': 'imagenet2012',
    'pretrain_deit3': words[0] if words[0] == 'imagenet21k' else 'imagenet2012',
    'finetune_deit3': 'imagenet2012',
    'pretrain_scaling_vit': 'my_set' if 'my_set' in argument else 'jft_3b',
    'distill_patient': 'imagenet2012',
  }.get(name)
  if name == 'finetune':
    others = {'resisc45': ('resisc45',), 'kitti': ('kitti',)}
    table_4 = load_module(name).TABLE_4 | others
    data = table_4.get(words[0], ('folder',))[0]
  if name == 'masked_patches':
    patch = int(model.split('/')[1])
    outputs = 16 * 512 if 'downsampled' in words else 512
    if 'pixels' in words:
      outputs = patch * patch * 3
    mask = BARE[model][1]
    return _count(model, classes=outputs) + mask
  classes = CLASSES['folder' if 'folder' in words or not data else data]
  if re.match(r'R\d+x', model):
    return _count_resnet(model, classes=classes, postact='postact' in words)
  if name == 'finetune':
    pixels = {
      'imagenet,L/16,polyak': 512,
      'imagenet,H/14,polyak': 518,
      'flowers,S/16,size=224,resize': 224,
      'flowers,R26+S/32,size=224': 224,
      'imagenet,S/16,augreg,size=224': 224,
    }.get(argument, 384)
    return _count(model, classes=classes, pixels=pixels)
  if name in ('pretrain_better_plain', 'algoperf'):
    # Neither class token nor learned positions (197 of them).
    width = BARE[model][1]
    return _count(model, classes=classes, hidden=True) - 198 * width
  if name == 'pretrain_deit':
    count, width = _count(model, classes=classes), BARE[model][1]
    if {'distilled', 'soft'} & set(words):
      count += 2 * width + (width + 1) * classes  # token, position and head
    return count
  if 'deit3' in name:
    return _count_deit3(model, load_config(name, argument), classes)
  if name == 'train_folder' and model not in MIXERS:
    width = BARE[model][1]  # as in the better plain ViT
    return _count(model, classes=classes) - 198 * width
  if name == 'pretrain_augreg':
    hidden = 'imagenet21k' not in words
    return _count(model, classes=classes, hidden=hidden)
  if name == 'pretrain_scaling_vit':
    # MAP's query, attention, norm and MLP for the class token and its position.
    d, _, m, _ = names.SIZES[model.split('/')[0]]
    extra = d + 4 * (d * d + d) + 2 * d + d * m + m + m * d + d - 2 * d
    return _count(model, classes=classes) + extra
  return _count(model, classes=classes, hidden=True)


def _count_deit3(model, config, classes):
  """Its LayerScales, and no position of the class token."""
  depth = names.SIZES[model.split('/')[0]][1]
  size = config.evals[next(iter(config.evals))].data.transforms[-1]['size']
  count = _count(model, classes=classes, pixels=size)
  return count + (2 * depth - 1) * BARE[model][1]


@pytest.mark.parametrize('name, argument', list(variants(tiny=False)))
def test_initialises_and_steps_in_shapes(name, argument, trace):
  config = replace_data(load_config(name, argument))
  left_out = _shorten(config.model)
  params = trace(config)
  count = sum(x.size for x in jax.tree.leaves(params))
  assert count + left_out == _expected_count(name, argument)


def _shorten(model):
  """Leave out most units of a ResNet, in place; return their parameters.

  The layers of other models are scanned: one is traced instead of up to 48.
  """
  if 'depth' in model:
    model.scan = True
  resnet = model if 'stages' in model else model.embedding
  left_out = 0
  for stage, units in enumerate(resnet.get('stages', ())):
    width = 64 * model.get('width_factor', 1) * 2**stage
    left_out += (units - 1) * (17 * width**2 + 12 * width)
  if left_out:
    resnet.stages = (1,) * len(resnet.stages)
  return left_out


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
  config = load_config(f'pretrain_{data}', argument)
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
  config = load_config('finetune', data)
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
  assert 'ema_decay' not in config
  dev = load_config('finetune', f'{data},dev,lr=.001,L/16,polyak')
  assert dev.data.source.split == f'train[:{percent}%]'
  assert list(dev.evals) == ['dev']
  assert dev.evals.dev.data.source.split == f'train[{percent}%:]'
  assert dev.schedule.lr == 0.001 and dev.ema_decay == 0.9999
  assert dev.data.transforms[0]['size'] == 512


def test_rates_that_the_paper_does_not_state():
  """R200x3 is in table 6 only."""
  with pytest.raises(ValueError, match=r'rate of R200x3\. Give one, lr=RATE'):
    load_config('pretrain_jft', 'R200x3')
  config = load_config('pretrain_jft', 'R200x3,lr=5e-4')
  assert (config.schedule.lr, config.total_epochs) == (5e-4, 14)


def _rates(config, num_examples, epochs):
  """Return the learning rates in the middle of these epochs."""
  schedule = dict(config.schedule)
  warmup = Duration(schedule.pop('warmup_steps'), 'steps')
  schedule = optim.Schedule(**schedule, warmup=warmup)
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
  config = load_config('pretrain_jft', 'R50x1,sgd,epochs=40')
  _check_bit_sgd(config)
  rates = _rates(config, 303_000_000, [9, 10, 22, 23, 29, 30, 36, 37])
  levels = [0, 1, 1, 2, 2, 3, 3, 4]
  assert rates == pytest.approx([0.48 * 0.1**n for n in levels])
  assert load_config('pretrain_jft', 'R152x2,sgd').total_epochs == 7
  assert load_config('pretrain_jft', 'R152x2,sgd,lr=.1').schedule.lr == 0.1
  with pytest.raises(ValueError, match=r"'sgd' is for ResNets .* R50\+B/16"):
    load_config('pretrain_jft', 'R50+B/16,sgd')


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
  assert 'form' not in config.model
  postact = load_config('pretrain_bit', f'{data},R101x1,postact')
  assert postact.model.form == 'postact'


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


@pytest.mark.parametrize('data', ['imagenet', 'cifar10', 'pets', 'folder'])
def test_bit_mixes_larger_data_sets(data):
  objective = load_config('finetune', f'{data},R50x1,bit').objective
  if data in ('imagenet', 'cifar10'):  # of 20k images and more
    assert objective.mixer.alpha == 0.1
  else:
    assert objective.target.endswith('.softmax_xent')


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


def test_augreg_published_in_the_study():
  cells = load_config('transfer', 'L/16,augreg,size=224').report[0]['cells']
  values = {x['column']: x['value'] for x in cells if 'value' in x}
  assert values == {
    'AugReg, 30 epochs': pytest.approx(0.8205),
    'AugReg, 300 epochs': pytest.approx(0.8398),
  }


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
  assert config.objective.per == 'batch'
  steps = timeline(config, 1_281_167 * 99 // 100).total_steps
  assert steps == pytest.approx(111_476, abs=1)


def test_algoperf():
  config = load_config('algoperf')
  assert config.data.source.split == 'train'  # all of it
  assert {x.data.source.split for x in config.evals.values()} == {'validation'}
  assert config.data.batch_size == 1024 and config.total_steps == 186_666
  crop, _, augment = config.data.transforms
  assert (crop['area'], crop['interpolation']) == ((0.08, 1.0), 'bicubic')
  assert (augment['num_layers'], augment['magnitude']) == (2, 10)
  assert config.objective.mixer.alpha == 0.2
  schedule, nadamw = config.schedule, config.optimizer
  assert nadamw.target == 'optax.nadamw' and nadamw.decay_mask == ('.*',)
  assert nadamw.b1 == pytest.approx(0.9327, abs=1e-4)
  assert nadamw.weight_decay == pytest.approx(0.0812, abs=1e-4)
  assert (schedule.decay, schedule.warmup_fraction) == ('cosine', 0.02)
  target = load_config('algoperf', 'target_setting')
  assert (target.total_steps, target.optimizer.b1) == (140_000, 0.7132)
  with pytest.raises(ValueError, match="'synthetic' and 'folder'"):
    load_config('algoperf', 'synthetic,folder')


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
  words = f'{data},L/16,{level},reg=0.1,weight_decay=0.03'
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
  assert (adam.weight_decay, adam.clip_norm) == (0.03, 1.0)
  assert (config.schedule.lr, config.schedule.warmup_steps) == (1e-3, 10_000)
  assert (config.total_epochs, config.data.batch_size) == (300, 4096)
  if augment:
    faulty = load_config('pretrain_augreg', f'{words},faults')
    assert faulty.data.transforms[-1]['faults']
  else:
    with pytest.raises(ValueError, match=r"'faults' are of RandAugment"):
      load_config('pretrain_augreg', f'{words},faults')


def test_augreg_defaults_are_the_best_of_figure_4():
  module = load_module('pretrain_augreg')
  page = (ROOT / 'docs' / 'augreg.md').read_text()
  for (data, number), best in module.BEST.items():
    title = 'ImageNet' if data == 'imagenet' else 'ImageNet-21k'
    table = page.split(f'### {title}, {number} epochs\n\n')[1].split('\n\n')[0]
    cells = {}
    for line in table.splitlines()[2:]:
      model, reg, *values = (x.strip() for x in line.strip('|').split('|'))
      for level, value in zip(module.LEVELS, values, strict=True):
        cells[model, level, float(reg)] = int(value)
    assert {model for model, _, _ in cells} == set(best) == set(module.MODELS)
    for model, setting in best.items():
      highest = max(cells[key] for key in cells if key[0] == model)
      assert cells[model, *setting] == highest


def _names(transforms):
  return [x['target'].rpartition('.')[2] for x in transforms]


def test_deit():
  config = load_config('pretrain_deit', 'S/16,distilled')
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
  assert config.model.stochastic_depth == 0.1 and config.ema_decay == 0.99996
  assert (config.schedule.lr, config.optimizer.weight_decay) == (1e-3, 0.05)
  assert list(config.evals) == ['val'] and config.data.source.split == 'train'
  plain = load_config('pretrain_deit', 'S/16')
  assert 'pooling' not in plain.model
  assert plain.objective.objective == distillation.objective
  soft = load_config('pretrain_deit', 'soft')
  assert soft.objective.objective.temperature == 3


# DeiT III's commands. Pre-training: data, model; epochs, learning rate, weight
# decay, pixels, stochastic depth. Fine-tuning: the same.
DEIT3 = """
  pretrain imagenet    S/16 800 4e-3 0.05 224 0.05
  pretrain imagenet    B/16 800 3e-3 0.05 192 0.2
  pretrain imagenet    L/16 800 3e-3 0.05 192 0.45
  pretrain imagenet    H/14 800 3e-3 0.05 154 0.6
  pretrain imagenet21k S/16 240 1e-3 0.02 224 0.05
  pretrain imagenet21k B/16 240 1e-3 0.02 224 0.1
  pretrain imagenet21k L/16 240 1e-3 0.02 224 0.3
  pretrain imagenet21k H/14  90 1e-3 0.02 126 0.5
  finetune imagenet    S/16  20 1e-5 0.1  384 0.0
  finetune imagenet    B/16  20 1e-5 0.1  224 0.2
  finetune imagenet    L/16  20 1e-5 0.1  224 0.45
  finetune imagenet    H/14  20 1e-5 0.1  224 0.55
  finetune imagenet21k S/16  50 3e-4 0.02 224 0.05
  finetune imagenet21k B/16  50 3e-4 0.02 224 0.15
  finetune imagenet21k L/16  50 3e-4 0.02 224 0.4
  finetune imagenet21k H/14  50 3e-4 0.02 224 0.45
"""


@pytest.mark.parametrize('row', DEIT3.strip().splitlines())
def test_deit3(row):
  stage, data, model, *numbers = row.split()
  epochs, lr, decay, size, depth = map(float, numbers)
  config = load_config(f'{stage}_deit3', f'{data},{model}')
  assert (config.total_epochs, config.schedule.lr) == (epochs, lr)
  assert config.schedule.warmup_epochs == 5
  assert config.optimizer.weight_decay == decay
  resolution = (stage, data) == ('finetune', 'imagenet')
  rule = 'optax.adamw' if resolution else 'vit_jax.optim.optimizers.lamb'
  assert config.optimizer.target == rule
  assert config.data.batch_size == (512 if resolution else 2048)
  assert config.data.transforms[0]['size'] == size
  small, crop = config.evals[next(iter(config.evals))].data.transforms
  assert small['size'] == crop['size'] == size
  assert config.model.stochastic_depth == (depth, depth)
  assert config.model.block.layerscale_init == 1e-4
  crop, _, *others = _names(config.data.transforms)
  from_scratch = (stage, data) == ('pretrain', 'imagenet')
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
  assert inner == ('mean_over_classes' if from_scratch else 'softmax_xent')


def test_layer_decay():
  for name in ('finetune', 'finetune_deit3'):
    config = load_config(name, 'layer_decay=.75')
    assert config.optimizer.layer_decay.rate == 0.75
    assert 'layer_decay' not in load_config(name).optimizer


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


@pytest.mark.parametrize('name', TRAINING)
def test_a_wrong_argument_lists_what_is_allowed(name):
  with pytest.raises(ValueError, match=r'(?s)does not take.*B/61.*tiny'):
    load_config(name, 'B/61')


@pytest.mark.parametrize(
  'argument, message',
  [
    ('B/16,L/16', "'B/16' and 'L/16' both set 'model'"),
    (
      'epochs=many',
      "'epochs=many': expected a number above 0, as in epochs=300",
    ),
    ('epochs=nan', "'epochs=nan': expected a number"),
    ('epochs=-3', "'epochs=-3': expected a number above 0"),
    ('epochs', "'epochs': expected a number"),
    ('tiny=1', "'tiny=1': 'tiny' takes no value"),
    ('model=B/16', "'model=B/16' (did you mean 'B/16'?)"),
    ('b/16', "(did you mean 'B/16'?)"),
    ('folder,tinny', "'tinny' (did you mean 'tiny'?)"),
  ],
)
def test_arguments_that_make_no_sense(argument, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    load_config('pretrain_imagenet', argument)


@pytest.mark.parametrize('argument', ['folder,dev', 'pets,epochs=3'])
def test_finetune_arguments_that_contradict(argument):
  with pytest.raises(ValueError, match=r'folder'):
    load_config('finetune', argument)


@pytest.mark.parametrize(
  'name, argument, message',
  [
    ('finetune', 'R50x1,bit,inception', "leave out 'inception'"),
    ('finetune', 'R50+B/16,postact', "'postact' is a form of ResNets"),
    ('pretrain_jft', 'L/16,postact', "'postact' is a form of ResNets"),
    ('pretrain_augreg', 'imagenet,light0', "the paper's name, 'light1'"),
    ('finetune', 'kitti', "'kitti' is for AugReg's protocol"),
    ('finetune', 'cifar10,augreg', "AugReg has no 'cifar10'"),
    ('finetune', 'pets,augreg,bit', "'augreg' and 'bit' contradict"),
    ('finetune', 'pets,augreg,steps=400', 'Use one of 500, 2500'),
    ('finetune', 'pets,steps=500', "'steps=' is for AugReg's"),
    ('finetune', 'imagenet,augreg,v2', "'v2' is for 'imagenet' with 'dev'"),
    ('finetune', 'kitti,augreg,resize', "leave out 'resize'"),
    ('transfer', 'cifar10,augreg', "'cifar10' is not in AugReg"),
    ('transfer', 'kitti', "'kitti' is not in table 4"),
    ('pretrain_bit', 'imagenet21k,R50x1,folder', "'folder' is for 'imagenet'"),
    ('pretrain_augreg', 'imagenet21k,folder', "'folder' is for 'imagenet'"),
  ],
)
def test_arguments_that_contradict(name, argument, message):
  with pytest.raises(ValueError, match=message):
    load_config(name, argument)


@pytest.mark.parametrize('name', TRAINING)
def test_documents_every_word_of_its_arguments(name):
  for argument in VARIANTS[name]:
    assert_documented(load_module(name), argument)


def test_evaluators_follow_the_source():
  config = load_config('pretrain_jft', 'B/16,name=my_set')
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
  with pytest.raises(ValueError, match=r"'folder' is for 'imagenet'"):
    load_config('masked_patches', 'folder')


@pytest.mark.parametrize('argument', VARIANTS['masked_patches_embedded'])
def test_masked_patches_embedded_traces(argument, trace):
  module = load_module('masked_patches_embedded')
  config = module.get_config(argument)
  for name in config.order[:3]:  # the others differ in seed and data
    run = config.runs[name]
    for part in (run, *run.evals.values()):
      if 'Fractals' in part.data.source.target:  # drawn when opened
        replace_data(run, image_size=24, num_classes=500, channels=1)
    _shorten(run.model)
    trace(run)
  assert_documented(module, argument)


def test_quickstart_traces(trace):
  runs = load_config('quickstart').runs
  for name in ('pretrain', 'scratch_5shot_seed0', 'finetune_5shot_seed0'):
    _shorten(runs[name].model)
    trace(runs[name])  # the others differ in seed and data


@pytest.mark.parametrize(
  'name, argument',
  [
    (name, argument)
    for name in ('transfer', 'vtab')
    for argument in VARIANTS[name]
    if not argument.endswith('tiny')
  ],
)
def test_transfer_studies_trace(name, argument, monkeypatch, trace):
  """Each kind of their runs: those that differ in more than data and rate."""
  for task in vtab.TASKS.values():
    monkeypatch.setitem(CLASSES, task.tfds, task.num_classes)
  config = load_config(name, argument)
  config.shared.weights = '/weights.npz'
  seen = set()
  for run in config.runs.values():
    run = run.copy_and_resolve_references()
    for part in (run, *run.evals.values()):  # the noise is not 0 and 1
      part.data.transforms = [
        x for x in part.data.transforms if not x['target'].endswith('.Scale')
      ]
    key = str([list(run.evals), run.data.transforms, run.schedule.decay])
    if key in seen:
      continue
    seen.add(key)
    _shorten(replace_data(run, num_classes=5).model)
    if 'best_of' in run:  # the study's
      del run.best_of
    trace(run)
  assert_documented(load_module(name), argument, load_module('finetune'))
