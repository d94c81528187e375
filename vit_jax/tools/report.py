"""Write one HTML file about a run or a study, or to compare several runs

  python -m vit_jax.tools.report /tmp/quickstart
  python -m vit_jax.tools.report /tmp/first /tmp/second

Runs and studies write it when they end; this command also makes it before, or
after a failure. For a study it also writes the pages of runs with results.
"""

import argparse
import sys
from collections.abc import Sequence

import jax

from vit_jax.io import terminal
from vit_jax.reports import page
from vit_jax.reports.workdir import Workdir
from vit_jax.tools import parsers


def parser() -> argparse.ArgumentParser:
  made = parsers.parser(__doc__, 'tools.report WORKDIR ... [--output=FILE]')
  made.add_argument('workdir', nargs='+', help='of a run or a study')
  made.add_argument('--output', help='instead of report.html, compare.html')
  return made


@terminal.one_message()
def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_args(argv)
  # A training that is running may hold the accelerator.
  jax.config.update('jax_platforms', 'cpu')
  if len(args.workdir) > 1:
    print(page.compare(args.workdir, args.output))
    return
  found = Workdir(args.workdir[0])
  for run in found.runs() if found.is_study else []:
    if run.records:
      page.write(run.path)
  print(page.write(found.path, args.output))
  if found.step == found.total_steps and not found.is_ended:
    again = 'Run the same command again'
    print(f'{again}: it ended before its last files.', file=sys.stderr)


if __name__ == '__main__':
  main()
