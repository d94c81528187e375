"""Write one HTML file about a run or a study: WORKDIR/report.html

  python -m vit_jax.tools.report /tmp/quickstart

Runs and studies write it when they end; this command also makes it for runs
that are running, were stopped or diverged. For a study it also writes the page
of each run that has results.
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
  made = parsers.parser(__doc__, 'tools.report WORKDIR [--output=FILE]')
  made.add_argument('workdir', help='of a run or a study')
  made.add_argument('--output', help='instead of WORKDIR/report.html')
  return made


@terminal.one_message()
def main(argv: Sequence[str] | None = None) -> int:
  args = parser().parse_args(argv)
  # A training that is running may hold the accelerator.
  jax.config.update('jax_platforms', 'cpu')
  found = Workdir(args.workdir)
  for run in found.runs() if found.is_study else []:
    if run.records:
      page.write(run.path)
  path = page.write(args.workdir, args.output)
  print(path)
  return 0


if __name__ == '__main__':
  sys.exit(main())
