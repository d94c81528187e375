"""Files as the authors of a model publish them, converted to safetensors.

They have no config: names of arrays say what they are. Such files are only
read.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from vit_jax.types import FlatParams
from vit_jax.weights import family
from vit_jax.weights.bundle import Weights
from vit_jax.weights.families import dinov2

FAMILIES = (  # the first that fits counts
  *dinov2.ORIGINAL,
)


def recognise(names: Iterable[str]) -> bool:
  """Return whether arrays of these names are such a file."""
  return family.recognise(FAMILIES, names)


def read(
  arrays: FlatParams,
  config: Mapping[str, Any] | None = None,
  **options: Any,
) -> Weights:
  """Return Weights of {name: array}; see `formats.read`. There is no config."""
  weights = family.read(FAMILIES, arrays, {}, name='original', **options)
  return dataclasses.replace(weights, origin='original')
