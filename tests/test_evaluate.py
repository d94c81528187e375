"""evaluate() on the checkpoint of a run measures what the run measured."""

import dataclasses
import functools
import types
from unittest import mock

import jax
import numpy as np
import optax
import pytest
import short_run
from jax.sharding import PartitionSpec as P
from options import all_set, note_choices

from vit_jax import tree
from vit_jax.config import Provenance
from vit_jax.data.pipeline import Data
from vit_jax.data.sources.digits import Digits
from vit_jax.data.sources.glyphs import Glyphs
from vit_jax.data.subsets import ByNames
from vit_jax.data.targets import Numbers
from vit_jax.durations import steps
from vit_jax.evals import evaluators
from vit_jax.evals.classification import Classification
from vit_jax.evaluate import evaluate
from vit_jax.models.dense import Normalize
from vit_jax.optim.optimizers import Optimizer
from vit_jax.optim.schedules import Ema, Schedule
from vit_jax.parallel.sharding import MeshSizes, fsdp
from vit_jax.reports import worst
from vit_jax.runs import workdirs
from vit_jax.runs.checkpoint import load_params
from vit_jax.runs.records import read_records
from vit_jax.training import Evaluation
from vit_jax.weights import formats
from vit_jax.weights.surgery import InitFrom
from vit_jax.zoo import names

MODEL = names.create('ViT-mu/4', num_classes=10)
TEST = Data(Digits(split='test'), 128)


def _evaluator(data=TEST, **options):
  return functools.partial(Classification, data=data, **options)


_train = functools.partial(
  short_run.run,
  model=MODEL,
  optimizer=Optimizer(optax.adam),
  schedule=Schedule(0.01),
  preprocess=Normalize(mean=100.0),
)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('run')
  evals = {'test': Evaluation(_evaluator())}
  _train(workdir, total=steps(3), ema=Ema(0.5), evals=evals)
  return workdir


def _evaluate(workdir, path, **options):
  options = {'evals': {'test': _evaluator()}} | options
  return evaluate(workdir, init_from=InitFrom(str(path)), **options)


def test_equals_what_the_run_measured(run, tmp_path, monkeypatch, capsys):
  """The run provides the model, preprocessing and EMA; sharding is free."""
  seen = {}

  def run_and_keep(self, params, run=Classification.run):
    seen.update(tree.flatten(params))
    return run(self, params)

  monkeypatch.setattr(Classification, 'run', run_and_keep)
  mesh, rules = MeshSizes(data=1, fsdp=-1), fsdp(min_elements=1)
  found = _evaluate(tmp_path, run, mesh=mesh, sharding=rules)
  assert seen['block_0/mlp/fc1/kernel'].sharding.spec == P(None, 'fsdp')
  recorded = {k: v for r in read_records(run) for k, v in r.items()}
  assert found['test/num_examples'] == 768
  for name, value in found.items():
    assert recorded[name] == pytest.approx(value, rel=1e-6), name
  assert read_records(tmp_path)[-1]['step'] == 3
  written = [x.split()[0] for x in capsys.readouterr().out.split('wrote ')[1:]]
  for name in ('confusion-test.csv', 'misclassified-test.csv'):
    assert f'{tmp_path / name}' in written
    assert len((tmp_path / name).read_text().splitlines()) > 10
    # Training leaves these files as well; the last digits may differ.
    assert (run / name).is_file()
  assert (tmp_path / 'confusion-test.png').is_file()


def test_all_arguments_of_an_evaluation_act(run, tmp_path, monkeypatch):
  made, spy, written = {}, mock.Mock(), mock.Mock(return_value=[])
  monkeypatch.setattr(worst, 'write_all', written)

  chosen = note_choices(monkeypatch)

  def evaluator(model, *, preprocess, mesh, data):
    def measure(params):
      made.update(tree.flatten(params))
      return {'one': 1}

    made.update(model=model, preprocess=preprocess, mesh=mesh)
    return types.SimpleNamespace(run=measure)

  new, kernel = tmp_path / 'new', 'block_0/mlp/fc1/kernel'
  model = MODEL.clone(dropout=0.5)
  options = {
    'workdir': new,
    'evals': {'mine': functools.partial(evaluator, data=TEST)},
    'init_from': InitFrom(run, ema=False, head='reset', head_rule=kernel),
    'model': model,
    'image_shape': (12, 16, 1),
    'preprocess': Normalize(5.0),
    'mesh': MeshSizes(data=4, fsdp=2),
    'sharding': [(kernel, ('fsdp',))],
    'seed': 4,
    'writers': {'spy': spy},
    'provenance': Provenance({'a': 1}, {'b': 2}),
  }
  assert all_set(evaluate, **options, dry_run=True) == {}
  assert list(new.rglob('*')) == [] and kernel not in made
  workdirs.write(new, 'attention.json', {'case': 'xla'})
  found = evaluate(**options)
  images = (1, 12, 16, 1)
  assert chosen[-1] == (128, 8, {'case': 'xla'}, model, images, False)
  assert (made['model'], made['preprocess']) == (model, Normalize(5.0))
  assert made['mesh'].shape == {'data': 4, 'fsdp': 2}
  assert made['pos_embedding'].shape[1:3] == (3, 4)
  init = jax.jit(lambda key: tree.flatten(model.init(key, np.zeros(images))))
  fresh = init(jax.random.key(4))[f'params/{kernel}']
  np.testing.assert_array_equal(made[kernel], fresh)
  assert made[kernel].sharding.spec == P('fsdp')
  bias = load_params(run, ema=False)[0]['norm/bias']
  np.testing.assert_array_equal(made['norm/bias'], bias)
  assert written.call_args.kwargs == {'class_names': list('0123456789')}
  (start, write, close) = spy.mock_calls
  assert start.args == (new, {'a': 1}) and close == mock.call.close()
  assert write.args[0] == 3 and found.items() <= write.args[1].items()
  both = ('config', 'preset')
  assert [workdirs.read(new, f'{x}.json') for x in both] == [{'a': 1}, {'b': 2}]


