"""Pictures that the project draws itself."""

import csv

import cv2
import numpy as np
import pytest

from vit_jax.data import images
from vit_jax.data.sources.folder import Folder
from vit_jax.data.sources.masks import VOID, open_masked
from vit_jax.tools import samples


def test_samples_are_a_folder_of_classes(tmp_path, monkeypatch):
  monkeypatch.setattr(samples, 'PER_CLASS', 4)
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


def test_a_table_says_what_is_drawn(tmp_path, monkeypatch):
  monkeypatch.setattr(samples, 'IN_TABLE', 8)
  samples.main([f'{tmp_path}', '--table'])
  with (tmp_path / 'table.csv').open() as file:
    rows = list(csv.DictReader(file))
  assert [x['image'] for x in rows] == [f'{i:03}.png' for i in range(8)]
  for i, row in enumerate(rows):
    names = [x for x in samples.SHAPES if row[x] == '1']
    assert row['shapes'] == '|'.join(names) and row['group'] == str(i // 4)
    image = cv2.GaussianBlur(samples.draw_several(i)[0], (0, 0), 3).astype(int)
    is_shape = np.abs(image - image[64, 64]).max(-1) > 50
    parts, _ = cv2.connectedComponents(is_shape.astype(np.uint8))
    assert parts - 1 == int(row['count']) >= len(names)


def test_masks_say_what_is_cut(tmp_path, monkeypatch):
  monkeypatch.setattr(samples, 'MASKED', {'train': 4, 'test': 2})
  samples.main([f'{tmp_path}', '--masks'])
  for split, count in samples.MASKED.items():
    source = open_masked(tmp_path, split=split)
    assert tuple(source.pixel_classes) == samples.MASK_CLASSES
    assert len(source) == count
    for i in range(count):
      found = {*np.unique(source[i]['mask'])} - {VOID, 0}
      assert found and found <= ({4, 5, 6} if i % 2 else {1, 2, 3})


def test_a_file_is_no_folder(tmp_path):
  (tmp_path / 'file').write_bytes(b'mine')
  with pytest.raises(SystemExit, match=r"Not a directory: '.*/file/checks'"):
    samples.main([f'{tmp_path}/file'])
  assert (tmp_path / 'file').read_bytes() == b'mine'
