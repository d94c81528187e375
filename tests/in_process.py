"""Command-line tools that run in the process of the test."""


def call(tool, *arguments):
  """Run a tool; return the status or message it exits with, or None."""
  try:
    tool.main([str(x) for x in arguments])
  except SystemExit as end:
    return end.code
