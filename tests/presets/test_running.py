"""Tiny configs run, and studies report what their runs have written.

The TFDS sets have the names and splits of the real ones, with noise as images.
"""

import functools
import io
import json
import shutil

import jax
import made_up
import numpy as np
import packed
import preset_configs as presets
import pytest
from nightly import nightly
from preset_configs import CLASSES, load_config, load_module, write_weights
from tiny import encode

from vit_jax import config as configs
from vit_jax.data import vtab
from vit_jax.runs.records import read_records
from vit_jax.tools import samples


def jpeg(seed):
  pixels = np.random.default_rng(seed).integers(0, 256, (40, 50, 3), np.uint8)
  return encode(pixels, 'JPEG')


def prepare(data_dir, name, version, sizes):
  """Write a TFDS set of this name, in ArrayRecord files: {split: size}."""
  import tensorflow_datasets as tfds

  features = {
    'image': tfds.features.Image(shape=(None, None, 3), encoding_format='jpeg'),
    'label': tfds.features.ClassLabel(num_classes=CLASSES[name]),
  }
  examples = {
    split: [
      {'image': io.BytesIO(jpeg(i)), 'label': i % CLASSES[name]}
      for i in range(size)
    ]
    for split, size in sizes.items()
  }
  made_up.prepare_new(data_dir, name, version, features, examples)


@pytest.fixture(scope='session')
def data_dir(tmp_path_factory):
  path = tmp_path_factory.mktemp('tfds')
  train_and_test = {'train': 100, 'test': 20}
  prepare(path, 'imagenet2012', '5.1.0', {'train': 100, 'validation': 20})
  prepare(path, 'imagenet21k', '1.0.0', {'full': 60})
  prepare(path, 'jft', '1.0.0', {'train': 60})
  prepare(path, 'jft_3b', '1.0.0', {'train': 60})
  prepare(path, 'cifar10', '3.0.2', train_and_test)
  prepare(path, 'oxford_iiit_pet', '4.0.0', train_and_test)
  return path


@pytest.fixture(scope='module')
def image_folder(tmp_path_factory):
  count = CLASSES['folder']
  files = {f'class_{i % count}/{i}.JPG': jpeg(i) for i in range(60)}
  return packed.write_folder(tmp_path_factory.mktemp('folder'), files)


@pytest.fixture(scope='module')
def pretrained(data_dir, tmp_path_factory):
  """Return a function from a config to its workdir; it runs once."""

  @functools.cache
  def run(name, argument):
    config = load_config(name, f'{argument},tiny')
    config.data.source.data_dir = str(data_dir)
    workdir = tmp_path_factory.mktemp(name)
    assert int(configs.run(config, workdir).step) == 4
    return workdir

  return run


@pytest.mark.parametrize(
  ('argument', 'metric'),
  nightly(
    [
      ('labels=a+b', 'mean_average_precision'),
      ('number=n', 'r2'),
      ('order=1<2<3', 'quadratic_weighted_kappa'),
    ],
    but=[('number=n', 'r2')],
  ),
)
def test_any_labels_of_a_table(argument, metric, image_folder, tmp_path):
  files = sorted(image_folder.rglob('*.JPG'))
  rows = ['file,a,b,n,label,object']
  for i, file in enumerate(files):
    empty = '' if i == 3 else i % 2
    rows.append(f'{file.name},{empty},{i % 3 % 2},{i / 7},{i % 3 + 1},{i // 4}')
  (tmp_path / 't.csv').write_text('\n'.join(rows))
  config = load_config('train_folder', f'{argument},tiny')
  config.data.source.path = str(image_folder)
  config.data.source.csv = str(tmp_path / 't.csv')
  config.data.source.group_key = 'object'
  config.checkpoints.every_fraction = 0.5
  state = configs.run(config, tmp_path / 'run')
  record = last_record(tmp_path / 'run')
  assert np.isfinite(record[f'test/{metric}'])
  assert record['test/num_examples'] % 4 == 0  # whole groups
  described = json.loads((tmp_path / 'run/model.json').read_text())
  assert described['targets']['target'].startswith('vit_jax.data.targets.')
  shutil.copytree(tmp_path / 'run', tmp_path / 'again')
  shutil.rmtree(tmp_path / 'again/checkpoints/4')
  again = configs.run(config, tmp_path / 'again')
  equal = jax.tree.map(np.array_equal, state.params, again.params)
  assert all(jax.tree.leaves(equal))


def last_record(workdir):
  return {k: v for r in read_records(workdir) for k, v in r.items()}


