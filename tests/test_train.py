"""A run around the step: what it refuses, compiles, stops at, and writes."""

import dataclasses
import functools
import os
import signal
import types
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import short_run
from options import all_set, note_choices

from vit_jax.config import Partial, Provenance
from vit_jax.data.pipeline import Data
from vit_jax.data.sources.digits import Digits
from vit_jax.data.transforms import Resize
from vit_jax.durations import Timeline, steps
from vit_jax.evals.evaluators import run as run_evaluators
from vit_jax.models.dense import Normalize
from vit_jax.objectives.classification import sigmoid_xent, softmax_xent
from vit_jax.optim.optimizers import Optimizer
from vit_jax.optim.schedules import Ema, Schedule
from vit_jax.parallel.hosts import Stopped
from vit_jax.parallel.sharding import MeshSizes
from vit_jax.probes import Histograms, Norms, Probe
from vit_jax.reports import worst
from vit_jax.runs import compiled, monitor, workdirs
from vit_jax.runs.checkpoint import Checkpoints, load_params
from vit_jax.runs.monitor import Logging, NonFiniteError
from vit_jax.runs.records import read_records
from vit_jax.runs.workdirs import ChangedRunError
from vit_jax.setup import with_num_classes
from vit_jax.step import init_state, train_step
from vit_jax.tools import report
from vit_jax.train import train
from vit_jax.training import Evaluation, Training
from vit_jax.weights import formats
from vit_jax.weights.surgery import InitFrom


class Linear(nn.Module):
  """The smallest model that can be trained."""

  num_classes: int | None = None
  dropout: float = 0.0

  @nn.compact
  def __call__(self, images, *, train=False):
    images = nn.Dropout(self.dropout, deterministic=not train)(images)
    return nn.Dense(self.num_classes)(images.reshape(len(images), -1))


class Spy:
  """Evaluator that notes its parameters, and may send a signal."""

  seen: list = []  # noqa: RUF012

  def __init__(self, model, *, preprocess, mesh, number=None):
    self._number = number
    self.seen.clear()

  def run(self, params):
    self.seen.append(np.asarray(jax.tree.leaves(params)[0]))
    if self._number:
      os.kill(os.getpid(), self._number)
    return {'score': float(len(self.seen))}


def nan_from(model, *, preprocess, step, update_only=False):
  """Objective with NaN from a step on, which it counts by a parameter."""
  inner = softmax_xent(model, preprocess=preprocess)

  def loss_fn(params, batch, rng):
    loss, metrics = inner(params, batch, rng)
    bias = params['Dense_0']['bias'][0]
    # Steps of SGD with a rate of 1 and this gradient: the bias counts them.
    bad = jax.lax.stop_gradient(bias) <= -step + 1
    counted = bias - jax.lax.stop_gradient(bias)
    wrong = jnp.where(bad, jnp.nan, 0.0)
    if update_only:  # of the gradient only
      return counted + wrong * counted, metrics
    return counted + wrong, metrics | {'loss': loss + wrong}

  return loss_fn


run = functools.partial(
  short_run.run,
  model=functools.partial(Linear),
  total=steps(6),
  checkpoints=Checkpoints(every=steps(3)),
)


def steps_of(workdir, key='train/loss', of='step'):
  return [r[of] for r in read_records(workdir) if key in r]


@pytest.mark.parametrize('update_only', [False, True])
def test_nan_is_never_saved_or_evaluated(update_only, tmp_path):
  with pytest.raises(NonFiniteError, match=r'(?s)step 5.*clip_norm') as error:
    run(
      tmp_path,
      objective=functools.partial(nan_from, step=5, update_only=update_only),
      evals={'spy': Evaluation(Spy, steps(1))},
    )
  assert len(Spy.seen) == 4 and np.isfinite(Spy.seen).all()
  assert workdirs.steps(tmp_path / 'checkpoints') == [3]
  assert steps_of(tmp_path) == [1, 2, 3, 4]
  assert error.value.cause in str(error.value)


