"""The pipeline: what is read is a function of seed and position alone."""

import dataclasses
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from PIL import Image

from vit_jax.config import resolve
from vit_jax.data import pipeline
from vit_jax.data import transforms as T
from vit_jax.data.folder import Folder

ROOT = pathlib.Path(__file__).parents[2]


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
  """Some examples cannot be decoded."""

  bad = (3, 4, 17)

  def __getitem__(self, index):
    if index in self.bad:
      return {'image': b'not an image', 'label': index}
    return super().__getitem__(index)


def _split(options):
  """Return the fields of Data, and the other options, of its methods."""
  names = {field.name for field in dataclasses.fields(pipeline.Data)}
  fields = {k: v for k, v in options.items() if k in names}
  return fields, {k: v for k, v in options.items() if k not in names}


def train_batches(source, transforms=(), **options):
  fields, options = _split(options)
  data = pipeline.Data(source, transforms=transforms, **fields)
  return data.train_batches(**options)


def eval_batches(source, transforms=(), **options):
  fields, options = _split(options)
  data = pipeline.Data(source, transforms=transforms, **fields)
  return data.eval_batches(**options)


def _take(count, source, transforms=(), **options):
  batches = train_batches(source, transforms, **options)
  try:
    return [next(batches) for _ in range(count)]
  finally:
    batches.close()


def _stack(batches, key):
  return np.concatenate([batch[key] for batch in batches])


def _assert_same(left, right):
  for key in ('image', 'label'):
    np.testing.assert_array_equal(_stack(left, key), _stack(right, key))


def test_every_epoch_is_another_permutation():
  labels = _stack(_take(6, Numbers(90), batch_size=45), 'label').reshape(3, 90)
  assert labels.dtype == np.int32
  for epoch in labels:
    assert sorted(epoch) == list(range(90))
  assert len({tuple(epoch) for epoch in labels}) == 3
  other = _stack(_take(2, Numbers(90), batch_size=45, seed=1), 'label')
  assert tuple(other) != tuple(labels[0])


