"""Outputs of a jitted function for every example of a split.

Evaluators reduce each example to a few numbers on the devices: a hit, a loss,
features. Every host then computes the metrics of all examples in numpy and
float64, so they do not depend on devices, hosts and batch size.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.data.pipeline import Data
from vit_jax.parallel import sharding
from vit_jax.types import Batch, Params, Preprocess, UserError

# {name: [N, ...]}, a row for each example.
Columns = dict[str, np.ndarray]


class Collector:
  """Apply fn to each example of a split exactly once, on all devices and hosts.

  Args:
    fn: (params, batch) -> {name: [B, ...]}; batch has 'image' (uint8), 'label',
      'mask' (False for padding) and 'index'. It is jitted.
    data: the split, whose batch size must fit the mesh.
    mesh: from `sharding.make_mesh`.
    num_classes: labels must be below it; None: as in the source.
    what: name of the data in errors.
  """

  def __init__(
    self,
    fn: Callable[..., dict[str, jax.Array]],
    *,
    data: Data,
    mesh: Mesh,
    num_classes: int | None = None,
    what: str = 'eval',
  ) -> None:
    sharding.check_batch_size(data.batch_size, mesh, what=f'{what} batch_size')
    self._data, self._mesh = data, mesh
    self._batches = data.eval_batches(
      **sharding.this_process(), num_classes=num_classes
    )
    example = data.first_example()
    label = np.asarray(example['label'])
    example['label'] = label.astype(np.float32 if label.ndim else np.int32)
    example |= {'mask': np.bool_(True), 'index': np.int32(0)}
    self._spec = {
      name: jax.ShapeDtypeStruct((data.batch_size, *x.shape), x.dtype)
      for name, x in example.items()
    }

    def with_label(params, batch):
      kept = {name: batch[name] for name in ('label', 'mask', 'index')}
      return kept | fn(params, batch)

    self._fn = jax.jit(with_label, out_shardings=sharding.replicated(mesh))

  def check(self, params: Params) -> None:
    """Raise the model's error if it does not accept the images. No compute."""
    jax.eval_shape(self._fn, params, self._spec)

  def __call__(self, params: Params) -> Columns:
    """Return {name: [N, ...]} for all readable examples, in source order.

    The names include 'label' and 'index'.
    """
    outs = (
      self._fn(params, sharding.put_batch(batch, self._mesh))
      for batch in self._batches
    )
    rows = []
    # Dispatch the next batch before fetching one: devices never wait.
    for out, _ in itertools.pairwise(itertools.chain(outs, [None])):
      found = jax.device_get(out)
      mask = found.pop('mask')
      rows.append({name: x[mask] for name, x in found.items()})
    columns = {
      name: np.concatenate([row[name] for row in rows]) for name in rows[0]
    }
    order = np.argsort(columns['index'], kind='stable')
    return {name: column[order] for name, column in columns.items()}

  def counts(self, columns: Columns) -> dict[str, int]:
    """Return {'num_examples', and 'skipped' if some could not be read}."""
    count = len(columns['index'])
    skipped = len(self._data.source) - count
    return {'num_examples': count} | ({'skipped': skipped} if skipped else {})


def means(columns: Columns, names: Iterable[str]) -> dict[str, float]:
  """Return {name: mean in float64} of the columns that exist."""
  return {
    name: float(np.mean(columns[name], dtype=np.float64))
    for name in names
    if name in columns
  }


@dataclasses.dataclass(eq=False)
class SplitEvaluator:
  """Base of the evaluators of one split; every example counts once.

  A subclass defines `measure`, the `fn` of its Collector, and `run`.
  """

  model: Any
  _: dataclasses.KW_ONLY
  preprocess: Preprocess
  mesh: jax.sharding.Mesh
  data: Data

  def __post_init__(self) -> None:
    self._collect = Collector(
      self.measure,
      data=self.data,
      mesh=self.mesh,
      num_classes=self.model.num_classes,
    )
    self.check = self._collect.check

  def measure(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
    """Return {name: [B, ...]} of a batch."""
    raise NotImplementedError


@dataclasses.dataclass(eq=False, kw_only=True)
class LabelEvaluator(SplitEvaluator):
  """Base of the evaluators that compare logits [B, K] with labels.

  Attributes:
    per_class: whether to report a metric of each class.
    same_classes: whether class names of data and training must be equal. False
      assumes that both use the same class numbers with different names, such as
      WordNet ids and words.
    flip: whether to average the probabilities of each image and its mirror
      image.
    class_names: of the data, to compare with the names of the model; or None.
  """

  per_class: bool = False
  same_classes: bool = True
  flip: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    source, wanted = self.data.source, self.model.num_classes
    self._names = getattr(source, 'class_names', None)
    self.class_names = self._names if self.same_classes else None
    found = getattr(source, 'num_classes', None)
    if not self.same_classes and found and wanted and found != wanted:
      raise UserError(
        f'same_classes=False: the data has {found} classes and the model '
        f'{wanted}, so their class numbers cannot agree. Use a model with '
        f'{found} classes.'
      )

  def logits(
    self, params: Params, images: jax.Array, activation: str = 'sigmoid'
  ) -> jax.Array:
    """Return logits [B, K]; `activation` makes them probabilities."""

    def predict(images):
      logits = self.model.apply({'params': params}, self.preprocess(images))
      if logits.ndim != 2:
        raise UserError(
          f'The model has logits of shape {logits.shape}; expected one row for '
          'each image. A model of masked patches has no classes: fine-tune it.'
        )
      return logits

    if not self.flip:
      return predict(images)
    both = jax.lax.map(predict, jnp.stack([images, images[:, :, ::-1]]))
    if activation == 'softmax':
      return _log_mean(jax.nn.log_softmax(both))
    on, off = jax.nn.log_sigmoid(both), jax.nn.log_sigmoid(-both)
    return _log_mean(on) - _log_mean(off)

  def of_each_class(
    self, metric: str, values: Mapping[int, float]
  ) -> dict[str, float]:
    """Return {'metric/CLASS': value} of {number: value}, if `per_class`.

    CLASS is the number if names are not unique.
    """
    names = self._names
    if not self.per_class:
      return {}
    if not names or len(set(names)) < len(names):
      names = range(max(values) + 1)
    return {f'{metric}/{names[number]}': x for number, x in values.items()}


def _log_mean(x):
  """Return the logarithm of the mean of exp(x) over the first dimension."""
  return jax.nn.logsumexp(x, axis=0) - jnp.log(x.shape[0])
