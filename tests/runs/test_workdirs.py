"""The directory of a run: created, claimed, and found from a checkpoint."""

import subprocess
import sys

import pytest

from vit_jax.runs import workdirs


def test_description_is_found_from_a_checkpoint(tmp_path):
  (tmp_path / 'model.json').write_text('{"image_shape": [8, 8, 3]}')
  for path in (tmp_path, tmp_path / 'checkpoints' / '500'):
    assert workdirs.description(path) == {'image_shape': [8, 8, 3]}
  other = tmp_path / 'a' / 'b' / 'c' / 'd'
  with pytest.raises(ValueError, match='is not the workdir of a training run'):
    workdirs.description(other)


def test_steps_are_sorted_as_numbers(tmp_path):
  for name in ('9', '10', '5.bak', 'damaged-11'):
    (tmp_path / 'checkpoints' / name).mkdir(parents=True)
  assert workdirs.steps(tmp_path / 'checkpoints') == [9, 10]
  assert workdirs.steps(tmp_path / 'missing') == []


def test_the_commit_of_this_checkout():
  commit = workdirs.git_commit()
  assert commit is None or len(commit.removesuffix('+dirty')) == 40


def test_the_last_start_may_write_at_a_url(tmp_path, monkeypatch):
  monkeypatch.setattr(workdirs, 'is_local', lambda path: False)
  first = workdirs.Claim(tmp_path)
  first.check()
  second = workdirs.Claim(tmp_path)
  with pytest.raises(ValueError, match='was started again by process'):
    first.check()
  second.check()


def test_what_another_process_has_claimed(tmp_path):
  workdirs.Claim(tmp_path).close()
  code = 'import fcntl, sys; file = open(sys.argv[1], "w"); '
  code += 'fcntl.lockf(file, fcntl.LOCK_EX); print(1, flush=True); input()'
  command = [sys.executable, '-c', code, str(tmp_path / '.claim.lock')]
  pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}
  with subprocess.Popen(command, **pipes) as other:
    other.stdout.readline()
    with pytest.raises(ValueError, match=r'already running as process \d+ of'):
      workdirs.Claim(tmp_path)
    other.stdin.write(b'\n')
  workdirs.Claim(tmp_path).close()
