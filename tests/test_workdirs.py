"""Working directories: created, checked, and found from a checkpoint."""

import json
import pathlib
import subprocess

import pytest

from vit_jax.parallel import hosts as distributed
from vit_jax.runs import workdirs


def test_prepare_makes_the_directory_and_leaves_nothing(tmp_path):
  for _ in range(2):
    workdirs.prepare(tmp_path / 'a' / 'b')
  assert list((tmp_path / 'a' / 'b').iterdir()) == []


def test_prepare_on_what_cannot_be_written(tmp_path):
  (tmp_path / 'file').write_text('')
  for path in (tmp_path / 'file', tmp_path / 'file' / 'x', '/proc/vit_jax'):
    message = f'--workdir={path} cannot be written to: .*Choose another'
    with pytest.raises(ValueError, match=message):
      workdirs.prepare(path)
  assert pathlib.Path(tmp_path / 'file').read_text() == ''


def test_prepare_checks_that_hosts_share_it(tmp_path, monkeypatch):
  checked = []
  monkeypatch.setattr(distributed, 'check_shared', checked.append)
  workdirs.prepare(tmp_path)
  assert checked == [tmp_path]


def test_description_is_found_from_a_checkpoint(tmp_path):
  (tmp_path / 'model.json').write_text('{"image_shape": [8, 8, 3]}')
  for path in (tmp_path, tmp_path / 'checkpoints' / '500'):
    assert workdirs.description(path) == {'image_shape': [8, 8, 3]}
  with pytest.raises(ValueError, match='is not the workdir of a training run'):
    workdirs.description(tmp_path / 'a' / 'b' / 'c' / 'd')


def git(folder, *words):
  who = ('-c', 'user.name=a', '-c', 'user.email=a@b')
  done = subprocess.run(
    ['git', *who, '-C', folder, *words], check=True, capture_output=True
  )
  return done.stdout.decode().strip()


def test_git_commit_of_a_checkout(tmp_path):
  """Not that of a repository in which an installed package happens to lie."""
  file, installed = tmp_path / 'code.py', tmp_path / '.venv' / 'code.py'
  git(tmp_path, 'init', '-q')
  file.write_text('a = 1')
  git(tmp_path, 'add', '.')
  git(tmp_path, 'commit', '-q', '-m', 'one')
  head = git(tmp_path, 'rev-parse', 'HEAD')
  commit = workdirs.git_commit.__wrapped__  # without its cache
  assert commit(file) == head and len(head) == 40
  file.write_text('a = 2')
  assert commit(file) == f'{head}+dirty'
  installed.parent.mkdir()
  installed.write_text('a = 2')
  assert commit(installed) is None


def test_git_commit_of_an_installed_package(tmp_path, monkeypatch):
  """`pip install git+https://...` notes the commit."""
  package, notes = tmp_path / 'vit_jax', tmp_path / 'vit_jax-0.1.0.dist-info'
  for folder in (package, notes):
    folder.mkdir()
  (notes / 'METADATA').write_text('Name: vit_jax\nVersion: 0.1.0\n')
  url = {'url': 'https://x', 'vcs_info': {'vcs': 'git', 'commit_id': 'abc'}}
  (notes / 'direct_url.json').write_text(json.dumps(url))
  (package / 'workdirs.py').write_text('')
  monkeypatch.syspath_prepend(tmp_path)
  commit = workdirs.git_commit.__wrapped__
  assert commit(package / 'workdirs.py') == 'abc'
  monkeypatch.setenv('PATH', '')  # no git
  assert commit(package / 'workdirs.py') == 'abc'
  assert commit(tmp_path / 'other' / 'workdirs.py') is None


def test_a_process_that_was_stopped_does_not_write_into_a_restarted_run(
  tmp_path, monkeypatch
):
  clock = [0.0]
  monkeypatch.setattr(workdirs.time, 'monotonic', lambda: clock[0])
  stopped = workdirs.Claim(tmp_path)
  clock[0] += 60
  stopped.check()
  restarted = workdirs.Claim(tmp_path)
  clock[0] += 60
  with pytest.raises(ValueError, match='was started again by process'):
    stopped.check()
  restarted.check()
  (tmp_path / '.claim').unlink()  # a moved workdir is reported elsewhere
  clock[0] += 60
  restarted.check()