def test_non_finite_names_the_arrays():
  mesh = MeshSizes().make()
  state = {'a': jnp.ones(8), 'b': jnp.full(3, jnp.inf), 'c': jnp.arange(2)}
  everywhere = jax.NamedSharding(mesh, jax.sharding.PartitionSpec())
  for arrays in (state, jax.device_put(state, everywhere)):
    with pytest.raises(NonFiniteError, match=r'1 arrays \(b\).*step 7'):
      monitor.check_finite(arrays, 7)


class Torn(Digits):
  """Every fifth scan cannot be read."""

  def __getitem__(self, index):
    if index % 5 == 0:
      raise ValueError('torn')
    return super().__getitem__(index)


def test_a_run_resumes_and_extends(tmp_path, capsys):
  """Evaluators see the EMA; a longer run is a change that is allowed.

  The newest checkpoint is damaged, so that a step is repeated.
  """
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  evals = {'spy': Evaluation(Spy)}
  data = Data(Torn(split='train'), batch_size=16, on_error='skip')
  options = {'ema': Ema(0.5), 'evals': evals, 'data': data}
  final = run(whole, **options)
  np.testing.assert_array_equal(Spy.seen[-1], final.ema['Dense_0']['bias'])
  assert not np.array_equal(Spy.seen[-1], final.params['Dense_0']['bias'])
  each = Checkpoints(every=steps(1), keep_last=2)
  run(parts, total=steps(3), checkpoints=each, **options)
  (parts / 'checkpoints' / '3' / 'record' / 'metadata').unlink()
  with pytest.raises(ChangedRunError, match='total_steps: 3 -> 6'):
    run(parts, **options)
  allowed = Provenance(allow_changes=['total'])
  with pytest.raises(ChangedRunError, match='total_steps: 3 -> 6'):
    run(parts, provenance=allowed, **options)
  allowed = Provenance(allow_changes=['total_steps'])
  resumed = run(parts, provenance=allowed, **options)
  for a, b in zip(jax.tree.leaves(final), jax.tree.leaves(resumed)):
    if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
      np.testing.assert_array_equal(a, b)
  assert steps_of(parts) == steps_of(whole) == [1, 2, 3, 4, 5, 6]
  skipped, same = (steps_of(x, of='data_skipped') for x in (whole, parts))
  assert skipped == same == sorted(skipped) and skipped[-1] > 9
  assert f'resumed at step 2 of {parts};' in capsys.readouterr().out
  (change,) = (parts / 'changes.jsonl').read_text().splitlines()
  assert '"step": 2, "key": "total_steps", "old": 3' in change
  with pytest.raises(ChangedRunError, match='seed: 0 -> 1'):
    run(parts, seed=1, **options)
  anything = Provenance(allow_changes=['data', 'total_steps'])
  with pytest.raises(ValueError, match=r'step 6 .* ends at step 5'):
    run(parts, total=steps(5), provenance=anything, **options)
  options['data'] = dataclasses.replace(data, batch_size=8)
  with pytest.raises(ValueError, match=r'step 6 .* 96 images, .* have 8 now'):
    run(parts, provenance=anything, **options)


def test_files_of_the_end_are_written_later(tmp_path, monkeypatch, capsys):
  """Also if the page of the run was made before."""
  image = np.zeros((8, 8, 1), np.uint8)
  few = Data([{'image': image, 'label': 1}] * 9, 16)
  evals = {'spy': Evaluation(Spy)}
  again = functools.partial(
    run, tmp_path, evals=evals, total=steps(2), data=few, model=Linear(2)
  )
  with monkeypatch.context() as patch, pytest.raises(OSError, match='full'):
    patch.setattr(worst, 'write_all', mock.Mock(side_effect=OSError('full')))
    again()
  report.main([str(tmp_path)])
  assert 'Run the same command again' in capsys.readouterr().err
  for remove, count in ((False, 1), (False, 0), (True, 1)):
    if remove:
      (tmp_path / 'report.html').unlink()
    again()
    assert len(Spy.seen) == count and (tmp_path / 'report.html').exists()
  assert '9 training images are fewer than a batch' in capsys.readouterr().out


