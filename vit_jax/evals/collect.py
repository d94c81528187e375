"""Outputs of a jitted function for every example of a split.

Evaluators reduce each example to a few numbers on the devices: a hit, a loss,
features. Every host then receives these numbers for all examples, in the order
of the source, and computes the metrics in numpy and float64. So the metrics do
not depend on the number of devices or hosts, nor on the batch size.
"""

import jax
import numpy as np

from vit_jax import sharding, terminal
from vit_jax.data import pipeline


class Collector:
  """Apply fn to each example of a split exactly once, on all devices and hosts.

  Args:
    fn: (params, batch) -> {name: [B, ...]}; batch has 'image' (uint8), 'label',
      'mask' (False for padding) and 'index'. It is jitted.
    data: a `pipeline.Data`.
    mesh: from `sharding.make_mesh`.
    num_classes: labels must be below it; defaults to that of the source.
    what: name of the data in errors and progress reports.

  Raises:
    ValueError: the batch size does not fit the mesh.
  """

  def __init__(self, fn, *, data, mesh, num_classes=None, what='eval'):
    sharding.check_batch_size(data.batch_size, mesh, what=f'{what} batch_size')
    self._data, self._mesh, self._what = data, mesh, what
    self._spec = _batch_spec(data)
    self._batches = data.eval_batches(
      **sharding.this_process(), num_classes=num_classes
    )

    def with_label(params, batch):
      kept = {name: batch[name] for name in ('label', 'mask', 'index')}
      return kept | fn(params, batch)

    self._fn = jax.jit(with_label, out_shardings=sharding.replicated(mesh))

  def check(self, params):
    """Raise the model's error if it does not accept the images. No compute."""
    jax.eval_shape(self._fn, params, self._spec)

  def __call__(self, params):
    """Return {name: [N, ...]} for all readable examples, in source order.

    The names include 'label' and 'index'. Raises ValueError if no example can
    be read.
    """
    unit = f'batches of {self._what}'
    batches = terminal.track(
      self._batches, len(self._batches), unit=unit, live=False
    )
    rows, pending = [], None
    for batch in batches:
      out = self._fn(params, sharding.put_batch(batch, self._mesh))
      # Fetch the previous batch, so that the device always has work queued.
      rows, pending = _fetch(rows, pending), out
    rows = _fetch(rows, pending)
    columns = {
      name: np.concatenate([row[name] for row in rows]) for name in rows[0]
    }
    if not len(columns['index']):
      raise ValueError(
        f'{self._what}: none of the {len(self._data.source)} examples could be '
        'read. Check the files of the source.'
      )
    order = np.argsort(columns['index'], kind='stable')
    return {name: column[order] for name, column in columns.items()}

  def counts(self, columns):
    """Return {'num_examples', and 'skipped' if some could not be read}."""
    count = len(columns['index'])
    skipped = len(self._data.source) - count
    return {'num_examples': count} | ({'skipped': skipped} if skipped else {})


def _fetch(rows, out):
  if out is None:
    return rows
  out = jax.device_get(out)
  mask = out.pop('mask')
  return [*rows, {name: x[mask] for name, x in out.items()}]


def _batch_spec(data):
  """Return the ShapeDtypeStructs of the evaluation batches."""
  example = pipeline.first_example(data.source, data.transforms)
  image, label = example['image'], np.asarray(example['label'])
  return {
    name: jax.ShapeDtypeStruct((data.batch_size, *shape), dtype)
    for name, shape, dtype in (
      ('image', image.shape, np.uint8),
      ('label', label.shape, np.float32 if label.ndim else np.int32),
      ('mask', (), bool),
      ('index', (), np.int32),
    )
  }
