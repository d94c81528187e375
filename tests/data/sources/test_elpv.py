"""ELPV: divisions, labels and the licence, on made-up cells of its package."""

import sys

import numpy as np
import pytest
from made_up import install_elpv

from vit_jax.data.sources import elpv
from vit_jax.data.sources.elpv import Elpv


@pytest.fixture
def cells(monkeypatch):
  elpv._cells.cache_clear()
  yield install_elpv(monkeypatch)
  elpv._cells.cache_clear()


def test_divisions_share_no_cell_and_keep_the_classes(cells, capsys):
  images, probability = cells
  defective, seen = probability >= 0.5, []
  for seed in (0, 1):
    parts = [Elpv(split, seed=seed) for split in ('train', 'test')]
    assert [len(x) for x in parts] == [60, 20]
    rows = [
      [int(x.describe(i)[-8:-4]) - 1 for i in range(len(x))] for x in parts
    ]
    assert sorted(rows[0] + rows[1]) == [*range(80)]
    for part, of_part in zip(parts, rows):
      assert part.labels().mean() == 0.25  # of all cells, too
      np.testing.assert_array_equal(part.labels(), defective[of_part])
      example = part[3]
      assert example['label'] == part.labels()[3]
      assert example['type'] == ('mono' if of_part[3] % 3 == 0 else 'poly')
      np.testing.assert_array_equal(
        example['image'][..., 0], images[of_part[3]]
      )
      colours = type(part)('test', seed, channels=3)[3]['image']
      np.testing.assert_array_equal(colours[..., 2], images[rows[1][3]])
      example['image'][:] = 0  # a copy
      assert part[3]['image'].any()
    seen.append(rows)
  assert seen[0] != seen[1]
  assert capsys.readouterr().out.count('CC BY-NC-SA') == 1


def test_a_missing_package_is_named(monkeypatch):
  elpv._cells.cache_clear()
  monkeypatch.setitem(sys.modules, 'elpv_dataset.utils', None)
  with pytest.raises(ValueError, match=r'\.\[elpv\]'):
    Elpv('train')
