"""The scaling studies: their runs and figures."""

import re

import jax
import jax.numpy as jnp
import pytest
from config_variants import VARIANTS
from etils import epath
from test_configs import (
  _shorten,
  assert_documented,
  load_config,
  load_module,
)

from vit_jax import study
from vit_jax.config import resolve
from vit_jax.reports.results import Results

NAMES = ('scaling_compute', 'scaling_data', 'scaling_shape')
SHARED = {
  'data_dir': '/data',
  'num_workers': 3,
  'accum_steps': 2,
  'remat': 'full',
}


def every():
  for name in NAMES:
    for argument in VARIANTS[name]:
      yield name, argument


@pytest.mark.parametrize('name, argument', list(every()))
def test_is_a_study_that_can_run(name, argument, tmp_path):
  """Runs come after what they need; reports can be filled."""
  config = load_config(name, argument)
  assert config.run == 'vit_jax.study.study'
  workdir = epath.Path(tmp_path)
  runs = study.ordered(config.runs, config.order, workdir)
  assert list(runs) == list(config.order)
  for run in runs:
    assert re.fullmatch(r'[\w-]+', run)
    needed = study.needed_by(run, runs, workdir)  # raises for a later one
    assert bool(needed) == (not run.startswith('pretrain'))
  assert len({run.lower() for run in runs}) == len(runs)
  for report in config.report:
    resolve(report).check(Results(runs, workdir, done=()))


@pytest.mark.parametrize('name', NAMES)
def test_documents_every_word_of_its_arguments(name):
  for argument in VARIANTS[name]:
    assert_documented(load_module(name), argument)
  with pytest.raises(ValueError, match=r'(?s)does not take.*B/61.*tiny'):
    load_config(name, 'B/61')


def run_name(model):
  return model.replace('+', '_').replace('/', '')


def flat(config):
  """Return {path: value}, with references resolved."""
  found = {}

  def walk(value, path):
    if isinstance(value, dict):
      for key, inner in value.items():
        walk(inner, f'{path}{key}.')
    elif isinstance(value, list | tuple):
      for i, inner in enumerate(value):
        walk(inner, f'{path}{i}.')
    else:
      found[path[:-1]] = value

  walk(config.to_dict(), '')
  return found


def difference(run, name, argument):
  """Return {path: value in the run} where it differs from another config."""
  defaults = {'accum_steps': 1, 'num_workers': None, 'remat': 'none', 'seed': 0}

  def changed(config):
    return {
      path: value
      for path, value in flat(config).items()
      if defaults.get(path.rpartition('.')[2], ...) != value
    }

  run, other = changed(run), changed(load_config(name, argument))
  paths = run.keys() | other.keys()
  return {p: run.get(p) for p in paths if run.get(p) != other.get(p)}


@pytest.mark.parametrize('name, argument', list(every()))
def test_all_runs_follow_what_is_shared(name, argument):
  config = load_config(name, argument)
  config.shared.update(SHARED | {'label_key': 'kind'})
  for run, of_run in config.runs.items():
    values = flat(of_run)
    assert values['accum_steps'] == 2 and values['model.remat'] == 'full'
    ends = {'data_dir': '/data', 'num_workers': 3}
    for path, value in values.items():
      end = path.rpartition('.')[2]
      assert value == ends.get(end, value), (run, path)
    sources = [p for p in values if p.endswith('source.target')]
    assert len(sources) == sum(p.endswith('source.data_dir') for p in values)
    is_jft = of_run.data.source.name in ('jft', 'my_set')
    key = of_run.data.source.label_key
    assert key == ('kind' if is_jft else 'label')
    if is_jft:
      assert of_run.evals.val.data.source.label_key == 'kind'


def test_subsets_of_figure_4():
  config = load_config('scaling_data')
  splits = {
    '9M': ('train[50000:9050000]', 9e6),
    '30M': ('train[50000:30050000]', 30e6),
    '90M': ('train[50000:90050000]', 90e6),
    'all': ('train[50000:]', 303e6),
  }
  models = ('half_B32', 'B32', 'L16', 'L32', 'R50x1', 'R152x2')
  assert set(config.order) == {
    f'pretrain_{m}_{s}' for m in models for s in splits
  }
  for name, run in config.runs.items():
    assert run.data.source.split == splits[name.rpartition('_')[2]][0]
    assert run.evals.val.data.source.split == 'train[:50000]'
    # 7 epochs of 303M images, whatever there is.
    assert run.total_steps == 517_822 and 'total_epochs' not in run
    frozen = run.evals.frozen
    assert frozen.every_steps == run.evals.val.every_steps == 5000
    imagenet = frozen.data.imagenet
    assert imagenet.train.source.split == 'train[:65000]'
    assert imagenet.test.source.split == 'validation'
    assert [t['size'] for t in imagenet.test.transforms] == [256, 224]
  (panel,) = config.report[0]['panels']
  for label, points in panel['lines'].items():
    assert [p['x'] for p in points] == [x for _, x in splits.values()]
    assert {p['y']['best'] for p in points} == {'val/accuracy'}, label


@pytest.mark.parametrize(
  'name, argument',
  [
    ('B32', 'B/32'),
    ('L16', 'L/16,epochs=7'),
    ('L32', 'L/32'),
    ('R50x1', 'R50x1'),
    ('R152x2', 'R152x2'),
  ],
)
def test_figure_4_has_the_settings_of_pretrain_jft(name, argument):
  """The same for all sizes."""
  runs = load_config('scaling_data').runs
  kept = difference(runs[f'pretrain_{name}_all'], 'pretrain_jft', argument)
  assert {k for k in kept if not k.startswith('evals.frozen')} == {
    'total_steps',
    'total_epochs',
  }
  for size in ('9M', '30M', '90M'):
    less = flat(runs[f'pretrain_{name}_{size}'])
    everything = flat(runs[f'pretrain_{name}_all'])
    assert {k for k in less if less[k] != everything[k]} == {
      'data.source.split'
    }


