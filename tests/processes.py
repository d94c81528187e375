"""Runs of `python -m vit_jax.main`, each in its own process."""

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from vit_jax.runs import workdirs

ROOT = pathlib.Path(__file__).parents[1]

# A config with everything whose state a restart could lose: dropout,
# augmentation, gradient accumulation, an EMA, an evaluator, a best checkpoint.
CONFIG = """
import ml_collections

def get_config():
  t = 'vit_jax.data.transforms.'
  digits = dict(target='vit_jax.data.sources.digits.Digits', split='train')
  return ml_collections.ConfigDict(dict(
    run='vit_jax.train.train',
    seed=3,
    total_steps=40,
    logging=dict(every_steps=3),
    accum_steps=2,
    ema=dict(decay=0.9),
    probes=dict(h=dict(target='vit_jax.probes.Histograms', every_steps=4)),
    model=dict(target='vit_jax.models.vit.VisionTransformer', width=32,
               depth=2, mlp_dim=64, num_heads=2,
               embedding=dict(patch_size=4), dropout=0.2,
               stochastic_depth=0.2),
    objective=dict(
      target='vit_jax.objectives.classification.softmax_xent'),
    optimizer=dict(target='optax.adamw', weight_decay=0.1),
    schedule=dict(lr=1e-2, warmup_steps=2),
    checkpoints=dict(every_steps=5, keep_last=2, best_metric='val/accuracy'),
    evals=dict(val=dict(
      target='vit_jax.evals.classification.Classification', every_steps=5,
      data=dict(source=dict(digits, split='test'), batch_size=200))),
    data=dict(
      source=digits,
      transforms=[dict(target=t + 'InceptionCrop', size=8),
                  dict(target=t + 'FlipLR')],
      batch_size=8,
    ),
  ))
"""


# CONFIG without evaluations, which take most of the time, and with a record of
# each step.
PLAIN = re.sub(r'\n    evals=.*?(?=\n    data=)', '', CONFIG, flags=re.DOTALL)
PLAIN = PLAIN.replace(", best_metric='val/accuracy'", '')
PLAIN = PLAIN.replace('every_steps=3', 'every_steps=1')


def python(
  *arguments: Any, cwd: Any = ROOT, timeout: float | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
  """Run Python in a new process; return it when it has ended."""
  return subprocess.run(
    [sys.executable, *map(str, arguments)],
    cwd=cwd,
    env={**os.environ, 'PYTHONPATH': str(ROOT), **environ},
    capture_output=True,
    text=True,
    timeout=timeout,
  )


needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None, reason='needs libtpu'
)


def with_libtpu(code: str) -> str:
  """Run code in a process of its own, as only one can use libtpu.

  Return what it prints.
  """
  done = python('-c', code, JAX_PLATFORMS='cpu', JAX_COMPILATION_CACHE_DIR='')
  assert done.returncode == 0, done.stderr
  return done.stdout


class Process:
  """Python process and its output.

  Args:
    folder: folder for the log.
    *command: arguments of Python.
    env: more environment variables.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    *command: str,
    env: Mapping[str, str] | None = None,
  ) -> None:
    number = len(list(folder.glob('log*')))
    self._log = folder / f'log{number}'
    one = {'JAX_NUM_CPU_DEVICES': '1'}
    with self._log.open('w') as log:
      self.process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={'JAX_PLATFORMS': 'cpu', **os.environ, **one, **(env or {})},
        stdout=log,
        stderr=log,
        start_new_session=True,
      )

  @property
  def output(self) -> str:
    return self._log.read_text()

  def wait_for(
    self,
    condition: Callable[[], Any],
    seconds: float = 300,
    poll_s: float = 0.02,
  ) -> bool:
    """Return whether the condition came true before the run ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and self.process.poll() is None:
      if condition():
        return True
      time.sleep(poll_s)
    return bool(condition())

  def kill(self) -> None:
    """End the process by SIGKILL, if it still runs."""
    with contextlib.suppress(ProcessLookupError):
      self.process.send_signal(signal.SIGKILL)
    self.process.wait()

  def finish(self, seconds: float = 300) -> int:
    """Wait for the end and return the exit status; kill it if it is late."""
    try:
      return self.process.wait(seconds)
    except subprocess.TimeoutExpired:
      self.kill()
      raise


class Run(Process):
  """Run of `python -m vit_jax.main` and its output.

  Args:
    folder: folder for the config file and the log.
    workdir: workdir of the run.
    *flags: more flags, such as '--config.total_steps=10'.
    config: text of the config file.
    env: more environment variables.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    workdir: pathlib.Path,
    *flags: str,
    config: str = CONFIG,
    env: Mapping[str, str] | None = None,
  ) -> None:
    self.workdir = workdir
    file = folder / 'config.py'
    if not file.exists() or file.read_text() != config:
      file.write_text(config)
    command = ['-m', 'vit_jax.main', f'--config={file}', f'--workdir={workdir}']
    super().__init__(folder, *command, *flags, env=env)


@functools.cache
def undisturbed() -> pathlib.Path:
  """Run CONFIG to its end, once for all faults, and return the workdir."""
  folder = tempfile.TemporaryDirectory(prefix='vit_jax_undisturbed_')
  atexit.register(folder.cleanup)
  run = Run(pathlib.Path(folder.name), pathlib.Path(folder.name, 'run'))
  assert run.finish() == 0, run.output
  return run.workdir


def free_port() -> int:
  """Return a free TCP port of this machine."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    return free.getsockname()[1]