def test_all_arguments_of_a_run_act(tmp_path, capsys, monkeypatch):
  """It equals two steps by hand, and records what it was given."""
  old, new = tmp_path / 'old', tmp_path / 'new'
  model, made = Linear(10, dropout=0.5), {}
  spy = mock.Mock(spec=['start', 'write', 'histograms', 'close'])
  chosen = note_choices(monkeypatch)
  written = mock.Mock()
  monkeypatch.setattr(worst, 'write_all', written)
  each = Checkpoints(every=steps(1), keep_last=2)
  run(old, model=model, total=steps(2), checkpoints=each)
  best = Checkpoints(every=steps(1), best_metric='mine/score')

  def evaluator(model, *, preprocess, mesh):
    made.update(preprocess=preprocess, mesh=mesh, transforms=(Resize(9),))
    run = lambda params: {'score': params['Dense_0']['bias'][0]}  # noqa: E731
    return types.SimpleNamespace(**made, run=run)

  trust, norms = (__name__,), Norms()
  options = {
    'model': model,
    'data': Data(Digits(split='train'), batch_size=16),
    'objective': sigmoid_xent,
    'optimizer': Optimizer(optax.adam, clip_norm=0.5),
    'schedule': Schedule(lr=0.5, decay='linear'),
    'total': steps(2),
    'evals': {'mine': Evaluation(evaluator, steps(1))},
    'checkpoints': best,
    'init_from': InitFrom(old, step=1, trust=trust, head_rule='.*/kernel'),
    'preprocess': Normalize(100.0, 50.0),
    'mesh': MeshSizes(data=2, fsdp=2, model=2),
    'sharding': [('.*/kernel', ('fsdp',))],
    'accum_steps': 2,
    'ema': Ema(0.5),
    'probes': {'n': Probe(norms, steps(1)), 'h': Probe(Histograms('updates'))},
    'seed': 3,
    'logging': Logging(every=steps(1), writers={'spy': spy}),
  }
  training = all_set(Training, ('variants',), **options)
  call = {'workdir': new, 'provenance': Provenance({'a': 1}, {'b': 2})}
  assert all_set(train, **call, training=training, dry_run=True) is None
  change = functools.partial(dataclasses.replace, training)
  message = r'12 is .* 4 devices in 2 micro-batches'
  with pytest.raises(ValueError, match=message):
    other = change(data=Data(Digits(split='train'), 12))
    train(**call, training=other, dry_run=True)
  missing = change(init_from=InitFrom(old, step=7))
  with pytest.raises(ValueError, match='no step 7'):
    train(**call, training=missing, dry_run=True)
  out = capsys.readouterr().out
  assert 'nothing was trained' in out and '650' in out  # 64 * 10 + 10
  assert 'after 2 steps, 25% of the EMA' in out
  assert list(new.rglob('*')) in ([], [new / 'checkpoints'])
  workdirs.write(new, 'attention.json', {'case': 'xla'})
  found = train(**call, training=training)

  loss_fn = sigmoid_xent(model, preprocess=Normalize(100.0, 50.0))
  rate = options['schedule'](Timeline(16, 1029, total_steps=2))
  make_tx = functools.partial(options['optimizer'], learning_rate=rate)
  images = jax.ShapeDtypeStruct((1, 8, 8, 1), jnp.float32)
  key = jax.random.key(3)
  state = init_state(key, model=model, images=images, tx=make_tx, ema=True)
  bias = load_params(old, step=1)[0]['Dense_0/bias']
  state.params['Dense_0']['bias'] = jnp.asarray(bias)
  state.ema = jax.tree.map(jnp.copy, state.params)
  step = functools.partial(train_step, loss_fn=loss_fn, accum_steps=2)
  step = functools.partial(step, probes={'n': norms})
  step = functools.partial(step, tx=make_tx(state.params), ema_weight=Ema(0.5))
  batches = options['data'].train_batches(seed=3)
  records = [r for r in read_records(new) if 'train/loss' in r]
  name = 'train/probes/n/grads/Dense_0/kernel'
  seen = [*zip(steps_of(new, name), steps_of(new, name, of=name), strict=True)]
  for i, record in enumerate(records):
    state, metrics = jax.jit(step)(state, next(batches))
    assert record['train/loss'] == pytest.approx(float(metrics['loss']), 1e-5)
    assert record['train/lr'] == pytest.approx(0.5 - 0.25 * i)
    (norm,) = metrics['probes']['n'].values()
    assert seen[i] == (i + 1, pytest.approx(float(norm), rel=1e-5))
    # Three forward passes, each of 64 x 10 multiply-adds for an image.
    flops = 3 * 16 * 2 * 64 * 10
    assert record['exaflops'] * 1e18 == pytest.approx((i + 1) * flops)
  batches.close()
  for name in ('params', 'ema'):
    actual, expected = (getattr(x, name)['Dense_0'] for x in (found, state))
    for key in ('kernel', 'bias'):
      np.testing.assert_allclose(actual[key], expected[key], atol=1e-5)
  first, last = steps_of(new, 'mine/score', of='mine/score')
  assert first > last == found.ema['Dense_0']['bias'][0]
  for x in (found.params, found.ema):
    spec = x['Dense_0']['kernel'].sharding.spec
    assert spec == jax.sharding.PartitionSpec('fsdp')
  assert made['mesh'].shape == {'data': 2, 'fsdp': 2, 'model': 2}
  assert workdirs.steps(new / 'checkpoints') == [1, 2]  # best and last
  assert spy.start.call_args.args[1] == {'a': 1} and spy.close.called
  (((step, counts), _),) = spy.histograms.call_args_list
  assert [step, *(x.sum() for x in counts.values())] == [2, 640]
  assert records[0]['seconds/setup'] > 0.01  # since the call of train
  assert chosen[-1] == (16 / 2, 8, {'case': 'xla'}, model, (1, 8, 8, 1), True)
  assert written.call_args.kwargs == {'class_names': list('0123456789')}
  # What describes the run.
  weights = formats.read(new, trust=trust)
  assert weights.activation == 'sigmoid' and weights.model == model
  assert weights.preprocess == made['preprocess'] == Normalize(100.0, 50.0)
  assert weights.transforms == made['transforms']
  assert weights.class_names == list('0123456789')
  assert weights.image_shape == (8, 8, 1)
  assert workdirs.read(new, 'config.json') == {'a': 1}
  assert workdirs.read(new, 'preset.json') == {'b': 2}
  packages = workdirs.read(new, 'environment.json')['packages']
  assert packages['jax'] == jax.__version__