B16 = 'pretrain_paper', 'imagenet,B/16'
BIT = 'pretrain_bit', 'R50x1'
HYBRID = 'pretrain_paper', 'jft,R50+L/32'
PLAIN = 'pretrain_better_plain', 'S/16'


@pytest.mark.parametrize(
  ('name', 'argument'),
  nightly(
    [
      *(B16, BIT, HYBRID, PLAIN),
      ('pretrain_paper', 'imagenet21k,B/16'),
      ('pretrain_augreg', 'imagenet,Ti/16,light2'),
      ('deit', 'deit3,B/16'),
      ('pretrain_scaling_vit', 'So400m/14'),
      ('flexivit', 'imagenet21k'),
    ],
    but=[B16],
  ),
)
def test_tiny_pretraining_runs(name, argument, pretrained):
  workdir = pretrained(name, argument)
  record = last_record(workdir)
  assert record['step'] == 4 and np.isfinite(record['train/loss'])
  config = json.loads((workdir / 'config.json').read_text())
  for evaluator in config['evals']:
    assert 0 <= record[f'{evaluator}/accuracy'] <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
  'argument',
  [
    x
    for x in (*load_module('pretrain_folder').METHODS, 'lejepa,labels')
    if x != 'simdino'  # LAPACK's calls deadlock on several simulated devices
  ],
)
def test_tiny_pretraining_without_labels(argument, image_folder, tmp_path):
  path = str(image_folder)
  config = load_config('pretrain_folder', f'{argument},S/16,tiny')
  config.data.source.path = path
  configs.run(config, tmp_path / 'run')
  record = last_record(tmp_path / 'run')
  assert np.isfinite(record['train/loss']) and record['watch/rank'] >= 1
  assert ('labels/own/linear/accuracy' in record) == ('labels' in argument)
  sheets = sorted(x.name for x in (tmp_path / 'run').glob('sheet-*.png'))
  assert len(sheets) >= 2 and 'nearest' in sheets[-1]
  further = {
    'finetune': 'folder,size=32,tiny',
    'pretrain_folder': f'{argument},from_weights,tiny',
  }
  for name, words in further.items():
    config = load_config(name, words)
    config.init_from.path = str(tmp_path / 'run')
    config.data.source.path = path
    configs.run(config, tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'words'), [('deit', 'soft,tiny'), ('flexivit', 'imagenet,tiny')]
)
def test_tiny_distillation_runs(name, words, data_dir, tmp_path):
  config = load_config(name, words)
  config.data.source.data_dir = str(data_dir)
  path = write_weights(tmp_path / 'teacher.npz', 'mu/8', 1000, size=8)
  presets.find_distillation(config).teacher.path = path
  if 'init_from' in config:
    config.init_from.path = path
  configs.run(config, tmp_path / 'run')
  record = last_record(tmp_path / 'run')
  assert record['step'] == 4 and np.isfinite(record['train/teacher_loss'])


@pytest.mark.slow
def test_tiny_feature_distillation_runs(image_folder, tmp_path):
  config = load_config('distill_features', 'labels,tiny')
  config.data.source.path = str(image_folder)
  path = write_weights(tmp_path / 'teacher.npz', 'mu/8', size=40)
  config.objective.teacher.path = path
  configs.run(config, tmp_path / 'run')
  record = last_record(tmp_path / 'run')
  assert np.isfinite(record['train/loss']) and record['step'] == 4
  assert 0 <= record['watch/shared_neighbours'] <= 1
  assert 'labels/own/linear/accuracy' in record
  sheets = sorted(x.name for x in (tmp_path / 'run').glob('sheet-*.png'))
  assert [x.split('-', 2)[2] for x in sheets[:2]] == [
    'views-of-images.png',
    'pca-of-patches.png',
  ]


def test_finetuning_on_a_folder(pretrained, image_folder, tmp_path, capsys):
  config = load_config('finetune', 'folder,size=256,tiny')
  config.init_from.path = str(pretrained(*B16))
  config.data.source.path = str(image_folder)
  state = configs.run(config, tmp_path)
  assert state.params['head']['kernel'].shape == (32, 5)
  assert state.params['pos_embedding'].shape == (1, 16, 16, 32)
  assert last_record(tmp_path)['test/num_examples'] == 6
  assert 'pos_embedding' in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
  ('first', 'words'),
  [(BIT, 'R50x1,bit'), (HYBRID, 'R50+L/32,dev'), (PLAIN, 'S/16,dev,polyak')],
)
def test_tiny_finetuning(first, words, pretrained, data_dir, tmp_path):
  weights = pretrained(*first)
  config = load_config('finetune', f'cifar10,{words},size=224,tiny')
  if first == PLAIN:  # as in the docstring of its pre-training
    override = (
      'model.pooling.target=vit_jax.models.pooling.Mean',
      'model.posemb.target=vit_jax.models.posemb.SinCos2d',
    )
    for part in override:
      assert f'--config.{part}' in load_module(first[0]).__doc__
    configs.override(config, override)
  config.init_from.path = str(weights)
  config.data.source.data_dir = str(data_dir)
  state = configs.run(config, tmp_path)
  assert state.params['head']['kernel'].shape[-1] == 10
  assert (state.ema is not None) == ('polyak' in words)
  (evaluator,) = config.evals
  assert evaluator == ('dev' if 'dev' in words else 'test')
  assert 0 <= last_record(tmp_path)[f'{evaluator}/accuracy'] <= 1


