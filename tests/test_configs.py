"""Every file in configs/, in every variant that it lists.

Large ones are traced, in shapes only; tiny ones really run, on TFDS sets and a
folder of the same names and splits that are made here.
"""

import functools
import importlib
import io
import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import config_dict
from PIL import Image

from vit_jax import assemble, sharding
from vit_jax import train as train_lib
from vit_jax.build import ConfigError, Reader, instantiate, resolve
from vit_jax.data import pipeline
from vit_jax.durations import to_steps

ROOT = pathlib.Path(__file__).parents[1]
FILES = [
  path.stem
  for path in sorted((ROOT / 'configs').glob('*.py'))
  if 'def get_config(' in path.read_text()
]
OURS = [name for name in FILES if name != 'quickstart']
CLASSES = {
  'imagenet2012': 1000,
  'imagenet21k': 21_843,
  'jft': 18_291,
  'my_set': 7,
  'cifar10': 10,
  'cifar100': 100,
  'oxford_iiit_pet': 37,
  'oxford_flowers102': 102,
  'folder': 5,
}


def _module(name):
  # Where users start: configs are imported from the root of the repository.
  if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
  return importlib.import_module(f'configs.{name}')


def _config(name, argument=''):
  return _module(name).get_config(argument)


def _variants(tiny):
  for name in OURS:
    for argument in _module(name).VARIANTS:
      if argument.endswith('tiny') == tiny:
        yield name, argument


def _replace_data(config):
  """Noise of the right number of classes in place of data sets."""
  classes = CLASSES[config.data.source.get('name', 'folder')]
  source = {
    'target': 'vit_jax.data.builtin.Synthetic',
    'image_size': (30, 40),
    'num_classes': classes,
    'num_examples': 2,
  }
  for part in (config, *config.evals.values()):
    part.data.source = config_dict.ConfigDict(source)
  return config


def _trace(config):
  """Shapes of the parameters after one step, built as train() builds it."""
  config = Reader(config)
  data = resolve(config.data)
  mesh = sharding.make_mesh(**resolve(config.get('mesh', {})))
  spec = pipeline.image_spec(data['source'], data.get('transforms', ()))
  steps_of = functools.partial(
    to_steps, batch_size=data['batch_size'], num_examples=1_000_000_000
  )
  total_steps = steps_of(config, 'total', default=...)
  steps_of = functools.partial(steps_of, total_steps=total_steps)
  model = assemble.model(config.model, data['source'])
  preprocess = assemble.preprocess(config)
  loss_fn = instantiate(config.objective, model, preprocess=preprocess)
  lr_fn = assemble.schedule(config.schedule, steps_of)
  make_tx = assemble.optimizer(config.optimizer, lr_fn)
  evaluators = assemble.evaluators(config, model, preprocess, mesh, steps_of)
  assert evaluators
  resolve(config.get('checkpoint')), resolve(config.get('init_from'))
  steps_of(config, 'log_every')
  ema_decay = config.get('ema_decay')
  init = functools.partial(
    train_lib.init_state,
    model=model,
    images=jax.ShapeDtypeStruct((1, *spec), jnp.float32),
    tx=make_tx,
    ema=bool(ema_decay),
  )
  state = jax.eval_shape(init, jax.random.key(config.get('seed', 0)))
  step_fn = functools.partial(
    train_lib.train_step,
    loss_fn=loss_fn,
    tx=make_tx(state.params),
    accum_steps=config.get('accum_steps', 1),
    ema_decay=ema_decay,
  )
  config.check_all_read('train')
  size = data['batch_size']
  batch = {
    'image': jax.ShapeDtypeStruct((size, *spec), jnp.uint8),
    'label': jax.ShapeDtypeStruct((size,), jnp.int32),
  }
  after, metrics = jax.eval_shape(step_fn, state, batch)
  assert metrics['loss'].shape == () and metrics['loss'].dtype == jnp.float32
  shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (state, after))
  assert shapes[0] == shapes[1]
  return after.params


# Parameters of the bare backbones at 224 px, class token included, and width.
BARE = {
  'Ti/16': (5_524_416, 192),
  'S/32': (22_493_952, 384),
  'S/16': (21_665_664, 384),
  'B/32': (87_455_232, 768),
  'B/16': (85_798_656, 768),
  'L/32': (305_510_400, 1024),
  'L/16': (303_301_632, 1024),
  'H/14': (630_764_800, 1280),
}


