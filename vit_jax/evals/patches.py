"""Readouts of the classes of pixels from frozen features of patches.

    config.evals.patches = dict(
      target='vit_jax.evals.patches.Patches',
      data=dict(train=dict(source=dict(target='...masks.open_masked', ...),
                           transforms=[a Resize], batch_size=32), test=...),
      readouts={'linear': dict(target='vit_jax.evals.patch_readouts.Linear'),
                'near_9': dict(target='vit_jax.evals.patch_readouts.Neighbours',
                               features=('map_8',))})

reports 'patches/linear/miou' and so on. Images are resized whole to one square.
A readout learns from patches of the training images and the shares of the
classes in each. Its scores for all patches of a test image are resized to the
mask, of which each pixel counts once. A readout is any object with

    features   names of the features that it takes, joined
    __call__(train: Shares) -> (Score, {metric: float})
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data import workers
from vit_jax.data.pipeline import Data
from vit_jax.data.sources.masks import VOID
from vit_jax.data.transforms import Resize, resize
from vit_jax.evals.collect import Collector
from vit_jax.evals.frozen import Split
from vit_jax.io import terminal
from vit_jax.types import (
  ACCURACY,
  DETAIL,
  Kinds,
  Params,
  Preprocess,
  UserError,
)

_MOST = 2**16  # patches that readouts learn from
_IMAGES = 64  # test images whose scores are in memory
# Features [..., D] -> scores of the classes [..., K].
Score = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(eq=False)
class Patches:
  """Extract features of patches once, for all readouts of the module docstring.

  The memory of every host has 2**16 patches of the training images, the same in
  every evaluation, and all of the test images: N gh gw D float32.

  Attributes:
    data: 'train' and 'test', whose sources have masks, see `sources.masks`.
    readouts: {name: readout}. Features are outputs [B, gh, gw, D] of
      `model.features`: 'map_-1' (after the final norm), 'map_8' (of the ninth
      layer), 'stage3'; or 'pixels', the preprocessed pixels of each patch, a
      baseline without a model.
  """

  model: Any
  _: dataclasses.KW_ONLY
  preprocess: Preprocess
  mesh: jax.sharding.Mesh
  data: Mapping[str, Data]
  readouts: Mapping[str, Any]

  def __post_init__(self) -> None:
    if {*self.data} != {'train', 'test'}:
      raise UserError(f'data has {sorted(self.data)}. Expected train and test.')
    for split, data in self.data.items():
      if not hasattr(data.source, 'pixel_classes'):
        raise UserError(
          f'{split}: no masks. Use data.sources.masks.open_masked.'
        )
      if [*map(type, data.transforms)] != [Resize]:
        raise UserError(f'{split}: transforms must be one Resize.')
    sources: dict[str, Any] = {k: x.source for k, x in self.data.items()}
    self.classes, of_train = (
      sources[split].pixel_classes for split in ('test', 'train')
    )
    if self.classes != of_train:
      raise UserError(f'test has {self.classes}, train {of_train}.')
    self._collect = {
      split: Collector(fn, data=self.data[split], mesh=self.mesh, what=split)
      for split, fn in {'train': self._some, 'test': self._maps}.items()
    }

  @property
  def metrics(self) -> Kinds:
    shown = {'miou': ACCURACY, 'pixel_accuracy': ACCURACY, '': DETAIL}
    return {
      f'{k}/{x}': kind for k in self.readouts for x, kind in shown.items()
    }

  def check(self, params: Params) -> None:
    """Read all masks, and say which classes they have.

    Raises:
      UserError: the features are not maps, or a mask is wrong.
    """
    for split, collect in self._collect.items():
      collect.check(params)
      data, count = self.data[split], len(self.data[split].source)
      found = np.zeros(1 + len(self.classes), np.int64)
      masks = _masks(data, range(count))
      for mask in terminal.track(masks, count, unit='masks'):
        found += np.bincount(mask.ravel() - VOID, minlength=len(found))
      parts = zip(['void', *self.classes], found / found.sum())
      text = ', '.join(f'{k} {x:.1%}' for k, x in parts)
      text = f'{split}: {count:,} masks, whose pixels are {text}'
      if np.count_nonzero(found[1:]) < 2:
        raise UserError(
          f'{text}. Expected several classes. If a value of void is a class, '
          'set values and void of the source.'
        )
      terminal.say(text)

  def _maps(self, params, batch):
    """Return {name: float32 [B, gh, gw, D]} of the features of all readouts."""
    x = self.preprocess(batch['image'])
    names = {
      name for readout in self.readouts.values() for name in readout.features
    }
    maps = tuple(int(k[4:]) for k in names if re.fullmatch(r'map_-?\d+', k))
    options = {'maps': maps, 'per_layer': False} if maps else {}
    out = self.model.apply({'params': params}, x, method='features', **options)
    found = {k: v for k, v in out.items() if v.ndim == 4}
    b, height, width, _ = x.shape
    gh, gw = next(iter(found.values())).shape[1:3] if found else (1, 1)
    cut = x[:, : height // gh * gh, : width // gw * gw]
    cut = cut.reshape(b, gh, height // gh, gw, width // gw, -1).swapaxes(2, 3)
    found['pixels'] = cut.reshape(b, gh, gw, -1)
    if missing := sorted(names - {*found}):
      raise UserError(
        f'features={missing[0]!r} is no map. Expected map_-1, map_I of a '
        f'layer, or one of {sorted(found)}.'
      )
    return {k: found[k].astype(jnp.float32) for k in names}

  def _some(self, params, batch):
    """Return features [B, n, D] of some patches, and their 'places' [B, n]."""
    maps = self._maps(params, batch)
    patches = {k: x.reshape(len(x), -1, x.shape[-1]) for k, x in maps.items()}
    grid = next(iter(maps.values())).shape[1:3]
    count = min(np.prod(grid), max(1, _MOST // len(self.data['train'].source)))

    def draw(index):  # the same on all hosts and in all evaluations
      key = jax.random.fold_in(jax.random.key(0), index)
      return jnp.sort(jax.random.permutation(key, np.prod(grid))[:count])

    places = jax.vmap(draw)(batch['index'])
    some = {
      k: jnp.take_along_axis(x, places[..., None], axis=1)
      for k, x in patches.items()
    }
    return some | {'places': places}

  def run(self, params: Params) -> dict[str, float]:
    """Return {'READOUT/miou', 'READOUT/iou_CLASS', ...: float}."""
    train, test = (self._collect[x](params) for x in ('train', 'test'))
    if not all(np.isfinite(x).all() for x in (*train.values(), *test.values())):
      return {f'{key}/miou': np.nan for key in self.readouts}
    found: dict[str, float] = {}
    grid = next(x.shape[1:3] for x in test.values() if x.ndim == 4)
    rows, y, image = self._shares(train, grid)
    scores: dict[str, Score] = {}
    for key, readout in self.readouts.items():
      x = _joined(train, readout.features)
      x = x.reshape(-1, x.shape[-1])[rows]
      scores[key], details = readout(Shares(x, y, image))
      found |= {f'{key}/{k}': value for k, value in details.items()}
    size = len(self.classes)
    counts = {key: np.zeros((size, size), np.int64) for key in scores}
    masks = _masks(self.data['test'], test['index'])
    for first in range(0, len(test['index']), _IMAGES):
      part = {k: x[first : first + _IMAGES] for k, x in test.items()}
      true = [*itertools.islice(masks, _IMAGES)]
      for key, score in scores.items():
        predicted = score(_joined(part, self.readouts[key].features))
        counts[key] += sum(map(confusion, true, predicted))
    for key, of_all in counts.items():
      values = metrics(of_all, self.classes)
      found |= {f'{key}/{k}': value for k, value in values.items()}
    return found

  def _shares(self, columns, grid):
    """Return (rows of patches with known pixels, shares, numbers of images)."""
    index, places = columns['index'], columns['places']
    found = [
      shares(mask, grid, len(self.classes)).reshape(-1, len(self.classes))[at]
      for mask, at in zip(_masks(self.data['train'], index), places)
    ]
    y = np.concatenate(found)
    rows = np.flatnonzero(y.any(axis=1))
    y = y[rows] / y[rows].sum(axis=1, keepdims=True)
    return rows, y, np.repeat(index, places.shape[1])[rows]


def _joined(columns, names):
  return np.concatenate([columns[name] for name in names], axis=-1)


def _masks(data: Data, rows: Iterable[int]) -> Iterator[np.ndarray]:
  """Yield the masks of examples in order, read ahead by threads."""

  def read(index):
    return data.source[int(index)]['mask']

  yield from workers.read_ahead(read, rows, 16)


def shares(mask: np.ndarray, grid: Sequence[int], count: int) -> np.ndarray:
  """Return the share of each class in the area of each patch, [gh, gw, K]."""
  rows, columns = map(_overlap, grid, mask.shape)
  found = np.zeros((*grid, count), np.float32)
  for label in {*np.unique(mask).tolist()} - {VOID}:
    found[..., label] = rows @ (mask == label) @ columns.T
  return found


def _overlap(count, pixels):
  """Return the part that each pixel has of each of `count` equal pieces."""
  edges, first = np.arange(count + 1) * pixels / count, np.arange(pixels)
  end = np.minimum(edges[1:, None], first + 1)
  part = end - np.maximum(edges[:-1, None], first)
  return part.clip(min=0) * count / pixels


def confusion(mask: np.ndarray, scores: np.ndarray) -> np.ndarray:
  """Return the numbers of pixels by true and predicted class, int [K, K].

  The scores [gh, gw, K] are resized to the mask, bilinearly.
  """
  count, known = scores.shape[-1], mask != VOID
  predicted = resize(scores.astype(np.float32), mask.shape).argmax(axis=-1)
  pairs = mask[known] * count + predicted[known]
  return np.bincount(pairs, minlength=count**2).reshape(count, count)


def metrics(counts: np.ndarray, names: Sequence[str]) -> dict[str, float]:
  """Return mIoU, pixel accuracy and the IoU of each class by `confusion`.

  The mean is over the classes that some pixel has or is predicted to have.
  """
  hits = np.diag(counts)
  union = counts.sum(axis=0) + counts.sum(axis=1) - hits
  iou = {k: float(h / u) for k, h, u in zip(names, hits, union) if u}
  return {
    'miou': float(np.mean([*iou.values()])),
    'pixel_accuracy': float(hits.sum() / counts.sum()),
    **{f'iou_{k}': x for k, x in iou.items()},
  }


@dataclasses.dataclass(frozen=True)
class Shares(Split):
  """Features x, float32 [N, D], and shares of the classes y, float32 [N, K].

  image: number of the image that each patch is from, int [N].
  """

  image: np.ndarray

  def __getitem__(self, rows: np.ndarray) -> 'Shares':
    return Shares(self.x[rows], self.y[rows], self.image[rows])