def test_first_places_are_uniform():
  visits = pipeline.Data(Numbers(1000), 1).visits()
  firsts = [visits(1000 * epoch)[1] // 100 for epoch in range(300)]
  assert np.abs(np.bincount(firsts, minlength=10) - 30).max() < 22  # 4 sigma


def test_batches_larger_than_the_set():
  labels = _stack(_take(1, Numbers(90), batch_size=270), 'label')
  for epoch in labels.reshape(3, 90):
    assert sorted(epoch) == list(range(90))


def test_augmentation_is_of_seed_epoch_and_index():
  (batch,) = _take(1, Numbers(80), (Noise(),), batch_size=240)
  seen = {}
  for row, (image, index) in enumerate(zip(batch['image'], batch['label'])):
    seen[row // 80, int(index)] = int(image[0, 0, 0])
  by_epoch = [[seen[e, i] for i in range(80)] for e in range(3)]
  assert by_epoch[0] != by_epoch[1] != by_epoch[2]
  for key, value in seen.items():  # the definition, written out
    philox = np.random.Philox(
      key=np.array([0, key[0]], np.uint64),
      counter=np.array([0, 0, key[1], 0], np.uint64),
    )
    assert value == np.random.Generator(philox).integers(256)


def test_processes_share_the_same_global_batch():
  options = {'batch_size': 80, 'seed': 5}
  whole = _take(2, Numbers(99), (Noise(),), **options)
  for count in (2, 4):
    parts = [
      _take(
        2,
        Numbers(99),
        (Noise(),),
        process_index=i,
        process_count=count,
        **options,
      )
      for i in range(count)
    ]
    for step in range(2):
      _assert_same([whole[step]], [part[step] for part in parts])


def test_resume_from_position():
  options = {'batch_size': 36, 'seed': 2}
  straight = _take(5, Numbers(99), (Noise(),), **options)
  batches = train_batches(Numbers(99), (Noise(),), **options)
  for _ in range(3):
    next(batches)
  assert batches.position == 36 * 3
  batches.close()
  rest = _take(2, Numbers(99), (Noise(),), start=batches.position, **options)
  _assert_same(straight[3:], rest)


def test_start_need_not_be_a_multiple():
  straight = _stack(_take(3, Numbers(99), batch_size=40), 'label')
  shifted = _stack(_take(2, Numbers(99), batch_size=40, start=17), 'label')
  np.testing.assert_array_equal(straight[17 : 17 + 80], shifted)


@pytest.mark.slow
def test_worker_processes_equal_threads():
  # 70 examples of a batch: three chunks, dealt to two processes in turn.
  options = {'batch_size': 70, 'seed': 3, 'on_error': 'skip'}
  threads = train_batches(Broken(40), (Noise(),), **options)
  workers = train_batches(Broken(40), (Noise(),), num_workers=2, **options)
  for _ in range(4):
    left, right = next(threads), next(workers)
    _assert_same([left], [right])
    assert threads.skipped == workers.skipped > 0
  threads.close()
  workers.close()


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
  batches = eval_batches(Numbers(70), (Noise(),), batch_size=32)
  first, second = list(batches), list(batches)
  _assert_same(first, second)


def test_soft_labels():
  (batch,) = _take(1, Numbers(99, soft=True), batch_size=12)
  assert batch['label'].dtype == np.float32
  np.testing.assert_array_equal(
    batch['label'].argmax(-1), batch['image'][:, 0, 0, 0]
  )


@pytest.fixture
def folder(tmp_path):
  (tmp_path / 'a').mkdir()
  for i in range(40):
    image = Image.fromarray(np.full((6, 8, 3), i, np.uint8))
    image.save(tmp_path / 'a' / f'{i:02}.png')
  (tmp_path / 'a' / '07.png').write_bytes(b'junk')
  return tmp_path


def test_corrupt_image_is_named(folder):
  with pytest.raises(ValueError) as info:
    _take(1, Folder(folder), batch_size=40)
  path = os.path.join(folder, 'a', '07.png')
  for part in ('example 7', path, "b'junk'", "on_error='skip'"):
    assert part in str(info.value)


def test_skipping_in_training(folder):
  batches = train_batches(Folder(folder), batch_size=40, on_error='skip')
  for epoch in range(1, 3):
    values = next(batches)['image'][:, 0, 0, 0].tolist()
    assert sorted(values) == sorted([*range(7), *range(8, 40), 8])
    assert batches.skipped == epoch
  batches.close()


def test_skipping_in_evaluation(folder):
  batches = eval_batches(Folder(folder), batch_size=16, on_error='skip')
  for _ in range(2):
    values = [b['image'][b['mask']][:, 0, 0, 0] for b in batches]
    expected = [*range(7), *range(8, 40)]
    assert np.concatenate(values).tolist() == expected
    assert batches.skipped == 1


def test_vanished_file_can_be_skipped(folder):
  source = Folder(folder)
  (folder / 'a' / '09.png').unlink()
  batches = train_batches(source, batch_size=40, on_error='skip')
  next(batches)
  assert batches.skipped == 2
  batches.close()


def test_all_unreadable():
  source = Broken(5)
  source.bad = range(5)
  with pytest.raises(ValueError, match='gave up after 5 unreadable examples'):
    _take(1, source, batch_size=2, on_error='skip')


@pytest.mark.parametrize('build', [train_batches, eval_batches])
def test_label_out_of_range(build):
  message = r'example 98 of Numbers \(number 98\) is 98, not in \[0, 98\)'
  batches = build(Numbers(99), batch_size=99, num_classes=98, on_error='skip')
  with pytest.raises(ValueError, match=message):
    next(iter(batches))
  batches = build(Numbers(99, num_classes=98), batch_size=99)
  with pytest.raises(ValueError, match=message):
    next(iter(batches))


def test_soft_label_of_wrong_length():
  with pytest.raises(ValueError, match=r'\(99,\).* num_classes=4'):
    _take(1, Numbers(99, soft=True), batch_size=5, num_classes=4)


class OwnError(Exception):
  """Cannot be pickled: its constructor takes other arguments than its args."""

  def __init__(self, one, two):
    super().__init__(f'{one} {two}')


def _own_error(image, rng):
  raise OwnError('far', 'away')


@pytest.mark.parametrize(
  'source, transforms, kind, message',
  [
    (Broken(5), (), ValueError, r'^cannot read example 3 of Broken'),
    (Numbers(5), (_own_error,), RuntimeError, '^OwnError: far away'),
  ],
)
def test_errors_can_leave_a_process(source, transforms, kind, message):
  batches = eval_batches(source, transforms, batch_size=5)
  with pytest.raises(kind, match=message) as info:
    next(iter(batches))
  assert type(pickle.loads(pickle.dumps(info.value))) is kind


class Growing(Numbers):
  """Images of different sizes."""

  def __getitem__(self, index):
    return {'image': np.zeros((2 + index, 3, 3), np.uint8), 'label': 0}


@pytest.mark.parametrize('batch_size', [32, 64])  # one chunk, and several
def test_unequal_shapes(batch_size):
  with pytest.raises(ValueError, match='images of one batch have the shapes'):
    _take(1, Growing(200), batch_size=batch_size)
  (batch,) = _take(1, Growing(200), (T.Resize(4),), batch_size=batch_size)
  assert batch['image'].shape == (batch_size, 4, 4, 3)


def test_error_of_a_transform_names_the_example():
  message = r'CentralCrop\(9, 9\) is larger .*\(example \d+ of Numbers'
  with pytest.raises(ValueError, match=message):
    _take(1, Numbers(99), (T.CentralCrop(9),), batch_size=5)


def _bug(image, rng):
  raise KeyError('bug')


@pytest.mark.parametrize('num_workers', [0, 1])
def test_bug_of_a_transform_keeps_its_traceback(num_workers):
  with pytest.raises(KeyError, match='bug') as info:
    _take(1, Numbers(99), (_bug,), batch_size=5, num_workers=num_workers)
  assert 'in _bug' in ''.join(info.value.__notes__)


def test_first_example(folder):
  def shape(*arguments):
    return pipeline.first_example(*arguments)['image'].shape

  assert shape(Folder(folder)) == (6, 8, 3)
  assert shape(Numbers(3), (T.Resize((5, 7)),)) == (5, 7, 1)
  source = Broken(5)
  source.bad = (0, 1)
  assert shape(source) == (4, 4, 1)


@pytest.mark.parametrize(
  'options, message',
  [
    ({'batch_size': 10, 'process_count': 4}, 'a multiple of .* processes, 4'),
    ({'batch_size': 0}, 'batch_size=0 must be an integer of at least 1'),
    (
      {'process_index': 2, 'process_count': 2},
      r'process_index=2 must lie in \[0, 2\)',
    ),
    ({'start': -1}, 'start=-1 must be'),
    ({'seed': -1}, 'seed=-1 must lie'),
    ({'num_workers': -1}, 'num_workers=-1 must be'),
    (
      {'on_error': 'ignore'},
      "on_error='ignore' must be one of 'raise', 'skip'",
    ),
  ],
)
def test_bad_arguments(options, message):
  with pytest.raises(ValueError, match=message):
    train_batches(Numbers(5), **{'batch_size': 8, **options})


def test_empty_source():
  with pytest.raises(ValueError, match='the source Numbers has 0 examples'):
    eval_batches(Numbers(0), batch_size=8)


def test_a_source_of_two_billion_examples():
  class Huge(Numbers):
    def __getitem__(self, index):
      return {'image': np.zeros((1, 1, 1), np.uint8), 'label': index}

  labels = _stack(_take(2, Huge(2**31), batch_size=64), 'label')
  assert len(set(labels.tolist())) == 128
  assert labels.max() > 2**30 and labels.min() >= 0


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
  ran = subprocess.run(
    [sys.executable, script],
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert (ran.returncode, ran.stdout, ran.stderr) == (0, 'done\n', '')


def test_data_imports_no_heavy_modules():
  code = (
    'import sys, vit_jax.data.pipeline, vit_jax.data.folder,'
    ' vit_jax.data.tfds, vit_jax.data.transforms, vit_jax.data.images;'
    " heavy = {'grain', 'cv2', 'tensorflow_datasets', 'PIL', 'jax'};"
    ' print(sorted(heavy & set(sys.modules)))'
  )
  out = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )
  assert out.stdout.strip() == '[]', out.stderr


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
  'field',
  [
    {'batch_size': 0},
    {'batch_size': 2.0},
    {'batch_size': True},
    {'batch_size': None},
    {'num_workers': -1},
    {'on_error': 'ignore'},
  ],
)
def test_data_names_an_invalid_field(field):
  (name,) = field
  with pytest.raises(ValueError, match=f'{name}=.* must be'):
    pipeline.Data(Numbers(5), **{'batch_size': 2, **field})


@dataclasses.dataclass(frozen=True)
class Concatenated:
  """A source that wraps sources, with nothing but what a source must have."""

  sources: tuple

  def __len__(self):
    return sum(map(len, self.sources))

  def __getitem__(self, index):
    for source in self.sources:
      if index < len(source):
        return source[index]
      index -= len(source)
    raise IndexError(index)


@dataclasses.dataclass(frozen=True)
class Sometimes:
  """A transform that wraps a transform: applies it with probability `p`."""

  transform: object
  p: float

  def __call__(self, image, rng):
    return self.transform(image, rng) if rng.random() < self.p else image


def test_wrappers_of_sources_and_transforms():
  config = {
    'source': {
      'target': f'{__name__}.Concatenated',
      'sources': (
        {'target': f'{__name__}.Numbers', 'count': 30},
        {'target': f'{__name__}.Numbers', 'count': 70},
      ),
    },
    'transforms': (
      {
        'target': f'{__name__}.Sometimes',
        'transform': {
          'target': 'vit_jax.data.transforms.RandomCrop',
          'size': 4,
        },
        'p': 1.0,
      },
      {
        'target': f'{__name__}.Sometimes',
        'transform': {'target': f'{__name__}.Noise'},
        'p': 0.5,
      },
    ),
    'batch_size': 50,
  }
  data = pipeline.Data(**resolve(config))
  seen = list(data.eval_batches())
  labels = [*range(30), *range(70)]
  assert _stack(seen, 'label').tolist() == labels
  assert pipeline.labels(data.source).tolist() == labels
  plain = _stack(seen, 'image')[:, 1, 1, 0]
  assert plain.tolist() == labels
  replaced = (_stack(seen, 'image')[:, 0, 0, 0] != plain).sum()
  assert 25 < replaced < 75
  unlabelled = dataclasses.replace(data, labels=False)
  assert next(unlabelled.train_batches())['label'].tolist() == [0] * 50
  message = r'example \d+ of Concatenated \(index \d+\) is \d+, not in \[0, 9\)'
  with pytest.raises(ValueError, match=message):
    next(data.train_batches(num_classes=9))
