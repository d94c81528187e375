"""The study of recipes and optimizers that needs no download."""

import re

import pytest
from config_variants import VARIANTS
from etils import epath
from test_configs import assert_documented, load_config, load_module
from test_configs_run import compile_fast  # noqa: F401

from vit_jax import config as configs
from vit_jax import study
from vit_jax.config import resolve
from vit_jax.data import pipeline
from vit_jax.reports.results import Results

MODULE = load_module('recipes_embedded')


def flat(run):
  """{key: value} of a run, without the seeds of its data."""
  entries = {}

  def visit(path, value):
    if isinstance(value, dict):
      for key, inner in value.items():
        visit((*path, key), inner)
    elif path[-1] != 'seed':
      entries['.'.join(path)] = value

  visit((), run.to_dict())
  return entries


def changed(run, baseline):
  one, other = flat(run), flat(baseline)
  return {
    key.split('.')[0]
    for key in one.keys() | other.keys()
    if one.get(key) != other.get(key) and not key.startswith('evals.progress')
  }


PARTS = {  # what a recipe or an optimizer changes in a run
  'baseline': '',
  'randaugment': 'data',
  'mixup': 'objective',
  'cutmix': 'objective',
  'erasing': 'data',
  'depth': 'model',
  'ema': 'ema_decay ema_debias',
  'smoothing': 'objective',
  'nadamw': 'optimizer best_of',
  'muon': 'optimizer best_of',
  'sgd': 'optimizer best_of',
  'schedule_free': 'optimizer best_of schedule',
}


def test_runs_differ_in_one_part_only():
  runs = load_config('recipes_embedded', '').runs
  seen = set()
  for name, run in runs.items():
    if not (parts := re.fullmatch(r'([a-z]+)_(\w+)_seed(\d)', name)):
      assert re.fullmatch(r'[a-z]+_\w+_lr\de-\d\d', name)
      continue
    task, recipe, seed = parts.groups()
    baseline = runs[f'{task}_baseline_seed{seed}']
    assert changed(run, baseline) == set(PARTS[recipe].split()), name
    assert run.seed == int(seed)
    seen.add((task, recipe))
  recipes, rules = set(list(PARTS)[:8]), set(list(PARTS)[8:])
  expected = {(task, x) for task in MODULE.TASKS for x in recipes}
  expected |= {('glyphs', x) for x in rules}
  assert seen == expected


def test_learning_rates_are_tried_on_other_data():
  """The rates of an optimizer, with its settings, and no image of a result."""
  runs = load_config('recipes_embedded', '').runs
  for name, run in runs.items():
    if 'best_of' not in run:
      continue
    tried = [x for x in runs if re.fullmatch(run.best_of.runs, x)]
    count = 3 if 'sgd' in name else 4
    assert len(tried) == count, name
    assert len({runs[x].schedule.lr for x in tried}) == count
    for each in tried:
      rest = {'best_of', 'schedule', 'data', 'model', 'objective', 'evals'}
      rest |= {'ema_decay', 'ema_debias', 'init_from'}
      assert changed(runs[each], run) <= rest

  def rows(source):
    source = resolve(source.to_dict())
    return {pipeline.describe(source, i).split()[3] for i in range(len(source))}

  trial, run = (runs[f'scratch_baseline_{x}'] for x in ('lr1e-03', 'seed0'))
  held_out = rows(trial.evals.val.data.source)
  assert len(held_out) == 515
  for name in ('lr1e-03', 'seed0', 'seed2'):
    assert not held_out & rows(runs[f'scratch_baseline_{name}'].data.source)
  assert not held_out & rows(run.evals.val.data.source)
  seeds = {
    kind: {
      part.data.source.seed
      for name, each in runs.items()
      if re.fullmatch(f'glyphs_.*_{kind}.*', name)
      for part in (each, each.evals.val)
    }
    for kind in ('lr', 'seed')
  }
  assert not seeds['lr'] & seeds['seed']
  # Held-out glyphs are not those of training.
  assert seeds == {'lr': {100, 101}, 'seed': {0, 1, 2, 3}}


@pytest.mark.parametrize('argument', VARIANTS['recipes_embedded'])
def test_reports_can_be_filled(argument, tmp_path):
  config = load_config('recipes_embedded', argument)
  workdir = epath.Path(tmp_path)
  runs = study.ordered(config.runs, config.order, workdir)
  for name in runs:
    needed = study.needed_by(name, runs, workdir)
    assert any('baseline_seed' in x for x in needed) == ('finetune' in name)
  for report in config.report:
    resolve(report).check(Results(runs, workdir, done=()))
  assert_documented(MODULE, argument)


@pytest.mark.slow
def test_a_tiny_study_reports(compile_fast, tmp_path):  # noqa: F811
  """Runs of each kind: the report has what these have measured."""
  config = load_config('recipes_embedded', 'tiny')
  for name in (
    *('glyphs_baseline_lr1e-03', 'glyphs_baseline_seed0'),
    'glyphs_randaugment_seed0',
  ):
    made = configs.run(config, tmp_path, member=name)
  rates, recipes, optimizers, _ = made
  assert [row for row, found in rates.items() if found] == ['glyphs: AdamW']
  columns = ['glyphs, held out', 'digits, linear']
  assert {row: list(x) for row, x in recipes.items() if x} == {
    'baseline': columns,
    'RandAugment': columns,
  }
  assert {row: list(x) for row, x in optimizers.items() if x} == {
    'AdamW': columns
  }
  for name in ('rates.md', 'recipes.md', 'optimizers.md'):
    assert (tmp_path / name).exists()
  # Only the baseline's checkpoints are kept: fine-tuning starts from them.
  kept = [x.parent.name for x in tmp_path.glob('*/checkpoints')]
  assert kept == ['glyphs_baseline_seed0']
