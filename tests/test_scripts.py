"""script/quickstart and script/test: what they install, when, and run."""

import os
import pathlib
import shutil
import subprocess

ROOT = pathlib.Path(__file__).parents[1]
# Each program writes its name and arguments; the first one makes the others.
PROGRAM = """#!/bin/bash
echo "${0##*/} $*" >> "$LOG"
[ "$*" != "-m venv .venv" ] || {
  mkdir -p .venv/bin && touch .venv/bin/activate
  cp "$0" .venv/bin/pip
}
[ "$*" != "-c import ensurepip" ] || exit $NO_VENV
"""


def test_the_scripts_install_what_is_missing_and_pass_arguments_on(tmp_path):
  shutil.copytree(ROOT / 'script', tmp_path / 'script')
  programs, log = tmp_path / 'programs', tmp_path / 'log'
  programs.mkdir()
  for name in ('python3', 'python', 'pytest'):
    (programs / name).write_text(PROGRAM)
    (programs / name).chmod(0o755)
  for name in ('bash', 'dirname', 'touch', 'mkdir', 'cp', 'id'):
    (programs / name).symlink_to(shutil.which(name))

  def changed(time):
    for name in ('setup.py', 'pyproject.toml'):
      (tmp_path / name).touch()
      os.utime(tmp_path / name, (time, time))

  def run(script, *arguments, no_venv=0):
    log.write_text('')
    done = subprocess.run(
      [tmp_path / 'script' / script, *arguments],
      env={'PATH': str(programs), 'LOG': str(log), 'NO_VENV': str(no_venv)},
      capture_output=True,
      text=True,
    )
    return done.returncode, log.read_text().splitlines(), done.stderr

  checks = ['python3 -c import ensurepip']
  makes = [*checks, 'python3 -m venv .venv']
  main = 'python -m vit_jax.main --config=configs/quickstart.py'
  changed(1)
  status, lines, error = run('test', no_venv=1)
  assert (status, lines) == (1, checks) and 'python3-venv' in error
  status, lines, _ = run('test', 'tests/models', '-k', 'a b')
  installs = 'pip install -e .[test]'
  assert lines == [*makes, installs, 'pytest tests/models -k a b']
  assert run('test')[1] == ['pytest ']
  assert run('test', '--all', '-x')[1] == ['pytest -rs -m  -x']
  start = [f'{main} --workdir=/tmp/quickstart --dry_run']
  assert run('quickstart', '--dry_run')[1] == [
    *makes,
    'pip install -e .',
    *start,
  ]
  assert run('quickstart', '--dry_run')[1] == start
  changed(2**32)
  assert run('test')[1][:-1] == [*makes, installs]
