"""The report on an installation."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.runs import canary, environment
from vit_jax.tools.doctor import __main__ as doctor
from vit_jax.tools.doctor import checks, reference

ROOT = pathlib.Path(__file__).parents[2]


def test_collectives_of_eight_devices():
  check = checks._collectives()
  assert canary.run(check) <= check.bound

  def of_another_device(x):
    found = check.compute(x)
    return found | {'next': jnp.roll(found['next'], 1, 0)}

  wrong = dataclasses.replace(check, compute=of_another_device)
  assert canary.run(wrong) > 1


def test_the_reference_of_a_step_by_finite_differences():
  """A ViT of two layers; every parameter moves along a random direction."""
  rng = np.random.default_rng(0)
  shapes = {
    'embedding': {'kernel': (4, 4, 3, 8), 'bias': (8,)},
    'cls': (1, 1, 8),
    'cls_pos_embedding': (1, 1, 8),
    'pos_embedding': (1, 2, 3, 8),
    'norm': {'scale': (8,), 'bias': (8,)},
    'head': {'kernel': (8, 5), 'bias': (5,)},
  }
  heads = {'kernel': (8, 2, 4), 'bias': (2, 4)}
  for i in range(2):
    shapes[f'block_{i}'] = {
      'norm1': shapes['norm'],
      'norm2': shapes['norm'],
      'attn': {name: heads for name in ('query', 'key', 'value')}
      | {'out': {'kernel': (2, 4, 8), 'bias': (8,)}},
      'mlp': {
        'fc1': {'kernel': (8, 12), 'bias': (12,)},
        'fc2': {'kernel': (12, 8), 'bias': (8,)},
      },
    }

  def draw():
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(rng.standard_normal, shapes, is_leaf=is_shape)

  params, images = draw(), rng.standard_normal((3, 8, 12, 3))
  labels = np.array([4, 0, 2])
  _, gradients = reference.vit_loss(params, images, labels)
  assert jax.tree.structure(gradients) == jax.tree.structure(params)
  for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
    direction = rng.standard_normal(gradient.shape)

    def loss(step, path=path, direction=direction):
      moved = jax.tree_util.tree_map_with_path(
        lambda p, x: x + step * direction if p == path else x, params
      )
      return reference.vit_loss(moved, images, labels)[0]

    slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
    expected = np.sum(gradient * direction)
    np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-8)


def test_a_wrong_result_is_named_with_its_remedy(monkeypatch, capsys):
  right = canary.QUICK[0]
  wrong = dataclasses.replace(
    right, name='a wrong kernel', compute=lambda a, x: jnp.sum(x @ a.T, axis=1)
  )

  def fails(a, x):
    raise RuntimeError('INTERNAL: no such kernel\nmore')

  fails = dataclasses.replace(right, name='no kernel', compute=fails)
  monkeypatch.setattr(canary, 'QUICK', (right, wrong, fails))
  with pytest.raises(SystemExit) as error:
    doctor.main(['--quick'])
  assert 'jax' in error.value.code  # Printed to stderr, with exit status 1.
  output = capsys.readouterr().out
  assert re.search(r'^norms of products.*float32 .* ok$', output, re.M)
  assert re.search(r'^a wrong kernel .* WRONG$', output, re.M)
  assert re.search(r'^no kernel .* FAILED\n  INTERNAL: no such', output, re.M)
  assert 'WRONG on this cpu:\n  a wrong kernel\n  no kernel\n' in output
  table = output.partition('WRONG on')[0]
  assert max(map(len, table.partition('check ')[2].splitlines())) <= 80
  for word in ('jaxlib', 'grain', 'attention, B/16', 'memory', 'disk'):
    assert re.search(f'^{word}', output, re.M), word


@pytest.mark.slow
@pytest.mark.parametrize('as_is', [False, True])
def test_as_users_run_it(as_is):
  """--as_is complains about the versions that compute wrong values."""
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'vit_jax.tools.doctor', '--quick'),
      *(['--as_is'] if as_is else []),
    ],
    cwd=ROOT,
    env=env | {'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
  )
  bad = environment.jaxlib_version() in environment.WRONG_JAXLIB
  if as_is and bad:
    assert done.returncode == 1
    assert f"Set XLA_FLAGS='{environment.OPTION}='" in done.stderr
  else:
    assert done.returncode == 0, done.stderr
    assert 'All results are right on this cpu.' in done.stdout
