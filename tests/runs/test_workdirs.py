"""The directory of a run: created, claimed, and found from a checkpoint."""

import pytest

from vit_jax.runs import workdirs


def test_prepare_makes_the_directory_and_leaves_nothing(tmp_path):
  for _ in range(2):
    workdirs.prepare(tmp_path / 'a' / 'b')
  assert list((tmp_path / 'a' / 'b').iterdir()) == []
  (tmp_path / 'file').write_text('')
  with pytest.raises(OSError, match='file/x'):
    workdirs.prepare(tmp_path / 'file' / 'x')


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
  assert workdirs.newest_step(tmp_path) == 10
  assert workdirs.newest_step(tmp_path / 'missing') is None


def test_the_commit_of_this_checkout():
  commit = workdirs.git_commit()
  assert commit is None or len(commit.removesuffix('+dirty')) == 40


def test_the_last_start_may_write(tmp_path):
  first = workdirs.Claim(tmp_path)
  first.check()
  second = workdirs.Claim(tmp_path)
  with pytest.raises(ValueError, match='was started again by process'):
    first.check()
  second.check()
