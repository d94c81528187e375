"""The choice of an implementation of attention, with candidates on the CPU."""

import dataclasses
import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest
from test_meshes_hosts import run_two_processes

from vit_jax.data.embedded import digits
from vit_jax.data.pipeline import Data
from vit_jax.evals.classification import Classification
from vit_jax.evaluate import evaluate
from vit_jax.models import autotune
from vit_jax.models.attention import KERNELS, Implementation, attention
from vit_jax.models.autotune import Autotuner, Case, Local, Trial, measure
from vit_jax.models.common import BlockOptions, PatchEmbedding
from vit_jax.models.pooling import Map
from vit_jax.models.posemb import Relative
from vit_jax.models.vit import VisionTransformer
from vit_jax.objectives.classification import softmax_xent
from vit_jax.objectives.distillation import distillation
from vit_jax.objectives.teacher import Teacher
from vit_jax.optim import durations
from vit_jax.optim.optimizers import Optimizer, sgd
from vit_jax.optim.schedules import Schedule
from vit_jax.parallel import hosts as distributed
from vit_jax.parallel.sharding import MeshSizes
from vit_jax.runs.metrics import read_records
from vit_jax.train import train
from vit_jax.weights.surgery import InitFrom

EINSUM, XLA = KERNELS['einsum'], KERNELS['xla']
IMAGES = jax.ShapeDtypeStruct((1, 8, 8, 1), jnp.float32)
MODEL = VisionTransformer(
  width=16, depth=2, mlp_dim=32, num_heads=2, embedding=PatchEmbedding(4)
)
CASE = Case(queries=5, tokens=5, heads=2, head_dim=8, dtype='float32')


def one_key_too_many(q, k, v):
  k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (k, v))
  return EINSUM.attend(q, k, v)


@jax.custom_vjp
def wrong_gradient(q, k, v):
  return EINSUM.attend(q, k, v)


def _backward(saved, gradient):
  dq, dk, dv = jax.vjp(EINSUM.attend, *saved)[1](gradient)
  return dq, dk.at[-1, -1, -1].multiply(0.5), dv


wrong_gradient.defvjp(lambda *qkv: (wrong_gradient(*qkv), qkv), _backward)


def refuses(*_):
  raise NotImplementedError('no such kernel here\nand a second line')


WRONG = {
  'a key too many': one_key_too_many,
  'a gradient': wrong_gradient,
  'NaN': lambda q, k, v: EINSUM.attend(q, k, v) * jnp.nan,
  'the scale': lambda q, k, v: EINSUM.attend(q * 1.2, k, v),
}


def trials(*candidates, seconds=(), case=CASE, backward=True, **options):
  """Measure on a CPU, where right candidates take the given seconds."""
  clock = iter(seconds)
  local = Local(case, 3, case.heads, 'cpu', backward)
  options = {'max_seconds': 100, 'timer': lambda *_: next(clock)} | options
  device = jax.devices()[0]
  return measure(local, candidates, device=device, **options)


def test_the_fastest_right_candidate_is_chosen():
  wrong = [Implementation(name, attend) for name, attend in WRONG.items()]
  raises = Implementation('raises', refuses)
  lacks = Implementation('lacks', refuses, lambda *_: 'a larger chip')
  found = trials(XLA, *wrong, raises, EINSUM, lacks, seconds=[3e-3, 2e-3])
  by_name = {trial.name: trial for trial in found}
  assert autotune.fastest(found) == 'einsum'
  assert by_name['xla'].seconds == 3e-3 and by_name['xla'].error < 1e-5
  for name in WRONG:
    assert by_name[name].seconds is None
    assert 'wrong: error' in by_name[name].problem, name
  # The first line only.
  problem = 'NotImplementedError: no such kernel here'
  assert by_name['raises'].problem == problem
  assert 'needs a larger chip' in by_name['lacks'].problem


@jax.custom_vjp
def wrong_bias_gradient(*pairs):
  return EINSUM.attend(
    *(x + bias[None, None].astype(x.dtype) for x, bias in pairs)
  )


def _bias_backward(pairs, gradient):
  def attend(*pairs):
    return EINSUM.attend(
      *(x + bias[None, None].astype(x.dtype) for x, bias in pairs)
    )

  of_q, of_k, (dv, bias) = jax.vjp(attend, *pairs)[1](gradient)
  return of_q, of_k, (dv, bias.at[-1, -1].add(jnp.abs(bias).mean()))


