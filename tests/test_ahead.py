"""The train step is compiled while the state is made."""

import contextlib
import functools
import threading

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

from vit_jax.data.embedded.digits import Digits
from vit_jax.data.pipeline import Data
from vit_jax.objectives import classification
from vit_jax.optim.durations import steps
from vit_jax.optim.optimizers import Optimizer
from vit_jax.optim.schedules import Schedule
from vit_jax.parallel import sharding
from vit_jax.runs import ahead
from vit_jax.train import train

COMPILED = '/jax/core/compile/backend_compile_duration'


@contextlib.contextmanager
def compilations():
  """Context manager with a list of (program compiled in it, thread)."""
  compiled = []

  def note(event, _, **kwargs):
    if event == COMPILED:
      compiled.append((kwargs['fun_name'], threading.current_thread().name))

  jax.monitoring.register_event_duration_secs_listener(note)
  try:
    yield compiled
  finally:
    jax.monitoring.unregister_event_duration_listener(note)


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
  with compilations() as compiled:
    of_the_step = (abstract_state, step_fn, shapes, mesh)
    ahead.start(lambda: ahead.compile_step(*of_the_step), mesh).join()
    assert compiled == [('jit(step_fn)', 'compile')]
    batch = sharding.put_batch(next(data.train_batches()), mesh)
    compiled.clear()
    with jax.set_mesh(mesh), jax.transfer_guard('disallow'):
      state, labels = step_fn(state, batch)
    assert not compiled
  assert jax.device_get(labels) > 0


class Linear(nn.Module):
  """The smallest model that can be trained."""

  num_classes: int = 2

  @nn.compact
  def __call__(self, images, *, train=False):
    del train
    return nn.Dense(self.num_classes)(images.reshape(len(images), -1))


class Several:
  """Images of 2 x 2 pixels with two labels each."""

  num_classes = 2
  channels = 1

  def __len__(self):
    return 64

  def __getitem__(self, index):
    image = np.full((2, 2, 1), index, np.uint8)
    return {'image': image, 'label': np.array([1.0, 0.0], np.float32)}


@pytest.mark.parametrize(
  ('source', 'objective'),
  [
    (Digits(split='train'), classification.softmax_xent),
    (Several(), classification.sigmoid_xent),
  ],
)
def test_a_run_compiles_its_step_once_and_ahead(source, objective, tmp_path):
  with compilations() as compiled:
    train(
      tmp_path,
      model=functools.partial(Linear),
      data=Data(source, batch_size=16),
      objective=objective,
      optimizer=Optimizer(optax.adam),
      schedule=Schedule(lr=1e-3),
      total=steps(2),
    )
  of_the_step = [x for x in compiled if x[0] == 'jit(train_step)']
  assert of_the_step == [('jit(train_step)', 'compile')]


@pytest.mark.filterwarnings('error')
def test_errors_are_left_to_the_first_call():
  def fail():
    raise MemoryError

  ahead.start(fail, sharding.make_mesh(data=8)).join()
