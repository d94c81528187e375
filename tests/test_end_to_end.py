"""The quickstart in miniature, as its user runs it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def _run(workdir):
  return subprocess.run(
    [
      *(sys.executable, '-m', 'vit_jax.main', f'--workdir={workdir}'),
      '--config=configs/quickstart.py:tiny',
    ],
    cwd=ROOT,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
  )


@pytest.mark.slow
def test_quickstart(tmp_path):
  done = _run(tmp_path)
  assert done.returncode == 0, done.stderr
  assert 'pos_embedding 1x6x6x96 resized to 1x8x8x96 (paper)' in done.stdout
  table = json.loads((tmp_path / 'table.json').read_text())
  # Raw pixels need no training, so that this number is the real one.
  pixels = table['linear on raw pixels']['5 per class']
  assert len(pixels['values']) == 3
  assert 0.75 < pixels['mean'] < 0.9
  assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
  for name in ('pretrain', 'finetune_5shot_seed0'):
    for file in ('config.json', 'environment.json', 'model.json'):
      json.loads((tmp_path / name / file).read_text())
  events = list((tmp_path / 'pretrain').glob('events.out.tfevents.*'))
  assert events and events[0].stat().st_size > 100

  again = _run(tmp_path)  # nothing left to do but the report
  assert again.returncode == 0, again.stderr
  assert '1/6 pretrain' not in again.stdout
  assert json.loads((tmp_path / 'table.json').read_text()) == table
