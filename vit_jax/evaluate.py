"""Evaluates a trained (or untrained) model: checkpoint + config.evals -> table.

    config.run = 'vit_jax.evaluate.evaluate'
    config.init_from = dict(path='WORKDIR of a run, or a weights file')
    config.evals = dict(test=dict(target=..., data=...))

Without init_from the model is a fresh one, which is the baseline that
features of a trained one are to be compared with. What gives top-1 and top-5
accuracy is also written as results-EVALUATOR.csv, in timm's columns.
"""

import contextlib
import functools
import inspect
import re

import jax
import jax.numpy as jnp
from etils import epath

from vit_jax import (
  assemble,
  sharding,
  terminal,
  workdirs,
)
from vit_jax.config import Reader, call, instantiate, resolve
from vit_jax.metrics import Writer
from vit_jax.reports import timm_csv
from vit_jax.weights import formats
from vit_jax.weights import surgery as transfer
from vit_jax.weights.bundle import make


def evaluate(config, workdir):
  """Runs config.evals, shows a table, writes metrics.jsonl. Returns the dict.

  Keys of the config: evals; init_from (path of a run or of any weights file,
  what else `weights.formats.read` takes, and what `transfer.adapt` takes; the
  head is kept by default); model, preprocess and image_shape (H, W, C), which
  by default are the weights' own; name, of the model in results-*.csv, by
  default what init_from.path ends with; mesh; sharding; seed.
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
  name = config.get('name') or timm_csv.name(init_from, model)
  init = functools.partial(
    _init, model, image_shape, jax.random.key(config.get('seed', 0))
  )
  abstract_params = jax.eval_shape(init)
  rules = resolve(config.get('sharding', ()))
  shardings = sharding.infer(abstract_params, rules, mesh)
  for _, evaluator in evaluators.values():
    evaluator.check(abstract_params)
  config.check_all_read('evaluate')
  workdirs.record(workdir, given)

  console = terminal.console()
  params, report = _params(init, model, weights, rest, shardings)
  step = weights.step if weights else 0
  console.print(report, markup=False, highlight=False)

  results, is_first_host = {}, jax.process_index() == 0
  for key, (_, evaluator) in evaluators.items():
    with jax.set_mesh(mesh):
      found = evaluator.run(params)
    results |= {f'{key}/{metric}': value for metric, value in found.items()}
    if {'accuracy', 'top5_accuracy'} <= found.keys() and is_first_host:
      row = timm_csv.row(name, found, params, evaluator, image_shape)
      timm_csv.write(epath.Path(workdir) / f'results-{key}.csv', row)
  with contextlib.closing(Writer(workdir)) as writer:
    writer.write(step, results)
  rows = _rows(results)
  console.print(terminal.table(f'step {step}', ['metric', 'value'], rows))
  return results


def _no_duration(settings, name, *, default):
  """In place of a training's `to_steps`: here every evaluator runs once."""
  if given := [k for k in settings if k.startswith(f'{name}_')]:
    raise ValueError(
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

  Raises ValueError where neither says.
  """
  settings = resolve(config.get('model'), descend=False)
  if not weights and not (settings and 'image_shape' in config):
    raise ValueError(
      'evaluate: without init_from (weights to start from) the config must '
      'have model and image_shape=(H, W, C).'
    )
  model = instantiate(settings) if settings else make(weights.settings)
  image_shape = config.get('image_shape') or weights.image_shape
  preprocess = assemble.preprocess(config)
  if weights and 'preprocess' not in config:
    preprocess = make(weights.preprocess)
  return model, image_shape, preprocess


def _init(model, image_shape, rng):
  return model.init(rng, jnp.zeros((1, *image_shape)))['params']


def _params(init, model, weights, rest, shardings):
  """(parameters, what became of the weights' in words)."""
  # Without a head of its own, the model takes the trunk only.
  rest = {'head': 'keep' if model.num_classes else 'reset'} | rest
  if weights and rest['head'] == 'keep':  # nothing stays as initialised
    params = sharding.annotate(jax.eval_shape(init), shardings)
  else:
    params = jax.jit(init, out_shardings=shardings)()
  if not weights:
    return params, 'parameters as initialised'
  return transfer.fit(weights, params, model, **rest)


def _rows(results):
  """Those of the table on the terminal; intervals stand behind their value."""
  rows = []
  for name, value in results.items():
    low, high = (results.get(f'{name}_{end}') for end in ('low', 'high'))
    interval = '' if low is None else f' [{low:.4g}, {high:.4g}]'
    text = str(value) if isinstance(value, int) else f'{value:.4g}'
    stem = re.sub('_(low|high)$', '', name)
    if stem == name or stem not in results:
      rows.append((name, text + interval))
  return rows
