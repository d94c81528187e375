"""Records of a run: written to its files and to writers, and read again."""

import contextlib
import dataclasses
import datetime
import functools
import json
import math
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax.io import terminal
from vit_jax.io.files import is_local, write_atomically
from vit_jax.probes import EDGES
from vit_jax.runs import workdirs
from vit_jax.runs.writers import MetricsWriter
from vit_jax.types import ACCOUNT, LOSS, Kind, Kinds, PathLike, UserError

NAME = 'metrics.jsonl'
KINDS = 'kinds.json'  # what these metrics are, see types.Kind
_SPEED = functools.partial(Kind, group='Speed and memory')
OF_A_RUN = {
  'train/loss': dataclasses.replace(LOSS, heading='loss'),
  'train/lr': Kind(group='Optimizer', heading='lr', form='{:.2e}'),
  'train/grad_norm': Kind(group='Optimizer', heading='grad', form='{:.3g}'),
  'train/probes/': Kind(group='Layers'),
  'images_per_s': _SPEED(better='higher', heading='img/s', form='{:,.0f}'),
  'mfu': _SPEED('%', 'higher', form='{:.1%}'),
  'data_wait': _SPEED('%', 'lower', heading='data wait', form='{:.0%}'),
  'memory_gb': _SPEED(heading='mem', form='{:.1f}GB'),
  **dict.fromkeys(('eta_s', 'exaflops', 'data_skipped', 'progress'), ACCOUNT),
  **dict.fromkeys(('data_wait/', 'seconds/', 'cpu_seconds'), ACCOUNT),
}


class Writer:
  """Records in metrics.jsonl, TensorBoard and more; host 0 writes them.

  JSON has no NaN and no infinity. They are written as the strings 'NaN',
  'Infinity' and '-Infinity', which `read_records` and pandas read as floats.

  Records of steps later than `start_step` are removed; None keeps all. `kinds`
  say what the metrics are; they join those of KINDS in the workdir.
  """

  def __init__(
    self,
    workdir: PathLike,
    start_step: int | None = None,
    *,
    writers: Mapping[str, MetricsWriter] | None = None,
    config: Mapping[str, Any] | None = None,
    kinds: Kinds | None = None,
  ) -> None:
    self._active = jax.process_index() == 0
    if not self._active:
      return
    import tensorboardX

    self._path = epath.Path(workdir) / NAME
    last = math.inf if start_step is None else start_step
    kept = [r for r in read_records(workdir) if r['step'] <= last]
    self._text = ''.join(map(_line, kept))
    if self._path.exists():  # also removes a line that a kill has torn
      write_atomically(self._path, self._text)
    self._events = tensorboardX.SummaryWriter(
      str(workdir),
      purge_step=None if start_step is None else start_step + 1,
      flush_secs=10,
      filename_suffix=f'.{start_step or 0}',  # for two starts in a second
    )
    known = {**OF_A_RUN, **(kinds or {})}
    with contextlib.suppress(UserError):  # damaged: it is written again
      known = read_kinds(workdir) | known
    workdirs.write(workdir, KINDS, {k: vars(x) for k, x in known.items()})
    self._writers = dict(writers or {})
    self._failed: set[str] = set()
    for writer in self._writers.values():
      if start := getattr(writer, 'start', None):
        start(epath.Path(workdir), config or {})

  def write(self, step: int, record: Mapping[str, Any]) -> None:
    if not self._active:
      return
    counts = {k: x for k, x in record.items() if np.ndim(x)}
    record = {k: x for k, x in record.items() if k not in counts}
    for name, n in counts.items():
      some, x = np.flatnonzero(n), (EDGES[1:] + EDGES[:-1]) / 2
      ends = EDGES[some[0]], EDGES[some[-1] + 1]
      sums = n.sum(), n @ x, n @ x**2
      self._events.add_histogram_raw(name, *ends, *sums, EDGES[1:], n, step)
      for p in (5, 50, 95):
        i = np.searchsorted(n.cumsum(), p / 100 * n.sum())
        record[f'{name}/p{p}'] = float(EDGES[i + 1])
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
    line = _line({'step': step, 'time': now, **record})
    if is_local(self._path):
      with self._path.open('a') as file:
        file.write(line)
    else:  # an object store has no append
      self._text += line
      self._path.write_text(self._text)
    for name, value in record.items():
      self._events.add_scalar(name, value, step)
    self._each('write', step, record)
    if counts:
      self._each('histograms', step, counts)

  def _each(self, method, *args):
    for name, writer in self._writers.items():
      try:
        if call := getattr(writer, method, None):
          call(*args)
      except Exception as error:  # a server that is down must not stop a run
        if name not in self._failed:
          self._failed.add(name)
          print(
            f'writers.{name} failed: {type(error).__name__}: {error}. The run '
            'continues; metrics.jsonl has everything.',
            file=sys.stderr,
          )

  def close(self) -> None:
    if self._active:
      self._events.close()
      self._each('close')


def read_records(workdir: PathLike) -> list[dict[str, Any]]:
  """Return the records of a run, oldest first; count damaged lines."""
  path = epath.Path(workdir) / NAME
  if not path.exists():
    return []
  records = [_record(line) for line in path.read_bytes().split(b'\n')]
  if count := records[:-1].count({}):
    terminal.say(f'{path}: {count} damaged lines were left out.')
  return [x for x in records if x]


def _record(line):
  """Return the record in a line; {} if it is damaged."""
  with contextlib.suppress(ValueError, TypeError, AttributeError, LookupError):
    found = json.loads(line)
    others = {k: x for k, x in found.items() if not isinstance(x, int)}
    floats = {k: float(x) for k, x in others.items() if k != 'time'}
    return found | floats if isinstance(found['step'], int) else {}
  return {}


def read_kinds(workdir: PathLike) -> dict[str, Kind]:
  """Return what the metrics of a run are."""
  found = workdirs.read(workdir, KINDS)
  try:
    return {name: Kind(**x) for name, x in found.items()}
  except TypeError as error:
    raise UserError(f'{workdir}/{KINDS} is damaged: {error}.') from error


def _line(record):
  def plain(x):
    x = x if isinstance(x, str | int) else float(x)
    return x if isinstance(x, str) or math.isfinite(x) else json.dumps(x)

  return json.dumps({key: plain(x) for key, x in record.items()}) + '\n'
