"""Keys of examples reach the batch, changed with the image."""

import dataclasses

import numpy as np
import pytest

from vit_jax.data import subsets
from vit_jax.data.pipeline import Data
from vit_jax.data.transforms import CentralCrop, FlipLR
from vit_jax.types import UserError


@dataclasses.dataclass
class Boxes:
  """Examples with a box [left, right) of bright columns, and more."""

  more: object = None
  num_classes = 2

  def __len__(self):
    return 9

  def __getitem__(self, i):
    image = np.zeros((8, 8, 3), np.uint8)
    image[:, : 1 + i % 4] = 255
    box = [0.0, 1.0 + i % 4]
    return {'image': image, 'label': i % 2, 'box': box, 'more': self.more}


@dataclasses.dataclass
class Flip:
  """Flip the image and its box; the label says to which side."""

  takes_example = True

  def __call__(self, example, rng):
    left, right = example['box']
    image = FlipLR(probability=1.0)(example['image'], rng)
    return {'image': image, 'box': [8 - right, 8 - left], 'label': 1}


@pytest.mark.parametrize('num_workers', [0, 1])
def test_a_box_and_a_label_change_with_their_image(num_workers):
  transforms = (CentralCrop(8), Flip(), CentralCrop(8))
  data = Data(Boxes(), 6, transforms, num_workers=num_workers, keep=('box',))
  assert data.name_left_out().endswith(' keys of the examples: more.')
  batches = data.train_batches()
  batch = next(batches)
  batches.close()
  assert {*batch} == {'image', 'label', 'box'} and (batch['label'] == 1).all()
  assert batch['box'].dtype == data.first_example()['box'].dtype == np.float32
  for image, (left, right) in zip(batch['image'], batch['box'].astype(int)):
    assert np.all(image[:, left:right] == 255) and np.all(image[:, :left] == 0)
  *_, last = data.eval_batches()
  assert last['box'].shape == (6, 2) and not last['box'][3:].any()


@pytest.mark.parametrize(
  'more, dtype',
  [
    (7, 'int32'),
    (np.uint64(7), 'int32'),
    (True, 'bool'),
    ([[0.5]], 'float32'),
    (np.uint8(3), 'uint8'),
  ],
)
def test_dtypes_are_those_of_the_example(more, dtype):
  found = Data(Boxes(more), 2, keep=('more',)).first_example()['more']
  assert found.dtype == dtype and (found == more).all()


@pytest.mark.parametrize(
  'more, words',
  [
    ('Oslo', "'more' of an example has <U4 .*'Oslo'.*numbers.*example 0 of Bo"),
    ([[1], [2, 3]], 'inhomogeneous shape .*example 0 of Boxes'),
    (None, "'more' of an example has object .*None"),
    (2**40, "'more' of an example has int64 .*1099511627776"),
    (np.uint64(2**33), "'more' of an example has uint64 "),
  ],
)
def test_what_no_batch_can_have(more, words):
  with pytest.raises(UserError, match=words):
    Data(Boxes(more), 2, keep=('more',)).first_example()


def test_keys_that_cannot_be_kept():
  with pytest.raises(UserError, match=r"no 'boxes'\. .*There are box, image, "):
    Data(Boxes(), 2, keep=('boxes',)).first_example()
  for key in 'image', 'seconds':
    with pytest.raises(UserError, match=f'batches have {key} of their own'):
      Data(Boxes(), 2, keep=('box', key))


def test_the_fingerprint_has_what_is_kept():
  def found(more, *keep):
    return Data(Boxes(more), 2, keep=keep).fingerprint()

  assert found(1) == found(2) == found(1, *()) != found(1, 'more')
  assert found(1, 'more') != found(2, 'more')
  images = (np.zeros(shape, np.uint8) for shape in ((2, 3, 1), (3, 2, 1)))
  one, other = ([{'image': x, 'label': 0}] for x in images)
  assert subsets.fingerprint(one) != subsets.fingerprint(other)
  assert subsets._hash([b'ab', b'c']) != subsets._hash([b'a', b'bc'])


def test_other_keys_are_read_when_they_are_asked_for():
  read = []
  known = {'image': b'', 'label': 3}
  example = subsets.Example(known, ['box'], lambda x: read.append(x) or 5)
  assert {*example} == {'image', 'label', 'box'} and not read
  unlabelled = subsets.Unlabelled([example])[0]
  assert unlabelled['label'] == 0 and not read and unlabelled['box'] == 5
  with pytest.raises(KeyError):
    example['name']