@pytest.mark.slow
def test_masked_patches_then_finetuning(data_dir, tmp_path, capsys):
  config = load_config('masked_patches', 'B/16,downsampled,imagenet,tiny')
  config.data.source.data_dir = str(data_dir)
  configs.run(config, tmp_path / 'masked')
  record = last_record(tmp_path / 'masked')
  for name in ('loss', 'accuracy'):
    assert np.isfinite(record[f'train/{name}'])
    assert np.isfinite(record[f'minival/{name}'])
  config = load_config('finetune', 'cifar10,B/16,size=224,tiny')
  config.init_from.path = str(tmp_path / 'masked')
  config.data.source.data_dir = str(data_dir)
  state = configs.run(config, tmp_path / 'cifar10')
  assert 'mask' not in state.params and 'cls' in state.params
  assert 'mask 1x1x32 dropped' in capsys.readouterr().out


# Evaluations.


def test_evaluate_on_another_split(pretrained, data_dir, tmp_path):
  config = load_config('evaluate', 'tfds,size=28')
  source = config.evals.test.data.source
  source.data_dir, source.name = str(data_dir), 'imagenet2012'
  source.split = 'validation'
  config.init_from.path = str(pretrained(*B16))
  result = configs.run(config, tmp_path / 'accuracy')
  assert result['test/num_examples'] == 20


@pytest.mark.slow
def test_evaluate_patches(pretrained, tmp_path, monkeypatch):
  monkeypatch.setattr(samples, 'MASKED', {'train': 6, 'test': 4})
  samples.main([f'{tmp_path}/masked', '--masks'])
  config = load_config('evaluate', 'patches,size=28,layers=1')
  config.evals.patches.data.train.source.path = f'{tmp_path}/masked'
  config.init_from.path = str(pretrained(*B16))
  result = configs.run(config, tmp_path / 'run')
  found = {f'{x}{of}' for x in ('linear', 'near') for of in ('', '_1')}
  assert {x for x in found if 0 < result[f'patches/{x}/miou'] < 1} == found


@pytest.mark.slow
def test_evaluate_features(pretrained, image_folder, tmp_path):
  config = load_config('evaluate', 'folder,fewshot,knn,size=36')
  for part, split in (('train', None), ('test', '[:20]')):
    source = config.evals.frozen.data.images[part].source
    source.path, source.split = str(image_folder), split
  config.init_from.path = str(pretrained(*B16))
  result = configs.run(config, tmp_path)
  assert 0 <= result['frozen/images/fewshot/10shot'] <= 1
  assert any(x.startswith('frozen/images/knn') for x in result)


@pytest.mark.slow
def test_fewshot_on_several_data_sets(pretrained, data_dir, tmp_path):
  config = load_config('fewshot', 'pets,cifar100,size=28')
  config.evals.frozen.data.cifar100 = config.evals.frozen.data.pets
  config.evals.frozen.data.pets.test.source.data_dir = str(data_dir)  # all
  config.evals.frozen.readouts.fewshot.shots = (1,)
  config.init_from.path = str(pretrained(*B16))
  result = configs.run(config, tmp_path)
  each = [result[f'frozen/{x}/fewshot/1shot'] for x in ('pets', 'cifar100')]
  assert result['frozen/mean/fewshot/1shot'] == pytest.approx(np.mean(each))


# Studies, of which some runs have left what a report reads.


def write(workdir, name, *records):
  (workdir / name).mkdir()
  lines = [json.dumps({'step': i, **r}) + '\n' for i, r in enumerate(records)]
  (workdir / name / 'metrics.jsonl').write_text(''.join(lines))
  (workdir / name / 'done.json').write_text('{"seconds": 1.0}')


def test_report_of_table_6(tmp_path):
  config = load_config('scaling', 'compute,B/32,R50x1,seeds=2')
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


