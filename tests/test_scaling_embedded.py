"""The scaling study that needs no download."""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from config_variants import VARIANTS
from etils import epath
from test_configs import load_config, load_module

from vit_jax import config as configs
from vit_jax.analysis import flops
from vit_jax.config import resolve
from vit_jax.reports.results import Results


def test_runs_differ_in_model_images_and_seed_only():
  config = load_config('scaling_embedded', '')
  assert len(config.runs) == 3 * 5 * 3
  same = set()
  for name, run in config.runs.items():
    _, size, seed = re.fullmatch(r'(\w+)_(\d+)_seed(\d)', name).groups()
    run = run.to_dict()
    source = run['data']['source']
    assert source.pop('num_examples') == int(size)
    # Held-out images are of seed 0.
    assert source.pop('seed') == run.pop('seed') + 1 == int(seed) + 1
    assert run['evals']['val']['data']['source']['seed'] == 0
    del run['model']
    same.add(repr(run))
  assert len(same) == 1
  sizes = {int(name.split('_')[1]) for name in config.runs}
  run = config.runs.ViT_480_seed0
  assert max(sizes) == run.total_steps * run.data.batch_size  # each image once
  assert min(sizes) == 480


def test_models_cost_the_same():
  images = jax.ShapeDtypeStruct((1, 24, 24, 1), jnp.float32)
  found = [
    flops.forward(resolve({**settings, 'num_classes': 480}), images)
    for settings in load_module('scaling_embedded').MODELS.values()
  ]
  assert max(found) / min(found) < 1.06


@pytest.mark.parametrize('argument', VARIANTS['scaling_embedded'])
def test_reports_can_be_filled(argument, tmp_path):
  config = load_config('scaling_embedded', argument)
  results = Results(config.order, epath.Path(tmp_path), done=())
  for report in config.report:
    report = resolve(report)
    report.check(results)
    points = [
      len(points)
      for panel in report.panels
      for points in panel['lines'].values()
    ]
    panels = 1 if 'fractals' in argument else 2
    assert points == [2 if 'tiny' in argument else 5] * 3 * panels


@pytest.mark.slow
def test_two_runs_of_the_tiny_study(tmp_path):
  config = load_config('scaling_embedded', 'tiny')
  for member in ('ResNet_480_seed0', 'hybrid_480_seed0'):
    (rows,) = configs.run(config, tmp_path, member=member)
  assert len(rows) == 2 * 2
  for row in rows:
    assert 0 <= row['mean'] <= 1
  assert json.loads((tmp_path / 'scaling.json').read_text())[0]['x'] == 480
  assert (tmp_path / 'scaling.png').exists()
