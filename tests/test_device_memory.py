"""Out of memory on a device: one message with what to do."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

from vit_jax.data.embedded.digits import Digits
from vit_jax.data.pipeline import Data
from vit_jax.evals.evaluators import run
from vit_jax.models import names
from vit_jax.objectives.classification import softmax_xent
from vit_jax.parallel.sharding import MeshSizes
from vit_jax.preprocess import Normalize
from vit_jax.runs import device_memory, dry_runs
from vit_jax.train import make_step


class TooLarge:
  """Evaluator that no device can run."""

  data = Data(Digits(split='test'), batch_size=64)

  def run(self, params):
    del params
    return {'sum': jnp.ones((2**45, 3), jnp.float32).sum()}


def test_an_evaluator_that_needs_too_much():
  with pytest.raises(device_memory.OutOfMemoryError) as error:
    run('val', TooLarge(), {})
  assert re.fullmatch(
    r'Out of memory on a device \(cpu of \d+\.\d GiB\)\. The evaluator '
    r'evals\.val has batches of 64 images, 8 per device\. Use a smaller batch: '
    r'--config\.evals\.val\.data\.batch_size=32\n  \(JAX: .*\)',
    str(error.value),
  )


def test_other_errors_stay_as_they_are():
  other = jax.errors.JaxRuntimeError('INTERNAL: something else')
  with (
    pytest.raises(jax.errors.JaxRuntimeError, match='INTERNAL') as error,
    device_memory.explaining(lambda: ''),
  ):
    raise other
  assert error.value is other


def test_what_a_training_step_needs():
  model = names.create('ViT-mu/4', num_classes=10)
  mesh = MeshSizes(data=2, fsdp=4).make()
  _, state, step_fn = make_step(
    model,
    images=jax.ShapeDtypeStruct((1, 8, 8, 1), jnp.float32),
    loss_fn=softmax_xent(model, preprocess=Normalize()),
    make_tx=lambda _: optax.sgd(0.1),
    mesh=mesh,
    accum_steps=2,
  )
  data = Data(Digits(split='train'), batch_size=96)
  text = dry_runs.explain_memory(
    *(model, state, step_fn, data, (8, 8, 1), mesh, 2)
  )
  first, *remedies = text.splitlines()
  assert re.fullmatch(
    r'The batch of 96 images is 12 per device in 2 micro-batches\. A training '
    r'step needs per device: state 0\.\d+ GiB, temporaries 0\.\d+ GiB\. To '
    'need less:',
    first,
  )
  flags = [line.strip().partition(':')[0] for line in remedies]
  assert flags == [
    *('--config.data.batch_size=48', '--config.accum_steps=3'),
    '--config.model.remat=full',
  ]
