"""--profile: the trace has the steps that were asked for."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from vit_jax.runs.metrics import Monitor
from vit_jax.runs.profiling import Profiler, Steps


def traced(workdir, steps, *, start=0, total=8):
  """Run steps as train() does; return [step_num of each traced step]."""
  workdir.mkdir(exist_ok=True)
  monitor = Monitor(
    workdir,
    total_steps=total,
    batch_size=1,
    log_every_steps=1,
    start_step=start,
  )
  profiler = Profiler(workdir, steps, start=start, total=total)
  add = jax.jit(lambda x: x + 1)
  for step in range(start + 1, total + 1):
    with profiler.step(step, monitor):
      monitor.step(step, {'loss': add(jnp.float32(step))})
  profiler.close()
  monitor.close()
  found = []
  for file in (workdir / 'profile').rglob('perfetto_trace.json.gz'):
    events = json.loads(gzip.decompress(file.read_bytes()))['traceEvents']
    found += [int(e['args']['step_num']) for e in events if is_step(e)]
  return sorted(found)


def is_step(event):
  return event.get('name') == 'train' and 'step_num' in event.get('args', {})


def test_the_trace_has_exactly_these_steps(tmp_path, capsys):
  assert traced(tmp_path, '3:5') == [3, 4, 5]
  said = capsys.readouterr().out
  assert f'tensorboard --logdir={tmp_path}/profile' in said
  (xplane,) = tmp_path.glob('profile/plugins/profile/*/*.xplane.pb')
  perfetto = xplane.parent / 'perfetto_trace.json.gz'
  assert f'https://ui.perfetto.dev: {perfetto}' in said


def test_a_resumed_run_counts_from_where_it_starts(tmp_path, capsys):
  assert traced(tmp_path, '2', start=4) == [6]
  # A scheduler restarts a job with the same command.
  capsys.readouterr()
  assert traced(tmp_path / 'end', '2:5', start=4) == []
  said = capsys.readouterr().out
  assert (
    '--profile=2:5: nothing will be traced, because the run resumes' in said
  )
  assert 'Choose from the 4 steps that are left' in said


@pytest.mark.parametrize(
  ('steps', 'message'),
  [
    ('1:3', 'step 1 includes compilation. Use for example --profile=10:15'),
    ('5:4', 'expected 2 <= FIRST <= LAST'),
    ('ten', "profile='ten' is neither a step nor FIRST:LAST"),
    ('-3', 'is neither a step nor FIRST:LAST'),
    ('7:9', "profile='7:9' ends after the 8 steps of this run. Choose"),
  ],
)
def test_ranges_that_are_wrong(steps, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    Profiler(tmp_path, steps, start=0, total=8)


def test_a_single_step():
  assert Steps.parse('10') == Steps(10, 10)
  assert Steps.parse(12) == Steps(12, 12)
  assert Steps.parse('10:15') == Steps(10, 15)
