"""The train step is compiled while the state is made."""

import functools

import jax
import numpy as np
import pytest

from vit_jax import ahead, sharding
from vit_jax.data.embedded.digits import Digits
from vit_jax.data.pipeline import Data

COMPILED = '/jax/core/compile/backend_compile_duration'


def test_the_first_call_finds_the_program():
  mesh = sharding.make_mesh(data=8)
  state = jax.device_put(np.zeros(8, np.float32), sharding.replicated(mesh))
  abstract_state = sharding.annotate(state, state.sharding)

  @functools.partial(jax.jit, donate_argnums=0)
  def step_fn(state, batch):
    return state + batch['image'].mean(), batch['label'].sum()

  data = Data(Digits(split='train'), batch_size=16)
  label = data.first_example()['label']
  shapes = ahead.batch_shapes((8, 8, 1), label, 16, mesh)
  compiled = []

  def count(event, _, **kwargs):
    if event == COMPILED:
      compiled.append(kwargs)

  jax.monitoring.register_event_duration_secs_listener(count)
  try:
    of_the_step = (abstract_state, step_fn, shapes, mesh)
    ahead.start(lambda: ahead.compile_step(*of_the_step), mesh).join()
    batch = sharding.put_batch(next(data.train_batches()), mesh)
    assert compiled  # the listener works
    compiled.clear()
    with jax.set_mesh(mesh), jax.transfer_guard('disallow'):
      state, labels = step_fn(state, batch)
    assert not compiled
  finally:
    jax.monitoring.unregister_event_duration_listener(count)
  assert jax.device_get(labels) > 0


@pytest.mark.filterwarnings('error')
def test_errors_are_left_to_the_first_call():
  def fail():
    raise MemoryError

  ahead.start(fail, sharding.make_mesh(data=8)).join()
