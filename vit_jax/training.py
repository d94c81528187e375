"""Parts of a training run: the schema of its config."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol

from vit_jax import config
from vit_jax.config.values import with_tuples
from vit_jax.data.pipeline import Data, Source
from vit_jax.durations import Interval
from vit_jax.evals.evaluators import Evaluator, Factory
from vit_jax.models.dense import Normalize
from vit_jax.optim.optimizers import Optimizer
from vit_jax.optim.schedules import Ema, Schedule
from vit_jax.parallel.sharding import MeshSizes, Rules
from vit_jax.probes import Probe
from vit_jax.runs.checkpoint import Checkpoints
from vit_jax.runs.monitor import Logging
from vit_jax.types import (
  HARMLESS,
  Count,
  KeySeed,
  MakeObjective,
  Model,
  Preprocess,
)
from vit_jax.weights.surgery import InitFrom

Change = Callable[[Any], Any]  # model -> model


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """An evaluator of a training run, and when it runs.

  Attributes:
    evaluator: makes it, see evaluators.py. In a config, the `target`.
    every: time between its runs; None for one at the end.
    change: function model -> the model that it gets; None: the same.
  """

  evaluator: Factory = dataclasses.field(metadata={'rest': True})
  every: Annotated[Interval | None, HARMLESS] = None
  change: Change | None = None

  def make(self, model: Model, **options: Any) -> Evaluator:
    """Return the evaluator of the model after `change`."""
    model = self.change(model) if self.change else model
    return self.evaluator(model, **options)


class Variants(Protocol):
  """Variants of a model, with the same parameters, for the steps of a run."""

  @property
  def changes(self) -> Mapping[str, Change]:
    """Functions model -> variant, by what they are named in metrics."""

  def of_steps(self, count: int, seed: int, /) -> Any:
    """Return the index of the variant in each step, uint8 [count].

    It depends on the arguments only: hosts and runs that resume agree.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
  """A training run.

  Attributes:
    model: Flax module whose call maps images [B, H, W, C] to logits [B, K]. A
      num_classes of None is set to the number of classes of the data.
    data, total: training images and batches; length of training.
    objective: function (model, preprocess=...) -> LossFn.
    optimizer: optimizer rule with clipping, decay mask, freezing.
    schedule: learning rate: function of the Timeline -> (step -> rate).
    variants: of the model in each step, see Variants; None: the model itself.
    evals: evaluators by name, and when they run. All run at the end.
    checkpoints: when checkpoints are written and which are kept.
    init_from: weights to start from if workdir has no checkpoint; None: random.
    preprocess: uint8 images -> float images, on the device.
    mesh: sizes of the mesh axes 'data', 'fsdp' and 'model'.
    sharding: rules, see sharding.infer; None: rules that follow from the mesh.
    accum_steps: micro-batches per step, to save memory; same result.
    ema: EMA of the parameters, used by evaluators and saved; None: no EMA.
    probes: what steps show of their gradients, see probes.py.
    seed: seed for initialisation, data order, augmentation and dropout.
    logging: records of metrics, their writers, and traces.
  """

  model: Model | functools.partial[Model]
  data: Data
  objective: MakeObjective
  optimizer: Optimizer
  schedule: Schedule
  total: Interval
  variants: Variants | None = None
  evals: Mapping[str, Evaluation] | None = None
  checkpoints: Annotated[Checkpoints, HARMLESS] = Checkpoints()
  init_from: InitFrom | None = None
  preprocess: Preprocess = Normalize()
  mesh: Annotated[MeshSizes, HARMLESS] = MeshSizes()
  sharding: Annotated[Rules | None, HARMLESS] = None
  accum_steps: Count = 1
  ema: Ema | None = None
  probes: Mapping[str, Probe] | None = None
  seed: KeySeed = 0
  logging: Annotated[Logging, HARMLESS] = Logging()

  def supplied(
    self, known: dict[str, Any], source: Callable[[], Source] | None = None
  ) -> 'Training':
    """Return the run with what is computed from its data, as class weights.

    Args:
      known: what was computed before, by function; new values are added.
      source: opens the data that are computed from; None: those of `data`.
    """

    def call(fn):
      if (name := config.full_name(fn.func)) not in known:
        known[name] = fn(source=source() if source else self.data.source)
      return with_tuples(known[name])

    parts = {
      name: config.supply(getattr(self, name), 'source', call)
      for name in ('model', 'objective', 'preprocess')
    }
    return dataclasses.replace(self, **parts)
