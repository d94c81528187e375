"""How well masked patches of held-out images are predicted, on any hosts."""

import jax
import numpy as np

from vit_jax.data.pipeline import Unlabelled
from vit_jax.evals.collect import Collector
from vit_jax.objectives.masked_patches import Prediction, Task


class MaskedPatches:
  """Loss and accuracy over the corrupted patches of a split.

  Every example counts once and is corrupted once, in a way that depends on
  seed and its number in the source alone: the result is the same on any number
  of devices and hosts, and comparable between steps and runs.

  Args:
    model: as the objective asks for.
    preprocess: uint8 images -> float images.
    mesh: of `sharding.make_mesh`.
    data: arguments of `pipeline.eval_batches`; batch_size is global. Labels
      are not looked at.
    seed: of the corruption.
    task: as of the objective, objectives/masked_patches.py.

  Attributes:
    transforms: of the data.
  """

  def __init__(
    self,
    model,
    *,
    preprocess,
    mesh,
    data,
    seed=0,
    task: Task = Task(),
  ):
    prediction = Prediction(model, preprocess, task)
    data = dict(data, source=Unlabelled(data['source']))
    data.pop('labels', None)
    self.transforms = tuple(data.get('transforms', ()))

    def of_examples(params, batch):
      keys = keys_of(batch['index'], seed)
      return prediction(params, batch['image'], keys)['metrics']

    self._collect = Collector(of_examples, data=data, mesh=mesh)

  def check(self, params):
    """Raises the model's error if it cannot take these images; no compute."""
    self._collect.check(params)

  def run(self, params):
    """{name: float} of

    loss, accuracy (not of 'pixels'): means over the corrupted patches.
    num_examples: that count; skipped: that could not be read, if any.
    """
    columns = self._collect(params)
    count = len(columns['index'])
    if not count:
      raise ValueError(
        f'None of the {len(self._collect.source)} examples could be read.'
      )
    results = {
      name: float(np.mean(columns[name], dtype=np.float64))
      for name in ('loss', 'accuracy')
      if name in columns
    }
    if skipped := len(self._collect.source) - count:
      results['skipped'] = skipped
    return results | {'num_examples': count}


def keys_of(index, seed):
  """Keys [B] of the corruption of examples, by their numbers int32 [B]."""
  fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
  return fold(jax.random.key(seed), index)
