"""Masks are read as classes of pixels, or refused by name."""

import numpy as np
import pytest
from PIL import Image

from vit_jax.data.images import decode
from vit_jax.data.pipeline import Data
from vit_jax.data.sources.masks import VOID, open_masked
from vit_jax.data.subsets import Subset

CLASSES = np.array([[0, 1, 255], [2, 2, 0]], np.uint8)
READ = np.array([[0, 1, VOID], [2, 2, 0]])
COLOURS = np.array([(0, 0, 0), (200, 0, 9), (0, 0, 255)], np.uint8)


def folder(top, masks, split='', ending='png'):
  """Write images of grey i, and masks (arrays or pictures), in a folder."""
  for i, mask in enumerate(masks):
    for part in ('images', 'masks'):
      (top / split / part / 'a').mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.full((2, 3, 3), i, np.uint8))
    image.save(top / split / f'images/a/{i}.png')
    mask = Image.fromarray(mask) if isinstance(mask, np.ndarray) else mask
    mask.save(top / split / f'masks/a/{i}.{ending}')
  (top / 'classes.txt').write_text('sky\ntree\nroad\n')
  return top


def palette():
  picture = Image.fromarray(CLASSES, 'P')
  picture.putpalette([*COLOURS.ravel().tolist(), *[0] * 759])
  return picture


def coloured():
  void = 224, 224, 192
  colours = np.array([*COLOURS, void], np.uint8)
  image = colours[CLASSES.clip(max=3)]
  return image, {'values': COLOURS.tolist(), 'void': [void]}


def test_numbers_palettes_and_colours(tmp_path):
  image, options = coloured()
  grey = np.stack([CLASSES] * 3, axis=-1)
  for name, mask, given in (
    ('numbers', CLASSES, {}),
    ('16 bits', CLASSES.astype(np.uint16), {}),
    ('palette', palette(), {}),
    ('grey', grey, {}),
    ('colours', image, options),
    ('others', CLASSES + np.uint8(1), {'values': (1, 2, 3), 'void': (0,)}),
  ):
    source = open_masked(folder(tmp_path / name, [mask]), **given)
    np.testing.assert_array_equal(source[0]['mask'], READ, name)
  assert source.pixel_classes == ['sky', 'tree', 'road']


def test_subsets_and_tables_keep_pairs(tmp_path):
  folder(tmp_path, [np.full((2, 3), x, np.uint8) for x in (0, 1, 2)], 'val')
  rows = 'image,mask,split\nval/images/a/2,val/masks/a/2,t\n'
  (tmp_path / 'table.csv').write_text(rows + 'val/images/a/1,val/masks/a/1,u\n')
  names = {'class_names': tmp_path / 'classes.txt'}
  for source in (
    Subset(open_masked(tmp_path, split='val'), examples=2, seed=1),
    open_masked(tmp_path, csv=tmp_path / 'table.csv', split='t', **names),
  ):
    for i in range(len(source)):
      image = decode(source[i]['image'])
      np.testing.assert_array_equal(image[..., 0], source[i]['mask'])


def test_a_column_of_hugging_face(tmp_path):
  datasets = pytest.importorskip('datasets')
  pictures = [Image.fromarray(CLASSES + np.uint8(i)) for i in (0, 1)]
  features = datasets.Features(
    {'image': datasets.Image(), 'annotation': datasets.Image()}
  )
  columns = {'image': pictures, 'annotation': pictures[::-1]}
  made = datasets.Dataset.from_dict(columns, features)
  made.to_parquet(tmp_path / 'train-0.parquet')
  source = open_masked(
    f'hf:{tmp_path / "train-0.parquet"}:train',
    image_key='image',
    mask_key='annotation',
    class_names=('a', 'b', 'c', 'd'),
    void=(255, 0),
  )
  np.testing.assert_array_equal(source[1]['mask'], READ)


@pytest.mark.parametrize(
  'mask, options, error',
  [
    (CLASSES, {'class_names': ('a', 'b')}, r'a/0.png has the values 2. .*0, 1'),
    (CLASSES[:1], {}, r'is \(1, 3\), its image \(2, 3\)'),
    (coloured()[0], {}, 'has colours. Set values'),
    (
      coloured()[0],
      {'values': coloured()[1]['values']},
      'has the values #e0e0c0',
    ),
    (CLASSES, {'values': (0, 1)}, '2 values of 3 classes'),
  ],
)
def test_wrong_masks(tmp_path, mask, options, error):
  folder(tmp_path, [mask])
  with pytest.raises(ValueError, match=error):
    open_masked(tmp_path, **options)[0]['mask']


def test_wrong_files(tmp_path):
  folder(tmp_path / 'jpeg', [CLASSES], ending='jpg')
  with pytest.raises(ValueError, match='JPEG, which changes values'):
    open_masked(tmp_path / 'jpeg')[0]['mask']
  source = open_masked(folder(tmp_path, [CLASSES, CLASSES]))
  with pytest.raises(ValueError, match='Masks are for evals'):
    Data(source, 2).train_batches()
  (tmp_path / 'masks/a/1.webp').write_bytes(b'')
  with pytest.raises(ValueError, match=r'several masks of \(1\): a/1'):
    open_masked(tmp_path)
  (tmp_path / 'masks/a/1.webp').unlink()
  (tmp_path / 'masks/a/1.png').rename(tmp_path / 'masks/a/1_mask.png')
  with pytest.raises(ValueError, match=r'no masks of .* \(1\): a/1. .*table'):
    open_masked(tmp_path)
