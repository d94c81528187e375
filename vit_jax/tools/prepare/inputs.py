"""The source that is prepared."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from vit_jax.data import fingerprints, sources
from vit_jax.data.views import Source


@dataclasses.dataclass
class Input:
  """A source by name, see `sources.open_source`.

  Attributes:
    text: the name.
    split: of the source; None to take the only one.
    options: more arguments of `open_source`.
    unpacked: not used.
  """

  text: str
  split: str | None
  options: Mapping[str, Any]
  unpacked: pathlib.Path

  is_compressed = False

  def open(self, split: str | None) -> Source:
    """Return the source.

    Args:
      split: taken if the source has splits and none is named.
    """
    options = dict(self.options)
    if self.split is not None:
      return sources.open_source(self.text, split=self.split, **options)
    try:
      return sources.open_source(self.text, **options)
    except ValueError as error:
      if split is None or 'split' not in str(error):
        raise
      return sources.open_source(self.text, split=split, **options)

  def fingerprint(self, source: Source) -> dict[str, Any]:
    """Return the fingerprint of the source."""
    return fingerprints.fingerprint(source)


def output_split(split: str | None, given: Input, source: Any) -> str:
  """Return the name of the prepared split: `split`, the source's, or train."""
  return split or given.split or getattr(source, 'split', None) or 'train'


def is_url(path: Any) -> bool:
  return '://' in str(path)
