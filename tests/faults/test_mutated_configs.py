"""A sample of the mutations of configs, traced but not compiled."""

import pytest

from vit_jax import config as configs

from .config_mutations import base, mutations
from .mutated_configs import ACCEPTED, REFUSED, outcome

BASE = 'pretrain_paper:imagenet,B/16,tiny'


def test_mutations_are_refused_or_have_a_meaning():
  every = [x for x in mutations() if x.base == BASE]
  assert len(every) > 500
  for mutation in every[:40]:
    found, message = outcome(mutation)
    assert found in (REFUSED, ACCEPTED), (mutation, message)


@pytest.mark.parametrize(
  ('assignment', 'message'),
  [
    ('accum_steps=0', 'accum_steps=0 must be an integer of at least 1'),
    ('model.num_heads=0', r'model\.num_heads=0 must be'),
    ('model.depth=0', r'model\.depth=0 must be'),
    ('model.depth=1000000', r'model\.depth=1000000 must be .* at most 1000'),
    ('model.dtype=bogus', r"model\.dtype='bogus' must be one of 'float32'"),
    ('optimizer.freeze=.*', r"optimizer\.freeze='\.\*' must be a list"),
    ("optimizer.freeze=('.*',)", 'matches every parameter'),
    (f'seed={2**70}', f'seed={2**70} must be an integer of at most 4294967295'),
    ('schedule.lr=1e9', r'schedule\.lr=1000000000\.0 must be between'),
    ('schedule.lr=-1', r'schedule\.lr=-1\.0 must be between 0 and 10000'),
    ('ema_decay=2', r'ema_decay=2 must be in \[0, 1\) or None'),
    (
      'optimizer.clip_norm=-1',
      r'optimizer\.clip_norm=-1\.0 must be .* above 0',
    ),
    ('optimizer.b1=-1', r'optimizer\.b1=-1\.0 must be in \[0, 1\)'),
    ('log_every_steps=0', 'log_every_steps=0 must be a duration above 0'),
    ('checkpoint.keep_last=1.5', r'keep_last=1\.5 must be an integer'),
    ('checkpoint.best_metric=minival/acuracy', "mean 'minival/accuracy'"),
    ('eval.val.every_steps=1', r"no argument 'eval' \(did you mean 'evals'"),
    ('model.target=optax.adamw', r'model\.'),
  ],
)
def test_each_is_one_message(assignment, message, tmp_path):
  config = base(BASE).copy_and_resolve_references()
  configs.override(config, [assignment])
  with pytest.raises(ValueError, match=message):
    configs.run(config, tmp_path / 'run', dry_run=True)


def test_an_evaluator_without_batch_size(tmp_path):
  config = base(BASE).copy_and_resolve_references()
  del config.evals.minival.data.batch_size
  with pytest.raises(configs.ConfigError, match="'batch_size' is missing"):
    configs.run(config, tmp_path / 'run', dry_run=True)
