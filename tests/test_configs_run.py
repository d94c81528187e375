"""Tiny variants of the configs run.

The TFDS sets have the names and splits of the real ones, with noise as images.
"""

import functools
import io
import json

import jax
import numpy as np
import pytest
from config_variants import VARIANTS
from PIL import Image
from test_configs import (
  CLASSES,
  TRAINING,
  find_distillation,
  load_config,
  load_module,
  replace_data,
  write_teacher,
)

from vit_jax import config as configs
from vit_jax.config import resolve
from vit_jax.runs.metrics import read_records


@pytest.fixture(scope='module', autouse=True)
def compile_fast():
  """Programs run a few times here, so compiling them well does not pay."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)


def _jpeg(seed):
  rng = np.random.default_rng(seed)
  file = io.BytesIO()
  pixels = rng.integers(0, 256, (40, 50, 3), np.uint8)
  Image.fromarray(pixels).save(file, 'JPEG')
  file.seek(0)
  return file


def _prepare(data_dir, name, version, sizes):
  """Write a TFDS set of this name, in ArrayRecord files: {split: size}."""
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
  """TFDS sets of all names in the configs, with TFDS's versions."""
  return prepare_all(tmp_path_factory.mktemp('tfds'))


def prepare_all(path):
  train_and_test = {'train': 100, 'test': 20}
  _prepare(path, 'imagenet2012', '5.1.0', {'train': 100, 'validation': 20})
  _prepare(path, 'imagenet21k', '1.0.0', {'full': 60})
  _prepare(path, 'jft', '1.0.0', {'train': 60})
  _prepare(path, 'jft_3b', '1.0.0', {'train': 60})
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
  """Function from a file to the workdir of its run, which it does once."""
  models = {
    'pretrain_augreg': 'imagenet,Ti/16,light2,',
    'pretrain_bit': 'R50x1,',
    'pretrain_deit3': 'imagenet,B/16,',
    'pretrain_scaling_vit': 'So400m/14,',
    'pretrain_jft': 'R50+L/32,',
    'pretrain_better_plain': 'S/16,',
  }

  @functools.cache
  def run(name):
    config = load_config(name, f'{models.get(name, "B/16,")}tiny')
    config.data.source.data_dir = str(data_dir)
    workdir = tmp_path_factory.mktemp(name)
    state = configs.run(config, workdir)
    assert int(state.step) == 4
    return workdir

  return run


def _last_record(workdir):
  return {k: v for r in read_records(workdir) for k, v in r.items()}


@pytest.mark.parametrize(
  'name',
  [
    x if x == 'pretrain_imagenet' else pytest.param(x, marks=pytest.mark.slow)
    for x in TRAINING
    if 'pretrain' in x and x != 'pretrain_deit'  # see distillation
  ],
)
def test_tiny_pretraining_runs(name, pretrained):
  workdir = pretrained(name)
  record = _last_record(workdir)
  assert record['step'] == 4 and np.isfinite(record['train/loss'])
  config = json.loads((workdir / 'config.json').read_text())
  for evaluator in config['evals']:
    assert 0 <= record[f'{evaluator}/accuracy'] <= 1


@pytest.mark.slow
def test_tiny_distillation_runs(data_dir, tmp_path):
  config = load_config('pretrain_deit', 'soft,tiny')
  config.data.source.data_dir = str(data_dir)
  path = write_teacher(tmp_path, num_classes=1000)
  find_distillation(config).teacher.path = path
  configs.run(config, tmp_path / 'run')
  record = _last_record(tmp_path / 'run')
  assert record['step'] == 4 and np.isfinite(record['train/teacher_loss'])
  assert 0 <= record['val/accuracy'] <= 1


