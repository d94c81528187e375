"""The study of gradients in bfloat16 and in float32."""

import pytest
from config_variants import VARIANTS
from etils import epath
from test_configs import assert_documented, load_config, load_module

from vit_jax import config as configs
from vit_jax import study
from vit_jax.config import resolve
from vit_jax.reports.results import Results

MODULE = load_module('gradient_precision')


@pytest.mark.parametrize('argument', VARIANTS['gradient_precision'])
def test_pairs_of_runs_differ_in_the_gradients_only(argument, tmp_path):
  config = load_config('gradient_precision', argument)
  runs = {name: run.to_dict() for name, run in config.runs.items()}
  seeds = {run['seed'] for run in runs.values()}
  assert len(runs) == 2 * len(seeds)
  for seed in seeds:
    coarse, fine = (runs[f'{x}_seed{seed}'] for x in ('bfloat16', 'float32'))
    assert coarse['model']['dtype'] == 'bfloat16'
    assert fine == coarse | {'grad_dtype': 'float32'}
  workdir = epath.Path(tmp_path)
  ordered = study.ordered(config.runs, config.order, workdir)
  for report in config.report:
    resolve(report).check(Results(ordered, workdir, done=()))
  assert_documented(MODULE, argument)


@pytest.mark.slow
def test_a_tiny_study_reports(tmp_path):
  config = load_config('gradient_precision', 'tiny')
  differences, _ = configs.run(config, tmp_path)
  assert [x['row'] for x in differences] == ['bfloat16'] * 4 + ['float32'] * 4
  # Gradients differ, so parameters do, and with them the loss.
  assert differences[5]['column'] == '100 x loss, held-out glyphs'
  assert 0 < abs(differences[5]['mean']) < 0.1
