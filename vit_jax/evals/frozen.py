"""Frozen features and the readouts that are trained on them.

    config.evals.frozen = dict(
      target='vit_jax.evals.frozen.Frozen',
      data={'digits': dict(train=dict(source=..., batch_size=128), test=...)},
      readouts={'knn': dict(target='vit_jax.evals.knn.Knn')},
    )

reports 'frozen/digits/knn/k10_t0.07' and so on. A readout is any object with

    check(labels_train, labels_test, *, labels_val=None)
    __call__(train, test, *, val=None, mesh) -> {metric: float}

where labels are int [N] and train, test and val are Splits, equal on all hosts.
`check` raises ValueError before any training if the readout cannot work. The
classifier that is tested is always fitted to the whole of `train` and to
nothing else; hyperparameters are never chosen on `test`.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from vit_jax.config.domains import Seed, checked
from vit_jax.data import pipeline
from vit_jax.data.pipeline import Data
from vit_jax.evals.collect import Collector
from vit_jax.parallel import sharding
from vit_jax.types import Params, Preprocess

# Outputs of `model.features` that are one vector for each image.
_ONE_PER_IMAGE = ('pooled', 'pre_logits', 'logits')


class Readout(Protocol):
  """Interface of readouts, see the module docstring."""

  def check(
    self,
    labels_train: np.ndarray,
    labels_test: np.ndarray,
    *,
    labels_val: np.ndarray | None = None,
  ) -> None:
    """Raise ValueError if the readout cannot work with the labels."""

  def __call__(
    self, train: Any, test: Any, *, val: Any = None, mesh: Any
  ) -> Mapping[str, float]:
    """Return {metric: number}."""


@checked
@dataclasses.dataclass(eq=False)
class Frozen:
  """Extract features on all devices, once per data set, for all readouts.

  One data set at a time is held in memory, in float32, on every host.

  Attributes:
    model: has apply(..., method='features') -> {name: [B, ...]}.
    preprocess: uint8 images -> float images.
    mesh: from `sharding.make_mesh`.
    data: {name: {'train', 'test' and optionally 'val': Data}}; labels are class
      numbers.
    readouts: {name: readout}, see the module docstring.
    features: name of an output of `model.features`, flattened to [B, D]; or
      'pixels', the preprocessed images (a baseline without a model).
  """

  model: Any
  _: dataclasses.KW_ONLY
  preprocess: Preprocess
  mesh: jax.sharding.Mesh
  data: Mapping[str, Mapping[str, Data]]
  readouts: Mapping[str, Readout]
  features: str = 'pre_logits'

  def __post_init__(self) -> None:
    _check_names(self.data, self.readouts)
    self._collectors = {
      (name, split): Collector(
        self._extract, data=part, mesh=self.mesh, what=f'{name}/{split}'
      )
      for name, splits in self.data.items()
      for split, part in splits.items()
    }

  def _extract(self, params, batch):
    x = self.preprocess(batch['image'])
    if self.features != 'pixels':
      out = self.model.apply({'params': params}, x, method='features')
      if self.features not in out:
        raise ValueError(
          f'features={self.features!r} must be one of {sorted(out)} (the '
          "outputs of this model) or 'pixels'."
        )
      x = out[self.features]
      if self.features in _ONE_PER_IMAGE and x.ndim > 2:
        raise ValueError(
          f'features={self.features!r} has {x.shape[1]} x {x.shape[2]} numbers '
          'for each image: the model does not pool its patches, as for masked '
          'patch prediction. Evaluate its weights with init_from.pooling=gap '
          '(mean over patches) or =token (class token), or set '
          "features='tokens' to read out all of them as one long vector."
        )
    return {'x': x.reshape(len(x), -1).astype('float32')}

  @property
  def metrics(self) -> list[str]:
    names = [*self.data, *(['mean'] if len(self.data) > 1 else [])]
    return [f'{name}/{key}/' for name in names for key in self.readouts]

  @functools.cached_property
  def _labels(self):
    """{data set: {split: int [N]}}; images are not decoded."""
    return {
      name: {
        split: _class_numbers(part.source, f'{name}/{split}')
        for split, part in splits.items()
      }
      for name, splits in self.data.items()
    }

  def check(self, params: Params) -> None:
    """Raise ValueError if images, features or labels cannot work.

    The first call reads the labels of all splits.
    """
    for collector in self._collectors.values():
      collector.check(params)
    for name, labels in self._labels.items():
      for key, readout in self.readouts.items():
        try:
          readout.check(
            labels['train'], labels['test'], labels_val=labels.get('val')
          )
        except ValueError as error:
          raise ValueError(f'{name}/{key}: {error}') from error

  def run(self, params: Params) -> dict[str, float]:
    """Return {'{data}/{readout}/{metric}': float}.

    With several data sets also 'mean/{readout}/{metric}', the means of the
    metrics that all data sets have.
    """
    found = {}
    for name, data in self.data.items():
      splits = {
        split: _split(self._collectors[name, split](params), f'{name}/{split}')
        for split in data
      }
      found[name] = {
        f'{key}/{metric}': value
        for key, readout in self.readouts.items()
        for metric, value in readout(**splits, mesh=self.mesh).items()
      }
    if len(found) > 1:
      first, *others = found.values()
      found['mean'] = {
        metric: float(np.mean([value, *(other[metric] for other in others)]))
        for metric, value in first.items()
        if all(metric in other for other in others)
      }
    return {
      f'{name}/{metric}': value
      for name, metrics in found.items()
      for metric, value in metrics.items()
    }


def _check_names(data, readouts):
  if not data or not readouts:
    raise ValueError(
      'Frozen needs at least one data set and one readout, but has data '
      f'{list(data)} and readouts {list(readouts)}.'
    )
  for name in (*data, *readouts):
    if '/' in name or name == 'mean':
      raise ValueError(
        f'data and readouts cannot be named {name!r}: "/" separates the parts '
        "of a metric's name, and 'mean' is the mean over data sets."
      )
  for name, splits in data.items():
    if not {'train', 'test'} <= set(splits) <= {'train', 'test', 'val'}:
      raise ValueError(
        f'data.{name} has splits {sorted(splits)}. It needs train and test, '
        'and may have val to choose hyperparameters on.'
      )


def _class_numbers(source, name):
  labels = pipeline.labels(source)
  if labels.ndim != 1:
    raise ValueError(
      f'{name}: readouts need one class number per example, but the labels '
      f'have shape {labels.shape}.'
    )
  return labels


def _split(columns, name):
  x = columns['x']
  if not np.isfinite(x).all():
    raise ValueError(
      f'{name}: {np.sum(~np.isfinite(x))} of {x.size} feature values are NaN '
      'or infinite. Check the weights of the model.'
    )
  return Split(x, columns['label'])


@dataclasses.dataclass(frozen=True)
class Split:
  """Features x, float32 [N, D], and class numbers y, int [N], in numpy."""

  x: np.ndarray
  y: np.ndarray

  def __getitem__(self, rows: np.ndarray) -> 'Split':
    return Split(self.x[rows], self.y[rows])


@dataclasses.dataclass(frozen=True)
class Linear:
  """A linear classifier: the argmax of (x - mean) / std @ kernel + bias.

  `converged` is whether the solver reached its tolerance.
  """

  kernel: np.ndarray  # float64 [D, K]
  bias: np.ndarray  # float64 [K]
  classes: np.ndarray  # int [K], the class numbers in the training split
  mean: np.ndarray  # float64 [D]
  std: np.ndarray  # float64 [D]
  converged: bool = True

  def predict(self, x: np.ndarray) -> np.ndarray:
    """Return class numbers [N] for features x [N, D]."""
    kernel = self.kernel / self.std[:, None]
    bias = self.bias - self.mean @ kernel
    best = [
      np.argmax(rows.astype(np.float64) @ kernel + bias, axis=1)
      for rows in np.split(x, range(8192, len(x), 8192))  # bounds memory
    ]
    return self.classes[np.concatenate(best)]

  def accuracy(self, split: Split) -> float:
    """Return the fraction of correct predictions; -1 if weights diverged."""
    if not (np.isfinite(self.kernel).all() and np.isfinite(self.bias).all()):
      return -1.0
    return float(np.mean(self.predict(split.x) == split.y))


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Return (mean, std + 1e-5), float64 [D], over the rows of x."""
  mean = x.mean(axis=0, dtype=np.float64)
  return mean, x.std(axis=0, dtype=np.float64) + 1e-5


