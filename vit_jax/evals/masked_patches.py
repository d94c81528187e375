"""Loss and accuracy of masked patch prediction on a whole split."""

import dataclasses
from typing import ClassVar

import jax

from vit_jax.evals.collect import COUNTS, SplitEvaluator, means
from vit_jax.objectives import masked_patches
from vit_jax.types import ACCURACY, Batch, KeySeed, Kind, Kinds, Params


@dataclasses.dataclass(eq=False, kw_only=True)
class MaskedPatches(SplitEvaluator):
  """Loss and accuracy over the corrupted patches of a split; no labels.

  The corruption of an example depends only on `seed` and its index. So results
  are comparable between steps, runs, and numbers of devices and hosts.

  Give it the `task` of the objective, see objectives/masked_patches.py.
  """

  seed: KeySeed = 0
  task: masked_patches.Task = masked_patches.Task()

  def __post_init__(self) -> None:
    self._objective = masked_patches.MaskedPatches(
      self.model, preprocess=self.preprocess, task=self.task
    )
    super().__post_init__()

  labelled = False
  metrics: ClassVar[Kinds] = {
    'loss': Kind(better='lower', main=True),
    'accuracy': ACCURACY,
    **COUNTS,
  }

  def measure(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
    keys = keys_of(batch['index'], self.seed)
    return self._objective.predict(params, batch['image'], keys)['metrics']

  def run(self, params: Params) -> dict[str, float]:
    """Return {metric: float}; there is no accuracy for 'pixels'."""
    columns = self.collect(params)
    return means(columns, ('loss', 'accuracy')) | self.collect.counts(columns)


def keys_of(index: jax.Array, seed: int) -> jax.Array:
  """Return random keys [B] for the corruption of the examples `index` [B]."""
  fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
  return fold(jax.random.key(seed), index)
