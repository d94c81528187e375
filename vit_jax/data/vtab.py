"""VTAB-1k: its 19 tasks, with their images, labels and transforms.

Splits, label rules and preprocessing follow the benchmark's public code
(google-research/task_adaptation) and the BiT and ViT papers. That code requires
major versions of the TFDS builders, whose examples and order are the same in
all versions, unless their notes say otherwise.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from vit_jax.types import Expect

GROUPS = ('natural', 'specialized', 'structured')


@dataclasses.dataclass(frozen=True)
class ClevrCount:
  """Label function for CLEVR's 'objects': their number, 3 to 10, minus 3."""

  num_classes = 8

  def __call__(self, objects: Mapping[str, Any]) -> int:
    return len(objects['size']) - 3


@dataclasses.dataclass(frozen=True)
class ClevrDistance:
  """Label function for CLEVR's 'objects': the nearest distance, in 6 bins.

  The bins (t[i], t[i + 1]] have the bounds t = 0, 8, 8.5, 9, 9.5, 10, 100.
  """

  num_classes = 6

  def __call__(self, objects: Mapping[str, Any]) -> int:
    nearest = np.min(objects['pixel_coords'][:, 2])
    return int(np.searchsorted((0, 8, 8.5, 9, 9.5, 10, 100), nearest)) - 1


@dataclasses.dataclass(frozen=True)
class KittiDistance:
  """Label function for KITTI's 'objects': distance of the nearest vehicle.

  Vehicles are the types 0 to 2 (car, van, truck); distance is z in metres.
  Classes 0 to 2 are (-100, 8], (8, 20] and (20, 999]; class 3 has no vehicle.
  """

  num_classes = 4

  def __call__(self, objects: Mapping[str, Any]) -> int:
    depths = objects['location'][objects['type'] < 3, 2]
    nearest = np.min(depths, initial=1000)
    return int(np.searchsorted((-100, 8, 20, 999), nearest)) - 1


@dataclasses.dataclass(frozen=True)
class Merged:
  """Label function for dSprites: merges neighbouring labels into 16 classes.

  Label l of `values` becomes floor(l * 16 / values): for 40 labels, 3 and 2 in
  turn form a class.
  """

  values: int
  num_classes: int = 16

  def __call__(self, label: Any) -> int:
    return int(label) * self.num_classes // self.values


@dataclasses.dataclass(frozen=True)
class Scale:
  """Multiply pixel values by `factor`, for dSprites' images of 0 and 1."""

  factor: Annotated[int, Expect(lambda x: 1 <= x <= 255, '1 to 255')] = 255

  def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return image * np.uint8(self.factor)


@dataclasses.dataclass(frozen=True)
class Task:
  """A task of VTAB-1k; `val` and `test` are TFDS splits."""

  title: str  # for tables
  group: str  # of GROUPS
  tfds: str  # name of the TFDS builder
  val: str = 'validation[:200]'
  test: str = 'test'
  label_key: str = 'label'  # TFDS feature
  label_fn: dict | None = None  # config of the label function
  flip: bool = True  # whether training images are flipped at random
  crop: bool = True  # whether training images are cropped at random
  is_binary: bool = False  # whether pixels are stored as 0 and 1


def _config(name, **fields):
  return {'target': f'{__name__}.{name}', **fields}


_N, _S, _T = GROUPS
_TRAIN = 'train[:800]'
_EYES = 'diabetic_retinopathy_detection/btgraham-300'
# fmt: off
_clevr = functools.partial(
  Task, group=_T, tfds='clevr', val='train[63000:63200]', test='validation',
  label_key='objects', crop=False)
_dsprites = functools.partial(
  Task, group=_T, tfds='dsprites', val='train[589824:590024]',
  test='train[663552:]', flip=False, is_binary=True)
_norb = functools.partial(
  Task, group=_T, tfds='smallnorb', val='test[:200]', test='test[50%:]')
TASKS = {  # in the order of table 9
  'caltech101': Task('Caltech101', _N, 'caltech101', 'train[2754:2954]'),
  'cifar100': Task('CIFAR-100', _N, 'cifar100', 'train[45000:45200]'),
  'dtd': Task('DTD', _N, 'dtd'),
  'flowers': Task('Flowers102', _N, 'oxford_flowers102'),
  'pets': Task('Pets', _N, 'oxford_iiit_pet', 'train[2944:3144]'),
  'sun397': Task('Sun397', _N, 'sun397/tfds'),
  'svhn': Task('SVHN', _N, 'svhn_cropped', 'train[65931:66131]'),
  'camelyon': Task('Camelyon', _S, 'patch_camelyon'),
  'eurosat': Task('EuroSAT', _S, 'eurosat/rgb',
    'train[16200:16400]', 'train[21600:]'),
  'resisc45': Task('Resisc45', _S, 'resisc45',
    'train[18900:19100]', 'train[25200:]'),
  'retinopathy': Task('Retinopathy', _S, _EYES),
  'clevr_count': _clevr('Clevr-Count', label_fn=_config('ClevrCount')),
  'clevr_distance': _clevr('Clevr-Dist', label_fn=_config('ClevrDistance')),
  'dmlab': Task('DMLab', _T, 'dmlab', crop=False),
  'dsprites_location': _dsprites('dSpr-Loc', label_key='label_x_position',
    label_fn=_config('Merged', values=32), crop=False),
  'dsprites_orientation': _dsprites('dSpr-Ori', label_key='label_orientation',
    label_fn=_config('Merged', values=40)),
  'kitti': Task('KITTI-Dist', _T, 'kitti', label_key='objects',
    label_fn=_config('KittiDistance'), crop=False),
  'snorb_azimuth': _norb('sNORB-Azim', label_key='label_azimuth', flip=False),
  'snorb_elevation': _norb('sNORB-Elev', label_key='label_elevation'),
}
# fmt: on


def settings(key: str, split: str, **fields: Any) -> dict[str, Any]:
  """Return the config of a task's source, a data.tfds.Tfds, as a dict.

  Splits are 'train800' to train, 'val200' to choose hyperparameters,
  'train800val200' for the final training, and 'test'.
  """
  task = TASKS[key]
  splits = {
    'train800': _TRAIN,
    'val200': task.val,
    'train800val200': f'{_TRAIN}+{task.val}',
    'test': task.test,
  }
  rule = {} if task.label_fn is None else {'label_fn': dict(task.label_fn)}
  return {
    'target': 'vit_jax.data.sources.tfds.Tfds',
    'name': task.tfds,
    'split': splits[split],
    'image_key': 'image',
    'label_key': task.label_key,
    **rule,
    **fields,
  }


def transforms(
  key: str, *, size: int = 384, train: bool
) -> list[dict[str, Any]]:
  """Return the configs of a task's transforms, a list of dicts.

  Images are resized to `size` pixels a side. With `train` they are cropped at
  random from 7/6 of the size (384 from 448; 224 from 256, as scenic has it) and
  flipped at random, where the task allows it.
  """
  task, module = TASKS[key], 'vit_jax.data.transforms'
  crop, flip = train and task.crop, train and task.flip
  large = 256 if size == 224 else round(size * 7 / 6)
  found = [_config('Scale', factor=255)] if task.is_binary else []
  found.append({'target': f'{module}.Resize', 'size': large if crop else size})
  if crop:
    found.append({'target': f'{module}.RandomCrop', 'size': size})
  if flip:
    found.append({'target': f'{module}.FlipLR', 'probability': 0.5})
  return found
