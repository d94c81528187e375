"""Everything between the training loop and the eyes of its user.

A Monitor takes the metrics of each step without ever making the host wait for
the step it has just dispatched: it fetches those of the step before. It stops
the run at the first NaN or Inf, and at every log interval writes a record to
metrics.jsonl, to TensorBoard, and to the terminal.
"""

import collections
import contextlib
import datetime
import json
import math
import resource
import sys
import time

import jax
import numpy as np
from etils import epath

from vit_jax.terminal import Terminal

# Dense bfloat16 FLOP/s of a device, by a piece of its device_kind: vendors'
# data sheets, from memory. 'TPU v2' and 'v3' devices are cores, two to a chip.
PEAK_FLOPS = {
  'TPU v2': 23e12,
  'TPU v3': 61.5e12,
  'TPU v4': 275e12,
  'TPU v5 lite': 197e12,
  'TPU v5e': 197e12,
  'TPU v5': 459e12,
  'TPU v6': 918e12,
  'B200': 2250e12,
  'H200': 989e12,
  'H100 PCIe': 756e12,
  'H100': 989e12,
  'A100': 312e12,
  'L40': 181e12,
  'L4': 121e12,
  'V100': 125e12,  # float16
  'T4': 65e12,  # float16
  'RTX 4090': 165e12,
  'RTX 3090': 71e12,
}


class NonFiniteError(FloatingPointError):
  """Training has met NaN or Inf."""


def peak_flops(device_kind):
  """FLOP/s of a device in bfloat16, or None where it is not known."""
  for name, flops in PEAK_FLOPS.items():
    if name in device_kind:
      return flops
  return None


class Monitor:
  """Metrics of a run.

  Args:
    workdir: gets metrics.jsonl and TensorBoard's event file.
    total_steps: of the training; for the ETA.
    batch_size: global, for images per second.
    log_every_steps: length of a log interval.
    flops_per_step: of model arithmetic (3 x forward), for the MFU; or None.
    start_step: what a resumed run begins with; records of later steps, which
      the lost part of the earlier run wrote, are removed.
    learning_rate: step -> rate, to be logged; or None.
  """

  def __init__(
    self,
    workdir,
    *,
    total_steps,
    batch_size,
    log_every_steps,
    flops_per_step=None,
    start_step=0,
    learning_rate=None,
  ):
    self.total_steps = total_steps
    self._batch_size = batch_size
    self._log_every = log_every_steps
    self._learning_rate = learning_rate
    peak = peak_flops(jax.devices()[0].device_kind)
    self._flops_per_step = flops_per_step
    self._peak_step_s = None  # seconds a step takes at peak FLOP/s
    if flops_per_step and peak:
      self._peak_step_s = flops_per_step / (peak * jax.device_count())
    self.writer = Writer(workdir, start_step)
    self._terminal = Terminal(start_step, total_steps)
    self._pending = None  # (step, metrics) dispatched, not yet fetched
    self._last_finite = start_step
    self._sums = collections.defaultdict(float)
    self._logged = start_step
    self.restart_clock(start_step)

  def restart_clock(self, step):
    """Rates are measured from here on: after compilation, and each log."""
    self._clock_step, self._clock = step, time.perf_counter()
    self._waited = self._paused = 0.0

  @contextlib.contextmanager
  def waiting(self):
    """Time spent in this context is time waiting for data."""
    begin = time.perf_counter()
    yield
    self._waited += time.perf_counter() - begin

  @contextlib.contextmanager
  def pause(self):
    """Time spent in this context (evaluation, saving) is not training time."""
    begin = time.perf_counter()
    yield
    self._paused += time.perf_counter() - begin

  def step(self, step, metrics, *, skipped=0):
    """Takes the metrics of a dispatched step; handles those of the one before.

    Args:
      step: number of steps done once this one is.
      metrics: {name: scalar array}, still being computed.
      skipped: unreadable examples that were replaced so far.
    """
    pending, self._pending = self._pending, (step, metrics, skipped)
    self._finish(pending)

  def flush(self):
    """Waits for the outstanding step and handles its metrics."""
    pending, self._pending = self._pending, None
    self._finish(pending)

  def _finish(self, pending):
    if pending is None:
      return
    step, metrics, skipped = pending
    values = {k: float(v) for k, v in jax.device_get(metrics).items()}
    self._check_finite(step, values)
    for name, value in values.items():
      self._sums[name] += value
    self._terminal.advance(step)
    if step % self._log_every == 0 or step == self.total_steps:
      self._log(step, skipped)

  def _check_finite(self, step, values):
    bad = {k: v for k, v in values.items() if not math.isfinite(v)}
    if not bad:
      self._last_finite = step
      return
    steps = [step]
    if self._pending is not None:  # one more was dispatched: does it show too?
      later = jax.device_get(self._pending[1])
      if not all(np.isfinite(v) for v in later.values()):
        steps.append(self._pending[0])
    self._pending = None
    self._terminal.close()
    shown = ', '.join(f'{k}={v}' for k, v in bad.items())
    raise NonFiniteError(
      f'{shown} in step {" and ".join(map(str, steps))} (of '
      f'{self.total_steps}); the last finite step was {self._last_finite}. '
      'Earlier checkpoints are kept, and none was written since. Try a lower '
      'learning rate, a longer warm-up, or clip_norm; then run the same '
      'command again.'
    )

  def _log(self, step, skipped):
    averaged = step - self._logged
    record = {f'train/{k}': v / averaged for k, v in self._sums.items()}
    if self._learning_rate is not None:
      # Of the last update, which was made with the count before it.
      with jax.transfer_guard('allow'):
        record['train/lr'] = float(self._learning_rate(step - 1))
    if step > self._clock_step:
      record |= self._rates(step)
    record['memory_gb'] = memory_gb()
    if self._flops_per_step:  # of the training so far, as in table 6
      record['exaflops'] = step * self._flops_per_step / 1e18
    if skipped:
      record['data_skipped'] = skipped
    self.write(step, record)
    self._sums.clear()
    self._logged = step
    self.restart_clock(step)

  def _rates(self, step):
    steps = step - self._clock_step
    seconds = time.perf_counter() - self._clock - self._paused
    images_per_s = steps * self._batch_size / seconds
    rates = {
      'images_per_s': images_per_s,
      'images_per_s_per_device': images_per_s / jax.device_count(),
      'data_wait': min(1.0, self._waited / seconds),
      'eta_s': (self.total_steps - step) * seconds / steps,
    }
    if self._peak_step_s:
      rates['mfu'] = self._peak_step_s * steps / seconds
    return rates

  def write(self, step, record):
    """A record of the step to every writer and the terminal."""
    self.writer.write(step, record)
    self._terminal.show(step, record)

  def compiled(self, step):
    """Tells how long the first step took; rates are measured from here on."""
    self.flush()
    seconds = time.perf_counter() - self._clock
    self.say(f'first step, compilation included: {seconds:.1f} s')
    self.restart_clock(step)

  def introduce(self, model, params, image_spec, mesh, origin):
    """Says what is about to be trained, on what, and from where."""
    num_params = sum(x.size for x in jax.tree.leaves(params))
    self.say(
      f'{type(model).__name__}, {num_params:,} parameters; batches of '
      f'{self._batch_size} images {"x".join(map(str, image_spec))}; '
      f'{self.total_steps} steps on {mesh.size} x '
      f'{jax.devices()[0].device_kind}'
    )
    self.say(origin)

  def say(self, text):
    """A line of the narrative, on the first host."""
    self._terminal.say(text)

  def close(self):
    """Closes the writers; the outstanding step is dropped."""
    self._terminal.close()
    self.writer.close()