wrong_bias_gradient.defvjp(
  lambda *pairs: (wrong_bias_gradient(*pairs), pairs), _bias_backward
)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_gradients_of_biases_by_a_kernel_are_compared(dtype):
  """Each candidate has them: those that leave them to the compiler, too."""
  case = Case(queries=40, tokens=40, heads=2, head_dim=64, dtype=dtype)
  wrong = dataclasses.replace(
    EINSUM, name='wrong', attend_biased=wrong_bias_gradient
  )
  found = trials(wrong, KERNELS['pallas'], XLA, case=case, seconds=[1.0, 2.0])
  refused, *right = found
  assert refused.problem.startswith('wrong: error')
  for trial in right:
    assert not trial.problem and trial.error < autotune.BOUNDS[dtype] / 2


def test_only_the_forward_pass_counts_where_nothing_is_trained():
  wrong = [Implementation(name, attend) for name, attend in WRONG.items()]
  found = trials(*wrong, EINSUM, seconds=[1.0, 2.0], backward=False)
  right = [trial.name for trial in found if not trial.problem]
  assert right == ['a gradient', 'einsum']


def test_without_a_right_candidate_there_is_no_choice():
  found = trials(Implementation('raises', refuses))
  assert autotune.fastest(found) is None


def test_bfloat16_is_compared_with_float32():
  case = dataclasses.replace(CASE, dtype='bfloat16', tokens=40, queries=40)
  wrong = Implementation('wrong', one_key_too_many)
  right, refused = trials(EINSUM, wrong, case=case, seconds=[1.0])
  assert 1e-4 < right.error < autotune.BOUNDS['bfloat16'] / 2
  assert refused.problem.startswith('wrong: error')


def test_when_time_is_over_candidates_are_left_out():
  (late,) = trials(EINSUM, max_seconds=0)
  assert late == Trial('einsum', problem='not ready within 0 s')


def test_calls_are_timed():
  calls = []

  def fn(x):
    calls.append(x)
    return jnp.zeros(())

  assert 0 < autotune.seconds_per_call(fn, 1) < 1
  assert len(calls) >= 1 + 5


@pytest.mark.parametrize(
  ('changes', 'expected'),
  [
    ({}, [CASE]),
    ({'dtype': 'bfloat16'}, [dataclasses.replace(CASE, dtype='bfloat16')]),
    ({'scan': True, 'remat': 'full'}, [CASE]),
    # The one query of the pooling has no choice, nor has what einsum alone can.
    ({'pooling': Map()}, [dataclasses.replace(CASE, queries=4, tokens=4)]),
    ({'block': BlockOptions(attention_dropout=0.1)}, []),
    ({'posemb': Relative()}, []),
    ({'attention': 'xla'}, []),
  ],
)
def test_cases_of_a_model(changes, expected):
  assert autotune.cases(MODEL.clone(**changes), IMAGES) == expected


def test_evaluation_drops_no_attention_weights():
  model = MODEL.clone(block=BlockOptions(attention_dropout=0.1))
  assert autotune.cases(model, IMAGES, train=False) == [CASE]


@pytest.mark.parametrize(
  ('sizes', 'batch', 'heads'),
  [
    (MeshSizes(), 2, 2),
    (MeshSizes(data=2, fsdp=2, model=2), 4, 1),
    (MeshSizes(data=2, model=4), 8, 2),  # four devices do not divide two heads
  ],
)
def test_a_device_has_a_part_of_the_batch_and_of_the_heads(sizes, batch, heads):
  local = Local.of(CASE, 16, sizes.make())
  assert (local.batch, local.heads) == (batch, heads)
  assert local.shapes[0].shape == (batch, 5, heads, 8)


def counting(name, kernel=EINSUM):
  """A candidate that counts how often it is traced."""
  count = []

  def attend(*qkv):
    count.append(1)
    return kernel.attend(*qkv)

  return Implementation(name, attend), count


def choose(tuner, workdir, model=MODEL):
  mesh = MeshSizes().make()
  return tuner.choose(model, IMAGES, batch_size=16, mesh=mesh, workdir=workdir)


def tuner(tmp_path, *candidates, seconds, **options):
  clock = iter(seconds)
  return Autotuner(
    candidates=candidates,
    platforms=('cpu',),
    timer=lambda *_: next(clock),
    cache=tmp_path / 'cache',
    **options,
  )


