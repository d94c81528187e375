"""Pictures by path: what is found, in which order it comes, what is wrong."""

import threading

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import images
from vit_jax.data.sources import image_files, inputs


def draw(path, value, size=(4, 6)):
  path.parent.mkdir(parents=True, exist_ok=True)
  Image.new('RGB', size[::-1], (value, 0, 0)).save(path)


@pytest.fixture
def folder(tmp_path):
  for i, name in enumerate(['b.png', 'a/d.JPG', 'a/c/e.webp', 'a/.f.png']):
    draw(tmp_path / name, i)
  draw(tmp_path / '.hidden/g.png', 9)
  (tmp_path / 'a/notes.txt').write_text('no picture')
  (tmp_path / 'a/odd').write_bytes((tmp_path / 'b.png').read_bytes())
  return tmp_path


@pytest.mark.parametrize(
  'patterns, found',
  [
    (['.'], ['a/c/e.webp', 'a/d.JPG', 'b.png']),
    (['b.png', '.', 'b.png'], ['a/c/e.webp', 'a/d.JPG', 'b.png']),
    (['a/odd'], ['a/odd']),  # named by itself: whatever its ending
    (['a/*'], ['a/c/e.webp', 'a/d.JPG']),
    (['*.png', 'a/?'], ['a/c/e.webp', 'b.png']),
    (['**/*.*'], ['a/c/e.webp', 'a/d.JPG', 'b.png']),
  ],
)
def test_find(folder, patterns, found):
  paths = image_files.find([f'{folder}/{p}' for p in patterns])
  # As they were named: 'FOLDER/./b.png' stays so.
  assert [p.removeprefix(f'{folder}/').removeprefix('./') for p in paths] == (
    found
  )


def test_ignored_files_are_counted_on_stderr(folder, capsys):
  assert len(image_files.find([f'{folder}'])) == 3
  out, err = capsys.readouterr()
  assert not out and err.endswith(f': {folder}/a/notes.txt, {folder}/a/odd\n')


@pytest.mark.parametrize(
  'pattern, message',
  [
    ('*.gif', r'\*\.gif: no images found.*\.jpg, \.jpeg'),
    ('none.png', 'none.png: no images found'),
    ('empty', 'empty: no images found'),
  ],
)
def test_nothing_found(folder, pattern, message):
  (folder / 'empty').mkdir()
  with pytest.raises(ValueError, match=message):
    image_files.find([f'{folder}/b.png', f'{folder}/{pattern}'])


def test_a_name_with_brackets_is_a_name(tmp_path):
  draw(tmp_path / 'x[1].png', 0)
  assert len(image_files.find([f'{tmp_path}/x[1].png'])) == 1


def test_order_is_kept_and_closing_stops_the_threads(tmp_path):
  for i in range(20):
    draw(tmp_path / f'{i:02}.png', i)
  paths = image_files.find([str(tmp_path)])
  source = inputs.Paths(paths)
  plus_one = [lambda image, rng: image + 1]
  loaded = list(inputs.load(source, plus_one, ahead=4))
  assert [path for path, _ in loaded] == paths
  assert [int(x['image'][0, 0, 0]) for _, x in loaded] == list(range(1, 21))
  before = threading.active_count()
  images = inputs.load(source, [], ahead=4)
  next(images)
  images.close()
  assert threading.active_count() == before


def test_one_channel_and_what_cannot_be_read(folder):
  (folder / 'cut.png').write_bytes((folder / 'b.png').read_bytes()[:30])
  paths = [str(folder / n) for n in ('b.png', 'cut.png', 'gone.png')]
  loaded = inputs.load(inputs.Paths(paths, images.Colours(1)), [])
  (_, good), (path, cut), (_, gone) = loaded
  assert good['image'].shape == (4, 6, 1) and good['image'].dtype == np.uint8
  assert path == paths[1]
  assert str(cut).startswith(f'{paths[1]}: cannot decode')
  assert str(gone).startswith(f'{paths[2]}: ')


def test_bug_in_a_transform_is_no_unreadable_picture(folder):
  def broken(image, rng):
    raise TypeError('a bug')

  source = inputs.Paths([f'{folder}/b.png'])
  with pytest.raises(TypeError, match='a bug'):
    list(inputs.load(source, [broken]))
