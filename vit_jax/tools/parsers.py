"""Argument parser of the tools; it imports the standard library only."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
  """An ArgumentParser whose errors are one line, with the exit status 2."""

  def error(self, message: str) -> NoReturn:
    self.exit(2, f'{message}. Usage: {self.usage} (--help explains it)\n')


def parser(doc: str | None, usage: str) -> Parser:
  """Return a Parser.

  Args:
    doc: of the tool's module.
    usage: what follows `python -m vit_jax.`.
  """
  made = Parser(
    description=doc,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    usage=f'python -m vit_jax.{usage}',
  )
  # The same flag as in main, which has more to show.
  made.add_argument('--helpfull', action='help', help=argparse.SUPPRESS)
  return made


def natural(text: str) -> int:
  """Return an int of at least 0; for `type` of arguments."""
  if not text.isdecimal():
    raise argparse.ArgumentTypeError(f'{text!r} is not an integer from 0 up')
  return int(text)


def count(text: str) -> int:
  """Return an int of at least 1; for `type` of arguments."""
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'{text!r} is not an integer from 1 up')
  return int(text)
