"""Evaluates a trained (or untrained) model: checkpoint + config.evals -> table.

    config.run = 'vit_jax.evaluate.evaluate'
    config.init_from = dict(path='WORKDIR of a run')
    config.evals = dict(test=dict(target=..., data=...))

Without init_from the model is a fresh one, which is the baseline that
features of a trained one are to be compared with.
"""

import contextlib

import jax
import jax.numpy as jnp

from vit_jax import (
  assemble,
  checkpoint,
  sharding,
  terminal,
  transfer,
  workdirs,
)
from vit_jax.build import ConfigError, Reader, call, instantiate, resolve
from vit_jax.metrics import Writer


def evaluate(config, workdir):
  """Runs config.evals, shows a table, writes metrics.jsonl. Returns the dict.

  Keys of the config: evals; init_from (path, step, ema, and what
  `transfer.adapt` takes; the head is kept by default); model, preprocess and
  image_shape (H, W, C), which by default are those of the checkpoint's run;
  mesh; seed.
  """
  config, given = Reader(config), config
  workdirs.prepare(workdir)
  mesh = sharding.make_mesh(**resolve(config.get('mesh', {})))
  init_from = resolve(config.get('init_from'))
  model, image_shape, preprocess, class_names = _model(config, init_from)
  evaluators = assemble.evaluators(
    config,
    model,
    preprocess,
    mesh,
    _no_duration,
    class_names,
  )
  images = jnp.zeros((1, *image_shape))
  rng = jax.random.key(config.get('seed', 0))
  abstract_params = jax.eval_shape(model.init, rng, images)['params']
  for _, evaluator in evaluators.values():
    evaluator.check(abstract_params)
  config.check_all_read('evaluate')
  workdirs.record(workdir, given)

  params, step = jax.jit(model.init)(rng, images)['params'], 0
  console = terminal.console()
  if init_from:
    # Without a head of its own, the model takes the trunk only.
    head = 'keep' if model.num_classes else 'reset'
    arguments = {'head': head} | init_from
    params, directory, report = call(transfer.load, arguments, params)
    step = int(directory.name)
    console.print(report, markup=False, highlight=False)
  params = jax.device_put(params, sharding.replicated(mesh))

  results = {}
  for name, (_, evaluator) in evaluators.items():
    for key, value in evaluator.run(params).items():
      results[f'{name}/{key}'] = value
  with contextlib.closing(Writer(workdir)) as writer:
    writer.write(step, results)
  rows = [(name, f'{value:.4g}') for name, value in results.items()]
  console.print(terminal.table(f'step {step}', ['metric', 'value'], rows))
  return results


def _no_duration(settings, name, *, default):
  """In place of a training's `to_steps`: here every evaluator runs once."""
  if given := [k for k in settings if k.startswith(f'{name}_')]:
    raise ConfigError(
      f'{given} mean nothing to evaluate, which runs each evaluator once; '
      'remove them.'
    )
  return default


def _model(config, init_from):
  """(model, image_shape, preprocess, class_names): the config's or the run's.

  Raises ConfigError where neither says.
  """
  run = {}
  if init_from:
    directory = checkpoint.find(init_from.get('path'), init_from.get('step'))
    run = workdirs.description(directory)
  settings = resolve(config.get('model'), descend=False) or run.get('model')
  image_shape = config.get('image_shape') or run.get('image_shape')
  if not settings or not image_shape:
    raise ConfigError(
      'evaluate: without init_from (a run of ours) the config must have '
      'model and image_shape=(H, W, C).'
    )
  preprocess = assemble.preprocess(config)
  if run and 'preprocess' not in config:
    preprocess = instantiate(run['preprocess'])
  return instantiate(settings), image_shape, preprocess, run.get('class_names')
