"""Frozen features and the readouts that are trained on them.

    config.evals.frozen = dict(
      target='vit_jax.evals.frozen.Frozen',
      data={'digits': dict(train=dict(source=..., batch_size=128), test=...)},
      readouts={'knn': dict(target='vit_jax.evals.knn.Knn')},
    )

reports 'frozen/digits/knn/k10_t0.07' and so on. A readout is any object with

    check({split: labels}), which raises ValueError before any training
    __call__(train, test, val=None) -> {metric: float}
    metrics, optional: what these are, {metric: types.Kind}

where labels are int [N] and train, test and val are Splits, equal on all hosts.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import types
from vit_jax.data import subsets
from vit_jax.data.pipeline import Data
from vit_jax.evals.collect import Collector
from vit_jax.models.vit import grid_of

# Outputs of `model.features` that are one vector for each image.
_ONE_PER_IMAGE = ('pooled', 'pre_logits', 'logits')


@dataclasses.dataclass(eq=False)
class Frozen:
  """Extract features on all devices, once per data set, for all readouts.

  One data set at a time is in the memory of every host.

  Attributes:
    data: {name: {'train', 'test', maybe 'val': Data}}; labels: class numbers.
    readouts: {name: readout}, see the module docstring.
    features: one or several outputs of `model.features`, flattened to [B, D]
      (if the model does not pool, the mean over patches); or 'pixels', the
      preprocessed images, a baseline without a model.
    statistics: over the patches, or the places of a feature map, of outputs
      that have these (block_7, stage3). (): such outputs are flattened.
    flip: whether to average the features of an image and its mirror image.
  """

  model: Any
  _: dataclasses.KW_ONLY
  preprocess: types.Preprocess
  mesh: jax.sharding.Mesh
  data: Mapping[str, Mapping[str, Data]]
  readouts: Mapping[str, Any]
  features: str | Sequence[str] = 'pre_logits'
  statistics: Sequence[Literal['mean', 'max', 'std']] = ()
  flip: bool = False

  def __post_init__(self) -> None:
    for name, splits in self.data.items():
      if {*splits, 'val'} != {'train', 'test', 'val'}:
        raise types.UserError(
          f'data.{name} has splits {sorted(splits)}. It needs train and test, '
          'and may have val to choose hyperparameters on.'
        )
    self.for_grids = self.features in _ONE_PER_IMAGE and not self.flip
    self._collectors = {
      (name, split): Collector(
        self._extract, data=part, mesh=self.mesh, what=f'{name}/{split}'
      )
      for name, splits in self.data.items()
      for split, part in splits.items()
    }

  def _extract(self, params, batch):
    images = self.preprocess(batch['image'])
    found = self._features(params, images, **grid_of(self.model, batch))
    if self.flip:
      found = (found + self._features(params, images[:, :, ::-1])) / 2
    return {'x': found}

  def _features(self, params, x, **grid):
    """Return features [B, D] of images."""
    out = {'pixels': x}
    names = [self.features] if isinstance(self.features, str) else self.features
    if [*names] != ['pixels']:
      out |= self.model.apply({'params': params}, x, **grid, method='features')
    if missing := [name for name in names if name not in out]:
      raise types.UserError(
        f'features={missing[0]!r} must be one of {sorted(out)} (the outputs of '
        "this model, and 'pixels')."
      )
    found = [x for name in names for x in self._vectors(name, out)]
    return jnp.concatenate(found, axis=1).astype('float32')

  def _vectors(self, name, out):
    """Yield features [B, .] of an output."""
    x = out[name]
    if name in _ONE_PER_IMAGE and x.ndim > 2:
      x = x.mean(axis=1)
    if self.statistics and x.ndim > 2:
      if x.ndim == 3:  # without a class token and registers
        x = x[:, -out['patches'].shape[1] :]
      places = x.reshape(len(x), -1, x.shape[-1]).astype('float32')
      for statistic in self.statistics:
        yield getattr(jnp, statistic)(places, axis=1)
    else:
      yield x.reshape(len(x), -1)

  @property
  def metrics(self) -> types.Kinds:
    names = [*self.data, *(['mean'] if len(self.data) > 1 else [])]
    other = {'': types.Kind()}
    return {
      f'{name}/{key}/{metric}': kind
      for name in names
      for key, readout in self.readouts.items()
      for metric, kind in getattr(readout, 'metrics', other).items()
    }

  def check(self, params: types.Params) -> None:
    """Raise ValueError if images, features or labels cannot work."""
    for collector in self._collectors.values():
      collector.check(params)
    for name, splits in self.data.items():
      labels = {k: subsets.class_labels(x.source) for k, x in splits.items()}
      for key, readout in self.readouts.items():
        try:
          readout.check(labels)
        except ValueError as error:
          raise types.UserError(f'{name}/{key}: {error}') from error

  def run(self, params: types.Params) -> dict[str, float]:
    """Return {'{data}/{readout}/{metric}': float}.

    'mean/{readout}/{metric}' is the mean over several data sets.
    """
    found: dict[str, float] = {}
    values = collections.defaultdict(list)
    for name, data in self.data.items():
      splits = {}
      for split in data:
        columns = self._collectors[name, split](params)
        splits[split] = Split(columns['x'], columns['label'])
      if not all(np.isfinite(x.x).all() for x in splits.values()):
        broken = f'{name}/', 'mean/'
        found |= {k: np.nan for k in self.metrics if k.startswith(broken)}
        continue
      for key, readout in self.readouts.items():
        for metric, value in readout(**splits).items():
          found[f'{name}/{key}/{metric}'] = value
          values[f'mean/{key}/{metric}'].append(value)
    for name, of_all in values.items():
      if len(of_all) == len(self.data) > 1:
        found[name] = float(np.mean(of_all))
    return found


@dataclasses.dataclass(frozen=True)
class Split:
  """Features x, float32 [N, D], and class numbers y, int [N], in numpy."""

  x: np.ndarray
  y: np.ndarray

  def __getitem__(self, rows: np.ndarray) -> 'Split':
    return Split(self.x[rows], self.y[rows])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Few:
  """A readout of `per_class` examples of each class, as of `subsets.Subset`."""

  readout: Any
  per_class: types.Count
  seed: types.Seed = 0

  @property
  def metrics(self) -> types.Kinds:
    return self.readout.metrics

  def check(self, labels: Mapping[str, np.ndarray]) -> None:
    few = labels['train'][self._rows(labels['train'])]
    self.readout.check({**labels, 'train': few})

  def __call__(
    self, train: Split, test: Split, val: Split | None = None
  ) -> dict[str, float]:
    return self.readout(train[self._rows(train.y)], test, val)

  def _rows(self, labels):
    return np.sort(subsets.few(labels, self.per_class, self.seed))


@dataclasses.dataclass(frozen=True)
class Linear:
  """A linear classifier: the argmax of (x - mean) / std @ kernel + bias."""

  kernel: np.ndarray  # float64 [D, K]
  bias: np.ndarray  # float64 [K]
  classes: np.ndarray  # int [K], the class numbers in the training split
  mean: np.ndarray  # float64 [D]
  std: np.ndarray  # float64 [D]

  def predict(self, x: np.ndarray) -> np.ndarray:
    """Return class numbers [N] for features x [N, D]."""
    return self.classes[np.argmax(self.logits(x), axis=1)]

  def logits(self, x: np.ndarray) -> np.ndarray:
    """Return float64 [..., K] for features x [..., D]."""
    kernel = self.kernel / self.std[:, None]
    return x.astype(np.float64) @ kernel + (self.bias - self.mean @ kernel)

  def accuracy(self, split: Split) -> float:
    """Return the fraction of correct predictions."""
    return float(np.mean(self.predict(split.x) == split.y))

  def mean_per_class_accuracy(self, split: Split) -> float:
    """Return the mean of the accuracies of the classes that occur."""
    hits = self.predict(split.x) == split.y
    return float(np.mean([np.mean(hits[split.y == c]) for c in {*split.y}]))


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Return (mean, std + 1e-5), float64 [D], over the rows of x."""
  mean = x.mean(axis=0, dtype=np.float64)
  return mean, x.std(axis=0, dtype=np.float64) + 1e-5
