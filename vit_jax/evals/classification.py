"""Accuracy and loss of a classifier, exact over any number of hosts."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import sharding
from vit_jax.data import pipeline
from vit_jax.objectives import classification


class Classification:
  """Top-1, top-5 (of more than 5 classes) and loss over a whole split.

  Every example counts once, on any number of devices and hosts.

  Args:
    model: has apply({'params': p}, images) -> logits [B, K].
    preprocess: uint8 images -> float images.
    mesh: of `sharding.make_mesh`.
    data: arguments of `pipeline.eval_batches`; batch_size is global.
    loss: 'softmax' or 'sigmoid'.

  Attributes:
    class_names: of the data, where it says; must be those of the training.
  """

  def __init__(self, model, *, preprocess, mesh, data, loss='softmax'):
    losses = {
      'softmax': classification.softmax_loss,
      'sigmoid': classification.sigmoid_loss,
    }
    if loss not in losses:
      raise ValueError(f'loss={loss!r} must be one of {sorted(losses)}.')
    sharding.check_batch_size(data['batch_size'], mesh, what='eval batch_size')
    self._mesh = mesh
    self.class_names = getattr(data['source'], 'class_names', None)
    self._batch_spec = batch_spec(data)
    self._batches = pipeline.eval_batches(
      **data,
      **sharding.this_process(),
      num_classes=model.num_classes,
    )

    def sums(params, batch):
      """Sums over the global batch, not means: padding must not count."""
      mask = batch['mask']
      logits = model.apply({'params': params}, preprocess(batch['image']))
      targets = classification.soft_targets(batch['label'], logits.shape[-1])
      num_classes = logits.shape[-1]
      top5 = jax.lax.top_k(logits, min(5, num_classes))[1]
      hits = jnp.take_along_axis(targets, top5, axis=-1) > 0
      example_loss = losses[loss](logits, targets)
      sums = {
        'num_examples': jnp.sum(mask),
        'accuracy': jnp.sum(hits[:, 0] & mask),
        'loss': jnp.sum(jnp.where(mask, example_loss, 0.0)),
      }
      if num_classes > 5:
        sums['top5_accuracy'] = jnp.sum(hits.any(axis=-1) & mask)
      return sums

    self._sums = jax.jit(sums, out_shardings=sharding.replicated(mesh))

  def check(self, params):
    """Raises the model's error if it cannot take these images; no compute."""
    jax.eval_shape(self._sums, params, self._batch_spec)

  def run(self, params):
    """{'accuracy', 'top5_accuracy', 'loss', 'num_examples'} of params."""
    totals, previous = {}, None
    for batch in self._batches:
      current = self._sums(params, sharding.put_batch(batch, self._mesh))
      # Fetching the previous batch's sums leaves the device busy with this one.
      _add(totals, previous)
      previous = current
    _add(totals, previous)
    count = totals.pop('num_examples')
    if not count:
      raise ValueError('The evaluation has no readable example.')
    means = {name: total / count for name, total in totals.items()}
    if self._batches.skipped:
      means['skipped'] = self._batches.skipped
    return means | {'num_examples': count}


def batch_spec(data):
  """ShapeDtypeStructs of the batches of eval_batches(**data)."""
  size, transforms = data['batch_size'], data.get('transforms', ())
  example = pipeline.first_example(data['source'], transforms)
  label = np.asarray(example['label'])
  kind = np.float32 if label.ndim else np.int32
  return {
    'image': jax.ShapeDtypeStruct((size, *example['image'].shape), np.uint8),
    'label': jax.ShapeDtypeStruct((size, *label.shape), kind),
    'mask': jax.ShapeDtypeStruct((size,), bool),
  }


def _add(totals, sums):
  for name, value in (jax.device_get(sums) if sums else {}).items():
    totals[name] = totals.get(name, 0) + value.item()
