"""VTAB-1k: its 19 tasks, as data: where the images are, and what labels them.

`settings` gives a task's source for a config, `transforms` its preprocessing.
The splits, label rules and preprocessing are those of the benchmark's public
code (google-research/task_adaptation; preprocessing: the BiT and ViT papers).
That code asks for major versions of the TFDS builders. Here they have names
only, so that each installed TFDS reads what it prepares: its versions have the
same examples in the same order, unless their notes say otherwise.
"""

import dataclasses
import difflib

import numpy as np

GROUPS = ('natural', 'specialized', 'structured')


@dataclasses.dataclass(frozen=True)
class ClevrCount:
  """Number of objects, 3 to 10, less 3; of CLEVR's 'objects'."""

  num_classes = 8

  def __call__(self, objects):
    return len(objects['size']) - 3


@dataclasses.dataclass(frozen=True)
class ClevrDistance:
  """Distance of the closest object, in 6 bins; of CLEVR's 'objects'.

  Class i has a distance in (t[i], t[i + 1]], t = 0, 8, 8.5, 9, 9.5, 10, 100; a
  distance equal to a threshold thus falls below it.
  """

  num_classes = 6

  def __call__(self, objects):
    nearest = np.min(objects['pixel_coords'][:, 2])
    return _bin(nearest, (0, 8, 8.5, 9, 9.5, 10, 100))


@dataclasses.dataclass(frozen=True)
class KittiDistance:
  """Distance of the closest vehicle, in 4 bins; of KITTI's 'objects'.

  Of cars, vans and trucks it is z in metres, in (-100, 8], (8, 20] or (20,
  999]; class 3 is without any.
  """

  num_classes = 4

  def __call__(self, objects):
    is_vehicle = objects['type'] < 3  # car, van, truck
    depths = objects['location'][is_vehicle, 2]
    nearest = np.min(depths, initial=1000)
    return _bin(nearest, (-100, 8, 20, 999))


@dataclasses.dataclass(frozen=True)
class Merged:
  """A label of `values` values as 16 classes of neighbours; of dSprites.

  The rule is floor(label / (values / 16)). With 40 values, 2.5 to a class,
  classes have three and two values in turn.
  """

  values: int
  num_classes: int = 16

  def __call__(self, label):
    if not 0 <= label < self.values:
      raise ValueError(
        f'the label is {int(label)}; it lies in [0, {self.values}).'
      )
    return int(label) * self.num_classes // self.values


def _bin(value, thresholds):
  """The last i with thresholds[i] < value."""
  return int(np.searchsorted(thresholds, value, side='left')) - 1


@dataclasses.dataclass(frozen=True)
class Scale:
  """Pixel values times `factor`: dSprites' images are of 0 and 1."""

  factor: int = 255

  def __post_init__(self):
    if self.factor not in range(1, 256):
      raise ValueError(
        f'Scale: factor is {self.factor!r}; give an int from 1 to 255.'
      )

  def __call__(self, image, rng):
    del rng
    if (highest := int(image.max())) * self.factor > 255:
      raise ValueError(
        f'Scale: the image has the value {highest}, and {highest} *'
        f' {self.factor} exceeds 255. The files are not those of 0 and 1 that'
        ' TFDS makes; leave Scale out of the transforms.'
      )
    return image * np.uint8(self.factor)


@dataclasses.dataclass(frozen=True)
class Task:
  """A task of VTAB-1k.

  Attributes:
    name: its key in TASKS.
    title: short, for the head of a column.
    group: of GROUPS.
    tfds: name of the TFDS builder.
    num_classes: of its labels.
    val, test, train: TFDS splits, of 200, `test_size` and 800 images.
    label_key, label_fn: arguments of data.tfds.Tfds; label_fn as a config.
    flip, crop: whether training images are mirrored, and cropped.
    is_binary: whether pixels are stored as 0 and 1.
  """

  name: str
  title: str
  group: str
  tfds: str
  num_classes: int
  val: str
  test: str
  test_size: int
  label_key: str = 'label'
  label_fn: dict | None = None
  flip: bool = True
  crop: bool = True
  is_binary: bool = False
  train: str = 'train[:800]'


def _rule(name, **fields):
  return {'target': f'{__name__}.{name}', **fields}


def _clevr(name, title, num_classes, rule):
  return Task(
    name,
    title,
    'structured',
    'clevr',
    num_classes,
    'train[63000:63200]',
    'validation',
    15000,
    label_key='objects',
    label_fn=_rule(rule),
    crop=False,
  )


def _dsprites(name, title, key, values, **fields):
  return Task(
    name,
    title,
    'structured',
    'dsprites',
    16,
    'train[589824:590024]',
    'train[663552:]',
    73728,
    label_key=key,
    label_fn=_rule('Merged', values=values),
    flip=False,
    is_binary=True,
    **fields,
  )