def test_a_choice_is_logged_and_cached(tmp_path, capsys):
  candidate, traced = counting('ours')
  raises = Implementation('raises', refuses)
  candidates = XLA, candidate, raises
  first = choose(tuner(tmp_path, *candidates, seconds=[2e-3, 1e-3]), tmp_path)
  log = capsys.readouterr().out
  assert 'attention: ours, measured on cpu, forward and backward, 2 x 5' in log
  assert 'xla: 2 ms, error' in log
  assert 'raises: left out, NotImplementedError: no such kernel' in log
  # Another run measures nothing.
  again = choose(tuner(tmp_path, *candidates, seconds=[]), tmp_path)
  assert again == first and hash(again) == hash(first)
  assert 'attention: ours for 5 tokens' in capsys.readouterr().out
  # Other candidates, or other shapes, are another matter.
  other = tuner(tmp_path, EINSUM, candidate, seconds=[1e-3, 2e-3])
  assert choose(other, tmp_path).by_case == ((CASE, EINSUM),)
  # The model uses what was chosen, and the table's for other shapes.
  traced.clear()
  model = first.apply(MODEL.clone(num_classes=3, scan=True))
  jax.eval_shape(functools.partial(model.init), jax.random.key(0), IMAGES)
  assert traced
  traced.clear()
  larger = jax.ShapeDtypeStruct((1, 16, 16, 1), jnp.float32)
  jax.eval_shape(model.init, jax.random.key(0), larger)
  assert not traced


def test_what_time_has_left_out_is_not_cached(tmp_path, capsys):
  late = tuner(tmp_path, EINSUM, seconds=[], max_seconds=0)
  choice = choose(late, tmp_path)
  assert choice.apply(MODEL) is MODEL
  assert 'the default, because no candidate is right' in capsys.readouterr().out
  assert choose(tuner(tmp_path, EINSUM, seconds=[1]), tmp_path).by_case


def test_a_damaged_cache_is_measured_again(tmp_path):
  choose(tuner(tmp_path, EINSUM, seconds=[1]), tmp_path)
  (file,) = (tmp_path / 'cache').iterdir()
  file.write_text('{')
  choose(tuner(tmp_path, EINSUM, seconds=[1]), tmp_path)
  assert json.loads(file.read_text())


def test_a_resumed_run_uses_its_own_choice(tmp_path, capsys):
  first, second = counting('first')[0], counting('second')[0]
  workdir = tmp_path / 'run'
  found = choose(tuner(tmp_path, first, second, seconds=[1, 2]), workdir)
  (workdir / 'checkpoints' / '7').mkdir(parents=True)
  found.record(workdir)
  # Whatever a measurement or the cache would say.
  later = Autotuner((second, first), ('cpu',), cache=tmp_path / 'empty')
  assert choose(later, workdir).by_case == ((CASE, first),)
  assert f'attention: first for {CASE}, from {workdir}' in (
    capsys.readouterr().out
  )
  # A candidate that is gone is replaced.
  other = tuner(tmp_path, second, seconds=[1])
  assert choose(other, workdir).by_case == ((CASE, second),)
  # A run that has started without a choice stays without one.
  (workdir / autotune.FILE).unlink()
  assert choose(later, workdir).by_case == ()


def test_a_chooser_is_not_asked_where_only_einsum_can():
  def never(*_):
    raise AssertionError

  q = jnp.ones((1, 3, 2, 8))
  logits = jnp.zeros((1, 2, 3, 3))
  attention(q, q, q, implementation=never, position_logits=logits)
  key = jax.random.key(0)
  attention(q, q, q, implementation=never, dropout_rate=0.1, dropout_rng=key)


def test_settings():
  assert autotune.find(True) == Autotuner()
  assert autotune.find(False).platforms == ()
  assert autotune.find(own := Autotuner(max_seconds=3)) is own
  assert 'cpu' not in Autotuner().platforms  # there the table stays


def run(
  workdir, setting=True, steps=3, objective=softmax_xent, evals=None, **changes
):
  """Train for some steps, or resume; return the losses."""
  train(
    workdir,
    model=MODEL.clone(**changes),
    data=Data(digits.Digits(split='train'), batch_size=16),
    objective=objective,
    evals=evals,
    optimizer=Optimizer(sgd),
    schedule=Schedule(lr=0.1, decay='constant'),
    total=durations.steps(steps),
    log_every=durations.steps(1),
    attention_autotune=setting,
    allow_changes=['total_steps'],
  )
  records = read_records(workdir)
  return [r['train/loss'] for r in records if 'train/loss' in r]


