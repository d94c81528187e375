"""Environment variables that the package sets."""

import os
import subprocess
import sys

import pytest

from vit_jax.runs import environment

ADDED = '--xla_cpu_experimental_ynn_fusion_type='


@pytest.mark.parametrize(
  ('version', 'before', 'after'),
  [
    ('0.10.1', None, ADDED),
    ('0.10.2', '', ADDED),
    ('0.10.2+local', ' --xla_dump_to=/d', f'--xla_dump_to=/d {ADDED}'),
    ('0.10.2', f'{ADDED}dot --xla_a=1', f'{ADDED}dot --xla_a=1'),
    ('0.10.2', ADDED, ADDED),
    ('0.10.2', '/file/of/flags', '/file/of/flags'),
    # Versions that are correct, or may not know the option.
    ('0.11.2', None, None),
    ('0.10.0', '--xla_a=1', '--xla_a=1'),
    ('', None, None),
  ],
)
def test_xla_flags(monkeypatch, version, before, after):
  monkeypatch.setattr(environment, '_before', None)
  metadata = environment.importlib.metadata
  monkeypatch.setattr(metadata, 'version', lambda _: version)
  monkeypatch.setenv('XLA_FLAGS', before or '')
  if before is None:
    monkeypatch.delenv('XLA_FLAGS')
  environment.avoid_wrong_results()
  environment.avoid_wrong_results()
  assert os.environ.get('XLA_FLAGS') == after
  changed = {} if after == before else {'XLA_FLAGS': before or ''}
  assert environment.users_own() == changed


def test_importing_the_package_sets_xla_flags():
  code = 'import vit_jax.tools, os; print(os.environ.get("XLA_FLAGS"))'
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  done = subprocess.run(
    [sys.executable, '-c', code], env=env, capture_output=True, text=True
  )
  bad = environment.jaxlib_version() in environment.WRONG_JAXLIB
  assert done.stdout.strip() == (ADDED if bad else 'None')
