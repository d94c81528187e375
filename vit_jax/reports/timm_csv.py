"""Results of an evaluation as CSV, with the columns of timm's validate.py."""

import csv
import io
import math
import re
from collections.abc import Mapping
from typing import Any

import jax

from vit_jax.data import transforms as image_transforms
from vit_jax.runs.files import PathLike, write_atomically
from vit_jax.types import Model, Params, Shape


def name(path: PathLike | None, model: Model) -> str:
  """Return the name of the weights: their folder or file, or the class."""
  parts = [part for part in str(path or '').split('/') if part]
  if parts and parts[-1] == 'model.safetensors':
    parts.pop()
  if not parts:
    return type(model).__name__
  return re.sub(r'\.(npz|safetensors)$', '', parts[-1])


def row(
  model_name: str,
  found: Mapping[str, float],
  params: Params,
  evaluator: Any,
  image_shape: Shape,
) -> dict[str, str]:
  """Return {column: text} of one model, as timm's validate.py writes them."""
  top1, top5 = (100 * found[k] for k in ('accuracy', 'top5_accuracy'))
  count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
  # Each of five crops, see evals/views.py, is as large as one at the centre.
  crops = [
    image_transforms.CentralCrop(view.size)
    for view in getattr(evaluator, 'views', ())
    if hasattr(view, 'size')
  ]
  transforms = [*getattr(evaluator, 'transforms', ()), *crops]
  size, crop, interpolation = _view(transforms, image_shape)
  return {
    'model': model_name,
    'top1': f'{top1:.3f}',
    'top1_err': f'{100 - top1:.3f}',
    'top5': f'{top5:.3f}',
    'top5_err': f'{100 - top5:.3f}',
    'param_count': f'{count / 1e6:.2f}',
    'img_size': str(size[0]) if size[0] == size[1] else f'{size[0]}x{size[1]}',
    'crop_pct': f'{crop:.3f}',
    'interpolation': interpolation,
  }


def _view(transforms, image_shape):
  """Return (height, width), the fraction a crop keeps, and interpolation."""
  size, kept, interpolation = tuple(image_shape[:2]), 1.0, ''
  for t in transforms:
    if isinstance(t, image_transforms.CentralCrop):
      kept, size = min(t.size) / min(size), t.size
    elif isinstance(t, image_transforms.Resize):
      kept, size, interpolation = 1.0, t.size, t.interpolation
    elif isinstance(t, image_transforms.ResizeSmall):
      kept, size, interpolation = 1.0, (t.size, t.size), t.interpolation
  return size, kept, interpolation


def write(path: PathLike, values: Mapping[str, str]) -> None:
  """Write a CSV file with one row, {column: text}."""
  text = io.StringIO()
  writer = csv.DictWriter(text, values, lineterminator='\n')
  writer.writeheader()
  writer.writerow(values)
  write_atomically(path, text.getvalue())
