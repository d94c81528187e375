"""Pictures that the project draws itself."""

import numpy as np
import pytest

from vit_jax.data import images
from vit_jax.data.sources.folder import Folder
from vit_jax.tools import samples


def test_samples_are_a_folder_of_classes(tmp_path):
  samples.main([f'{tmp_path}/new'])
  source = Folder(tmp_path / 'new')
  assert tuple(source.class_names) == samples.CLASSES
  assert np.bincount(source.labels()).tolist() == [samples.PER_CLASS] * 6
  endings = {source.describe(i)[-3:] for i in range(len(source))}
  assert endings == {'jpg', 'png', 'ebp'}
  first = [images.decode(source[i]['image']) for i in range(4)]
  assert len({x.shape for x in first}) == 4  # sizes
  again = samples.draw('checks', np.random.default_rng([0, 2]))
  np.testing.assert_array_equal(first[2], again)  # a PNG: 02.png


def test_a_file_is_no_folder(tmp_path):
  (tmp_path / 'file').write_bytes(b'mine')
  with pytest.raises(SystemExit, match=r"Not a directory: '.*/file/checks'"):
    samples.main([f'{tmp_path}/file'])
  assert (tmp_path / 'file').read_bytes() == b'mine'
