"""Files as the authors of a model publish them, converted to safetensors.

They have no config but, perhaps, open_clip_config.json: names of arrays say
what they are. Such files are only read.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from vit_jax.types import FlatParams
from vit_jax.weights import family, timm
from vit_jax.weights.bundle import Weights
from vit_jax.weights.families import original_clip, original_vit

FAMILIES = (  # the first that fits counts
  *original_vit.ORIGINAL,
  *original_clip.ORIGINAL,
)


def recognise(names: Iterable[str]) -> bool:
  """Return whether arrays of these names are such a file."""
  names = set(names)  # timm's EVA has a mask vector, too, and lm_head
  return 'lm_head.weight' not in names and family.recognise(FAMILIES, names)


def read(
  arrays: FlatParams,
  config: Mapping[str, Any] | None = None,
  **options: Any,
) -> Weights:
  """Return Weights of {name: array}; see `formats.read`.

  The config is open_clip_config.json.
  """
  levels = [(config or {}).get(x, {}) for x in ('model_cfg', 'preprocess_cfg')]
  config = levels[0] | levels[1]
  found = family.find(FAMILIES, arrays, 'original')
  weights = family.read([found], arrays, config, name='original', **options)
  images = {**found.images, **config}
  use = timm.image_use(images, weights.image_shape, weights.notes)
  return dataclasses.replace(weights, origin='original', **use)
