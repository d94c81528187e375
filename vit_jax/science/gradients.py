"""Stable rank of the gradients of a training run, by kernel."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from vit_jax import tree
from vit_jax.data.pipeline import Data
from vit_jax.kernels import find
from vit_jax.parallel import sharding
from vit_jax.step import as_objective
from vit_jax.types import MakeObjective, Params, Preprocess, UserError


@dataclasses.dataclass(eq=False)
class StableRank:
  """|G|_F^2 / |G|_2^2 of the gradient G of each kernel of the layers.

  It is between 1 and the smaller side of the matrix [inputs, outputs], and
  falls if a few directions take over. The gradient is that of the first batch
  of the data, whose images are transformed as in evaluation, in training with
  dropout and the like.
  """

  model: Any
  _: dataclasses.KW_ONLY
  preprocess: Preprocess
  mesh: jax.sharding.Mesh
  data: Data
  objective: MakeObjective

  def __post_init__(self) -> None:
    made = self.objective(self.model, preprocess=self.preprocess)
    objective = as_objective(made)
    if objective.teachers or objective.ema_weight:
      raise UserError('StableRank cannot measure an objective with a teacher.')

    def loss(params, batch, rng):
      batch = objective.prepare(batch, jax.random.fold_in(rng, 2**32 - 1))
      return objective(params, batch, rng)[:2]

    self._grad = jax.jit(
      jax.grad(loss, has_aux=True), out_shardings=sharding.replicated(self.mesh)
    )
    batch = next(iter(self.data.eval_batches(**sharding.this_process())))
    self._batch = {key: batch[key] for key in ('image', 'label')}

  def run(self, params: Params) -> dict[str, float]:
    """Return {path of the kernel: stable rank}."""
    batch = sharding.put_batch(self._batch, self.mesh)
    grads, _ = jax.device_get(self._grad(params, batch, jax.random.key(0)))
    found = {}
    for path, grad in tree.unstack_blocks(tree.flatten(grads)).items():
      if path.startswith('block_') and path.endswith('/kernel'):
        outputs = grad.shape[-len(find(path).outputs) :]
        matrix = grad.reshape(-1, math.prod(outputs))
        values = np.linalg.svd(matrix, compute_uv=False)
        found[path] = float(np.sum(values**2) / max(values[0] ** 2, 1e-30))
    return found
