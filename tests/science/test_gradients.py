"""Stable rank of gradients."""

import jax
import numpy as np
import pytest
import tiny
from nightly import nightly
from synthetic import Synthetic

from vit_jax import tree
from vit_jax.data.pipeline import Data
from vit_jax.models.dense import Normalize
from vit_jax.objectives.classification import softmax_xent
from vit_jax.parallel import sharding
from vit_jax.science.gradients import StableRank


@pytest.mark.parametrize('scan', [True, *nightly([False])])
def test_ranks_are_those_of_the_gradients(scan):
  model = tiny.vit(width=8, depth=2, mlp_dim=12, num_classes=3, scan=scan)
  params = tree.unflatten(tiny.normal_params(model, (8, 8, 3), 0.3))
  source = Synthetic(image_size=8, num_classes=3, num_examples=24)
  evaluator = StableRank(
    model,
    preprocess=Normalize(),
    mesh=sharding.make_mesh(),
    data=Data(source, 16),
    objective=softmax_xent,
  )
  found = evaluator.run(params)
  assert len(found) == 2 * 6
  batch = next(iter(Data(source, 16).eval_batches()))
  loss_fn = softmax_xent(model, preprocess=Normalize())
  grad = jax.grad(lambda p: loss_fn(p, batch, jax.random.key(0))[0])
  grads = jax.jit(grad)(params)
  flat = tree.unstack_blocks(tree.flatten(grads))
  for path, rows in (('attn/query', 8), ('attn/out', 8), ('mlp/fc2', 12)):
    path = f'block_1/{path}/kernel'
    g = np.asarray(flat[path]).reshape(rows, -1)
    expected = np.trace(g.T @ g) / np.linalg.eigvalsh(g.T @ g)[-1]
    assert found[path] == pytest.approx(expected, rel=1e-4)
