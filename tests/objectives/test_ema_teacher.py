"""A method in a few lines, as docs/self_supervised.md has it."""

import functools
import pathlib
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tiny

from vit_jax.durations import Timeline
from vit_jax.models.dense import Normalize
from vit_jax.models.vit import PatchEmbedding
from vit_jax.step import init_state, train_step

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'self_supervised.md'


def test_the_teacher_of_the_example_follows_the_student(tmp_path):
  code = re.search(r'```python\n(.*?)```', PAGE.read_text(), re.S)[1]
  (tmp_path / 'mine.py').write_text(code)
  method = runpy.run_path(str(tmp_path / 'mine.py'))['Tokens']
  model = tiny.vit(embedding=PatchEmbedding(4, mask_token=True))
  made = method(model, preprocess=Normalize(), momentum=0.9)
  images = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)
  objective = made.of_run(Timeline(4, 40, total_steps=2), images)
  tx = optax.adam(1e-2)
  state = init_state(
    jax.random.key(0), model=model, images=images, tx=lambda _: tx, ema=True
  )
  rng = np.random.default_rng(0)
  batch = {'image': rng.integers(0, 256, (4, 8, 8, 3), np.uint8)}
  options = {'loss_fn': objective, 'tx': tx, 'accum_steps': 2}
  options['ema_weight'] = objective.ema_weight
  step = jax.jit(functools.partial(train_step, **options))
  for weight in (0.1, 0.05):  # to 0 on half a cosine
    former = state.ema
    state, metrics = step(state, batch)
    assert metrics['loss'] > 0
    expected = optax.incremental_update(state.params, former, weight)
    for found, other in zip(*map(jax.tree.leaves, (state.ema, expected))):
      np.testing.assert_allclose(found, other, rtol=1e-6, atol=1e-7)