def standardise(x: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
  """Return (x - mean) / std in float32."""
  return ((x - mean.astype(np.float32)) / std.astype(np.float32)).astype('f4')


def cross_entropies(
  params: tuple[jax.Array, jax.Array], x: jax.Array, y: jax.Array
) -> jax.Array:
  """Return the losses [N] of logits x @ kernel + bias; jittable."""
  kernel, bias = params
  logits = jnp.matmul(x, kernel, precision='highest') + bias
  return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def sweep(
  value: Any, name: str, *, allow_zero: bool = False
) -> tuple[float, ...]:
  """Return the numbers to try as a tuple of floats; `value` may be one number.

  Raises ValueError if there is none, or one is not positive.
  """
  values = tuple(value) if isinstance(value, list | tuple) else (value,)
  if not values or not all(
    isinstance(x, int | float)
    and not isinstance(x, bool)
    and (x > 0 or (allow_zero and x == 0))
    for x in values
  ):
    bound = 'of at least 0' if allow_zero else 'above 0'
    raise ValueError(
      f'{name}={value!r} must be a number {bound}, or several of them.'
    )
  return tuple(float(x) for x in values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
  """Base of readouts whose hyperparameters are chosen on held-out examples.

  Attributes:
    held_out: fraction of each class of train to choose on without `val`.
    seed: of the held-out examples.
  """

  held_out: float = 0.1
  seed: Seed = 0

  def __post_init__(self) -> None:
    if not isinstance(self.held_out, float) or not 0 < self.held_out < 1:
      raise ValueError(
        f'held_out={self.held_out!r} must be a fraction above 0 and below 1: '
        'the part of train to choose hyperparameters on.'
      )

  def rows(self, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (kept, held), the sorted rows of a stratified split.

    From each class round(held_out * n) rows are held out, at least one if the
    class has two; at least one is kept. Raises ValueError if no class has two.
    """
    rng = np.random.default_rng(self.seed)
    held = []
    for label in np.unique(labels):
      rows = np.flatnonzero(labels == label)
      count = max(1, round(self.held_out * len(rows)))
      held.append(rng.permutation(rows)[: min(count, len(rows) - 1)])
    held_rows = np.sort(np.concatenate(held))
    if not len(held_rows):
      raise ValueError(
        f'No class of the {len(labels)} training examples has two examples, so '
        'none can be held out to choose hyperparameters on. Add a val split, '
        'or give one value.'
      )
    return np.setdiff1d(np.arange(len(labels)), held_rows), held_rows

  def split(self, train: Split, val: Split | None) -> tuple[Split, Split]:
    """Return (Split to fit, Split to choose on); the latter is `val` if any."""
    if val is not None:
      return train, val
    kept, held = self.rows(train.y)
    return train[kept], train[held]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunedLinear(Tuned):
  """Base of linear classifiers with a sweep over hyperparameters.

  A subclass has `settings`, the hyperparameters to try, and defines `fit`.
  """

  def check(
    self,
    labels_train: np.ndarray,
    labels_test: np.ndarray,
    *,
    labels_val: np.ndarray | None = None,
  ) -> None:
    """Raise ValueError for a single class, or if none can be held out."""
    del labels_test
    if len(np.unique(labels_train)) < 2:
      raise ValueError(
        f'The {len(labels_train)} training examples are all of one class. Use '
        'a split with two or more classes.'
      )
    if len(self.settings) > 1 and labels_val is None:
      self.rows(labels_train)

  if TYPE_CHECKING:  # a field or a property of the subclass

    @property
    def settings(self) -> Sequence[Any]: ...

  def fit(
    self, train: Split, settings: Sequence[Any], mesh: Mesh
  ) -> list[Linear]:
    """Return the classifier fitted with each of the settings."""
    raise NotImplementedError

  def best(
    self, train: Split, val: Split | None, mesh: Mesh
  ) -> tuple[Any, Linear]:
    """Return (setting, Linear fitted to the whole of train).

    The setting has the best accuracy on `val` or held-out examples; of equals
    it is the first.
    """
    best = self.settings[0]
    if len(self.settings) > 1:
      part, held = self.split(train, val)
      solutions = self.fit(part, self.settings, mesh)
      scores = [linear.accuracy(held) for linear in solutions]
      best = self.settings[int(np.argmax(scores))]
    return best, self.fit(train, [best], mesh)[0]


def put_rows(x: np.ndarray, mesh: Mesh) -> jax.Array:
  """Return x (equal on all hosts) as a global array, sharded as batches are.

  Rows of zeros fill up the shards.
  """
  where = sharding.batch_sharding(mesh)
  num_shards = mesh.size // where.shard_shape((mesh.size,))[0]
  padding = [(0, -len(x) % num_shards)] + [(0, 0)] * (x.ndim - 1)
  return _put(np.pad(x, padding), where)


def put_whole(x: np.ndarray | np.generic, mesh: Mesh) -> jax.Array:
  """Return x (equal on all hosts) as a global array copied to every device."""
  return _put(x, sharding.replicated(mesh))


def _put(x, where):
  # On several hosts jax reports an implicit transfer, although it is explicit.
  with jax.transfer_guard_host_to_device('allow'):
    return jax.make_array_from_callback(x.shape, where, lambda i: x[i])
