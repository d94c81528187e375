"""Outputs of a jitted function for every example of a split.

Evaluators reduce each example to a few numbers on the devices: a hit, a loss,
features. Every host then computes the metrics of all examples in numpy and
float64, so they do not depend on devices, hosts and batch size.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.data.pipeline import Data
from vit_jax.io import terminal
from vit_jax.models.vit import grid_of
from vit_jax.parallel import sharding
from vit_jax.types import DETAIL, Batch, Params, Preprocess, UserError

COUNTS = {'num_examples': DETAIL, 'skipped': DETAIL}
# {name: [N, ...]}, a row for each example.
Columns = dict[str, np.ndarray]


class Collector:
  """Apply fn to each example of a split exactly once, on all devices and hosts.

  Args:
    fn: (params, batch) -> {name: [B, ...]}; batch has 'image' (uint8), 'label',
      'mask' (False for padding) and 'index'. It is jitted.
    data, mesh: the split, whose batch size must fit the mesh.
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
    self._data, self._mesh, self._has_named = data, mesh, False
    self._batches = data.eval_batches(
      **sharding.this_process(), num_classes=num_classes
    )
    example = data.first_example()
    owner = getattr(fn, '__self__', None)
    if 'grid' in example and not getattr(owner, 'for_grids', False):
      raise UserError(
        f'{what}: {type(owner).__name__}, or an option such as flip, cannot '
        'take images of any aspect ratio (KeepAspect).'
      )
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
    """Return the outputs, 'label' and 'index' of all readable examples."""
    batches = (sharding.put_batch(x, self._mesh) for x in self._batches)
    outs = (self._fn(params, batch) for batch in batches)
    rows = []
    # Dispatch the next batch before fetching one: devices never wait.
    for out, _ in itertools.pairwise(itertools.chain(outs, [None])):
      found = jax.device_get(out)
      mask = found.pop('mask')
      rows.append({name: x[mask] for name, x in found.items()})
    columns = jax.tree.map(lambda *parts: np.concatenate(parts), *rows)
    order = np.argsort(columns['index'], kind='stable')
    return {name: column[order] for name, column in columns.items()}

  def counts(self, columns: Columns) -> dict[str, int]:
    """Return {'num_examples', and 'skipped' if some could not be read}."""
    count, total = len(columns['index']), len(self._data.source)
    if count == total:
      return {'num_examples': count}
    if not self._has_named:  # once, not at each evaluation
      missing = set(range(total)).difference(columns['index'].tolist())
      terminal.say(self._data.name_skipped(missing))
    self._has_named = True
    return {'num_examples': count, 'skipped': total - count}


def means(columns: Columns, names: Iterable[str]) -> dict[str, float]:
  """Return {name: mean in float64} of the columns that exist."""
  return {
    name: float(np.mean(columns[name], dtype=np.float64))
    for name in names
    if name in columns
  }


@dataclasses.dataclass(eq=False)
class SplitEvaluator:
  """Base of the evaluators of one split; a subclass also defines `run`."""

  labelled: ClassVar[bool] = True  # whether the metrics need labels
  for_grids = False  # whether `measure` uses `grid_of`

  model: Any
  _: dataclasses.KW_ONLY
  preprocess: Preprocess
  mesh: jax.sharding.Mesh
  data: Data

  def __post_init__(self) -> None:
    if not self.labelled:
      self.data = dataclasses.replace(self.data, labels=False)
    classes = self.model.num_classes
    self.collect = Collector(
      self.measure, data=self.data, mesh=self.mesh, num_classes=classes
    )
    self.check = self.collect.check
    self.transforms = self.data.transforms  # for predictions, see train

  def measure(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
    """Return {name: [B, ...]} of a batch; the `fn` of the Collector."""
    raise NotImplementedError


class OutputEvaluator(SplitEvaluator):
  """Base of the evaluators of vectors: outputs and labels of K columns."""

  for_grids = True

  def __post_init__(self) -> None:
    super().__post_init__()
    self.class_names = getattr(self.data.source, 'class_names', None)
    self.names = self.class_names or [*map(str, range(self.model.num_classes))]
    self.predictions: Any = None

  def measure(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
    images, grid = self.preprocess(batch['image']), grid_of(self.model, batch)
    return {'outputs': self.model.apply({'params': params}, images, **grid)}
