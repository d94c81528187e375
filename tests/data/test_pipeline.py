"""The pipeline: what is read is a function of seed and position alone."""

import contextlib
import dataclasses
import textwrap
import time
from unittest import mock

import numpy as np
import packed
import pytest
from options import all_set
from PIL import Image
from processes import python
from tiny import encode

from vit_jax.data import pipeline
from vit_jax.data import transforms as T
from vit_jax.data.images import Colours
from vit_jax.data.order import Balanced
from vit_jax.data.sources.folder import Folder


class Numbers:
  """Image i is filled with i; label i, or a row of the identity matrix."""

  class_names = None

  def __init__(self, count, *, size=4, soft=False, num_classes=None):
    self.count, self.size, self.soft = count, size, soft
    self.num_classes = num_classes

  def __len__(self):
    return self.count

  def __getitem__(self, index):
    image = np.full((self.size, self.size, 1), index, np.uint8)
    label = np.eye(self.count)[index] if self.soft else index
    return {'image': image, 'label': label}

  def describe(self, index):
    return f'number {index}'


@dataclasses.dataclass(frozen=True)
class Noise:
  """Replaces the corner by a random byte: shows which stream was used."""

  def __call__(self, image, rng):
    image = image.copy()
    image[0, 0] = rng.integers(256)
    return image


class Broken(Numbers):
  bad = (3, 4, 17)

  def __getitem__(self, index):
    if index in self.bad:
      return {'image': b'not an image', 'label': index}
    return super().__getitem__(index)


NAMES = {field.name for field in dataclasses.fields(pipeline.Data)}


def _batches(method, source, transforms, options):
  fields = {k: options.pop(k) for k in NAMES & set(options)}
  data = pipeline.Data(source, transforms=transforms, **fields)
  return getattr(data, method)(**options)


def train_batches(source, transforms=(), **options):
  return _batches('train_batches', source, transforms, options)


def eval_batches(source, transforms=(), **options):
  return _batches('eval_batches', source, transforms, options)


def _take(count, source, transforms=(), **options):
  batches = train_batches(source, transforms, **options)
  try:
    return [next(batches) for _ in range(count)]
  finally:
    batches.close()


def _stack(batches, key):
  return np.concatenate([batch[key] for batch in batches])


def drawn_by_definition(seed, epoch, index):
  """Return the first random byte of a visit."""
  philox = np.random.Philox(
    key=np.array([seed, epoch], np.uint64),
    counter=np.array([0, 0, index, 0], np.uint64),
  )
  return np.random.Generator(philox).integers(256)


