"""Writers of metrics to Weights & Biases, MLflow and elsewhere."""

import importlib.util
import json
import time

import numpy as np
import pytest

from vit_jax.probes import EDGES
from vit_jax.runs.records import Writer, read_records
from vit_jax.runs.writers import MLflow, WandB

CONFIG = {'seed': 3, 'schedule': {'lr': 0.1}}


def needs(package):
  found = importlib.util.find_spec(package)
  why = f"{package} is not installed: pip install -e '.[{package}]'"
  return pytest.mark.skipif(found is None, reason=why)


def run_twice(workdir, make, between=lambda: None):
  """Write two records, and resume after the first of them."""
  for start, steps in ((0, (2, 4)), (2, (4, 6))):
    writer = Writer(workdir, start, writers={'x': make()}, config=CONFIG)
    for step in steps:
      values = {'train/loss': step + start, 'val/class/a,b': 0.5}
      writer.write(step, values | {'grads': np.ones(len(EDGES) - 1, int)})
    writer.close()
    between()
  assert [r['step'] for r in read_records(workdir)] == [2, 4, 6]


@needs('mlflow')
def test_mlflow_continues_its_run(tmp_path, monkeypatch):
  """On a file store, the only local one without the big package."""
  monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
  import mlflow

  uri = (tmp_path / 'store').as_uri()
  workdir = tmp_path / 'my_run'
  workdir.mkdir()
  run_twice(workdir, lambda: MLflow(experiment='mine', tracking_uri=uri))
  client = mlflow.MlflowClient(tracking_uri=uri)
  experiment = client.get_experiment_by_name('mine').experiment_id
  (run,) = client.search_runs([experiment])
  assert run.info.run_name == 'my_run' and run.info.status == 'FINISHED'
  assert run.data.params == {'seed': '3', 'schedule.lr': '0.1'}
  history = client.get_metric_history(run.info.run_id, 'train/loss')
  found = [(m.step, m.value) for m in history]
  assert found == [(2, 2), (4, 4), (4, 6), (6, 8)]
  assert run.data.metrics['val/class/a_b'] == 0.5
  assert run.data.metrics['grads/p95'] == EDGES[77]


@needs('mlflow')
def test_mlflow_knows_that_a_run_failed(tmp_path, monkeypatch):
  monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
  import contextlib

  import mlflow

  uri = (tmp_path / 'store').as_uri()
  writer = Writer(tmp_path, writers={'x': MLflow(tracking_uri=uri)})
  with pytest.raises(ZeroDivisionError), contextlib.closing(writer):
    writer.write(1, {'loss': 1 / 0})
  run_id = json.loads((tmp_path / 'mlflow.json').read_text())['run_id']
  run = mlflow.MlflowClient(tracking_uri=uri).get_run(run_id)
  assert run.info.status == 'FAILED'


@needs('wandb')
@pytest.mark.slow
def test_wandb_offline_continues_its_run(tmp_path, monkeypatch):
  """The files of both processes have one id."""
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_SILENT', 'true')
  # W&B names the folders of a run by id and second.
  run_twice(
    tmp_path,
    lambda: WandB(project='mine', tags=('a',)),
    between=lambda: time.sleep(1.1),
  )
  run_id = json.loads((tmp_path / 'wandb.json').read_text())['id']
  assert len(list(tmp_path.glob(f'wandb/offline-run-*-{run_id}/*.wandb'))) == 2
