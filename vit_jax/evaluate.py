"""Evaluates a trained (or untrained) model: checkpoint + config.evals -> table.

    config.run = 'vit_jax.evaluate.evaluate'
    config.init_from = dict(path='WORKDIR of a run, or a weights file')
    config.evals = dict(test=dict(target=..., data=...))

Without init_from the model is a fresh one, which is the baseline that
features of a trained one are to be compared with.
"""

import contextlib
import inspect

import jax
import jax.numpy as jnp

from vit_jax import (
  assemble,
  sharding,
  terminal,
  transfer,
  workdirs,
)
from vit_jax.build import ConfigError, Reader, call, instantiate, resolve
from vit_jax.metrics import Writer
from vit_jax.weights import formats
from vit_jax.weights.bundle import make


def evaluate(config, workdir):
  """Runs config.evals, shows a table, writes metrics.jsonl. Returns the dict.

  Keys of the config: evals; init_from (path of a run or of any weights file,
  what else `weights.formats.read` takes, and what `transfer.adapt` takes; the
  head is kept by default); model, preprocess and image_shape (H, W, C), which
  by default are the weights' own; mesh; seed.
  """
  config, given = Reader(config), config
  workdirs.prepare(workdir)
  mesh = sharding.make_mesh(**resolve(config.get('mesh', {})))
  init_from = resolve(config.get('init_from'))
  weights, rest = _weights(init_from)
  model, image_shape, preprocess = _model(config, weights)
  evaluators = assemble.evaluators(
    config,
    model,
    preprocess,
    mesh,
    _no_duration,
    weights and weights.class_names,
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
  if weights:
    # Without a head of its own, the model takes the trunk only.
    arguments = {'head': 'keep' if model.num_classes else 'reset'} | rest
    params, report = transfer.fit(weights, params, model, **arguments)
    step = weights.step
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


def _weights(init_from):
  """(what init_from names or None, the rest of its arguments)."""
  if not init_from:
    return None, {}
  names = inspect.signature(transfer.adapt).parameters
  rest = {k: v for k, v in init_from.items() if k in names}
  where = {k: v for k, v in init_from.items() if k not in names}
  return call(formats.read, where), rest


def _model(config, weights):
  """(model, image_shape, preprocess): the config's, or else the weights'.

  Raises ConfigError where neither says.
  """
  settings = resolve(config.get('model'), descend=False)
  if not weights and not (settings and 'image_shape' in config):
    raise ConfigError(
      'evaluate: without init_from (weights to start from) the config must '
      'have model and image_shape=(H, W, C).'
    )
  model = instantiate(settings) if settings else make(weights.settings)
  image_shape = config.get('image_shape') or weights.image_shape
  preprocess = assemble.preprocess(config)
  if weights and 'preprocess' not in config:
    preprocess = make(weights.preprocess)
  return model, image_shape, preprocess
