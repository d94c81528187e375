"""Command `python -m tests.faults`: inject faults, print the losses."""

import argparse
import sys

from . import harness
from .catalogue import FAULTS


def main() -> int:
  parser = argparse.ArgumentParser(prog='python -m tests.faults')
  parser.add_argument('names', nargs='*', help='faults; all by default')
  parser.add_argument('--list', action='store_true', help='list the names')
  parser.add_argument(
    '--scale', type=float, default=1.0, help='factor for numbers of injections'
  )
  parser.add_argument(
    '--messages',
    action='store_true',
    help='also print the messages to the user',
  )
  options = parser.parse_args()
  if unknown := set(options.names) - set(FAULTS):
    parser.error(
      f'no fault {", ".join(unknown)}. There are {", ".join(FAULTS)}'
    )
  if options.list:
    for name, fault in FAULTS.items():
      print(f'{name}: {fault.title} ({fault.times:,} times)')
    return 0
  names = options.names or list(FAULTS)
  rows = []
  for number, name in enumerate(names, 1):
    fault = FAULTS[name]
    times = max(1, round(fault.times * options.scale))
    print(f'{number}/{len(names)} {name} ...', file=sys.stderr, flush=True)
    row = harness.run(fault, times)
    rows.append(row)
    count = f'{row.survived:,} of {len(row.injected):,} survived'
    shown = ', '.join(
      filter(None, [count, row.skipped, f'{row.seconds:.0f} s'])
    )
    print(f'  {shown}', file=sys.stderr, flush=True)
  print(harness.markdown(rows))
  if options.messages:
    for row in rows:
      print(f'\n{row.fault.title}')
      for message in dict.fromkeys(c.message for c in row.cases if c.message):
        print(f'\n{message}')
  return int(any(row.lost for row in rows))


if __name__ == '__main__':
  sys.exit(main())
