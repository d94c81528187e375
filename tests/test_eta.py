"""Estimates of how long a study takes."""

import ml_collections
import pytest

from vit_jax.analysis import flops
from vit_jax.runs import eta
from vit_jax.runs.eta import Cost, Spent


def run(*, steps=10, seed=0, init_from=None, examples=30, patch_size=4):
  def digits(split, **fields):
    target = 'vit_jax.data.embedded.digits.Digits'
    return {
      'source': {'target': target, 'split': split, **fields},
      'batch_size': 8,
    }

  return ml_collections.ConfigDict(
    {
      'run': 'vit_jax.train.train',
      'total_steps': steps,
      'seed': seed,
      'init_from': init_from,
      'model': {
        'target': 'vit_jax.models.vit.VisionTransformer',
        'embedding': {
          'target': 'vit_jax.models.common.PatchEmbedding',
          'patch_size': patch_size,
        },
        **{'width': 8, 'depth': 1, 'mlp_dim': 16, 'num_heads': 2},
      },
      'objective': {'target': 'vit_jax.objectives.classification.softmax_xent'},
      'optimizer': {'target': 'optax.adam'},
      'schedule': {'lr': 0.1},
      'data': digits('train', examples_per_class=examples, seed=seed),
      'evals': {
        'test': {
          'target': 'vit_jax.evals.classification.Classification',
          'data': digits('test'),
          'every_steps': 4,
        }
      },
    }
  )


def test_arithmetic_of_runs(monkeypatch):
  traced = []

  def forward(model, images):
    traced.append(images.shape)
    return 1000 if model.embedding.patch_size == (4, 4) else 100

  monkeypatch.setattr(flops, 'forward', forward)
  eta._traced.cache_clear()
  costs = eta.costs(
    {
      'a': run(),
      'again': run(seed=1, init_from={'path': 'a'}),
      'longer': run(steps=20),
      'cheaper': run(patch_size=8),
    }
  )
  eta._traced.cache_clear()
  # 10 steps of 8 images; the 768 test scans after steps 4, 8 and 10.
  assert costs['a'] == Cost(3 * 80 * 1000, 3 * 768 * 1000, first=True)
  assert costs['again'] == Cost(3 * 80 * 1000, 3 * 768 * 1000, first=False)
  assert costs['longer'] == Cost(3 * 160 * 1000, 5 * 768 * 1000, first=True)
  assert costs['cheaper'].total == costs['a'].total / 10
  assert traced == [(1, 8, 8, 1)] * 2


@pytest.mark.parametrize('key', ['run', 'model'])
def test_a_run_of_unknown_arithmetic(key):
  config = run()
  config[key] = 'tests.own_run' if key == 'run' else None
  assert eta.costs({'a': run(), 'b': config}) is None


def test_seconds_left():
  costs = {
    'long': Cost(900.0, 100.0, first=True),
    'short': Cost(90.0, 10.0, first=True),
    'again': Cost(90.0, 10.0, first=False),
    'once_more': Cost(90.0, 10.0, first=False),
  }
  # 0.1 s per FLOP, and 20 s for the rest, which `again` reuses.
  spent = {'long': Spent(120.0, steps=90.0)}
  assert eta.seconds_left(costs, spent) == pytest.approx(30 + 10 + 10)
  spent['short'] = Spent(24.0, steps=9.0)  # its start took 14 s
  spent['again'] = Spent(13.0, steps=9.0)
  assert eta.seconds_left(costs, spent) == pytest.approx(13)
  spent['once_more'] = Spent(13.0, steps=9.0)
  assert eta.seconds_left(costs, spent) == 0


def test_seconds_left_of_evaluations():
  costs = {name: Cost(0.0, 10.0 * i, True) for i, name in enumerate('abc', 1)}
  assert eta.seconds_left(costs, {'a': Spent(2.0)}) == pytest.approx(10)