@pytest.mark.parametrize(
  'count, processes, soft',
  [(1, 3, True), (60, 1, False), (61, 2, False), (125, 3, False)],
)
def test_evaluation_sees_every_example_once(count, processes, soft):
  parts = [
    eval_batches(
      Numbers(count, soft=soft),
      batch_size=60,
      process_index=i,
      process_count=processes,
    )
    for i in range(processes)
  ]
  assert {len(part) for part in parts} == {-(-count // 60)}
  seen = []
  for part in parts:
    batches = list(part)
    assert len(batches) == len(part)
    for batch in batches:
      assert batch['mask'].dtype == bool
      assert len(batch['mask']) == len(batch['image']) == 60 // processes
      assert batch['image'].shape[1:] == (4, 4, 1)
      label = batch['label'].argmax(-1) if soft else batch['label']
      assert batch['label'].dtype == (np.float32 if soft else np.int32)
      seen += label[batch['mask']].tolist()
      np.testing.assert_array_equal(
        batch['image'][batch['mask']][:, 0, 0, 0], label[batch['mask']]
      )
      assert not batch['image'][~batch['mask']].any()
  assert sorted(seen) == list(range(count))


def test_evaluation_repeats():
  batches = eval_batches(Numbers(70), (Noise(),), batch_size=35)
  first, second = list(batches), list(batches)
  expected = [drawn_by_definition(0, 0, index) for index in range(70)]
  for found in (first, second):
    drawn = _stack(found, 'image')[:, 0, 0, 0]
    assert drawn.tolist() == expected
    assert _stack(found, 'label').tolist() == list(range(70))


@pytest.fixture
def folder(tmp_path):
  pixels = (np.full((6, 8, 3), i, np.uint8) for i in range(40))
  files = {f'a/{i:02}.png': encode(x) for i, x in enumerate(pixels)}
  return packed.write_folder(tmp_path, files | {'a/07.png': b'junk'})


def test_skipping_in_training(folder):
  """Images that cannot be decoded, and a file that no longer exists."""
  source = Folder(folder)
  (folder / 'a' / '09.png').unlink()
  batches = train_batches(source, batch_size=40, on_error='skip')
  for _ in range(2):
    values = next(batches)['image'][:, 0, 0, 0].tolist()
    assert sorted(values) == sorted([*range(7), 8, *range(10, 40), 8, 10])
    assert batches.skipped == {7, 9}
  batches.close()


def _own(error):
  def transform(image, rng):
    raise error

  return transform


def broken(count):
  source = Broken(count)
  source.bad = range(count)
  return source


def black(*shapes, dtype=np.uint8):
  return [{'image': np.zeros(shape, dtype), 'label': 0} for shape in shapes]


@pytest.mark.parametrize('build', [train_batches, eval_batches])
@pytest.mark.parametrize(
  'source, options, words',
  [
    (broken(5), {}, ['example', "on_error='skip'"]),
    (Numbers(0), {}, ['Numbers', 'no examples']),
    (Numbers(4), {'num_classes': 3}, ['number', 'num_classes=3']),
    (Numbers(4, num_classes=3), {}, ['num_classes=3']),
    (Numbers(9, soft=True), {'num_classes': 4}, ['(9,)', 'num_classes=4']),
    (black((2, 3, 3), (3, 3, 3)), {}, ['(2, 3, 3)', 'Resize']),
    (black((2, 2, 3), dtype=float), {}, ['float64', '(2, 2, 3)']),
    (
      Numbers(9),
      {'transforms': (T.CentralCrop(9),)},
      ['CentralCrop(9, 9)', 'number'],
    ),
    (Numbers(9), {'transforms': (_own(KeyError('bug')),)}, ['bug']),
  ],
)
def test_errors(build, source, options, words):
  options = {'batch_size': 9, **options}
  kind = KeyError if words == ['bug'] else ValueError
  with pytest.raises(kind) as error:
    next(iter(build(source, options.pop('transforms', ()), **options)))
  assert all(word in str(error.value) for word in words)
  if kind is KeyError:
    assert 'number' in error.value.__notes__[0]  # names the example


def test_examples_without_a_description_can_be_skipped():
  class Damaged(Numbers):
    def __getitem__(self, index):
      if index == 3:
        raise ValueError('damaged')
      return super().__getitem__(index)

    def describe(self, index):
      return f'label {self[index]["label"]}'

  batches = eval_batches(Damaged(5), batch_size=5, on_error='skip')
  (batch,) = batches
  assert batch['mask'].tolist() == [True, True, True, False, True]
  with pytest.raises(ValueError, match='example 3 of Damaged'):
    _take(1, Damaged(5), batch_size=5)


def test_all_unreadable():
  with pytest.raises(ValueError, match='after 5 unreadable'):
    _take(1, broken(5), batch_size=2, on_error='skip')


class Turned(Numbers):
  """A JPEG of 6 x 8 pixels, red, that EXIF turns."""

  def __getitem__(self, index):
    image, exif = Image.new('RGB', (8, 6), (255, 0, 0)), Image.Exif()
    exif[0x0112] = 6  # orientation
    return {'image': encode(image, 'JPEG', exif=exif), 'label': 0}


def shape(source, transforms=()):
  return pipeline.Data(source, 1, transforms).first_example()['image'].shape


def test_images_are_decoded_as_the_source_says():
  source = Turned(2)
  assert shape(source) == (8, 6, 3)
  source.decode = Colours(1)
  assert shape(source) == (8, 6, 1)
  source.decode = Colours(1, exif=False)
  assert shape(source) == (6, 8, 1)


def test_first_example(folder):
  (folder / 'a' / '07.png').unlink()
  assert shape(Folder(folder)) == (6, 8, 3)
  assert shape(Numbers(3), (T.Resize((5, 7)),)) == (5, 7, 1)
  source = Broken(5)
  source.bad = (0, 1)
  assert shape(source) == (4, 4, 1)


class Pictures(Numbers):
  """JPEGs of several sizes; number 5 cannot be decoded."""

  def __getitem__(self, index):
    pixels = np.random.default_rng(index).integers(0, 256, (9, 9 + index, 3))
    data = encode(pixels.astype(np.uint8), 'JPEG')
    return {'image': b'no image' if index == 5 else data, 'label': index}


def test_several_views_of_an_image():
  crops = T.MultiCrop(1.0, local_size=0.5, local_count=3)
  options = {'transforms': (crops,), 'image_size': 8, 'on_error': 'skip'}
  data = pipeline.Data(Pictures(11), 4, **options)
  first = {k: np.shape(x) for k, x in data.first_example().items()}
  assert first == {'image': (2, 8, 8, 3), 'local': (3, 4, 4, 3), 'label': ()}

  def take(count, start=0, **changes):
    batches = dataclasses.replace(data, **changes).train_batches(
      seed=1, start=start, num_classes=11
    )
    with contextlib.closing(batches):
      found = [next(batches) for _ in range(count)]
    return {name: _stack(found, name) for name in found[0]}

  whole = take(6)
  assert {k: x.shape for k, x in whole.items()} == {
    'image': (24, 2, 8, 8, 3),
    'local': (24, 3, 4, 4, 3),
    'label': (24,),
  }
  rest = {name: x[8:] for name, x in whole.items()}
  for resumed in (take(4, start=8), take(4, start=8, num_workers=1)):
    for name, values in rest.items():
      np.testing.assert_array_equal(resumed[name], values)
  *_, last = data.eval_batches()
  assert last['mask'].tolist() == [True, True, True, False]
  assert last['local'][2].any() and not last['local'][3].any()
  uneven = (lambda image, rng: {'image': image, 'local': image[None]},)
  with pytest.raises(ValueError, match='End the transforms with one'):
    take(1, transforms=uneven)


def test_closed_iterator_stops():
  batches = train_batches(Numbers(5), batch_size=8)
  next(batches)
  batches.close()
  batches.close()
  with pytest.raises(StopIteration):
    next(batches)


def test_exit_without_close_is_quiet(tmp_path):
  script = tmp_path / 'script.py'
  script.write_text(
    textwrap.dedent("""
    import dataclasses

    import numpy as np
    from vit_jax.data import pipeline

    class Source:
      def __len__(self): return 100
      def __getitem__(self, i):
        return {'image': np.zeros((2, 2, 3), np.uint8), 'label': i}

    if __name__ == '__main__':
      data = pipeline.Data(Source(), batch_size=64)
      threads = data.train_batches()
      process = dataclasses.replace(data, num_workers=1).train_batches()
      next(threads), next(process)
      print('done', flush=True)
    """)
  )
  ran = python(script)
  assert (ran.returncode, ran.stdout, ran.stderr) == (0, 'done\n', '')


def test_evaluation_gives_the_index_of_each_example():
  data = pipeline.Data(Numbers(5), batch_size=2)
  local = [b['index'].tolist() for b in data.eval_batches(process_count=2)]
  assert local == [[0], [2], [4]]


def test_data_without_labels():
  data = pipeline.Data(Numbers(5, num_classes=5), batch_size=2, labels=False)
  assert data.source.num_classes is None
  assert next(data.train_batches())['label'].tolist() == [0, 0]
  again = dataclasses.replace(data, batch_size=4)
  assert again.source is data.source


@pytest.mark.parametrize(
  'cores, settings, expected',
  [
    (2, {}, (0, 4)),
    (16, {}, (0, 16)),
    (112, {}, (14, 16)),
    (112, {'num_workers': 0}, (0, 16)),
    (112, {'num_workers': 28}, (28, 8)),
    (2, {'num_workers': 2, 'num_threads': 5}, (2, 3)),
  ],
)
def test_processes_and_threads(cores, settings, expected, monkeypatch):
  monkeypatch.setattr(pipeline.workers, 'cores', lambda: cores)
  data = pipeline.Data(Numbers(5), 2, **settings)
  assert data.processes_and_threads() == expected


def test_seconds_of_the_parts_add_up():
  class Slow(Numbers):
    def __getitem__(self, index):
      time.sleep(0.01)
      return super().__getitem__(index)

  batches = train_batches(Slow(9), (_pause,), batch_size=8, prefetch=1)
  next(batches)
  batches.close()
  assert list(batches.spent) == ['reading', 'decoding', 'transforming']
  assert 0.08 < batches.spent['reading'] < batches.spent['transforming']


def test_decoding_is_not_counted_as_transforming(folder, monkeypatch):
  class Decoded(pipeline.images.Encoded):
    def pixels(self):
      self.seconds = 5.0
      return super().pixels()

  monkeypatch.setattr(pipeline.images, 'Encoded', Decoded)
  batches = train_batches(Folder(folder), batch_size=4, on_error='skip')
  next(batches)
  batches.close()
  assert batches.spent['decoding'] >= 20
  total = batches.spent['decoding'] + batches.spent['transforming']
  assert 0 < total < 5  # the time that has really passed


def _pause(image, rng):
  time.sleep(0.03)
  return image


class Files(Numbers):
  """PNGs, of which number 4 has one pixel more."""

  def __getitem__(self, index):
    image = Image.new('RGB', (12 + (index == 4), 1), (index,) * 3)
    return {'image': encode(image), 'label': index, 'place': index}


def test_all_fields_of_data_act(monkeypatch):
  pools, started = [], []
  make_pool = pipeline._pool

  class Processes:
    close = print

    def __init__(self, reader, numbers, processes, prefetch):
      started.append((processes, prefetch))
      self.__class__.__next__ = lambda _: reader(0)

  monkeypatch.setattr(
    pipeline, '_pool', lambda count: pools.append(count) or make_pool(count)
  )
  monkeypatch.setattr(pipeline.workers, 'Processes', Processes)
  options = {'num_workers': 3, 'num_threads': 15, 'prefetch': 7}
  options |= {'on_error': 'skip', 'labels': False, 'order': Balanced()}
  options |= {'image_size': (8, 12), 'transforms': (T.Resize(0.5), Noise())}
  options |= {'batch_size': 12, 'max_image_bytes': 36}
  options |= {'interpolation': 'nearest', 'keep': ('place',)}
  source = Files(6, num_classes=6)
  data = all_set(pipeline.Data, source=source, **options)
  assert data.transforms == (T.Resize((4, 6), 'nearest'), Noise())
  batch = next(batches := data.train_batches(seed=5))
  assert started == [(3, 7)] and pools == [5]
  visits = [Balanced().bind(source, 5)(position) for position in range(12)]
  numbers = batch['image'][:, 1, 0, 0].tolist()
  assert numbers == [index + (index == 4) for _, index in visits]
  assert batch['place'].tolist() == numbers
  drawn = batch['image'][:, 0, 0, 0].tolist()
  assert drawn == [drawn_by_definition(5, *visit) for visit in visits]
  assert batch['image'].shape == (12, 4, 6, 3) and batches.skipped == {4}
  assert batch['label'].dtype == np.int32
  assert not batch['label'].any()  # but the order sees the labels
  read_ahead = mock.Mock(wraps=pipeline.workers.read_ahead)
  monkeypatch.setattr(pipeline.workers, 'read_ahead', read_ahead)
  dataclasses.replace(data, num_workers=0).train_batches().close()
  assert read_ahead.call_args.args[2] == 7
