"""The sheet of augmentations."""

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import augment
from vit_jax.tools import augmentations


def _image(channels=3):
  rng = np.random.default_rng(0)
  return rng.integers(0, 256, (40, 40, channels), dtype=np.uint8)


@pytest.mark.parametrize('channels', [1, 3])
def test_each_operation_is_drawn_at_three_strengths(channels):
  image = _image(channels)
  rows = dict(augmentations.of_policies(image))
  for policy, columns in (
    (augment.RandAugment, slice(0, 3)),
    (augment.TimmRandAugment, slice(3, 6)),
    (augment.TrivialAugment, slice(6, 9)),
  ):
    drawn = {k for k, v in rows.items() if v[columns][0] is not None}
    assert drawn == set(policy.names) - {'Identity'}
  strengths = {x.tobytes() for x in rows['Rotate']}
  assert len(strengths) == 9
  others = augmentations.of_others(image)
  cells = [x for _, row in [*rows.items(), *others] for x in row]
  assert {x.shape for x in cells if x is not None} == {image.shape}


@pytest.mark.slow
def test_the_file_shows_the_image(tmp_path, capsys):
  path, sheet = tmp_path / 'image.png', tmp_path / 'sheet.png'
  Image.new('RGB', (60, 50), (250, 0, 250)).save(path)
  argv = [str(path), f'--output={sheet}', '--image_size=16']
  augmentations.main(argv)
  assert capsys.readouterr().out.strip() == str(sheet)
  with Image.open(sheet) as file:
    pixels = np.asarray(file.convert('RGB')).reshape(-1, 3)
  original = (np.abs(pixels.astype(int) - (250, 0, 250)) < 3).all(1).sum()
  # At least the first column of the 25 rows, each cell of 112 x 112 pixels.
  assert original > 25 * 100 * 100


@pytest.mark.parametrize(
  ('argv', 'message'),
  [
    (['--output=sheet.jpg'], r'sheet\.jpg must end with \.png or \.pdf'),
    (['--output=/no/such/sheet.png'], r'/no/such is not a folder'),
    (['no.jpg', '--output=sheet.png'], r'no\.jpg does not exist'),
  ],
)
def test_mistakes_are_one_line(argv, message, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit, match=message):
    augmentations.main(argv)
