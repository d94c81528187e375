"""Checks of the compiler, and the environment that processes start with."""

import os
import subprocess
import sys
from socket import gethostname

import in_process
import jax.numpy as jnp
import pytest
from processes import Process, free_port, python

from vit_jax.io import environment
from vit_jax.runs import canary, workdirs
from vit_jax.tools import doctor, preflight

RIGHT = canary.Check(
  'sums of squares', ((4096, 3),), lambda np, x: np.sum(x**2, axis=1)
)
SMALL = [
  check._replace(shapes=[(min(x, 1000), *rest) for x, *rest in check.shapes])
  for check in doctor._CHECKS
]
WRONG = {
  'one row': lambda y: y.at[-1].mul(1.001),
  'one row of another': lambda y: y.at[-1].set(0.5),
  'less precise': lambda y: y.astype('bfloat16'),
  'not finite': lambda y: y.at[5].set(jnp.nan),
}
HAS_BUG = environment.jaxlib_version() in environment.WRONG_JAXLIB


@pytest.mark.parametrize(
  'check', [RIGHT, *canary.QUICK, *SMALL], ids=lambda c: c.name
)
def test_right_results_pass(check):
  assert 0 < canary.run(check) < canary.bound('float32') / 3


@pytest.mark.parametrize('kind', WRONG)
def test_wrong_results_are_found(kind, monkeypatch, capsys):
  def compute(np, x):
    found = RIGHT.compute(np, x)
    return WRONG[kind](found) if np is jnp else found

  check = RIGHT._replace(compute=compute)
  assert canary.run(check) > 10 * canary.bound('float32')
  monkeypatch.setattr(canary, 'QUICK', (RIGHT, check))
  monkeypatch.setattr(doctor, '_CHECKS', ())
  monkeypatch.setattr(doctor, 'step_error', lambda: 0.0)
  with pytest.raises(ValueError, match='sums of squares'):
    canary.refuse_wrong_results()
  with pytest.raises(SystemExit, match='WRONG: sums of squares'):
    doctor.main([])
  *_, first, second, _ = capsys.readouterr().out.splitlines()
  assert first.endswith('ok') and second.endswith('WRONG')


def test_a_check_is_named_while_it_runs(monkeypatch, capsys):
  seen = []

  def run(check, dtype='float32'):
    seen.append(check.name in capsys.readouterr().out.splitlines()[-1])
    return 0.0

  monkeypatch.setattr(canary, 'run', run)
  monkeypatch.setattr(doctor, 'step_error', lambda: 0.0)
  doctor.main([])
  assert seen == [True] * 6


@pytest.mark.slow
def test_step():
  assert doctor.step_error() <= 4 * canary.bound()


def test_report():
  found = doctor.report()
  assert found['jaxlib'] and found['devices'] and found['XLA_FLAGS']
  assert found['JPEG extension'].startswith(('in use', 'not compiled'))


@pytest.mark.parametrize(
  ('version', 'before', 'after'),
  [
    ('0.10.1', None, f'{environment.OPTION}='),
    ('0.10.2+local', ' --a=/d', f'--a=/d {environment.OPTION}='),
    ('0.10.2', f'{environment.OPTION}=dot -b', f'{environment.OPTION}=dot -b'),
    ('0.10.2', '/file/of/flags', '/file/of/flags'),
    # Versions that are correct, or may not know the option.
    ('0.11.2', None, None),
    ('0.10.0', '--a=1', '--a=1'),
  ],
)
def test_xla_flags(monkeypatch, version, before, after):
  monkeypatch.setattr('importlib.metadata.version', lambda _: version)
  monkeypatch.setenv('XLA_FLAGS', before or '')
  if before is None:
    monkeypatch.delenv('XLA_FLAGS')
  environment.avoid_wrong_results()
  environment.avoid_wrong_results()
  assert os.environ.get('XLA_FLAGS') == after


@pytest.mark.skipif(not HAS_BUG, reason='this jaxlib computes correctly')
def test_the_bug_of_this_jaxlib_is_found():
  """The option is in XLA_FLAGS with another value, which users' flags keep."""
  code = 'from vit_jax.runs import canary; canary.refuse_wrong_results()'
  flags = f'{environment.OPTION}=dot,reduce'
  done = python('-c', code, XLA_FLAGS=flags)
  assert done.returncode == 1
  assert f'{environment.OPTION}= to XLA_FLAGS' in done.stderr


def test_faults_of_a_host(tmp_path, monkeypatch):
  chip = tmp_path / 'accel0'
  chip.write_text('')
  monkeypatch.setattr(preflight, 'TPUS', [f'{tmp_path}/accel[0-9]*'])
  versions = {'Python': '3', 'jax': '0', 'jaxlib': '0', 'libtpu': '0.0.1'}
  monkeypatch.setattr(workdirs, 'versions', lambda: versions)
  monkeypatch.setenv('MEGASCALE_NUM_SLICES', '3')
  monkeypatch.delenv('TPU_SKIP_MDS_QUERY', raising=False)
  with chip.open() as file:
    pipe, held = subprocess.PIPE, [file.fileno()]
    with subprocess.Popen('cat', stdin=pipe, pass_fds=held) as user:
      faults = in_process.call(doctor).splitlines()
  assert faults[0] == f'{chip} is in use by cat. Run: kill {user.pid}'
  assert faults[1].startswith('libtpu is not 0.0.')
  assert faults[2].endswith('unset MEGASCALE_NUM_SLICES')


@pytest.mark.slow
def test_a_host_that_does_not_come_is_named(tmp_path):
  address = f'localhost:{free_port()}'
  given = {'JAX_COORDINATOR_ADDRESS': address, 'JAX_NUM_PROCESSES': '3'}
  command = '-m', 'vit_jax.tools.doctor', '--hosts'
  first, third = (
    Process(tmp_path, *command, env={**given, 'JAX_PROCESS_ID': i})
    for i in '02'
  )
  assert [first.finish(), third.finish()] == [1, 0]
  _, *rows, missing = first.output.splitlines()
  assert [row.split()[:2] for row in rows] == [[x, gethostname()] for x in '02']
  assert missing == f'Missing at {address} after 30 s: [1].'


@pytest.mark.skipif(sys.platform != 'linux', reason='of glibc')
def test_a_process_starts_itself_with_huge_pages(monkeypatch):
  monkeypatch.delenv('GLIBC_TUNABLES', raising=False)
  names = 'GLIBC_TUNABLES', 'OWN', 'SET'
  code = 'import os; from vit_jax.io import environment as e; '
  code += f"e.start(OWN='1', SET='2'); print([os.environ[x] for x in {names}])"
  done = python('-c', code, SET='3')
  assert done.stdout == "['glibc.malloc.hugetlb=1', '1', '3']\n"
