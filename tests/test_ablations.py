"""The ablation studies: what their runs and tables are made of."""

import re

import jax
import jax.numpy as jnp
import pytest
from config_variants import VARIANTS
from etils import epath
from test_configs import (
  _count,
  _count_resnet,
  assert_documented,
  load_config,
  load_module,
)
from test_configs_run import compile_fast  # noqa: F401
from test_scaling_configs import count, difference, flat

from vit_jax import config as configs
from vit_jax import study
from vit_jax.config import resolve
from vit_jax.models import names
from vit_jax.reports.results import Results

MODULE = load_module('ablations')
FULL = [x for x in VARIANTS['ablations'] if not re.search('tiny|embedded', x)]
EMBEDDED = [x for x in VARIANTS['ablations'] if x not in FULL]


@pytest.mark.parametrize('argument', VARIANTS['ablations'])
def test_is_a_study_that_can_run(argument, tmp_path):
  config = load_config('ablations', argument)
  workdir = epath.Path(tmp_path)
  runs = study.ordered(config.runs, config.order, workdir)
  for run in runs:
    needed = study.needed_by(run, runs, workdir)
    assert bool(needed) == (not run.startswith('pretrain'))
  for report in config.report:
    resolve(report).check(Results(runs, workdir, done=()))
  assert_documented(MODULE, argument)


@pytest.mark.parametrize('argument', FULL)
def test_runs_are_pretrain_jft_with_one_change(argument):
  """All with the same shared values; differences in `allowed` only."""
  study_name, *words = argument.split(',')
  allowed = {
    'positions': {'model.posemb', 'model.posemb.target', 'model.posemb.at'},
    'pooling': {'model.pooling.target', 'schedule.lr'},
    'head': {'model.head.representation_size'},
    'axial': {'model.target'},
    'optimizer': set(),
    'overlap': {'model.embedding.stride'},
  }[study_name]
  words = [x for x in words if not re.match('seeds|grid', x)]
  config = load_config('ablations', argument)
  config.shared.data_dir = '/data'
  for name, member in MODULE.MEMBERS[study_name].items():
    run = config.runs[f'pretrain_{name}']
    of_model = ','.join([member.model, *member.words, *words])
    changed = difference(run, 'pretrain_jft', of_model)
    found = {
      p
      for p in changed
      if not p.startswith('evals.frozen') and not p.endswith('data_dir')
    }
    assert found <= allowed, name
    frozen = run.evals.frozen.data.imagenet
    assert frozen.train.source.split == 'train[:65000]'
    sources = [v for p, v in flat(run).items() if p.endswith('data_dir')]
    assert len(sources) == 4 and set(sources) == {'/data'}


def hand_counts():
  """Study, member, parameters with 10 classes at 224 px, by hand."""
  b16 = _count('B/16', classes=10, hidden=True)
  n, d, m = 196, 768, 3072
  one = (n + 1) * d  # a table with the class token's row
  two = 28 * d // 2 + d
  yield 'positions', 'none', b16 - one
  yield 'positions', 'learned', b16
  yield 'positions', 'learned_layers', b16 + 11 * one
  yield 'positions', 'learned_layers_shared', b16
  yield 'positions', 'learned2d', b16 - one + two
  yield 'positions', 'learned2d_layers', b16 - one + 12 * two
  yield 'positions', 'learned2d_layers_shared', b16 - one + two
  yield 'positions', 'relative', b16 - one + 12 * 2 * n * d
  yield 'pooling', 'token_8e-4', b16
  yield 'pooling', 'gap_3e-4', b16 - 2 * d
  yield 'head', 'linear', b16 - (d + 1) * d
  yield 'overlap', 'stride_8', b16 + (27**2 - n) * d
  block = 4 * (d * d + d) + 2 * d * m + m + d + 4 * d
  b32 = _count('B/32', classes=10, hidden=True)
  yield 'axial', 'axial_B32', b32 - 2 * d + 12 * block
  yield 'axial', 'axial_B16', b16 - 2 * d + 12 * block
  yield 'axial', 'R50x1', _count_resnet('R50x1', classes=10)
  yield 'optimizer', 'R152x2_sgd', _count_resnet('R152x2', classes=10)


