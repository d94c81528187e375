"""What a function says of every example of a split, exact over all hosts.

Evaluators let the devices reduce each example to a few numbers (is it a hit,
its loss, its features), and every host gets all of these in the source's order.
What is made of them is then computed in numpy, in float64, and does not depend
on how many devices or hosts there were, nor on the batch size.
"""

import jax
import numpy as np

from vit_jax import sharding, terminal
from vit_jax.data import pipeline


class Collector:
  """fn over each example of a split once, on all devices and hosts.

  Args:
    fn: (params, batch) -> {name: [B, ...]}; batch has 'image' (uint8), 'label',
      'mask' (False on padding) and 'index'. It is jitted.
    data: arguments of `pipeline.eval_batches`; batch_size is global.
    mesh: of `sharding.make_mesh`.
    num_classes: labels are checked against it; the source's by default.
    what: name of the data in errors and progress.

  Attributes:
    source: of the data.
  """

  def __init__(self, fn, *, data, mesh, num_classes=None, what='eval'):
    size = data['batch_size']
    sharding.check_batch_size(size, mesh, what=f'{what} batch_size')
    self.source = data['source']
    self._mesh, self._what = mesh, what
    self._spec = _batch_spec(data)
    self._batches = pipeline.eval_batches(
      **data, **sharding.this_process(), num_classes=num_classes
    )

    def with_label(params, batch):
      kept = {name: batch[name] for name in ('label', 'mask', 'index')}
      return kept | fn(params, batch)

    self._fn = jax.jit(with_label, out_shardings=sharding.replicated(mesh))

  def labels(self):
    """int32 [n] or float32 [n, K] of all examples; images are not decoded."""
    return pipeline.labels(self.source)

  def check(self, params):
    """Raises the model's error if it cannot take these images; no compute."""
    jax.eval_shape(self._fn, params, self._spec)

  def __call__(self, params):
    """{name: [N, ...]} of all readable examples, in the source's order.

    'label' and 'index' are among the names.
    """
    unit = f'batches of {self._what}'
    batches = terminal.track(
      self._batches, len(self._batches), unit=unit, live=False
    )
    rows, pending = [], None
    for batch in batches:
      out = self._fn(params, sharding.put_batch(batch, self._mesh))
      # One batch behind, so that the host never waits for an idle device.
      rows, pending = _fetch(rows, pending), out
    rows = _fetch(rows, pending)
    columns = {
      name: np.concatenate([row[name] for row in rows]) for name in rows[0]
    }
    order = np.argsort(columns['index'], kind='stable')
    return {name: column[order] for name, column in columns.items()}


def _fetch(rows, out):
  if out is None:
    return rows
  out = jax.device_get(out)
  mask = out.pop('mask')
  return [*rows, {name: x[mask] for name, x in out.items()}]


def _batch_spec(data):
  """ShapeDtypeStructs of the batches of eval_batches(**data)."""
  size, transforms = data['batch_size'], data.get('transforms', ())
  example = pipeline.first_example(data['source'], transforms)
  label = np.asarray(example['label'])
  kind = np.float32 if label.ndim else np.int32
  return {
    'image': jax.ShapeDtypeStruct((size, *example['image'].shape), np.uint8),
    'label': jax.ShapeDtypeStruct((size, *label.shape), kind),
    'mask': jax.ShapeDtypeStruct((size,), bool),
    'index': jax.ShapeDtypeStruct((size,), np.int32),
  }