@pytest.mark.parametrize(
  'argument',
  # Data sets have the same parts, so one is enough.
  [
    'folder,size=256,tiny',
    pytest.param('cifar10,tiny', marks=pytest.mark.slow),
  ],
)
def test_tiny_finetuning_runs(
  argument, pretrained, data_dir, image_folder, tmp_path, capsys
):
  config = load_config('finetune', argument)
  config.init_from.path = str(pretrained('pretrain_imagenet'))
  if argument.startswith('folder'):
    config.data.source.path = str(image_folder)
  else:
    config.data.source.data_dir = str(data_dir)
  state = configs.run(config, tmp_path)
  classes = CLASSES[config.data.source.get('name', 'folder')]
  assert state.params['head']['kernel'].shape == (32, classes)
  side = 16 if 'size=256' in argument else 24
  assert state.params['pos_embedding'].shape == (1, side, side, 32)
  record = _last_record(tmp_path)
  assert record['test/num_examples'] == (6 if 'folder' in argument else 20)
  assert 'pos_embedding' in capsys.readouterr().out


@pytest.mark.parametrize(
  'name, words',
  [
    pytest.param('pretrain_bit', 'R50x1,bit', marks=pytest.mark.slow),
    pytest.param('pretrain_jft', 'R50+L/32,dev', marks=pytest.mark.slow),
  ],
)
def test_finetuning_resnets_and_hybrids(
  name, words, pretrained, data_dir, tmp_path
):
  config = load_config('finetune', f'cifar10,{words},size=224,tiny')
  config.init_from.path = str(pretrained(name))
  config.data.source.data_dir = str(data_dir)
  state = configs.run(config, tmp_path)
  assert state.params['head']['kernel'].shape[-1] == 10
  (evaluator,) = config.evals
  assert 0 <= _last_record(tmp_path)[f'{evaluator}/accuracy'] <= 1


@pytest.mark.slow
def test_finetuning_a_mixer(data_dir, tmp_path):
  """Of a run from scratch: no config pre-trains one."""
  for data, init_from in (('cifar10', None), ('pets', tmp_path / 'cifar10')):
    config = load_config('finetune', f'{data},Mixer-B/16,tiny')
    config.data.source.data_dir = str(data_dir)
    if init_from is None:
      del config.init_from
    else:
      config.init_from.path = str(init_from)
    state = configs.run(config, tmp_path / data)
  assert state.params['head']['kernel'].shape[-1] == 37


@pytest.mark.slow
def test_finetuning_a_better_plain_vit(pretrained, data_dir, tmp_path):
  """As in the docstring of its pre-training, and on the dev split."""
  config = load_config('finetune', 'cifar10,S/16,dev,polyak,size=224,tiny')
  override = (
    'model.pooling.target=vit_jax.models.pooling.Mean',
    'model.posemb.target=vit_jax.models.posemb.SinCos2d',
  )
  for part in override:
    assert f'--config.{part}' in load_module('pretrain_better_plain').__doc__
  configs.override(config, override)
  config.init_from.path = str(pretrained('pretrain_better_plain'))
  config.data.source.data_dir = str(data_dir)
  state = configs.run(config, tmp_path)
  assert state.ema is not None
  assert _last_record(tmp_path)['dev/num_examples'] == 2


@pytest.mark.parametrize('mode', ['final', 'dev'])
@pytest.mark.parametrize(
  'data', ['cifar10', 'cifar100', 'flowers', 'pets', 'imagenet']
)
def test_finetuning_opens_its_data(data, mode, data_dir):
  config = load_config('finetune', f'{data},{mode},tiny')
  config.data.source.data_dir = str(data_dir)
  ((evaluator, evaluation),) = config.evals.items()
  train, test = resolve(config.data.source), resolve(evaluation.data.source)
  held_out = {'c': 2, 'i': 1}.get(data[0], 10)
  if mode == 'dev':
    assert (len(train), len(test)) == (100 - held_out, held_out)
  else:
    assert (evaluator, len(train), len(test)) == ('test', 100, 20)