def test_a_best_metric_must_exist():
  metrics = {'accuracy': None, 'class_accuracy/': None}
  made = {'val': types.SimpleNamespace(metrics=metrics), 'own': object()}
  for metric in (None, 'val/accuracy', 'val/class_accuracy/7', 'own/score'):
    evaluators.check_best_metric(metric, made)
  for metric in ('val/loss', 'val/accuracy/7', 'val'):
    with pytest.raises(ValueError, match=r"'val' .* It has accuracy, "):
      evaluators.check_best_metric(metric, made)


def test_an_untrained_model_is_initialised_by_the_seed(tmp_path):
  def norm(**seed):
    def factory(model, *, preprocess, mesh):
      norm = jax.jit(optax.tree.norm)
      return types.SimpleNamespace(run=lambda x: {'norm': norm(x)})

    model = MODEL.clone(depth=0)
    options = {'model': model, 'image_shape': (8, 8, 1), **seed}
    return evaluate(tmp_path, evals={'all': factory}, **options)['all/norm']

  assert norm() == norm(seed=0) != norm(seed=1)
  assert read_records(tmp_path)[-1]['step'] == 0


def test_without_weights_the_model_must_be_named(tmp_path):
  with pytest.raises(ValueError, match='evaluate needs init_from'):
    evaluate(tmp_path, evals={'test': _evaluator()})


def test_files_of_another_run_stay_as_they_are(run, tmp_path):
  with pytest.raises(ValueError, match=rf'run, train\. .*={run}/evaluate\.'):
    _evaluate(run, run)
  workdirs.write(tmp_path, 'config.json', {'run': 'vit_jax.study.study'})
  with pytest.raises(ValueError, match='another kind of run, study'):
    _train(tmp_path, total=steps(3))


@pytest.mark.parametrize(
  'name', ['', 'a/b', 'train', 'seconds', 'step', 'images_per_s']
)
def test_names_that_metrics_or_files_cannot_have(name, tmp_path):
  with pytest.raises(ValueError, match=f"evals.{name}: .* begin with '{name}'"):
    _train(tmp_path, total=steps(1), evals={name: Evaluation(_evaluator())})


def test_labels_are_numbered_by_the_names_of_the_weights(run, tmp_path, capsys):
  turned = ByNames(Digits(split='test'), [*'9876543210'])
  assert turned[0]['label'] == 9 - Digits(split='test')[0]['label']
  evals = {'test': _evaluator(dataclasses.replace(TEST, source=turned))}
  found = _evaluate(tmp_path, run, evals=evals)
  recorded = {k: v for r in read_records(run) for k, v in r.items()}
  assert found['test/accuracy'] == recorded['test/accuracy']
  assert 'by the names of the weights' in capsys.readouterr().out
  turned.targets = Numbers()
  unlabelled = dataclasses.replace(TEST, source=turned, labels=False)
  given = _evaluator(unlabelled)
  assert evaluators.by_names(given, formats.read(run)) is given
  with pytest.raises(ValueError, match=r'Numbers, .* weights are of Cl'):
    _evaluate(tmp_path, run, evals=evals)


def test_other_classes_are_an_error(run, tmp_path):
  data = Data(Glyphs(image_size=8, num_examples=8), 128)
  flags = r'test\.data\.source\.class_names=FILE.*test\.same_classes=F'
  with pytest.raises(ValueError, match=rf'evals\.test: .* 480 .*{flags}'):
    _evaluate(tmp_path, run, evals={'test': _evaluator(data)})