@pytest.mark.parametrize('name, member, expected', list(hand_counts()))
def test_counts_by_hand(name, member, expected):
  run = load_config('ablations', f'{name},classes=10').runs[
    f'pretrain_{member}'
  ]
  assert count(run) == expected


def test_rates_of_figure_9():
  config = load_config('ablations', 'pooling')
  runs = [config.runs[name] for name in config.order]
  found = [('pooling' in run.model, run.schedule.lr) for run in runs]
  assert found == [(False, 8e-4), (True, 8e-4), (True, 3e-4)]
  assert runs[1].model.pooling.target.endswith('.Mean')


def test_rules_of_table_7():
  runs = load_config('ablations', 'optimizer,seeds=2').runs
  assert len(runs) == 4 + 4 * 5 * 2
  for name, run in runs.items():
    if name.startswith('pretrain'):
      rule = name.rpartition('_')[2]
      rules = {'adam': 'optax.adamw', 'sgd': 'vit_jax.optim.optimizers.sgd'}
      assert run.optimizer.target == rules[rule]
      assert run.model.target == names.RESNET and run.total_epochs == 7
    else:
      path = re.fullmatch(r'finetune_(\w+?)_[a-z0-9]+_seed\d', name)[1]
      assert run.init_from.path == f'{{workdir}}/pretrain_{path}'


def printed(report):
  """{row: {column: percent}} of the published values in a report."""
  found = {}
  for cell in report['cells']:
    if cell['row'].endswith(' paper'):
      row = found.setdefault(cell['row'].removesuffix(' paper'), {})
      row[cell['column']] = 100 * cell['value']
  return found


# Tables 8 and 7; the last number of the latter is the average.
PUBLISHED = {
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


@pytest.mark.parametrize('name', PUBLISHED)
def test_published_numbers(name):
  (report,) = load_config('ablations', name).report
  found = printed(report)
  for line in PUBLISHED[name].strip().splitlines():
    row, numbers = re.split('  +', line.strip())
    numbers = [float(x) for x in numbers.split()]
    values = list(found.pop(row).values())
    assert values == pytest.approx(numbers, abs=0.005)
  assert not found


def test_shape_at_full_size_is_elsewhere():
  with pytest.raises(ValueError, match=r"'shape' .*scaling_shape\.py"):
    load_config('ablations', 'shape')
  with pytest.raises(ValueError, match=r'(?s)does not take.*positions.pool'):
    load_config('ablations', 'position')


@pytest.mark.parametrize(
  'argument',
  [
    x
    if re.match('head|overlap', x)
    else pytest.param(x, marks=pytest.mark.slow)
    for x in EMBEDDED
    if 'tiny' in x
  ],
)
def test_embedded_models_initialise(argument):
  """And differ from each other, where that can be seen in their parameters."""
  config = load_config('ablations', argument)
  seen = set()
  for run in config.runs.values():
    model = resolve(run.model)
    images = jax.ShapeDtypeStruct((1, 24, 24, 1), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    logits = jax.eval_shape(model.apply, variables, images)
    assert logits.shape == (1, 480)
    seen.add(str(variables))
  name = argument.split(',')[0]
  alike = {'positions': 6, 'pooling': 2, 'optimizer': 2}.get(
    name, len(MODULE.MEMBERS[name])
  )
  assert len(seen) == alike


def test_embedded_members_start_alike():
  """One seed has the same images and order for all members."""
  config = load_config('ablations', 'positions,embedded,steps=300,seeds=3')
  assert len(config.runs) == 24
  of_seed = {}
  for name, run in config.runs.items():
    of_seed.setdefault(name[-1], set()).add((run.seed, str(run.data)))
  assert all(len(x) == 1 for x in of_seed.values())
  assert len(set.union(*of_seed.values())) == 3


@pytest.mark.slow
def test_a_tiny_study_runs(compile_fast, tmp_path):  # noqa: F811
  config = load_config('ablations', 'pooling,tiny')
  table, *_ = configs.run(config, tmp_path)
  assert len(table) == len(MODULE.MEMBERS['pooling'])
  for row in table.values():
    assert list(row) == ['digits, 10-shot', 'glyphs, held out']
  assert (tmp_path / 'pooling.md').exists()