class Writer:
  """Appends records to workdir/metrics.jsonl and to TensorBoard (host 0)."""

  def __init__(self, workdir, start_step=None):
    self._active = jax.process_index() == 0
    if not self._active:
      return
    from tensorboardX import SummaryWriter

    self._path = epath.Path(workdir) / 'metrics.jsonl'
    records = read_records(workdir)
    if start_step is not None:
      records = [r for r in records if r['step'] <= start_step]
    self._lines = [json.dumps(r) for r in records]
    self._save()
    purge = None if start_step is None else start_step + 1
    self._board = SummaryWriter(str(workdir), purge_step=purge)

  def write(self, step, record):
    if not self._active:
      return
    self._lines.append(json.dumps({'step': step, 'time': _now(), **record}))
    self._save()
    for name, value in record.items():
      self._board.add_scalar(name, value, step)
    self._board.flush()

  def _save(self):
    # Whole, because object stores cannot append; and to another name first,
    # so that a kill never leaves half a file.
    partial = self._path.with_name('metrics.jsonl.part')
    partial.write_text(''.join(line + '\n' for line in self._lines))
    partial.replace(self._path)

  def close(self):
    if self._active:
      self._board.close()


def read_records(workdir):
  """The records of workdir/metrics.jsonl, oldest first; [] if there is none."""
  path = epath.Path(workdir) / 'metrics.jsonl'
  if not path.exists():
    return []
  return [json.loads(line) for line in path.read_text().splitlines()]


def memory_gb():
  """Peak memory in GB: of the fullest device, or of this process on a CPU."""
  stats = [d.memory_stats() for d in jax.local_devices()]
  peaks = [s['peak_bytes_in_use'] for s in stats if s]
  if peaks:
    return max(peaks) / 1e9
  unit = 1 if sys.platform == 'darwin' else 1024  # bytes there, KiB elsewhere
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def _now():
  return datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
