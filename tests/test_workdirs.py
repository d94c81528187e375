"""Working directories: created, checked, and found from a checkpoint."""

import pathlib

import pytest

from vit_jax import distributed, workdirs


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
