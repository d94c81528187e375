"""Files appear whole, with ordinary permissions."""

import os
import stat

import numpy as np
import pytest
import safetensors.numpy

from vit_jax.runs.files import replacing, write_atomically


@pytest.fixture(params=[0o022, 0o077, 0o002])
def mode(request):
  """Permissions of a new file under a umask."""
  before = os.umask(request.param)
  yield 0o666 & ~request.param
  os.umask(before)


def test_permissions_are_those_of_new_files(mode, tmp_path):
  """Also if a library writes the file with permissions of its own."""
  path = tmp_path / 'x'
  for content in ('text', b'bytes'):
    write_atomically(path, content)
    assert stat.S_IMODE(path.stat().st_mode) == mode
  with replacing(path) as partial:
    safetensors.numpy.save_file({'a': np.zeros(2, np.float32)}, partial)
  assert stat.S_IMODE(path.stat().st_mode) == mode
  with replacing(path) as partial:
    partial.write_bytes(b'')
    os.chmod(partial, 0o400)
  assert stat.S_IMODE(path.stat().st_mode) == mode
  assert [p.name for p in tmp_path.iterdir()] == ['x']


def test_nothing_is_left_of_what_fails(tmp_path):
  path = tmp_path / 'x'
  path.write_text('before')
  with pytest.raises(KeyError), replacing(path) as partial:
    partial.write_text('half')
    raise KeyError
  assert path.read_text() == 'before' and len(list(tmp_path.iterdir())) == 1