def test_a_signal_stops_after_saving(tmp_path, capsys):
  """Means over an interval with a restart are those of a run without one."""
  parts, whole = tmp_path / 'parts', tmp_path / 'whole'
  spy = functools.partial(Spy, number=signal.SIGTERM)
  logging = Logging(every=steps(4))
  with pytest.raises(Stopped) as stopped:
    run(parts, evals={'spy': Evaluation(spy, steps(4))}, logging=logging)
  assert stopped.value.code == 128 + signal.SIGTERM
  assert workdirs.steps(parts / 'checkpoints')[-1] == 5
  assert 'SIGTERM: saved step 5 of 6' in capsys.readouterr().out
  run(parts, logging=logging, provenance=Provenance(allow_changes=['evals']))
  run(whole, logging=logging)
  losses, same = (steps_of(x, of='train/loss') for x in (parts, whole))
  assert losses == same and len(losses) == 2


def test_a_trace_has_exactly_these_steps(tmp_path, capsys):
  run(tmp_path, logging=Logging(every=steps(1), profile='3:4'))
  assert 'profile of steps 3 to 4' in capsys.readouterr().out
  assert len(list(tmp_path.glob('profile/**/perfetto_trace.json.gz'))) == 1


@pytest.mark.parametrize('profile', ['1:3', '5:4', 'ten', '-3'])
def test_steps_that_cannot_be_traced(profile, tmp_path):
  with pytest.raises(ValueError, match=f"profile='{profile}'.*10:15"):
    run(tmp_path, logging=Logging(profile=profile))


