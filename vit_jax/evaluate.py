"""Evaluates a trained (or untrained) model: checkpoint + config.evals -> table.

    config.run = 'vit_jax.evaluate.evaluate'
    config.init_from = dict(path='WORKDIR of a run')
    config.evals = dict(test=dict(target=..., data=...))

Without init_from the model is a fresh one, which is the baseline that
features of a trained one are to be compared with.
"""

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
  trained = {}
  if init_from:
    directory = checkpoint.find(init_from['path'], init_from.get('step'))
    trained = workdirs.description(directory)
  settings = resolve(config.get('model'), descend=False) or trained.get('model')
  image_shape = config.get('image_shape') or trained.get('image_shape')
  if not settings or not image_shape:
    raise ConfigError(
      'evaluate: without init_from (a run of ours) the config must have '
      'model and image_shape=(H, W, C).'
    )
  model = instantiate(settings)
  if 'preprocess' not in config and trained:
    preprocess = instantiate(trained['preprocess'])
  else:
    preprocess = assemble.preprocess(config)
  evaluators = assemble.evaluators(
    config,
    model,
    preprocess,
    mesh,
    lambda *_, default: default,
    trained.get('class_names'),
  )
  seed = config.get('seed', 0)
  config.check_all_read('evaluate')
  workdirs.record(workdir, given)

  images = jnp.zeros((1, *image_shape))
  params = jax.jit(model.init)(jax.random.key(seed), images)['params']
  step = 0
  if init_from:
    # Without a head of its own, the model takes the trunk only.
    keep = 'keep' if settings.get('num_classes') else 'reset'
    params, directory, report = call(
      transfer.load, {'head': keep} | init_from, params
    )
    step = int(directory.name)
    terminal.console().print(report, markup=False, highlight=False)
  params = jax.device_put(params, sharding.replicated(mesh))

  results = {}
  for name, (_, evaluator) in evaluators.items():
    for key, value in evaluator.run(params).items():
      results[f'{name}/{key}'] = value
  writer = Writer(workdir)
  writer.write(step, results)
  writer.close()
  rows = [(name, f'{value:.4g}') for name, value in results.items()]
  terminal.console().print(
    terminal.table(f'step {step}', ['metric', 'value'], rows)
  )
  return results
