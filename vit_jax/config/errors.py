"""The error of configs, and suggestions for misspelt words."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
  """A config that cannot be used as it is."""


def suggest(word: str, words: Iterable[str]) -> str:
  """Return ' (did you mean ...?)' for the most similar word, or ''."""
  near = difflib.get_close_matches(str(word), words, n=1)
  return f' (did you mean {near[0]!r}?)' if near else ''