def test_the_model_gets_the_classes_of_the_data(tmp_path):
  assert with_num_classes(Linear(), 10).num_classes == 10
  assert with_num_classes(Linear(12), 10).num_classes == 12
  for model, found in ((Linear(9), 10), (Linear(), None)):
    with pytest.raises(ValueError, match=r'--config\.model\.num_classes='):
      with_num_classes(model, found)
  with pytest.raises(ValueError, match=r'=12, and .* 10 class names'):
    run(tmp_path, model=Linear(12))
  image = np.zeros((8, 8, 1), np.uint8)
  unnamed = Data([{'image': image, 'label': 10}] * 16, 16)
  with pytest.raises(ValueError, match=r'label .* num_classes=10'):
    run(tmp_path, data=unnamed, model=Linear(10))


def test_a_run_that_was_started_again_ends(tmp_path):
  """Before it writes anything more."""

  class Second(Spy):
    def run(self, params):
      (tmp_path / '.claim').write_text('process 7')
      return super().run(params)

  with pytest.raises(ValueError, match='was started again by process 7'):
    run(tmp_path, evals={'spy': Evaluation(Second, steps(2))})
  assert steps_of(tmp_path) == [1, 2]


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_what_is_not_finite_is_never_the_best(tmp_path, capsys, bad):
  class Ends(Spy):
    def run(self, params):
      return {'score': [0, 0.5, bad, 0.2][int(super().run(params)['score'])]}

  best = Checkpoints(every=steps(1), best_metric='spy/score')
  evals = {'spy': Evaluation(Ends, steps(1))}
  run(tmp_path, total=steps(3), evals=evals, checkpoints=best)
  assert workdirs.steps(tmp_path / 'checkpoints') == [1, 3]
  said = f'Step 2: evaluators returned spy/score={bad}. '
  assert said in capsys.readouterr().out


# Compilation and memory.

COMPILED = '/jax/core/compile/backend_compile_duration'


def smooth(model, *, preprocess, options):
  return softmax_xent(model, preprocess=preprocess, **options)


def test_two_runs_with_a_dict_compile_one_step(tmp_path):
  found = []

  def note(event, _, **kwargs):
    if event == COMPILED:
      found.append(kwargs['fun_name'])

  jax.monitoring.register_event_duration_secs_listener(note)
  try:
    for name in 'ab':
      loss = Partial(smooth, options={'label_smoothing': 0.1})
      run(tmp_path / name, objective=loss, total=steps(2))
  finally:
    jax.monitoring.unregister_event_duration_listener(note)
  assert found.count('jit(train_step)') == 1


def test_a_long_compilation_says_so(monkeypatch, capsys):
  monkeypatch.setattr(compiled, '_EVERY_S', 0.01)
  before = jax.config.jax_logging_level
  with compiled.waiting():
    while jax.config.jax_logging_level != 'CRITICAL':
      pass
  assert 'still compiling after 0:00:0' in capsys.readouterr().out
  assert jax.config.jax_logging_level == before


class TooLarge:
  """Evaluator that no device can run."""

  data = Data(Digits(split='test'), batch_size=64)

  def run(self, params):
    return {'sum': jnp.ones((2**45, 3), jnp.float32).sum()}


def test_an_evaluator_that_needs_too_much():
  with pytest.raises(
    compiled.OutOfMemoryError, match=r'evals\.val.*data\.batch_size='
  ):
    run_evaluators({'val': TooLarge()}, {}, step=1)
  with (
    pytest.raises(jax.errors.JaxRuntimeError, match='INTERNAL'),
    compiled.explaining(''),
  ):
    raise jax.errors.JaxRuntimeError('INTERNAL: something else')
  with pytest.raises(MemoryError) as of_host, compiled.explaining(''):
    raise MemoryError
  assert not isinstance(of_host.value, compiled.OutOfMemoryError)


def test_shapes_of_a_batch():
  mesh = MeshSizes().make()
  image = np.zeros((8, 8, 1), np.uint8)
  example = {'image': image, 'label': np.int32(3)}
  batch = compiled.batch_shapes(example, 96, mesh)
  assert batch['image'].shape == (96, 8, 8, 1)
  assert batch['label'].dtype == jnp.int32
  example['label'] = np.ones(5, np.float32)
  soft = compiled.batch_shapes(example, 8, mesh)['label']
  assert soft.shape == (8, 5) and soft.dtype == jnp.float32
