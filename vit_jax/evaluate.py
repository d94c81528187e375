"""Evaluation of trained (or untrained) weights: evaluators -> table.

config.run = 'vit_jax.evaluate.evaluate'
config.init_from = dict(path='WORKDIR of a run, or a weights file')
config.evals = dict(test=dict(target=..., data=...))
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Annotated

import jax
import jax.numpy as jnp

from vit_jax.config import Provenance
from vit_jax.data.pipeline import Data
from vit_jax.evals import evaluators as evaluators_lib
from vit_jax.evals.evaluators import Factory
from vit_jax.io import terminal
from vit_jax.models.dense import Normalize
from vit_jax.models.pallas.choice import Chooser
from vit_jax.parallel import sharding as sharding_lib
from vit_jax.reports import page, worst
from vit_jax.runs import compiled, workdirs
from vit_jax.runs.monitor import Stopwatch
from vit_jax.runs.records import Writer
from vit_jax.runs.writers import MetricsWriter
from vit_jax.types import (
  HARMLESS,
  Count,
  KeySeed,
  Model,
  PathLike,
  Preprocess,
  Side,
  UserError,
)
from vit_jax.weights import surgery
from vit_jax.weights.surgery import InitFrom


def evaluate(
  workdir: PathLike,
  *,
  evals: Mapping[str, Factory],
  init_from: InitFrom | None = None,
  model: Model | None = None,
  image_shape: tuple[Side, Side, Count] | None = None,
  preprocess: Preprocess | None = None,
  mesh: Annotated[sharding_lib.MeshSizes, HARMLESS] = sharding_lib.MeshSizes(),
  sharding: Annotated[sharding_lib.Rules | None, HARMLESS] = None,
  seed: KeySeed = 0,
  writers: Annotated[Mapping[str, MetricsWriter] | None, HARMLESS] = None,
  provenance: Provenance | None = None,
  dry_run: Annotated[bool, HARMLESS] = False,
) -> dict[str, float]:
  """Run each evaluator once, print a table and write metrics.jsonl.

  Return {'EVALUATOR/METRIC': value}. Predictions are files, see worst.py.

  Args:
    workdir: folder for the results.
    evals: {name: factory}, see evaluators.py.
    init_from: the weights; the head is kept by default. None: a model that is
      initialised from `seed`, the baseline for features of a trained one.
    model, image_shape, preprocess: None: those of the weights.
    mesh, sharding, writers, provenance: as in `train`.
    dry_run: stop after all checks, and return {}.
  """
  stopwatch, provenance = Stopwatch(), provenance or Provenance()
  workdirs.make(workdir, 'evaluate', {'evals': evals})
  mesh = mesh.make()
  weights = surgery.read(init_from) if init_from else None
  if weights is not None:
    model = weights.model if model is None else model
    image_shape = image_shape or weights.image_shape
    preprocess = preprocess or weights.preprocess
  elif model is None or image_shape is None:
    raise UserError(
      'evaluate needs init_from (weights), or model and image_shape=(H, W, C) '
      'to evaluate a freshly initialised model.'
    )
  choices = workdirs.read(workdir, 'attention.json')
  images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
  model = Chooser(_largest_batch(evals), mesh, choices, terminal.say)(
    model, images, backward=False
  )

  def init():
    return model.init(jax.random.key(seed), jnp.zeros(images.shape))['params']

  abstract_params = jax.eval_shape(init)
  class_names = weights.class_names if weights else None
  if weights:
    evals = {k: evaluators_lib.by_names(x, weights) for k, x in evals.items()}
  evaluators = evaluators_lib.make(
    evals,
    model,
    preprocess=preprocess or Normalize(),
    mesh=mesh,
    class_names=class_names,
    abstract_params=abstract_params,
  )
  shardings = sharding_lib.infer(abstract_params, sharding, mesh)
  if dry_run:
    terminal.say(f'Dry run: {", ".join(evaluators)} can run on this model.')
    return {}
  workdirs.record_start(workdir, workdirs.basis_of(provenance.entries))
  if choices:
    workdirs.write(workdir, 'attention.json', choices)
  workdirs.record_config(workdir, provenance)

  with compiled.explaining(
    'It cannot hold the parameters. Use more devices, and shard the parameters '
    'over them: --config.mesh.fsdp=-1'
  ):
    params, report = _params(init, model, weights, init_from, shardings)
  terminal.say(report)
  step = weights.step if weights else 0
  stopwatch.lap('setup')
  with jax.set_mesh(mesh):
    results = evaluators_lib.run(evaluators, params, step)
  stopwatch.lap('evals')
  written = worst.write_all(workdir, evaluators, class_names=class_names)
  kinds, config = evaluators_lib.kinds(evaluators), provenance.config
  writer = Writer(workdir, writers=writers, config=config, kinds=kinds)
  with contextlib.closing(writer):
    writer.write(step, results | stopwatch.record())
  rows = [(name, str(round(value, 4))) for name, value in results.items()]
  terminal.table(f'step {step}', ['metric', 'value'], rows)
  for path in written:
    terminal.say(f'wrote {path}')
  page.write_at_end(workdir)
  return results


def _largest_batch(evals):
  """Return the largest batch size of the data of evaluators, at least 1."""
  arguments = [getattr(factory, 'keywords', {}) for factory in evals.values()]
  found = [x for x in jax.tree.leaves(arguments) if isinstance(x, Data)]
  return max((data.batch_size for data in found), default=1)


def _params(init, model, weights, init_from, shardings):
  """Return (parameters, report of how the weights were adapted)."""
  if not weights:
    return jax.jit(init, out_shardings=shardings)(), 'parameters as initialised'
  # A model without a head takes the trunk only.
  default = 'keep' if model.num_classes else 'reset'
  init_from = dataclasses.replace(init_from, head=init_from.head or default)
  params = sharding_lib.annotate(jax.eval_shape(init), shardings)
  if init_from.head != 'keep':  # some stay as initialised
    params = jax.jit(init, out_shardings=shardings)()
  return surgery.fit(weights, params, model, init_from)
