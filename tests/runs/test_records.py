"""Records of a run: damaged lines, values that JSON lacks, failing writers."""

import json

import numpy as np
import pytest

from vit_jax.runs.records import OF_A_RUN, Writer, read_kinds, read_records
from vit_jax.types import UserError


def test_a_writer_without_start_appends(tmp_path):
  for value in (1.0, np.float32('inf'), np.int64(3)):
    writer = Writer(tmp_path)
    writer.write(5, {'test/accuracy': value})
    writer.close()
  found = [r['test/accuracy'] for r in read_records(tmp_path)]
  assert found == [1.0, float('inf'), 3]
  lines = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  assert json.loads(lines[0])['time'].endswith('+00:00')
  assert json.loads(lines[1])['test/accuracy'] == 'Infinity'
  assert read_records(tmp_path / 'nowhere') == []


@pytest.mark.parametrize(
  'kinds', [b'', b'{"a"', b'[]', b'{"a": 3}', b'{"a": {"b": 1}}', b'\xff']
)
def test_damaged_files_of_metrics(kinds, tmp_path, capsys):
  """Whole records are kept; kinds.json is written again."""
  lines = b'{"step": 1, "a": "NaN"}\n3\n[]\n{"a": 1}\n{"step": "x"}\n\xff\n\n'
  lines += b'{"step": 1, "a": null}\n{"step": 2, "b": 3}'
  (tmp_path / 'metrics.jsonl').write_bytes(lines)
  (tmp_path / 'kinds.json').write_bytes(kinds)
  with pytest.raises(UserError, match=r'kinds\.json'):
    read_kinds(tmp_path)
  Writer(tmp_path, 2).close()
  (said,) = capsys.readouterr().out.splitlines()
  assert said.endswith('metrics.jsonl: 7 damaged lines were left out.')
  assert read_kinds(tmp_path) == OF_A_RUN
  first, second = read_records(tmp_path)
  assert np.isnan(first['a']) and second == {'step': 2, 'b': 3}


class Failing:
  """A writer without the optional methods, which cannot reach its server."""

  def write(self, step, values):
    raise ConnectionError('no route')


def test_a_writer_that_fails_does_not_stop_the_run(tmp_path, capsys):
  writer = Writer(tmp_path, writers={'mine': Failing()})
  for step in (1, 2):
    writer.write(step, {'loss': 0.5})
  writer.close()
  (said,) = capsys.readouterr().err.splitlines()
  assert said.startswith('writers.mine failed: ConnectionError: no route. The')
  assert [r['step'] for r in read_records(tmp_path)] == [1, 2]