@pytest.mark.slow
def test_training(tmp_path):
  """A run uses, records and resumes its choice, to the last bit."""
  candidates = EINSUM, XLA

  def tune(seconds, folder):
    return tuner(tmp_path / folder, *candidates, seconds=seconds)

  whole = run(tmp_path / 'whole', tune([2, 1], 'a'))
  run(tmp_path / 'parts', tune([2, 1], 'b'), steps=2)
  # Without the record, einsum would be chosen now.
  parts = run(tmp_path / 'parts', tune([1, 2], 'c'))
  assert parts == whole
  (row,) = json.loads((tmp_path / 'parts' / autotune.FILE).read_text())
  assert row['chosen'] == 'xla'
  assert [x['name'] for x in row['trials']] == ['einsum', 'xla']
  # Weights are read anywhere: the model is described by what was configured.
  model = json.loads((tmp_path / 'parts' / 'model.json').read_text())
  assert model['model'].get('attention', 'auto') == 'auto'
  # It is the one that was used, and not what the table has.
  assert whole == run(tmp_path / 'named', attention='xla')
  assert not (tmp_path / 'named' / autotune.FILE).exists()


@pytest.mark.slow
def test_teachers_and_evaluations(tmp_path, capsys):
  """The teacher of a run without a choice has one, as has an evaluation."""
  run(tmp_path / 'teacher', num_heads=4)
  weights = str(tmp_path / 'teacher')
  kernel, traced = counting('mine')
  teacher = Teacher(weights, same_classes=True)
  objective = functools.partial(distillation, teacher=teacher)
  own = tuner(tmp_path / 'a', XLA, kernel, seconds=[2, 1])
  run(tmp_path / 'student', own, objective=objective, attention='einsum')
  log = capsys.readouterr().out
  assert 'attention: mine, measured on cpu, forward, 2 x 5 tokens, 4' in log
  (row,) = json.loads((tmp_path / 'student' / autotune.FILE).read_text())
  assert row['chosen'] == 'mine' and not row['local']['backward']
  # A resumed run has its teacher's choice, whatever is measured now.
  other = tuner(tmp_path / 'b', XLA, kernel, seconds=[1, 2])
  run(tmp_path / 'student', other, 4, objective, attention='einsum')
  assert 'attention: mine for 5 tokens, 4 heads' in capsys.readouterr().out

  traced.clear()
  test = Data(digits.Digits(split='test'), 64)
  evaluate(
    tmp_path / 'evaluation',
    init_from=InitFrom(path=weights),
    evals={'test': functools.partial(Classification, data=test)},
    attention_autotune=tuner(tmp_path / 'c', XLA, kernel, seconds=[2, 1]),
  )
  assert 'cpu, forward, 8 x 5 tokens' in capsys.readouterr().out
  (row,) = json.loads((tmp_path / 'evaluation' / autotune.FILE).read_text())
  assert row['chosen'] == 'mine'
  assert len(traced) > 1  # once to be measured


@pytest.mark.slow
def test_all_hosts_take_the_choice_of_the_first(tmp_path):
  printed = run_two_processes(tmp_path, __file__, num_devices=2)
  said = [json.loads(out.splitlines()[-1]) for out in printed]
  # The clock of the second host says the opposite.
  assert said == [['xla', 'xla', 'xla']] * 2


def main(folder):
  """Choose by measurement, from the first host's cache, and on resuming."""
  me = jax.process_index()
  found = []

  def choice(seconds, workdir):
    own = tuner(folder / f'host_{me}', EINSUM, XLA, seconds=seconds)
    chosen = choose(own, workdir)
    ((_, implementation),) = chosen.by_case
    found.append(implementation.name)
    return chosen

  workdir = folder / 'run'
  first = choice([2, 1] if me == 0 else [1, 2], workdir)
  choice([], folder / 'other')  # Only the first host has a file in its cache.
  if me == 0:
    (workdir / 'checkpoints' / '3').mkdir(parents=True)
    first.record(workdir)
  distributed.of_first_host('recorded')
  choice([], workdir)
  print(json.dumps(found))


if __name__ == '__main__':
  distributed.initialize()
  with distributed.failing_together():
    main(pathlib.Path(sys.argv[1]))