def test_report_of_vtab(tmp_path):
  config = load_config('vtab', 'L/16')
  config.shared.weights = 'weights.npz'
  for task in vtab.TASKS:
    for seed in range(3):
      accuracy = len(task) / 100 + 0.1 * seed
      write(tmp_path, f'{task}_seed{seed}', {'test/accuracy': accuracy})
  (made,) = configs.run(config, tmp_path, report_only=True)
  assert len(made) == 23
  for group in ('Natural (7)', 'Mean of 19'):
    tasks = [
      task
      for task, x in vtab.TASKS.items()
      if group.startswith(('Mean', x.group.capitalize()))
    ]
    mean = np.mean([len(x) for x in tasks]) / 100 + 0.1
    assert made[group]['ours']['mean'] == pytest.approx(mean)
    std = 0.1 * np.std([0, 1, 2])
    assert made[group]['ours']['std'] == pytest.approx(std)


@pytest.mark.slow
def test_a_tiny_study_of_photographs_runs(tmp_path, monkeypatch):
  made_up.install_elpv(monkeypatch)
  config = load_config('photographs', 'tiny')
  accuracies, *_ = configs.run(config, tmp_path)
  assert len(accuracies) == 11 and all(accuracies.values())
  assert (tmp_path / 'photographs.png').exists()


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'members'),
  [
    ('photographs_trained', 'layers_seed0 tuned_seed0'),
    ('teachers', 'distilled_seed0 tuned_distilled_seed0 lejepa_anchor_seed0'),
    ('dense', 'start_seed0 random_seed0 lejepa_anchor_seed0'),
  ],
)
def test_studies_of_trained_weights(name, members, tmp_path, monkeypatch):
  made_up.install_elpv(monkeypatch)
  config, weights = load_config(name, 'tiny'), tmp_path / 'tiny.npz'
  config.shared.weights = write_weights(weights, 'ViT-Ti/14', size=224)
  if name == 'dense':
    monkeypatch.setattr(samples, 'MASKED', {'train': 8, 'test': 4})
    samples.main([f'{tmp_path}/masked', '--masks'])
    config.shared.masked = f'{tmp_path}/masked'
  for member in members.split():
    tables = configs.run(config, tmp_path / 'study', member=member)
  assert any(tables) and list(tmp_path.glob('study/*.md'))


@pytest.mark.slow
def test_a_tiny_study_runs(tmp_path):
  """Selects a rate on the dev split and tests it, also on ReaL labels."""
  data_dir = tmp_path / 'data'
  held_out = {'validation': 20}
  made_up.prepare(data_dir, 'imagenet2012', {'train': 200} | held_out)
  made_up.prepare(data_dir, 'imagenet2012_real', held_out)
  config = load_config('transfer', 'imagenet,seeds=2,size=224,tiny')
  config.shared.weights = write_weights(tmp_path / 'tiny.npz', 'ViT-mu/2')
  config.shared.data_dir = str(data_dir)
  config.shared.model.dtype = 'float32'
  made, _ = configs.run(config, tmp_path / 'study')
  assert list(made) == ['ImageNet', 'ImageNet-ReaL']
  for row in made.values():
    assert len(row['ours']['values']) == 2
  record = last_record(tmp_path / 'study' / 'imagenet_final_seed1')
  assert record['test/num_examples'] == 20
  assert record['real/num_examples'] + record['real/num_unlabelled'] == 20


@pytest.mark.slow
@pytest.mark.parametrize(
  ('config', 'members'),
  [
    (
      'scaling compute,R50+B/32,tiny',
      'pretrain_R50_B32_7ep finetune_R50_B32_7ep_imagenet_seed0',
    ),
    ('scaling data,B/32,sizes=9M+all,tiny', 'pretrain_B32_9M'),
    ('scaling_embedded tiny', 'ResNet_480_seed0'),
    ('recipes_embedded tiny', 'glyphs_baseline_lr1e-03 glyphs_baseline_seed0'),
    ('ablations pooling,tiny', 'pretrain_gap_3e-4'),
    ('self_supervised_embedded tiny', 'lejepa_lr5e-04 lejepa_steps_seed0'),
    (
      'science parts_glyphs,tiny',
      'steps_all_lr1e-03 steps_all_seed0 less_rope_seed0',
    ),
    ('race all,tiny', 'baseline_seed0 muon_seed0'),
  ],
)
def test_members_of_tiny_studies_run(config, members, data_dir, tmp_path):
  config = load_config(*config.split())
  if 'shared' in config:
    config.shared.data_dir = str(data_dir)
  for member in members.split():
    reports = configs.run(config, tmp_path, member=member)
  assert reports and reports[0]
  assert list(tmp_path.glob('*.md'))