def join(count: int) -> list[tuple[str, ...]]:
  """Return the flags of `count` processes that join each other."""
  address = f'localhost:{free_port()}'
  shared = '--distributed', f'--coordinator_address={address}'
  shared += (f'--num_processes={count}',)
  return [(*shared, f'--process_id={i}') for i in range(count)]


def steps(workdir: pathlib.Path) -> list[int]:
  """Return the steps of the complete checkpoints of a run, sorted."""
  return workdirs.steps(workdir / 'checkpoints')


def everything(workdir: pathlib.Path, step: int) -> dict[str, Any]:
  """Return {path: array or value} of a checkpoint, read by Orbax alone."""
  import jax
  import orbax.checkpoint as ocp

  from vit_jax import tree

  folder = workdir / 'checkpoints' / str(step)
  handler, found = ocp.PyTreeCheckpointHandler(), {}
  for item in {'params', 'train', 'ema'} & {x.name for x in folder.iterdir()}:
    shapes = handler.metadata(folder / item).tree
    numpy = jax.tree.map(
      lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes
    )
    args = ocp.args.PyTreeRestore(restore_args=numpy)
    flat = tree.flatten(handler.restore(folder / item, args=args))
    found |= {f'{item}/{path}': value for path, value in flat.items()}
  handler.close()
  data = json.loads((folder / 'record' / 'metadata').read_text())['data']
  for name in ('seconds', 'cpu_seconds'):
    data['metrics'].pop(name)
  return found | {f'data/{key}': value for key, value in data.items()}


# Entries of metrics.jsonl that depend on the clock, not on the computation.
_OF_CLOCK = ('time', 'images_per_s', 'data_wait', 'eta_s', 'memory_gb', 'mfu')


def records(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Return the records of a run without entries that depend on the clock."""
  from vit_jax.runs.records import read_records

  kept = [
    {
      key: value
      for key, value in record.items()
      if key not in _OF_CLOCK
      and not key.startswith(('seconds/', 'cpu_seconds', 'data_wait/'))
    }
    for record in read_records(workdir)
  ]
  return [record for record in kept if set(record) - {'step', 'progress'}]


def difference(one: pathlib.Path, other: pathlib.Path) -> str:
  """Return a difference between the ends of two runs; '' if they are equal.

  Compared bit by bit are the arrays and data positions of the checkpoints that
  both have, the metrics of all records, and TensorBoard's scalars.
  """
  kept, others = steps(one), steps(other)
  if kept[-1:] != others[-1:]:
    return f'checkpoints {kept}, now {others}'
  for step in {*kept} & {*others}:
    a, b = everything(one, step), everything(other, step)
    if a.keys() != b.keys():
      return f'checkpoint {step} has other items: {a.keys() ^ b.keys()}'
    for path in a:
      if not np.array_equal(a[path], b[path]):
        return f'checkpoint {step}: {path} differs'
  a, b = records(one), records(other)
  if a != b:
    differing = [(x, y) for x, y in zip(a, b) if x != y]
    return f'records differ ({len(a)}, {len(b)}): {differing[:1]}'
  if scalars(one) != scalars(other):
    return 'TensorBoard has other scalars'
  return ''


def scalars(workdir: pathlib.Path) -> dict[str, list[tuple[int, Any]]]:
  """Return {name: [(step, value or counts)]} as TensorBoard shows them.

  Each start of a run writes its first step, and TensorBoard drops earlier
  events from that step on. Scalars that depend on the clock are left out.
  """
  from tensorboardX.proto import event_pb2

  found: dict[str, list[tuple[int, Any]]] = {}
  for file in sorted(workdir.glob('events.out.tfevents.*')):
    data = file.read_bytes()
    while len(data) >= 12:  # length, checksum, event, checksum
      length = int.from_bytes(data[:8], 'little')
      if len(data) < 16 + length:
        break  # truncated by a kill; TensorBoard, too, skips the rest
      event = event_pb2.Event.FromString(data[12 : 12 + length])
      data = data[16 + length :]
      if event.session_log.status == event_pb2.SessionLog.START:
        for events in found.values():
          events[:] = [each for each in events if each[0] < event.step]
      for value in event.summary.value:
        number = [*value.histo.bucket] or value.simple_value
        found.setdefault(value.tag, []).append((event.step, number))
  return {
    name: events
    for name, events in found.items()
    # A run that is stopped by a signal writes its progress once more.
    if name not in (*_OF_CLOCK, 'progress')
    and not name.startswith(('seconds/', 'cpu_seconds', 'data_wait/'))
  }
