"""Every config is checked, and one of each kind is traced, in shapes only."""

import re

import jax
import numpy as np
import preset_configs as presets
import pytest
from ml_collections import ConfigDict
from nightly import nightly
from preset_configs import CLASSES, ROOT, VARIANTS, load_config, variants
from tiny import recorded

from vit_jax import config as configs
from vit_jax.config import resolve
from vit_jax.tools.compile.lowering import lower
from vit_jax.weights import bundle
from vit_jax.zoo import names


def test_every_config_is_covered():
  files = {
    path.stem
    for path in (ROOT / 'configs').rglob('*.py')
    if 'def get_config(' in path.read_text()
  }
  kinds = presets.TRAINING, presets.STUDIES, presets.EVALUATIONS
  assert files == set(VARIANTS) == {x for kind in kinds for x in kind}


def set_paths(config):
  """Set what only the user knows, in place."""
  for part in (config, presets.find_distillation(config) or {}):
    for key in ('init_from', 'teacher'):
      if part.get(key):
        part[key].path = '/weights'
  for part in (config, *config.evals.values()):
    for key in ('path', 'name'):
      if 'source' in part.data and part.data.source.get(key, ...) is None:
        part.data.source[key] = '/data'


@pytest.mark.parametrize('name', presets.TRAINING)
def test_each_key_of_a_training_is_known(name):
  for argument in VARIANTS[name]:
    config = load_config(name, argument)
    set_paths(config)
    configs.plan_run(config)
  for where in ('', 'model', 'optimizer', 'data', 'schedule'):
    config = load_config(name, next(x for x in VARIANTS[name] if 'tiny' in x))
    part = config[where] if where else config
    part.wieght_decay = 0.1
    with pytest.raises(configs.ConfigError, match='wieght_decay'):
      configs.plan_run(config)


@pytest.mark.parametrize(('name', 'argument'), variants(presets.EVALUATIONS))
def test_each_key_of_an_evaluation_is_known(name, argument):
  configs.plan_run(load_config(name, argument))


PARAMETERS = {  # with 1000 classes at 224 px
  re.sub('ViT-|BiT-', '', name): count
  for name, count in recorded('parameters').items()
}