@pytest.mark.parametrize(
  'name, where',
  [(name, where) for name in TRAINING for where in ('', 'model', 'optimizer')]
  + [('finetune', 'data'), ('finetune', 'schedule')],
)
def test_an_unknown_key_is_an_error(name, where):
  config = load_config(name, next(x for x in VARIANTS[name] if 'tiny' in x))
  part = config[where] if where else config
  part.wieght_decay = 0.1
  with pytest.raises(configs.ConfigError, match='wieght_decay'):
    configs.plan_run(config)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('argument', 'metrics'),
  [
    ('B/16,downsampled,imagenet,tiny', {'loss', 'accuracy'}),
    ('B/32,imagenet,pixels,tiny', {'loss'}),
  ],
)
def test_masked_patches_then_finetuning(
  argument, metrics, data_dir, tmp_path, capsys
):
  config = load_config('masked_patches', argument)
  config.data.source.data_dir = str(data_dir)
  configs.run(config, tmp_path / 'masked')
  record = _last_record(tmp_path / 'masked')
  for name in metrics:
    assert np.isfinite(record[f'train/{name}'])
    assert np.isfinite(record[f'{next(iter(config.evals))}/{name}'])
  assert ('train/accuracy' in record) == ('accuracy' in metrics)
  if 'pixels' in argument:
    return  # fine-tuning does not depend on the prediction

  model = argument.split(',')[0]
  config = load_config('finetune', f'cifar10,{model},size=224,tiny')
  config.init_from.path = str(tmp_path / 'masked')
  config.data.source.data_dir = str(data_dir)
  state = configs.run(config, tmp_path / 'cifar10')
  assert 'mask' not in state.params and 'cls' in state.params
  assert state.params['head']['kernel'].shape == (32, 10)
  assert 'mask 1x1x32 dropped' in capsys.readouterr().out


def test_finetuning_needs_a_checkpoint(tmp_path):
  config = replace_data(load_config('finetune', 'cifar10,tiny'))
  with pytest.raises(ValueError, match=r'init_from\.path'):
    configs.run(config, tmp_path)


def test_evaluate_runs(pretrained, data_dir, tmp_path):
  """On another split, with the model of the run."""
  accuracy = load_config('evaluate', 'tfds,size=28')
  source = accuracy.evals.test.data.source
  source.data_dir, source.name = str(data_dir), 'imagenet2012'
  source.split = 'validation'
  accuracy.init_from.path = str(pretrained('pretrain_imagenet'))
  result = configs.run(accuracy, tmp_path / 'accuracy')
  assert result['test/num_examples'] == 20


def test_evaluate_runs_fewshot(pretrained, image_folder, tmp_path):
  """At another size than the run's: its positions are interpolated."""
  config = load_config('evaluate', 'folder,fewshot,knn,size=36')
  for part, split in (('train', None), ('test', '[:20]')):
    source = config.evals.frozen.data.images[part].source
    source.path, source.split = str(image_folder), split
  config.init_from.path = str(pretrained('pretrain_imagenet'))
  result = configs.run(config, tmp_path)
  assert 0 <= result['frozen/images/fewshot/10shot'] <= 1
  assert result['frozen/images/knn/chosen_k'] in (1, 5, 10, 20)


def test_fewshot_runs_on_several_data_sets(pretrained, data_dir, tmp_path):
  config = load_config('fewshot', 'pets,cifar100,size=28')
  config.evals.frozen.data.pets.test.source.data_dir = str(data_dir)  # all
  config.evals.frozen.readouts.fewshot.shots = (1,)
  config.init_from.path = str(pretrained('pretrain_imagenet'))
  result = configs.run(config, tmp_path)
  each = [result[f'frozen/{x}/fewshot/1shot'] for x in ('pets', 'cifar100')]
  assert result['frozen/mean/fewshot/1shot'] == pytest.approx(np.mean(each))


@pytest.mark.parametrize(
  'name, argument',
  [(x, v) for x in ('evaluate', 'fewshot') for v in VARIANTS[x]],
)
def test_evaluations_have_no_unknown_keys(name, argument):
  configs.plan_run(load_config(name, argument))


def test_evaluation_needs_a_checkpoint(image_folder, tmp_path):
  config = load_config('evaluate', 'folder,size=28')
  config.evals.test.data.source.path = str(image_folder)
  with pytest.raises(ValueError, match=r'init_from\.path'):
    configs.run(config, tmp_path)
