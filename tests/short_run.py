"""Training runs of a few steps, by default on the digits."""

import optax

from vit_jax.data.pipeline import Data
from vit_jax.data.sources.digits import Digits
from vit_jax.durations import steps
from vit_jax.objectives.classification import softmax_xent
from vit_jax.optim.optimizers import Optimizer
from vit_jax.optim.schedules import Schedule
from vit_jax.runs.monitor import Logging
from vit_jax.train import train
from vit_jax.training import Training


def run(workdir, **options):
  """Train with these fields of Training and arguments of train."""
  options = {
    'data': Data(Digits(split='train'), batch_size=16),
    'objective': softmax_xent,
    'optimizer': Optimizer(optax.sgd),
    'schedule': Schedule(lr=1.0, decay='constant'),
    'logging': Logging(every=steps(1)),
    **options,
  }
  call = {k: options.pop(k) for k in ('provenance', 'dry_run') if k in options}
  return train(workdir, Training(**options), **call)