def _norb(name, title, key, num_classes, **fields):
  return Task(
    name,
    title,
    'structured',
    'smallnorb',
    num_classes,
    'test[:200]',
    'test[50%:]',
    12150,
    label_key=key,
    **fields,
  )


_N, _S, _T = GROUPS
_VAL = 'validation[:200]'
_EYES = 'diabetic_retinopathy_detection/btgraham-300'
# fmt: off
_TASKS = (  # in the order of table 9
  Task('caltech101', 'Caltech101', _N, 'caltech101', 102,  # one: backgrounds
       'train[2754:2954]', 'test', 6084),
  Task('cifar100', 'CIFAR-100', _N, 'cifar100', 100,
       'train[45000:45200]', 'test', 10000),
  Task('dtd', 'DTD', _N, 'dtd', 47, _VAL, 'test', 1880),
  Task('flowers', 'Flowers102', _N, 'oxford_flowers102', 102,
       _VAL, 'test', 6149),
  Task('pets', 'Pets', _N, 'oxford_iiit_pet', 37,
       'train[2944:3144]', 'test', 3669),
  Task('sun397', 'Sun397', _N, 'sun397/tfds', 397, _VAL, 'test', 21750),
  Task('svhn', 'SVHN', _N, 'svhn_cropped', 10,
       'train[65931:66131]', 'test', 26032),
  Task('camelyon', 'Camelyon', _S, 'patch_camelyon', 2, _VAL, 'test', 32768),
  Task('eurosat', 'EuroSAT', _S, 'eurosat/rgb', 10,
       'train[16200:16400]', 'train[21600:]', 5400),
  Task('resisc45', 'Resisc45', _S, 'resisc45', 45,
       'train[18900:19100]', 'train[25200:]', 6300),
  Task('retinopathy', 'Retinopathy', _S, _EYES, 5, _VAL, 'test', 42670),
  _clevr('clevr_count', 'Clevr-Count', 8, 'ClevrCount'),
  _clevr('clevr_distance', 'Clevr-Dist', 6, 'ClevrDistance'),
  Task('dmlab', 'DMLab', _T, 'dmlab', 6, _VAL, 'test', 22735, crop=False),
  _dsprites('dsprites_location', 'dSpr-Loc', 'label_x_position', 32,
            crop=False),
  _dsprites('dsprites_orientation', 'dSpr-Ori', 'label_orientation', 40),
  Task('kitti', 'KITTI-Dist', _T, 'kitti', 4, _VAL, 'test', 711,
       label_key='objects', label_fn=_rule('KittiDistance'), crop=False),
  _norb('snorb_azimuth', 'sNORB-Azim', 'label_azimuth', 18, flip=False),
  _norb('snorb_elevation', 'sNORB-Elev', 'label_elevation', 9),
)
# fmt: on
TASKS = {task.name: task for task in _TASKS}


def settings(key, split, **fields):
  """The config of a task's source: a plain dict for data.tfds.Tfds.

  Args:
    key: of TASKS.
    split: 'train800' to fit, 'val200' to choose by, 'train800val200' for the
      final run, 'test'.
    **fields: further arguments of Tfds, such as data_dir.
  """
  task = _task(key)
  splits = {
    'train800': task.train,
    'val200': task.val,
    'train800val200': f'{task.train}+{task.val}',
    'test': task.test,
  }
  if split not in splits:
    raise ValueError(
      f'VTAB-1k has no split {split!r}; it has {", ".join(splits)}.'
    )
  rule = {} if task.label_fn is None else {'label_fn': dict(task.label_fn)}
  return {
    'target': 'vit_jax.data.tfds.Tfds',
    'name': task.tfds,
    'split': splits[split],
    'image_key': 'image',
    'label_key': task.label_key,
    **rule,
    **fields,
  }


def transforms(key, *, size=384, train):
  """The configs of a task's transforms, to images of `size` by `size` pixels.

  In training a crop out of 7/6 of the size (448 of 384), where the task allows
  one, and a mirror image, where it does. In tests a plain resize.
  """
  task = _task(key)
  common = 'vit_jax.data.transforms'
  found = [_rule('Scale', factor=255)] if task.is_binary else []
  if train and task.crop:
    found.append({'target': f'{common}.Resize', 'size': round(size * 7 / 6)})
    found.append({'target': f'{common}.RandomCrop', 'size': size})
  else:
    found.append({'target': f'{common}.Resize', 'size': size})
  if train and task.flip:
    found.append({'target': f'{common}.FlipLR', 'probability': 0.5})
  return found


def _task(key):
  if key not in TASKS:
    near = difflib.get_close_matches(str(key), TASKS, n=1)
    hint = f' Did you mean {near[0]!r}?' if near else ''
    raise ValueError(
      f'VTAB-1k has no task {key!r}; it has {", ".join(TASKS)}.{hint}'
    )
  return TASKS[key]
