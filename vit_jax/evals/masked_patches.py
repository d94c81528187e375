"""Loss and accuracy of masked patch prediction on a whole split."""

import dataclasses

import jax
import numpy as np

from vit_jax.data.pipeline import Data
from vit_jax.evals.collect import Collector
from vit_jax.objectives.masked_patches import Prediction, Task


class MaskedPatches:
  """Loss and accuracy over the corrupted patches of a split.

  Every example counts once. Its corruption depends only on `seed` and on its
  index in the source, so results are the same on any number of devices and
  hosts, and comparable between steps and runs.

  Args:
    model: as the objective requires.
    preprocess: uint8 images -> float images.
    mesh: from `sharding.make_mesh`.
    data: the split; labels are ignored.
    seed: of the corruption.
    task: that of the objective, see objectives/masked_patches.py.

  Attributes:
    transforms: of the data.
  """

  def __init__(
    self,
    model,
    *,
    preprocess,
    mesh,
    data: Data,
    seed=0,
    task: Task = Task(),
  ):
    prediction = Prediction(model, preprocess, task)
    self.transforms = data.transforms

    def per_example(params, batch):
      keys = keys_of(batch['index'], seed)
      return prediction(params, batch['image'], keys)['metrics']

    data = dataclasses.replace(data, labels=False)
    self._collect = Collector(per_example, data=data, mesh=mesh)

  def check(self, params):
    """Raise the model's error if it does not accept the images. No compute."""
    self._collect.check(params)

  def run(self, params):
    """Return {metric: float}.

    loss, accuracy (not for 'pixels'): means over the corrupted patches.
    num_examples; skipped: number of unreadable examples, if any.
    """
    columns = self._collect(params)
    means = {
      name: float(np.mean(columns[name], dtype=np.float64))
      for name in ('loss', 'accuracy')
      if name in columns
    }
    return means | self._collect.counts(columns)


def keys_of(index, seed):
  """Return random keys [B] for the corruption of the examples `index` [B]."""
  fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
  return fold(jax.random.key(seed), index)
