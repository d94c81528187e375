"""Published weights, or your own, as a model and its parameters.

    model, params = pretrained.load('B_16.npz', image_size=384, num_classes=10)
    logits = model.apply({'params': params}, images)  # [B, H, W, 3] in [-1, 1]

weights/formats.py lists the supported files. TensorFlow and PyTorch are never
needed, and nothing in a file is executed.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax import tree
from vit_jax.files import PathLike
from vit_jax.models.common import as_pair
from vit_jax.types import Model, Params, Shape, Size
from vit_jax.weights import bundle, formats, surgery
from vit_jax.weights.bundle import Weights


def load(
  path: PathLike,
  *,
  image_size: Size | None = None,
  num_classes: int | None = None,
  posemb_resize: str = 'paper',
  patch_size: Size | None = None,
  patch_resize: str = 'bicubic_antialias',
  in_chans: int | None = None,
  head: str = 'keep',
  step: int | None = None,
  ema: bool | str = 'auto',
  trust: Sequence[str] = (),
  report: Callable[[str], Any] | None = print,
  **options: Any,
) -> tuple[Model, Params]:
  """Return the model and the parameters of a weights file or a workdir.

  The architecture is read off the file. `bundle.infer` lists what files do not
  contain, and the defaults. The GELU is 'tanh' for .npz and 'exact' for timm
  unless config.json says otherwise; images of a model without a table of
  positions have 224 pixels per side.

  Args:
    path: file or folder, local or remote, see weights/formats.py.
    image_size: int or (H, W) to use the model with; position tables are
      resized. None: the size it was trained for.
    num_classes: None: the file's head. Another number: a new head of zeros,
      without the tanh layer before it, as in the paper's fine-tuning. 0: no
      head.
    posemb_resize: method for position tables: 'paper', 'bilinear' or
      'bicubic_antialias', see `models.resample.resize`.
    patch_size: int or (height, width) that patches are resized to.
    patch_resize: method for patches, see `models.resample.resize_kernel`.
    in_chans: number of image channels, if not the file's.
    head: 'reset': a new head of zeros with as many classes as the file's.
    step, ema: of a workdir: which checkpoint; whether the EMA of the
      parameters (True, False, or 'auto': if there is one).
    trust: packages whose classes the file may name, for models and transforms
      of your own: ('my_package',).
    report: called with a text that lists what was read, left out, resized and
      newly initialised; None: no report.
    **options: grid=(rows, columns) of the file's patches if they are not a
      square; and fields of the model, for what the file does not contain
      (num_heads, gelu='tanh', ...) or how to run it (dtype, scan, ...).

  Returns:
    (model, params): model.apply({'params': params}, images) takes float images
    [B, H, W, C] in [-1, 1] (the output of `formats.read(path).preprocess`) and
    returns float32 logits [B, K]. params are on the default device.

  Raises:
    ValueError: the file is missing, broken, a pickle or of an unknown format;
      or arrays are missing, unexpected or of another shape (lists all).
  """
  weights = formats.read(path, step=step, ema=ema, trust=trust, **options)
  weights, changes = fit(
    weights,
    image_size=image_size,
    num_classes=num_classes,
    posemb_resize=posemb_resize,
    patch_size=patch_size,
    patch_resize=patch_resize,
    in_chans=in_chans,
    head=head,
  )
  if report is not None:
    report(f'{weights.origin}: {changes}')
  return build(weights)


def build(weights: Weights) -> tuple[Any, dict[str, Any]]:
  """Return (model, nested parameters on the default device)."""
  model, params = weights.model, weights.params
  if getattr(model, 'scan', False) and isinstance(model, bundle.MODELS):
    params = tree.stack_blocks(params)
  return model, tree.unflatten(jax.device_put(params))


def fit(
  weights: Weights,
  *,
  image_size: Size | None = None,
  num_classes: int | None = None,
  posemb_resize: str = 'paper',
  patch_size: Size | None = None,
  patch_resize: str = 'bicubic_antialias',
  in_chans: int | None = None,
  head: str = 'keep',
) -> tuple[Weights, surgery.Report]:
  """Return (Weights, surgery.Report) for another use; arguments as of `load`.

  Sizes in the transforms change in proportion.

  Raises:
    ValueError: the model cannot be used so.
  """
  model, old_shape = weights.model, weights.image_shape
  size = old_shape[:2] if image_size is None else as_pair(image_size)
  shape = (*size, in_chans or old_shape[2])
  old_classes = model.num_classes or 0
  classes = old_classes if num_classes is None else num_classes
  if classes and classes != old_classes:
    head = 'reset'
  changes = {'num_classes': classes or None}
  if patch_size is not None:
    changes['patch_size'] = patch_size
  if head == 'reset' and hasattr(model, 'head'):
    changes['representation_size'] = None
  model = bundle.replace(model, **changes)
  params, names = dict(weights.params), weights.class_names
  if not classes or head == 'reset':
    names = None
  dropped = {}
  if not classes:
    dropped = {p: v for p, v in params.items() if p.startswith('head/')}
    params = {p: v for p, v in params.items() if p not in dropped}
  params, report = surgery.adapt(
    params,
    bundle.shapes(model, shape),
    model,
    head=head,
    posemb_resize=posemb_resize,
    patch_resize=patch_resize,
    adapt_channels=True,
  )
  report.notes += [f'  {p} dropped' for p in dropped] + weights.notes
  bias = getattr(getattr(model, 'head', None), 'bias_init', 0.0)
  made = dataclasses.replace(
    weights,
    model=model,
    params={path: _filled(path, v, bias) for path, v in params.items()},
    image_shape=shape,
    transforms=scale(weights.transforms, old_shape, shape),
    class_names=names,
    notes=[],
  )
  return made, report


def _filled(path, value, bias):
  """Return the array; for a newly initialised head, zeros and the bias."""
  if isinstance(value, np.ndarray):
    return value
  fill = bias if path.endswith('/bias') else 0.0
  return np.full(value.shape, fill, value.dtype)


def scale(transforms: Sequence[Any], old: Shape, new: Shape) -> tuple[Any, ...]:
  """Return transforms for images of another size.

  'Resize to 256, crop to 224' becomes 'resize to 439, crop to 384', so the
  same part of the image is used. A shorter side (ResizeSmall) grows with the
  larger side of the image, so that it can still be cropped.

  Args:
    transforms: those with a field `size` in pixels are changed.
    old, new: (H, W), or more.
  """
  old, new = tuple(old[:2]), tuple(new[:2])

  def scaled(transform):
    size = getattr(transform, 'size', None)
    if old == new or size is None:
      return transform
    if isinstance(size, int):
      size = round(size * max(new) / max(old))
    else:
      size = tuple(round(s * n / o) for s, n, o in zip(size, new, old))
    return dataclasses.replace(transform, size=size)

  return tuple(scaled(transform) for transform in transforms)