def test_own_sizes():
  argument = 'name=my_set,images=5000000,epochs=14,sizes=500k+all,L/16'
  config = load_config('scaling_data', argument)
  some, everything = (config.runs[name] for name in config.order)
  assert some.data.source.split == 'train[50000:550000]'
  assert everything.total_steps == some.total_steps == 14 * 5_000_000 // 4096
  assert config.report[0]['panels'][0]['ticks'] == {500_000: '500k', 5e6: 'all'}
  for argument, message in (
    ('sizes=9+1.5M', "'1.5M' is not a size"),
    ('fig3,b/32', 'fig3 does not have b/32. It has B/32'),
    ('B/16', 'fig4 does not have B/16'),
  ):
    with pytest.raises(ValueError, match=re.escape(message)):
      load_config('scaling_data', argument)


def test_figure_3_has_the_settings_of_the_other_configs():
  config = load_config('scaling_data', 'fig3,i21k=mine')
  expected = {}
  for model in ('B/32', 'B/16', 'L/32', 'L/16'):
    for data, file in (
      ('imagenet1k', 'imagenet'),
      ('imagenet21k', 'imagenet21k'),
      ('jft', 'jft'),
    ):
      expected[data, model] = f'pretrain_{file}', model
  expected['jft', 'H/14'] = 'pretrain_jft', 'H/14'
  for model in ('R50x1', 'R152x2'):
    expected['imagenet1k', model] = 'pretrain_bit', f'imagenet,{model}'
    expected['imagenet21k', model] = 'pretrain_bit', f'imagenet21k,{model}'
    expected['jft', model] = 'pretrain_jft', f'{model},sgd'
  assert len(config.order) == 2 * len(expected)
  for (data, model), (file, argument) in expected.items():
    name = f'{data}_{run_name(model)}'
    changed = difference(config.runs[f'pretrain_{name}'], file, argument)
    assert set(changed.values()) == (
      {'mine'} if data == 'imagenet21k' else set()
    )
    words = f'imagenet,{model}' + (',bit' if 'x' in model else '')
    run = config.runs[f'finetune_{name}_imagenet_seed0']
    assert difference(run, 'finetune', words) == {
      'init_from.path': f'{{workdir}}/pretrain_{name}'
    }
  dev = load_config('scaling_data', 'fig3,R50x1,B/32,grid').order
  assert [x for x in dev if x.startswith('dev')] and not [
    x for x in dev if x.startswith('dev') and 'R50x1' in x
  ]


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
  (panel,) = load_config('scaling_data', 'fig3').report[1]['panels']
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


def count_vit(depth, width, mlp, patch, *, classes):
  """Parameters of a ViT with a tanh layer, at 224 px."""
  block = 4 * width + 4 * (width**2 + width) + 2 * width * mlp + mlp + width
  embedding = patch**2 * 3 * width + width
  tokens = (224 // patch) ** 2 + 1
  ends = (1 + tokens + 2) * width + width**2 + width + (width + 1) * classes
  return embedding + depth * block + ends


def count(run):
  """Parameters of a run's model, initialised in shapes, and left-out ones."""
  model_config = run.model.copy_and_resolve_references()
  left_out = _shorten(model_config)
  model = resolve(model_config)
  size = run.data.transforms[0]['size']
  images = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  return left_out + sum(x.size for x in jax.tree.leaves(params))


def test_shapes_of_figure_8():
  config = load_config('scaling_shape', 'classes=10')
  rows = [line.split() for line in SHAPES.strip().splitlines()]
  assert set(config.order) == {f'pretrain_{name}' for name, *_ in rows}
  for name, *numbers, heads in rows:
    run = config.runs[f'pretrain_{name}']
    depth, width, mlp, patch = map(int, numbers)
    assert run.model.num_heads == int(heads)
    if name in ('base', 'depth_64', 'width_256', 'patch_56', 'all_16'):
      expected = count_vit(depth, width, mlp, patch, classes=10)
      assert count(run) == expected
    settings = run.model.depth, run.model.width, run.model.mlp_dim
    assert (*settings, run.model.embedding.patch_size) == (
      *(depth, width, mlp),
      (patch, patch),
    )
    changed = difference(run, 'pretrain_jft', 'L/32,classes=10')
    parts = {path.split('.')[0] for path in changed}
    assert parts <= {'model', 'evals'}
    assert (run.schedule.lr, run.total_epochs) == (6e-4, 7)
  (panel,) = config.report[0]['panels']
  lines = {
    label: {p['name'] for p in points}
    for label, points in panel['lines'].items()
  }
  assert set.intersection(*lines.values()) == {'base'}
  assert set.union(*lines.values()) == {name for name, *_ in rows}
  assert panel['relative_to']['runs'] == 'pretrain_base'


def test_vit_b_of_figure_4():
  """All hidden dimensions of B/32 halved."""
  half, full = (
    load_config('scaling_data').runs[f'pretrain_{name}_9M']
    for name in ('half_B32', 'B32')
  )
  for name, factor in (('width', 2), ('mlp_dim', 2), ('depth', 1)):
    assert factor * half.model[name] == full.model[name]
  assert half.model.embedding == full.model.embedding
  assert half.model.embedding.patch_size == (32, 32)
  changed = {p for p in flat(half) if flat(half)[p] != flat(full)[p]}
  fields = ('width', 'mlp_dim', 'num_heads', 'head.representation_size')
  assert changed == {f'model.{x}' for x in fields}
  half.model.num_classes = 10
  assert count(half) == count_vit(12, 384, 1536, 32, classes=10)
