"""Writers of a run's metrics to Weights & Biases and MLflow.

    config.logging.writers.wandb = dict(
      target='vit_jax.runs.writers.WandB', project='mine'
    )

A run always writes metrics.jsonl and TensorBoard files. These writers get the
same records, on the first host. A run that resumes continues the tracker's run,
whose id is in wandb.json or mlflow.json.
"""

import dataclasses
import re
import secrets
import sys
import typing
from collections.abc import Mapping
from typing import Any, Literal

from etils import epath

from vit_jax.config import walk
from vit_jax.io.files import is_local
from vit_jax.probes import EDGES
from vit_jax.runs import workdirs
from vit_jax.types import PathLike


class MetricsWriter(typing.Protocol):
  """Interface of writers; only `write` is required.

  Optional methods:
    start(workdir, config as JSON values): called first in each process.
    histograms(step, counts): {name: counts in the bins between probes.EDGES}.
    close(): the run has ended. During an error, sys.exception() returns it.
  """

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Take the metrics of a step: training, evaluation, or both."""


@dataclasses.dataclass
class WandB:
  """Run at Weights & Biases (pip install wandb).

  WANDB_MODE=offline writes to WORKDIR/wandb only; `wandb sync` uploads later.

  Attributes:
    project, entity, name (default: that of the workdir), ...: see wandb.init.
  """

  project: str = 'vit_jax'
  entity: str | None = None
  name: str | None = None
  group: str | None = None
  tags: tuple[str, ...] = ()
  mode: Literal['online', 'offline', 'disabled'] | None = None

  def start(self, workdir: PathLike, config: Mapping[str, Any]) -> None:
    import wandb

    workdir = epath.Path(workdir)
    options = dataclasses.asdict(self)
    options['name'] = self.name or workdir.name
    self._run = wandb.init(
      **options,
      id=workdirs.read(workdir, 'wandb.json').get('id') or secrets.token_hex(4),
      resume='allow',
      config=dict(config),
      dir=str(workdir) if is_local(workdir) else None,
    )
    # W&B's own step only grows. A run that was killed repeats some steps.
    self._run.define_metric('*', step_metric='step')
    found = {'id': self._run.id, 'url': self._run.url}
    workdirs.write(workdir, 'wandb.json', found)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    self._run.log({'step': step, **values})

  def histograms(self, step: int, counts: Mapping[str, Any]) -> None:
    from wandb import Histogram

    made = {k: Histogram(np_histogram=(n, EDGES)) for k, n in counts.items()}
    self._run.log({'step': step, **made})

  def close(self) -> None:
    self._run.finish(exit_code=1 if sys.exception() else 0)


@dataclasses.dataclass
class MLflow:
  """Run in MLflow (pip install mlflow).

  Attributes:
    experiment: name of the experiment; it is created if there is none.
    tracking_uri: of the server or database; None: MLFLOW_TRACKING_URI.
    name: name of the run; defaults to the name of the workdir.
  """

  experiment: str = 'vit_jax'
  tracking_uri: str | None = None
  name: str | None = None

  def start(self, workdir: PathLike, config: Mapping[str, Any]) -> None:
    import mlflow

    workdir = epath.Path(workdir)
    mlflow.set_tracking_uri(self.tracking_uri)
    mlflow.set_experiment(self.experiment)
    run_id = workdirs.read(workdir, 'mlflow.json').get('run_id')
    run = mlflow.start_run(run_id, run_name=self.name or workdir.name)
    if run_id:
      return
    params = {_allowed(k): str(x)[:6000] for k, x in walk(config) if k}
    mlflow.log_params(params)
    workdirs.write(workdir, 'mlflow.json', {'run_id': run.info.run_id})

  def write(self, step: int, values: Mapping[str, float]) -> None:
    import mlflow

    values = {_allowed(k): x for k, x in values.items()}
    mlflow.log_metrics(values, step=step)

  def close(self) -> None:
    import mlflow

    mlflow.end_run('FAILED' if sys.exception() else 'FINISHED')


def _allowed(name):
  """Return a name with the characters that MLflow allows."""
  return re.sub(r'[^\w\-. :/]', '_', name)
