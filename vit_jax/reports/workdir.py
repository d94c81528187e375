"""Content of the files in a workdir, for reports."""

import concurrent.futures
import functools
import re
from typing import Any

from etils import epath

from vit_jax.runs import workdirs
from vit_jax.runs.records import read_kinds, read_records
from vit_jax.types import PathLike

CAUTION = 'A tiny preset shows that everything runs: its numbers mean nothing.'


class Workdir:
  """Content of the files in a workdir; a missing file is empty.

  Attributes (and more with the content of a file):
    kinds: what the metrics are.
    last: {metric: last value}.
    total_steps: length of the training, or None if it is not known.
    kind: function of the config: 'train', 'evaluate', 'study' or ''.
    phases: {phase: seconds}, the last account of the time, longest first.
    seconds: wall time, or None if it is not known.
  """

  def __init__(self, path: PathLike) -> None:
    self.path = epath.Path(path)
    self.name = self.path.name or str(self.path)
    names = ('config', 'preset', 'environment', 'done')
    found = (workdirs.read(path, f'{name}.json') for name in names)
    self.config, self.preset, self.environment, self.done = found
    self.records = read_records(self.path)
    self.kinds = read_kinds(self.path)
    self.last = {k: v for r in self.records for k, v in r.items()}
    self.step = max((r['step'] for r in self.records), default=0)
    self.total_steps = None
    for record in self.records:
      if progress := record.get('progress'):
        self.total_steps = round(record['step'] / progress)
    self.kind = str(self.config.get('run', '')).rpartition('.')[2]
    self.is_study = isinstance(self.config.get('runs'), dict)
    seconds = [(v, k) for k, v in self.last.items() if k.startswith('seconds/')]
    self.phases = {k[8:]: v for v, k in sorted(seconds, reverse=True)}
    self.seconds = sum(self.phases.values()) or self.done.get('seconds')

  @functools.cached_property
  def model(self) -> dict[str, Any]:
    """Content of model.json, which only the end of a run needs; or {}."""
    return workdirs.read(self.path, 'model.json')

  @property
  def is_ended(self) -> bool:
    """Whether the last record, the account of the time, has been written."""
    return bool(self.records) and 'progress' not in self.records[-1]

  @property
  def caution(self) -> str:
    """Sentence about the numbers of a tiny preset; '' for others."""
    words = re.split('[:,]', self.preset.get('config') or '')
    return CAUTION * ('tiny' in words)

  @property
  def status(self) -> tuple[str, str]:
    """(status of the run in words, 'good', 'bad' or 'warn')."""
    if 'diverged' in self.done:
      return 'diverged', 'bad'
    if not self.records:
      return 'no results yet', 'warn'
    is_over = self.done or self.kind == 'evaluate'
    if is_over or self.step == self.total_steps:
      return 'finished', 'good'
    of = f' of {self.total_steps:,}' if self.total_steps else ''
    return f'stopped or running, step {self.step:,}{of}', 'warn'

  def runs(self) -> list['Workdir']:
    """Return the Workdirs of a study's runs, in order."""
    names = self.config.get('order') or self.config['runs']
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
      return list(pool.map(Workdir, [self.path / name for name in names]))
