"""The parts of a run, built from its config; shared by train and evaluate.

This is the last layer that knows what a config looks like: it takes Readers
and returns objects.
"""

from vit_jax import checkpoint, optim, schedules
from vit_jax.config import (
  Reader,
  call,
  instantiate,
  locate,
  resolve,
)
from vit_jax.data.unlabelled import Unlabelled
from vit_jax.preprocess import Normalize

_UNITS = ('_steps', '_epochs', '_examples', '_fraction')


def data(config):
  """Arguments of `pipeline.train_batches`: the source opened, and so on.

  With labels=False the source's labels and classes are forgotten.
  """
  for key in ('source', 'batch_size'):
    getattr(config, key)  # raises a ValueError where it is missing
  found = resolve(config)
  if not found.pop('labels', True):
    found['source'] = Unlabelled(found['source'])
  return found


def model(config, source):
  """The model; num_classes is the source's where the config leaves it None."""
  settings = resolve(config, descend=False)
  found = getattr(source, 'num_classes', None)
  if settings.get('num_classes') is None:
    if found is None:
      raise ValueError(
        'model.num_classes is not set, and the training data does not say '
        'how many classes it has. Set it.'
      )
    settings['num_classes'] = found
  elif found is not None and settings['num_classes'] < found:
    raise ValueError(
      f'model.num_classes={settings["num_classes"]}, but the training data '
      f'has {found} classes. Set it to {found}, or to None.'
    )
  return instantiate(settings)


def preprocess(config):
  """uint8 -> float images; config.preprocess, or to [-1, 1]."""
  if 'preprocess' in config:
    return instantiate(config.preprocess)
  return Normalize()


def schedule(config, steps_of):
  """step -> learning rate; durations may be in any unit."""
  settings = _without_durations(resolve(config, descend=False), 'warmup')
  settings = _without_durations(settings, 'cooldown')
  return call(
    schedules.schedule,
    settings,
    total_steps=steps_of({'total_fraction': 1.0}, 'total'),
    warmup_steps=steps_of(config, 'warmup', default=0),
    cooldown_steps=steps_of(config, 'cooldown', default=0),
  )


def optimizer(config, lr_fn):
  """params -> optax transformation."""
  settings = resolve(config, descend=False)
  if 'target' not in settings:
    raise ValueError("config.optimizer needs a 'target': 'vit_jax.optim.adam'")
  rule = locate(settings.pop('target'))

  def make(params):
    return call(optim.make_optimizer, settings, rule, params, lr_fn)

  return make


def evaluators(config, model, preprocess, mesh, steps_of, class_names=None):
  """{name: (every_steps or None for "at the end", evaluator)}.

  Args:
    config: with `evals`.
    model, preprocess, mesh: passed to each evaluator.
    steps_of: durations to steps.
    class_names: what the model's outputs mean, where that is known.

  Raises:
    ValueError: an evaluator's labels mean other classes.
  """
  made = {}
  for name, settings in config.get('evals', Reader({})).items():
    every = steps_of(settings, 'every', default=None)
    settings = _without_durations(resolve(settings, descend=False), 'every')
    evaluator = instantiate(settings, model, preprocess=preprocess, mesh=mesh)
    _check_class_names(name, class_names, evaluator)
    made[name] = (every, evaluator)
  return made


def _check_class_names(name, class_names, evaluator):
  """Two folders with other sub-folders number their classes differently."""
  found = getattr(evaluator, 'class_names', None)
  if not found or not class_names or list(found) == list(class_names):
    return
  only_here = sorted(set(found) - set(class_names))[:5]
  missing = sorted(set(class_names) - set(found))[:5]
  raise ValueError(
    f'evals.{name} has {len(found)} classes, the training {len(class_names)}, '
    f'in another order or with other names (only here: {only_here}; missing: '
    f'{missing}), so that its labels would mean something else. For a folder, '
    "set class_names in the evaluator's data.source. If they are the same "
    'classes in the same order, but called otherwise (ImageNet by WordNet ids '
    f'here, in words there), set evals.{name}.same_classes=False.'
  )


def checkpointer(config, workdir, steps_of, evaluators):
  """(Checkpointer, every_steps) of config.checkpoint."""
  settings = resolve(config.get('checkpoint', {}), descend=False)
  every = steps_of(settings, 'every', default=None)
  keep_every = steps_of(settings, 'keep_every', default=None)
  rest = _without_durations(settings, 'every')
  rest = _without_durations(rest, 'keep_every')
  total = steps_of({'total_fraction': 1.0}, 'total')
  if keep_every and keep_every % (every or total):
    raise ValueError(
      f'checkpoint: keep_every ({keep_every} steps) must be a multiple of '
      f'every ({every or total} steps), for only those are written.'
    )
  if best := rest.get('best_metric'):
    _check_best_metric(best, every or total, evaluators)
  made = call(
    checkpoint.Checkpointer, rest, workdir, keep_every_steps=keep_every
  )
  return made, every or total


def _check_best_metric(metric, every, evaluators):
  """The best checkpoint can only be told if each one has been evaluated."""
  name = metric.split('/')[0]
  if name not in evaluators:
    raise ValueError(
      f'checkpoint.best_metric={metric!r}: there is no evaluator {name!r} in '
      f"evals, which has {list(evaluators)}. Write 'EVALUATOR/METRIC'."
    )
  eval_every = evaluators[name][0]
  if not eval_every or every % eval_every:
    raise ValueError(
      f'checkpoint.best_metric={metric!r}: checkpoints are written every '
      f'{every} steps, but {name!r} is evaluated every {eval_every}. Let the '
      'second divide the first.'
    )


def _without_durations(settings, name):
  return {
    k: v for k, v in settings.items() if k not in {name + u for u in _UNITS}
  }
