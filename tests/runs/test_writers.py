"""Writers of metrics to Weights & Biases, MLflow and elsewhere."""

import importlib.util
import json
import struct
import time

import numpy as np
import pytest
from PIL import Image

from vit_jax import config
from vit_jax.runs.metrics import Writer, read_records
from vit_jax.runs.writers import MLflow, WandB

# What `run_twice` writes.
LOSSES = [(2, 2), (4, 4), (4, 6), (6, 8)]
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
      writer.write(step, {'train/loss': step + start, 'val/class/a,b': 0.5})
    writer.image('test/confusion', picture(workdir))
    writer.close()
    between()
  assert [r['step'] for r in read_records(workdir)] == [2, 4, 6]


def picture(workdir):
  """Return the path of a PNG file."""
  path = workdir / 'confusion.png'
  Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path)
  return path


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
  assert [(m.step, m.value) for m in history] == [
    (2, 2),
    (4, 4),
    (4, 6),
    (6, 8),
  ]
  assert run.data.metrics['val/class/a_b'] == 0.5
  images = client.list_artifacts(run.info.run_id, 'test')
  assert [x.path for x in images] == ['test/confusion.png']


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


@needs('mlflow')
def test_a_store_that_does_not_work_is_one_message(tmp_path):
  with pytest.raises(ValueError, match=r'cannot start a run: .*MLFLOW_T'):
    Writer(tmp_path, writers={'x': MLflow(tracking_uri='nonsense://x')})


@needs('wandb')
@pytest.mark.slow
def test_wandb_offline_continues_its_run(tmp_path, monkeypatch):
  """The files of both processes have one id, and all values."""
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_SILENT', 'true')
  from wandb.proto import wandb_internal_pb2

  # W&B names the folders of a run by id and second.
  run_twice(
    tmp_path,
    lambda: WandB(project='mine', tags=('a',)),
    between=lambda: time.sleep(1.1),
  )
  run_id = json.loads((tmp_path / 'wandb.json').read_text())['id']
  files = sorted(tmp_path.glob(f'wandb/offline-run-*-{run_id}/*.wandb'))
  losses, configs = [], []
  for file in files:
    for data in logged(file.read_bytes()):
      record = wandb_internal_pb2.Record.FromString(data)
      row = {
        '/'.join(x.nested_key) or x.key: json.loads(x.value_json)
        for x in record.history.item
      }
      if 'train/loss' in row:
        losses.append((row['step'], row['train/loss']))
      configs += [x.key for x in record.run.config.update]
      if record.run.run_id:
        assert (record.run.run_id, record.run.project) == (run_id, 'mine')
  assert losses == LOSSES
  assert {'seed', 'schedule'} <= set(configs)
  assert len(list(tmp_path.rglob('confusion_*.png'))) == 2


def logged(data, block=2**15):
  """Yield the entries of a .wandb file, which is a LevelDB log."""
  at, entry = 7, b''  # after the header of the file
  while at + 7 <= len(data):
    if block - at % block < 7:  # the rest of a block is padding
      at += block - at % block
      continue
    _, size, kind = struct.unpack('<IHB', data[at : at + 7])
    entry += data[at + 7 : at + 7 + size]
    at += 7 + size
    if kind in (1, 4):  # whole, or the last part
      yield entry
      entry = b''


def test_a_missing_package_names_the_extra(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  for name, extra in (('WandB', 'wandb'), ('MLflow', 'mlflow')):
    with pytest.raises(ValueError, match=rf"pip install -e '\.\[{extra}\]'"):
      config.resolve({'target': f'vit_jax.runs.writers.{name}'})
