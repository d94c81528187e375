"""Nightly sessions: `nox`. CI runs the default tests, see .ci/run.

- slow: the slow tests (kills, hosts, studies, notebooks, browser, faults);
- gpu_compiler: the train step compiled for GPUs, which need not be there;
- parity: live comparison with timm and transformers;
- oldest, tests: the default tests on each supported version.

`nox -l` lists the sessions; arguments after -- go to pytest, as in
`nox -s oldest -- tests/test_step.py`.
"""

import pathlib
import re

import nox

nox.options.error_on_missing_interpreters = True


@nox.session(python='3.11')
def slow(session):
  """Slow tests, with all extras that they use."""
  session.install('-e', '.[test,demo,dinov2,mlflow,wandb,tpu]')
  session.run('pytest', '-m', 'slow', *session.posargs)


@nox.session(python='3.11')
def gpu_compiler(session):
  """The programs that NVIDIA's compiler makes; 6 GB to install."""
  session.install('-e', '.[test,cuda]')
  session.run('pytest', '-m', 'slow', 'tests/tools/test_compile.py', '-n', '0')


@nox.session(python='3.11')
def parity(session):
  """Live comparison with other implementations."""
  session.install('-e', '.[test,parity]')
  session.run('pytest', '-m', 'parity', 'tests/parity', '-n', '0')


@nox.session(python='3.11')
def oldest(session):
  """Lower bounds of setup.py, the oldest jax among them."""
  bounds = re.findall(
    r"^    '([\w-]+)[\w\[\]-]*>=([\d.]+)'",
    pathlib.Path('setup.py').read_text(),
    re.MULTILINE,
  )
  constraints = pathlib.Path(session.create_tmp()) / 'oldest.txt'
  lines = (f'{name}=={version}.*' for name, version in bounds)
  constraints.write_text('\n'.join(lines))
  run_tests(session, '-c', str(constraints))


@nox.session
@nox.parametrize(
  'python, jax',
  [('3.11', '0.10.2'), ('3.12', '0.11.2'), ('3.13', '0.12.0.1')],
  ids=['3.11', '3.12', '3.13'],
)
def tests(session, jax):
  """The newest other packages, with one version of jax."""
  run_tests(session, f'jax=={jax}')


def run_tests(session, *requirements):
  session.install('-e', '.[test]', *requirements)
  session.run('python', '-m', 'vit_jax.tools.doctor')
  session.run('pytest', *session.posargs)
