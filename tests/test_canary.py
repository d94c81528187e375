"""The checks of what the compiler computes."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.runs import canary, environment

ROOT = pathlib.Path(__file__).parents[1]
RIGHT = canary.Check(
  'sums of squares',
  inputs=canary.normal((4096, 3)),
  compute=lambda x: {'sums': jnp.sum(x**2, axis=1)},
  reference=lambda x: {'sums': np.sum(x**2, axis=1)},
)
WRONG = {
  'one row': lambda x: jnp.sum(x**2, axis=1).at[-1].mul(1.001),
  'one row of another': lambda x: jnp.sum(x**2, axis=1).at[-1].set(0.5),
  'less precise': lambda x: jnp.sum(x.astype('bfloat16') ** 2, axis=1),
  'not finite': lambda x: jnp.sum(x**2, axis=1).at[5].set(jnp.nan),
  'another shape': lambda x: jnp.sum(x**2, axis=1)[:-1],
}
on_wrong_jaxlib = pytest.mark.skipif(
  environment.jaxlib_version() not in environment.WRONG_JAXLIB,
  reason='this jaxlib computes correctly',
)


@pytest.mark.parametrize('check', [RIGHT, *canary.QUICK], ids=lambda c: c.name)
def test_right_results_pass(check):
  assert 0 < canary.run(check) < check.bound / 3


@pytest.mark.parametrize('kind', WRONG)
def test_wrong_results_are_found(kind, monkeypatch):
  compute = WRONG[kind]
  check = dataclasses.replace(RIGHT, compute=lambda x: {'sums': compute(x)})
  assert canary.run(check) > 10 * check.bound
  monkeypatch.setattr(canary, 'QUICK', (RIGHT, check))
  with pytest.raises(
    canary.WrongResult, match=r'this cpu: sums of squares.*tools\.doctor'
  ):
    canary.refuse_wrong_results()


@on_wrong_jaxlib
def test_main_refuses_to_train_on_a_wrong_compiler(tmp_path):
  """The option is in XLA_FLAGS with another value, which main respects."""
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'vit_jax.main'),
      *('--config=configs/quickstart.py', f'--workdir={tmp_path / "run"}'),
    ],
    cwd=ROOT,
    env=os.environ | {'XLA_FLAGS': f'{environment.OPTION}=dot,reduce'},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 1
  assert 'WrongResult: This installation computes wrong' in done.stderr
  assert f'Remove {environment.OPTION} from XLA_FLAGS' in done.stderr
  assert 'Traceback' not in done.stderr
  assert not (tmp_path / 'run').exists()
