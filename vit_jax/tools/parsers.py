"""Argument parser of the tools; it imports the standard library only."""

import argparse
from typing import Any


def parser(doc: str | None, usage: str) -> argparse.ArgumentParser:
  """Return an ArgumentParser; `usage` is what follows `python -m vit_jax.`."""
  return argparse.ArgumentParser(
    prog=f'python -m vit_jax.{usage.split()[0]}',
    usage=f'python -m vit_jax.{usage} (--help explains it)',
    description=doc,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )


def count(text: str) -> int:
  """Return an int of at least 1; for `type` of arguments."""
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'{text!r} is not an integer from 1 up')
  return int(text)


def add_counts(group: Any, **counts: tuple[int | None, str]) -> None:
  """Add an argument --NAME=N for each NAME=(default, help)."""
  for name, (default, what) in counts.items():
    help = what if default is None else f'{what} ({default})'
    group.add_argument(
      f'--{name}', type=count, default=default, metavar='N', help=help
    )
