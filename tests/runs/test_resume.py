"""Resuming is bit-identical: real processes and real signals.

Dropout is on, examples are augmented, gradients are accumulated, and the
optimizer and an EMA have a state. One undisturbed run serves all questions.
"""

import json
import signal

import pytest
from processes import Run, difference, python, steps, undisturbed

from vit_jax.runs.records import read_records


@pytest.mark.slow
def test_a_killed_run_equals_one_that_was_not(tmp_path):
  killed = tmp_path / 'killed'
  run = Run(tmp_path, killed)
  assert run.wait_for(lambda: steps(killed), poll_s=0.002), run.output
  run.kill()
  step = max(steps(killed))
  assert step != 40  # the run was not done when it was killed
  with (killed / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 39, "tra')  # a kill can leave half of a line
  # The newest checkpoint may be damaged, too.
  if len(steps(killed)) > 1:
    files = (killed / 'checkpoints' / str(step) / 'params').glob('ocdbt*/d/*')
    max(files, key=lambda f: f.stat().st_size).write_bytes(b'')
    step = steps(killed)[0]

  run = Run(tmp_path, killed, '--config.data.num_workers=2')
  assert run.finish() == 0, run.output
  assert f'resumed at step {step} of {killed}' in run.output
  assert not difference(undisturbed(), killed)


@pytest.mark.slow
def test_sigterm_saves_and_exits_with_a_message(tmp_path):
  stopped = tmp_path / 'stopped'
  run = Run(tmp_path, stopped)
  assert run.wait_for(lambda: read_records(stopped), poll_s=0.002), run.output
  run.process.send_signal(signal.SIGTERM)
  assert run.finish() == 128 + signal.SIGTERM, run.output
  step = max(steps(stopped))
  assert 3 <= step < 40
  assert f'SIGTERM: saved step {step} of 40 in {stopped}' in run.output
  assert 'Traceback' not in run.output

  run = Run(tmp_path, stopped)
  assert run.finish() == 0, run.output
  assert not difference(undisturbed(), stopped)
  # A changed config is refused in one line, without a traceback.
  run = Run(tmp_path, stopped, '--config.seed=4')
  assert run.finish() == 1
  assert 'seed: 3 -> 4' in run.output and 'Traceback' not in run.output


@pytest.mark.slow
def test_of_two_runs_in_one_workdir_one_ends(tmp_path):
  both = tmp_path / 'both'
  first, second = (Run(tmp_path, both) for _ in range(2))
  codes = sorted([first.finish(), second.finish()])
  assert codes == [0, 1], first.output + second.output
  outputs = first.output + second.output
  assert outputs.count('is already running as process') == 1
  assert not difference(undisturbed(), both)


@pytest.mark.slow
def test_quickstart(tmp_path):
  flags = f'--workdir={tmp_path}', '--config=configs/quickstart.py:tiny'

  def run():
    done = python('-m', 'vit_jax.main', *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((tmp_path / 'table.json').read_text())

  out, table = run()
  assert 'pos_embedding 1x4x4x96 resized to 1x6x6x96 (paper)' in out
  # Raw pixels need no training, so that this number is the real one.
  pixels = table['linear on raw pixels']['5 per class']
  assert len(pixels['values']) == 3 and 0.75 < pixels['mean'] < 0.9
  assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
  for name in ('pretrain', 'finetune_seed0'):
    for file in ('config.json', 'environment.json', 'model.json'):
      json.loads((tmp_path / name / file).read_text())
  again, same = run()  # nothing left to do but the report
  assert '1/6 pretrain' not in again and same == table
