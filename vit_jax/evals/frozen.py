"""Readouts of frozen features: each data set is run through the model once.

    config.evals.frozen = dict(
      target='vit_jax.evals.frozen.Frozen',
      data={'digits': dict(train=dict(source=..., batch_size=128), test=...)},
      readouts={'knn': dict(target='vit_jax.evals.knn.Knn')},
    )

gives 'frozen/digits/knn/k10_t0.07' and so on.
"""

import numpy as np

from vit_jax.evals.collect import Collector
from vit_jax.evals.readout import Split


class Frozen:
  """Extracts features, sharded over all devices, and hands them to readouts.

  Args:
    model: has apply(..., method='features') -> {name: [B, ...]}.
    preprocess: uint8 images -> float images.
    mesh: of `sharding.make_mesh`.
    data: {name: {'train', 'test', and where wanted 'val': arguments of
      `pipeline.eval_batches`}}; each example has one class.
    readouts: {name: readout}, see `readout`.
    features: name of what `model.features` returns, flattened to [B, D]; or
      'pixels', the preprocessed images (a baseline that needs no model).

  One data set's features at a time are held, in float32, on every host.
  """

  def __init__(
    self, model, *, preprocess, mesh, data, readouts, features='pre_logits'
  ):
    _check_names(data, readouts)

    def extract(params, batch):
      images = preprocess(batch['image'])
      if features == 'pixels':
        out = images
      else:
        out = model.apply({'params': params}, images, method='features')
        if features not in out:
          raise ValueError(
            f'features={features!r}: this model has {sorted(out)} (and pixels).'
          )
        out = out[features]
      return {'x': out.reshape(len(out), -1).astype('float32')}

    self._mesh, self._readouts = mesh, dict(readouts)
    self._data = {
      name: {
        split: Collector(
          extract, data=settings, mesh=mesh, what=f'{name}/{split}'
        )
        for split, settings in splits.items()
      }
      for name, splits in data.items()
    }
    self._labels = None

  def check(self, params):
    """Raises for images, features or labels that cannot work.

    Reads the labels of all splits, the first time; images are not decoded.
    """
    for splits in self._data.values():
      for collector in splits.values():
        collector.check(params)
    if self._labels is None:
      self._labels = {
        name: {split: _labels(c, name, split) for split, c in splits.items()}
        for name, splits in self._data.items()
      }
    for name, labels in self._labels.items():
      for readout, read in self._readouts.items():
        try:
          read.check(
            labels['train'], labels['test'], labels_val=labels.get('val')
          )
        except ValueError as error:
          raise ValueError(f'{name}/{readout}: {error}') from error

  def run(self, params):
    """{'{data}/{readout}/{metric}'}, and the means over several data sets.

    The latter are 'mean/{readout}/{metric}', of metrics that all of them have.
    """
    results = {}
    for name, collectors in self._data.items():
      splits = {
        split: _split(collector(params), f'{name}/{split}')
        for split, collector in collectors.items()
      }
      results[name] = {
        f'{readout}/{metric}': value
        for readout, read in self._readouts.items()
        for metric, value in read(**splits, mesh=self._mesh).items()
      }
    flat = {
      f'{name}/{metric}': value
      for name, found in results.items()
      for metric, value in found.items()
    }
    return flat | (_means(list(results.values())) if len(results) > 1 else {})


def _check_names(data, readouts):
  if not data or not readouts:
    raise ValueError(
      f'Frozen needs data and readouts; it has data {list(data)} and readouts '
      f'{list(readouts)}.'
    )
  for name in (*data, *readouts):
    if '/' in name or name == 'mean':
      raise ValueError(
        f"{name!r} cannot name data or a readout: metrics are 'data/readout/"
        "metric', and 'mean' is the mean over data sets."
      )
  for name, splits in data.items():
    if not {'train', 'test'} <= set(splits) <= {'train', 'test', 'val'}:
      raise ValueError(
        f'data.{name} has {sorted(splits)}; give train, test, and if you '
        'want settings chosen on it, val.'
      )


def _labels(collector, name, split):
  labels = collector.labels()
  if labels.ndim != 1:
    raise ValueError(
      f'{name}/{split}: readouts of frozen features need one class per '
      f'example; labels have shape {labels.shape}.'
    )
  return labels


def _split(columns, name):
  x = columns['x']
  if not np.isfinite(x).all():
    raise ValueError(
      f'{name}: {np.sum(~np.isfinite(x))} of {x.size} feature values are NaN '
      'or Inf, so nothing can be read out of them.'
    )
  return Split(x, columns['label'])


def _means(found):
  first, *others = found
  shared = [m for m in first if all(m in other for other in others)]
  return {f'mean/{m}': float(np.mean([r[m] for r in found])) for m in shared}