def _count(model, *, classes, pixels=224, hidden=False):
  bare, width = BARE[model]
  patch = int(model.split('/')[1])
  grown = (pixels // patch) ** 2 - (224 // patch) ** 2
  hidden = width * width + width if hidden else 0
  return bare + grown * width + hidden + width * classes + classes


def test_counts_are_those_of_the_paper():
  """Released models; with tanh layer and 21,843 classes; at 384 and 518 px."""
  assert _count('B/16', classes=1000) == 86_567_656
  assert _count('S/32', classes=21_843, hidden=True) == 31_051_347
  assert _count('L/16', classes=1000, pixels=384) == 304_715_752
  assert _count('H/14', classes=1000, pixels=518) == 633_470_440


def _expected_count(name, argument):
  found = re.search(r'[A-Z]i?/\d+', argument)
  model = found.group() if found else 'B/16'
  if name == 'finetune':
    data = _module(name).TABLE_4.get(argument.split(',')[0], ('folder',))[0]
    pixels = {
      'imagenet,L/16,polyak': 512,
      'imagenet,H/14,polyak': 518,
      'flowers,S/16,size=224,resize': 224,
    }.get(argument, 384)
    return _count(model, classes=CLASSES[data], pixels=pixels)
  if name == 'pretrain_s16_better_plain':
    # Neither class token nor learned positions (197 of them).
    classes = 5 if 'folder' in argument else 1000
    return _count('S/16', classes=classes, hidden=True) - 384 - 197 * 384
  data = {
    'pretrain_imagenet': 'folder' if 'folder' in argument else 'imagenet2012',
    'pretrain_imagenet21k': 'imagenet21k',
    'pretrain_jft': 'my_set' if 'my_set' in argument else 'jft',
  }[name]
  return _count(model, classes=CLASSES[data], hidden=True)


@pytest.mark.parametrize('name, argument', list(_variants(tiny=False)))
def test_initialises_and_steps_in_shapes(name, argument):
  config = _replace_data(_config(name, argument))
  config.model.scan = True  # traces one layer in place of up to 32
  params = _trace(config)
  count = sum(x.size for x in jax.tree.leaves(params))
  assert count == _expected_count(name, argument)


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
"""


@pytest.mark.parametrize('row', TABLE_3.strip().splitlines())
def test_table_3(row):
  data, argument, *cells, decay, wd, dropout, clip, ksteps, images = row.split()
  config = _config(f'pretrain_{data}', argument)
  assert [config.total_epochs, config.schedule.lr] == [float(x) for x in cells]
  assert config.schedule.decay == decay
  assert config.schedule.warmup_steps == 10_000
  assert config.data.batch_size == 4096
  adam = config.optimizer
  assert adam.target.endswith('.adam') and (adam.b1, adam.b2) == (0.9, 0.999)
  assert adam.weight_decay == float(wd)
  assert config.model.dropout == float(dropout)
  assert str(adam.clip_norm) == clip
  assert config.model.pooling == 'token'
  steps = to_steps(
    config,
    'total',
    batch_size=config.data.batch_size,
    num_examples=float(images) * 1e6,
  )
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
  config = _config('finetune', data)
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
  assert config.ema_decay is None
  dev = _config('finetune', f'{data},dev,lr=.001,L/16,polyak')
  assert dev.data.source.split == f'train[:{percent}%]'
  assert list(dev.evals) == ['dev']
  assert dev.evals.dev.data.source.split == f'train[{percent}%:]'
  assert dev.schedule.lr == 0.001 and dev.ema_decay == 0.9999
  assert dev.data.transforms[0]['size'] == 512


def test_better_plain_vit():
  config = _config('pretrain_s16_better_plain')
  model, adam = config.model, config.optimizer
  assert (model.pooling, model.posemb) == ('gap', 'sincos2d')
  assert (model.dropout, model.stochastic_depth) == (0.0, 0.0)
  assert config.total_epochs == 90 and config.data.batch_size == 1024
  assert (config.schedule.lr, config.schedule.warmup_steps) == (1e-3, 10_000)
  assert (adam.weight_decay, adam.clip_norm) == (0.1, 1.0)
  assert 'RandAugment' in _module('pretrain_s16_better_plain').__doc__
  steps = to_steps(
    config, 'total', batch_size=1024, num_examples=1_281_167 * 99 // 100
  )
  assert steps == pytest.approx(111_476, abs=1)


@pytest.mark.parametrize('name', OURS)
def test_a_wrong_argument_lists_what_is_allowed(name):
  with pytest.raises(ValueError, match=r'(?s)does not take.*B/61.*tiny'):
    _config(name, 'B/61')


@pytest.mark.parametrize(
  'argument, message',
  [
    ('B/16,L/16', "'B/16' and 'L/16' both set 'model'"),
    ('epochs=many', 'epochs=NUMBER'),
    ('tiny=1', "'tiny=1'"),
    ('model=B/16', "'model=B/16'"),
  ],
)
def test_arguments_that_make_no_sense(argument, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    _config('pretrain_imagenet', argument)


@pytest.mark.parametrize('argument', ['folder,dev', 'pets,epochs=3'])
def test_finetune_arguments_that_contradict(argument):
  with pytest.raises(ValueError, match=r'folder'):
    _config('finetune', argument)


@pytest.mark.parametrize('name', OURS)
def test_documents_every_word_of_its_arguments(name):
  module = _module(name)
  for argument in module.VARIANTS:
    for word in filter(None, argument.split(',')):
      assert word.split('=')[0] in module.__doc__


def test_evaluators_follow_the_source():
  config = _config('pretrain_jft', 'B/16,name=my_set')
  config.data.source.data_dir, config.data.source.label_key = '/data', 'kind'
  source = config.evals.val.data.source
  assert (source.name, source.data_dir) == ('my_set', '/data')
  assert source.label_key == 'kind'
  assert source.split != config.data.source.split


# From here on things really run.


def _jpeg(seed):
  rng = np.random.default_rng(seed)
  file = io.BytesIO()
  pixels = rng.integers(0, 256, (40, 50, 3), np.uint8)
  Image.fromarray(pixels).save(file, 'JPEG')
  file.seek(0)
  return file


def _prepare(data_dir, name, version, sizes):
  """A TFDS set of that name, in ArrayRecord files: {split: size}."""
  import tensorflow_datasets as tfds

  def examples(size):
    for i in range(size):
      yield i, {'image': _jpeg(i), 'label': i % CLASSES[name]}

  class Prepared(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version(version)
    pkg_dir_path = data_dir

    def _info(self):
      features = {
        'image': tfds.features.Image(
          shape=(None, None, 3), encoding_format='jpeg'
        ),
        'label': tfds.features.ClassLabel(num_classes=CLASSES[name]),
      }
      features = tfds.features.FeaturesDict(features)
      return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, manager):
      del manager
      return {split: examples(size) for split, size in sizes.items()}

    def _generate_examples(self):
      raise NotImplementedError

  Prepared.name = name
  Prepared(data_dir=data_dir, file_format='array_record').download_and_prepare()


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  """TFDS sets of all names in the configs; versions are those TFDS has."""
  path = tmp_path_factory.mktemp('tfds')
  train_and_test = {'train': 100, 'test': 20}
  _prepare(path, 'imagenet2012', '5.1.0', {'train': 100, 'validation': 20})
  _prepare(path, 'imagenet21k', '1.0.0', {'full': 60})
  _prepare(path, 'jft', '1.0.0', {'train': 60})
  _prepare(path, 'cifar10', '3.0.2', train_and_test)
  _prepare(path, 'cifar100', '3.0.2', train_and_test)
  _prepare(path, 'oxford_iiit_pet', '4.0.0', train_and_test)
  _prepare(path, 'oxford_flowers102', '2.1.1', train_and_test)
  return path


@pytest.fixture(scope='module')
def image_folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('folder')
  for i in range(60):
    folder = path / f'class_{i % CLASSES["folder"]}'
    folder.mkdir(exist_ok=True)
    (folder / f'{i}.JPG').write_bytes(_jpeg(i).read())
  return path


@pytest.fixture(scope='module')
def pretrained(data_dir, tmp_path_factory):
  """{file: workdir} of each pre-training, run on first use."""

  @functools.cache
  def run(name):
    config = _config(name, 'B/16,tiny' if 'plain' not in name else 'tiny')
    config.data.source.data_dir = str(data_dir)
    workdir = tmp_path_factory.mktemp(name)
    state = train_lib.train(config, workdir)
    assert int(state.step) == 4
    return workdir

  return run


def _last_record(workdir):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  record = {}
  for line in lines:
    record |= json.loads(line)
  return record


@pytest.mark.parametrize('name', [x for x in OURS if 'pretrain' in x])
def test_tiny_pretraining_runs(name, pretrained):
  workdir = pretrained(name)
  record = _last_record(workdir)
  assert record['step'] == 4 and np.isfinite(record['train/loss'])
  config = json.loads((workdir / 'config.json').read_text())
  for evaluator in config['evals']:
    assert 0 <= record[f'{evaluator}/accuracy'] <= 1


def _tiny_finetunings():
  """Those that differ from another in the name of the data only are slow."""
  for name, argument in _variants(tiny=True):
    if name == 'finetune':
      slow = re.match('cifar|flowers', argument)
      marks = [pytest.mark.slow] if slow else []
      yield pytest.param(argument, marks=marks)


@pytest.mark.parametrize('argument', list(_tiny_finetunings()))
def test_tiny_finetuning_runs(
  argument, pretrained, data_dir, image_folder, tmp_path, capsys
):
  config = _config('finetune', argument)
  config.init_from.path = str(pretrained('pretrain_imagenet'))
  if argument.startswith('folder'):
    config.data.source.path = str(image_folder)
  else:
    config.data.source.data_dir = str(data_dir)
  state = train_lib.train(config, tmp_path)
  classes = CLASSES[config.data.source.get('name', 'folder')]
  assert state.params['head']['kernel'].shape == (32, classes)
  assert state.params['pos_embedding'].shape == (1, 24, 24, 32)
  record = _last_record(tmp_path)
  assert record['test/num_examples'] == (6 if 'folder' in argument else 20)
  assert 'pos_embedding' in capsys.readouterr().out


def test_finetuning_a_better_plain_vit(pretrained, data_dir, tmp_path):
  """As the docstring of its pre-training says, and on the dev split."""
  config = _config('finetune', 'cifar10,S/16,dev,polyak,tiny')
  config.model.pooling, config.model.posemb = 'gap', 'sincos2d'
  config.init_from.path = str(pretrained('pretrain_s16_better_plain'))
  config.data.source.data_dir = str(data_dir)
  state = train_lib.train(config, tmp_path)
  assert state.ema is not None
  assert _last_record(tmp_path)['dev/num_examples'] == 2


@pytest.mark.parametrize('mode', ['final', 'dev'])
@pytest.mark.parametrize('data', ['cifar10', 'cifar100', 'flowers'])
def test_finetuning_opens_its_data(data, mode, data_dir):
  config = _config('finetune', f'{data},{mode},tiny')
  config.data.source.data_dir = str(data_dir)
  ((evaluator, evaluation),) = config.evals.items()
  train = resolve(config.data)['source']
  test = resolve(evaluation.data)['source']
  held_out = 2 if 'cifar' in data else 10
  if mode == 'dev':
    assert (len(train), len(test)) == (100 - held_out, held_out)
  else:
    assert (evaluator, len(train), len(test)) == ('test', 100, 20)


@pytest.mark.parametrize(
  'name, where',
  [(name, where) for name in OURS for where in ('', 'model', 'optimizer')]
  + [('finetune', 'data'), ('finetune', 'schedule')],
)
def test_a_key_that_nothing_reads_is_an_error(name, where, tmp_path):
  module = _module(name)
  argument = next(x for x in module.VARIANTS if x.endswith('tiny'))
  config = _replace_data(_config(name, argument))
  if 'init_from' in config:
    del config.init_from  # from scratch will do
  part = config[where] if where else config
  part.wieght_decay = 0.1
  with pytest.raises(ConfigError, match='wieght_decay'):
    train_lib.train(config, tmp_path)


def test_finetuning_needs_a_checkpoint(tmp_path):
  config = _replace_data(_config('finetune', 'cifar10,tiny'))
  with pytest.raises(ConfigError, match='path'):
    train_lib.train(config, tmp_path)


@pytest.mark.skipif('quickstart' not in FILES, reason='there is none')
def test_quickstart_traces():
  """Each of its runs that trains; those alike but for seed and data once."""
  seen = set()
  for config in _config('quickstart').runs.values():
    if config.run != 'vit_jax.train.train':
      continue
    parts = [config.get(k) for k in ('model', 'optimizer', 'schedule')]
    key = str([*parts, config.data.get('transforms'), config.get('ema_decay')])
    if key not in seen:
      _trace(config)
    seen.add(key)
  assert len(seen) >= 2
