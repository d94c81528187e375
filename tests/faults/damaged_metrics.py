"""Damage to the metrics.jsonl of a run between two starts."""

import json
import pathlib
import shutil
from collections.abc import Callable, Iterator

from .harness import Case, fault
from .runs import Run, records, steps, undisturbed


def _insert(line):
  """Return a function that inserts a line after the first one."""

  def damage(file):
    first, rest = file.read_bytes().split(b'\n', 1)
    file.write_bytes(b'\n'.join([first, line, rest]))

  return damage


def _folder(file):
  file.unlink()
  file.mkdir()


_DAMAGES: dict[str, Callable[[pathlib.Path], object]] = {
  'torn last line': lambda file: file.write_bytes(file.read_bytes()[:-30]),
  'garbage in the middle': _insert(b'\xff garbage {'),
  'NUL bytes at the end': lambda file: file.write_bytes(
    file.read_bytes() + bytes(4096)
  ),
  'a record without step': _insert(b'{"loss": 1}'),
  'bare NaN': _insert(b'{"step": 3, "x": NaN}'),
  'no newline at the end': lambda file: file.write_bytes(
    file.read_bytes()[:-1]
  ),
  'empty': lambda file: file.write_bytes(b''),
  'a folder': _folder,
}


# tests/test_records.py tests the other kinds of damage without a run.
@fault(times=8, in_ci=1)
def damaged_metrics(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Damaged metrics.jsonl, then the same command again."""
  killed = folder / 'killed'
  run = Run(folder, killed)
  run.wait_for(lambda: 20 in steps(killed))
  run.kill()
  for name, damage in list(_DAMAGES.items())[:times]:
    workdir = folder / name.replace(' ', '_')
    shutil.copytree(killed, workdir)
    damage(workdir / 'metrics.jsonl')
    run = Run(folder, workdir)
    status = run.finish()
    message = [x for x in run.output.splitlines() if 'metrics.jsonl' in x]
    if status:
      lost = f'the run ended: {run.output[-300:]}'
    else:
      lost = _lost(workdir, all_earlier=name in ('empty', 'a folder'))
    yield Case(name, lost, message[0] if message else '')


def _lost(workdir, *, all_earlier):
  """Return which records are missing or invalid; '' if none are."""
  expected, found = records(undisturbed()), records(workdir)
  found = [record for record in found if 'x' not in record]
  if all_earlier:  # the damage removed all earlier records
    expected = expected[len(expected) - len(found) :]
  if not found or found != expected:
    return f'{len(found)} of {len(expected)} records'
  for line in (workdir / 'metrics.jsonl').read_text().splitlines():
    json.loads(line, parse_constant=_refuse)
  return ''


def _refuse(constant):
  raise ValueError(f'{constant} is not JSON')
