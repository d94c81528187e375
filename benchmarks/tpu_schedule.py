"""Where a TPU's step spends its cycles, by three measures of the compiler.

  python benchmarks/tpu_schedule.py configs/pretrain_paper.py:jft,B/16 v6e:2x2

Mcycles of the 40 longest operations: the estimate that tools.compile adds up;
the schedule, instructions of the final program times its loops; and the time of
the bytes that it moves to and from HBM, at the data sheet's rate. `longer` is
the longer of the last two, which a chip takes at least. More words are
KEY=VALUE of the config. No TPU is needed, only pip install -e '.[tpu]'.
"""

import collections
import os
import pathlib
import re
import sys
import tempfile

import jax

from vit_jax import config as configs
from vit_jax.analysis import chips
from vit_jax.tools.compile import hlo, lowering

_LINE = re.compile(r'\s*(0x[\da-f]+|\d+) +(?:L[BHE]|P[BF]|CT)?\s*: ')
_EXIT = re.compile(r', (\d+) /\* loop exit test')
_WINDOW = re.compile(r'"window_config":\{.*?\}')


def schedule(text: str) -> float:
  """Return the cycles of an operation's final program: one per instruction."""
  lines, begins = list[str](), dict[str, int]()
  for line in text.splitlines():
    if _LINE.match(line):
      lines.append(line)
    elif lines:
      lines[-1] += line
  runs = [1.0] * len(lines)
  for i, line in enumerate(lines):
    for region in re.findall(r'Start(?:/End empty)? region (\d+)', line):
      begins.setdefault(region, i)
    for region in re.findall(r'sbr\.rel .*? target = \$region(\d+)', line):
      begin = begins.get(region, i + 1)
      exits = _EXIT.findall('\n'.join(lines[begin : i + 1]))
      if begin <= i and exits:  # jumps back
        runs[begin : i + 1] = [n * int(exits[-1]) for n in runs[begin : i + 1]]
  return sum(runs)


def hbm_bytes(shape: str) -> int:
  """Return the bytes of the arrays of a shape that are not kept on chip."""
  arrays = re.findall(r'\w+\[[\d,]*\](?:\{[^}]*\})?', shape)
  return sum(hlo.num_bytes(x) for x in arrays if not re.search(r'S\(\d\)', x))


def main():
  if len(sys.argv) < 3:
    sys.exit(__doc__)
  _, path, topology, *assignments = sys.argv
  jax.config.update('jax_platforms', 'cpu')
  config = configs.load(path)
  configs.override(config, assignments)
  with tempfile.TemporaryDirectory() as folder:
    os.environ['LIBTPU_INIT_ARGS'] = (
      f'--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true '
      '--xla_jf_dump_llo_pass_label_regex=^final_bundles'
    )
    lowered, row = lowering.lower(config, lowering.find_devices(topology))
    module, entry = hlo.parse(lowered.compile().as_text())
    end = '-01-final_bundles.txt'
    files = pathlib.Path(folder).glob(f'*{end}')
    programs = {x.name.removesuffix(end).partition('-')[2]: x for x in files}
    chip = chips.find(row['device_kind'])
    executed = [x for x in hlo.executed(module, entry) if not x[3]]
    # The compiler makes one program for all equal operations.
    schedules = {
      _key(each): schedule(programs[each.name].read_text())
      for _, each, *_ in executed
      if each.name in programs
    }
  found = collections.defaultdict(lambda: [0.0] * 4)
  for times, each, computation, _ in executed:
    estimated = each.cycles or 0
    scheduled = schedules.get(_key(each), estimated)
    if not scheduled:
      continue
    read = [computation[x].shape for x in each.operands if x in computation]
    moved = sum(map(hbm_bytes, [each.shape, *read]))
    moved *= chip.clock_ghz / chip.hbm_gb_s
    numbers = estimated, scheduled, moved, max(scheduled, moved)
    shape = re.sub(r'\{[^}]*\}', '', each.shape)
    key = ' '.join([*hlo.where(each), shape])
    found[key] = [x + times * y for x, y in zip(found[key], numbers)]
  columns = 'estimate', 'schedule', 'bytes', 'longer'
  ranked = sorted(found.items(), key=lambda x: -x[1][3])
  totals = [sum(x) for x in zip(*found.values())]
  lines = [('all', totals), *ranked[:40]]
  print(f'Mcycles, {row["device_kind"]}', *columns, sep='\t')
  for key, numbers in lines:
    print(*(f'{x / 1e6:8.2f}' for x in numbers), key[:150])


def _key(instruction):
  window = _WINDOW.search(instruction.attributes)
  tiles = window and re.sub(r'"estimated_cycles":"\d+"', '', window[0])
  if instruction.op == 'custom-call':
    tiles = hlo.where(instruction)[0]
  return instruction.op, re.sub(r'S\(\d\)', '', instruction.shape), tiles


if __name__ == '__main__':
  main()