def count(model, classes, *, pixels=224, hidden=False):
  """Return the parameters of a model with a head, at a size."""
  if 'x' in model:
    width, grown = 2048 * int(model.split('x')[1]), 0
  else:
    width, patch = names.settings(model)['width'], int(model.split('/')[1])
    grown = (pixels // patch) ** 2 - (224 // patch) ** 2
  hidden = width * width + width if hidden else 0
  head = (classes - 1000) * (width + 1)
  return PARAMETERS[model] + grown * width + hidden + head


def map_head(model):
  """Return the parameters of MAP's query, attention, norm and MLP."""
  d, _, m, _ = names.SIZES[model.split('/')[0]]
  return d + 4 * (d * d + d) + 2 * d + d * m + m + m * d + d


I21K, JFT = CLASSES['imagenet21k'], CLASSES['jft']
TRACED = {  # (config, argument): parameters
  ('pretrain_paper', 'B/16'): count('B/16', 1000, hidden=True),
  ('pretrain_paper', 'imagenet21k,L/16,fsdp'): count('L/16', I21K, hidden=True),
  ('pretrain_paper', 'jft,R50+B/16'): count('R50+B/16', JFT, hidden=True),
  ('pretrain_paper', 'jft,H/14,fsdp'): count('H/14', JFT, hidden=True),
  ('pretrain_paper', 'jft,R50x1,sgd'): count('R50x1', JFT),
  ('pretrain_paper', 'jft,R152x2'): count('R152x2', JFT),
  ('pretrain_bit', 'imagenet21k,R101x3'): count('R101x3', I21K),
  ('pretrain_augreg', 'imagenet,B/16'): count('B/16', 1000, hidden=True),
  ('pretrain_augreg', 'imagenet21k,R50+L/32'): count('R50+L/32', I21K),
  # Neither class token nor learned positions (197 of them).
  ('pretrain_better_plain', 'S/16'): (
    count('S/16', 1000, hidden=True) - 198 * 384
  ),
  ('train_folder', 'Ti/16,size=224'): count('Ti/16', 5) - 198 * 192,
  # No class token.
  ('pretrain_scaling_vit', 'G/14,fsdp'): (
    count('G/14', 29_593) + map_head('G/14') - 2 * 1664
  ),
  ('pretrain_scaling_vit', 'So400m/14'): (
    count('So400m/14', 29_593) + map_head('So400m/14') - 2 * 1152
  ),
  ('deit', 'deit,S/16'): count('S/16', 1000),
  # A token, a position and a head.
  ('deit', 'deit,S/16,distilled'): count('S/16', 1000) + 2 * 384 + 385 * 1000,
  # LayerScales, and no position of the class token.
  ('deit', 'deit3,M/16'): count('M/16', 1000) + 23 * 512,
  ('deit', 'deit3_finetune,B/16,imagenet21k'): count('B/16', 1000) + 23 * 768,
  ('pretrain_vit5', 'S/16'): count('5-S/16', 1000),
  # A kernel of 8 px, and 7x7 positions.
  ('flexivit', 'imagenet21k'): (
    count('B/16', 21_843) - (3 * (16**2 - 8**2) + 197 - 49) * 768
  ),
  ('distill_patient', ''): count('R50x1', 1000),
  # No head, and two maps to the width of the teacher.
  ('distill_features', 'S/16'): count('S/16', 0) + 2 * 385 * 32,
  ('finetune', 'imagenet,L/16,polyak'): count('L/16', 1000, pixels=512),
  ('finetune', 'imagenet,H/14'): count('H/14', 1000, pixels=518),
  ('finetune', 'pets,B/16'): count('B/16', 37, pixels=384),
  ('finetune', 'cifar10,R50x1,bit'): count('R50x1', 10),
  # 512 colours, and the mask vector.
  ('masked_patches', 'B/16'): count('B/16', 512) + 768,
  ('masked_patches', 'B/16,pixels'): count('B/16', 768) + 768,
}


def shorten(model):
  """Leave out most units of a ResNet, in place; return their parameters.

  The layers of other models are in a loop: one is traced instead of up to 48.
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


def trace(config, tmp_path, num_classes=5, image_shape=None):
  """Trace the step of a training; return the number of its parameters."""
  set_paths(config)
  config.data.batch_size -= config.data.batch_size % 8  # devices
  if distilled := presets.find_distillation(config):
    path = tmp_path / 'teacher.npz'
    presets.write_weights(path, 'mu/8', num_classes, size=8)
    distilled.teacher.path = str(path)
  left_out = shorten(config.model)
  _, row = lower(
    config, jax.devices(), num_classes=num_classes, image_shape=image_shape
  )
  return row['parameters'] + left_out


BY_DAY = [  # each kind of model and loss, and a mesh that shards parameters
  *[('pretrain_paper', 'imagenet21k,L/16,fsdp'), ('masked_patches', 'B/16')],
  *[('pretrain_augreg', 'imagenet,B/16'), ('deit', 'deit,S/16,distilled')],
  *[('pretrain_scaling_vit', 'So400m/14'), ('pretrain_vit5', 'S/16')],
  *[('finetune', 'cifar10,R50x1,bit'), ('distill_features', 'S/16')],
]


@pytest.mark.parametrize(('name', 'argument'), nightly(TRACED, but=BY_DAY))
def test_traces_with_the_parameters_of_its_model(name, argument, tmp_path):
  config = load_config(name, argument)
  classes = CLASSES[config.data.source.get('name', 'folder')]
  assert trace(config, tmp_path, classes) == TRACED[name, argument]


EMBEDDED = [  # The other runs of the quickstart differ in seed and data.
  ('quickstart', '', 'pretrain', 24),
  ('masked_patches_embedded', '', 'pretrain', 24),
  ('quickstart', '', 'scratch_seed0', 36),
]


@pytest.mark.parametrize(
  ('name', 'argument', 'run', 'size'),
  nightly(EMBEDDED, but=EMBEDDED[:2]),
)
def test_embedded_runs_trace(name, argument, run, size, tmp_path):
  config = ConfigDict(load_config(name, argument).runs[run])
  trace(config, tmp_path, image_shape=(size, size, 1))


@pytest.mark.parametrize(('name', 'argument'), variants(('transfer', 'vtab')))
def test_transfer_studies_trace(name, argument, tmp_path):
  """Runs differ in data, rate and duration: every key, and one of each size."""
  config = load_config(name, argument)
  config.shared.weights = '/weights.npz'
  traced = set()
  for run in config.runs.values():
    run = run.copy_and_resolve_references()
    if 'best_of' in run:  # the study's
      del run.best_of
    configs.plan_run(run)
    key = run.data.transforms[-1].get('size'), run.objective.target
    if key not in traced and 'tiny' in argument:
      trace(run, tmp_path)
    traced.add(key)


def initialise(run):
  """Return the number of parameters of a run's model."""
  settings = run.model.copy_and_resolve_references()
  left_out, size = shorten(settings), run.data.transforms[0]['size']
  shapes = bundle.shapes(resolve(settings), (size, size, 3))
  return left_out + sum(x.size for x in shapes.values())


def ablations():
  """Yield study, member, parameters with 10 classes at 224 px."""
  b16 = count('B/16', 10, hidden=True)
  n, d, m = 196, 768, 3072
  one = (n + 1) * d  # a table with the class token's row
  two = 28 * d // 2 + d
  yield 'positions', 'none', b16 - one
  yield 'positions', 'learned', b16
  yield 'positions', 'learned_layers', b16 + 11 * one
  yield 'positions', 'learned_layers_shared', b16
  yield 'positions', 'learned2d', b16 - one + two
  yield 'positions', 'learned2d_layers', b16 - one + 12 * two
  yield 'positions', 'relative', b16 - one + 12 * 2 * n * d
  yield 'pooling', 'gap_3e-4', b16 - 2 * d
  yield 'head', 'linear', b16 - (d + 1) * d
  block = 4 * (d * d + d) + 2 * d * m + m + d + 4 * d
  yield 'axial', 'axial_B16', b16 - 2 * d + 12 * block
  yield 'axial', 'R50x1', count('R50x1', 10)


@pytest.mark.parametrize(('study', 'member', 'expected'), list(ablations()))
def test_models_of_ablations(study, member, expected):
  runs = load_config('ablations', f'{study},classes=10').runs
  assert initialise(runs[f'pretrain_{member}']) == expected


TINY = [x for x in VARIANTS['ablations'] if 'tiny' in x]
HEADS = [x for x in TINY if 'head' in x]


@pytest.mark.parametrize('argument', nightly(TINY, but=HEADS))
def test_embedded_models_of_ablations(argument):
  """They differ where that can be seen in their parameters."""
  config, seen = load_config('ablations', argument), set()
  for run in config.runs.values():
    model = resolve(run.model)
    images = jax.ShapeDtypeStruct((1, 24, 24, 1), np.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    logits = jax.eval_shape(model.apply, variables, images)
    assert logits.shape == (1, 480)
    seen.add(str(variables))
  alike = {'positions': 6, 'pooling': 2, 'optimizer': 2}
  study = argument.split(',')[0]
  assert len(seen) == alike.get(study, len(config.runs))
