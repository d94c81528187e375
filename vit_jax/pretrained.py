"""Published weights, or your own, as a model and its parameters.

    model, params = pretrained.load('B_16.npz', image_size=384, num_classes=10)
    logits = model.apply({'params': params}, images)  # [B, H, W, 3] in [-1, 1]

weights/formats.py lists the supported files. Its `read(path)` also has their
class_names, transforms and preprocess; `tools.predict.predict` uses them all.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from vit_jax import types
from vit_jax.data.images import Colours
from vit_jax.data.targets import Classes
from vit_jax.data.transforms import (
  Bounds,
  FlipLR,
  Interpolation,
  Transform,
  antialiased,
  scale,
)
from vit_jax.models import flexi
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.pooling import ClassToken, Mean, NoPooling
from vit_jax.models.vit import as_pair
from vit_jax.weights import bundle, formats, surgery
from vit_jax.weights.bundle import Weights, build
from vit_jax.weights.surgery import InitFrom


def load(
  path: types.PathLike,
  *,
  image_size: types.Size | None = None,
  num_classes: int | None = None,
  report: Callable[[str], Any] | None = print,
  **options: Any,
) -> tuple[types.Model, types.Params]:
  """Return the model and the parameters of a weights file or a workdir.

  The model takes the output of `formats.read(path).preprocess` and returns
  float32 logits [B, K]. The parameters are on the default device.

  The GELU is 'tanh' for .npz and 'exact' for timm unless config.json says
  otherwise; images of a model without a position table have 224 x 224 pixels.

  Args:
    path: file or folder, local or remote, see weights/formats.py.
    image_size, num_classes: to use the model with, see `fit`.
    report: called with the changes of the parameters in words; or None.
    **options: more arguments of `fit` (patch_size, in_chans, ...) and
      `formats.read` (step, ema, trust, grid, prefix); and fields of the model,
      for what the file does not contain (num_heads, 'block.mlp', ...) or how to
      run it (dtype, scan, ...), as in `bundle.replace`.
  """
  names = options.keys() & inspect.signature(fit).parameters.keys()
  use = {name: options.pop(name) for name in names}
  options |= {'use_size': image_size, 'new_head': num_classes is not None}
  weights = formats.read(path, **options)
  weights, changes = fit(
    weights, image_size=image_size, num_classes=num_classes, **use
  )
  if report is not None:
    report(f'{weights.origin}: {changes}')
  return build(weights)


def fit(
  weights: Weights,
  *,
  image_size: types.Size | None = None,
  num_classes: int | None = None,
  patch_size: types.Size | None = None,
  in_chans: int | None = None,
  head: Literal['keep', 'reset'] = 'keep',
) -> tuple[Weights, str]:
  """Return (Weights, report) for another use.

  Args:
    image_size: int or (H, W); position tables and transforms are resized, too.
    num_classes: None: the head of the weights; 0: none. Another number: a new
      head of zeros, without a tanh layer, as in the paper's fine-tuning.
    patch_size: int or (height, width) that patches are resized to, as by the
      code of the weights; those of models/flexi.py then have this size only.
    in_chans: number of image channels.
    head: 'reset': a new head of zeros with as many classes.
  """
  model, old_shape = weights.model, weights.image_shape
  size = old_shape[:2] if image_size is None else as_pair(image_size)
  shape = (*size, in_chans or old_shape[2])
  classes = model.num_classes if num_classes is None else num_classes
  changes: dict[str, Any] = {'num_classes': classes or None}
  patch_resize: Any = None
  if patch_size is not None:
    model, patch_resize = flexi.fixed(model, weights.patch_resize)
    changes['embedding.patch_size'] = patch_size
  if head == 'reset' or classes != model.num_classes or not classes:
    head = 'reset'
    if classes and hasattr(model, 'head'):
      changes['head'] = model.head.new()
  model = bundle.replace(model, **changes)
  rule = surgery.HEAD if classes else 'head/.*'
  resize: dict[str, Any] = {'patch_resize': patch_resize}
  how = InitFrom('', head=head, head_rule=rule, adapt_channels=True, **resize)
  shapes = bundle.shapes(model, shape)
  params, report = surgery.adapt(weights.params, shapes, model, how)
  bias = getattr(getattr(model, 'head', None), 'bias_init', 0.0)
  for path, value in params.items():
    if not isinstance(value, np.ndarray):  # of the new head
      fill = bias if path.endswith('/bias') else 0.0
      params[path] = np.full(value.shape, fill, value.dtype)
  resized = scale(weights.transforms, size, old=old_shape)
  fields: Any = {'image_shape': shape, 'transforms': resized, 'notes': []}
  made = dataclasses.replace(weights, model=model, params=params, **fields)
  if head == 'reset':
    made.class_names, made.activation, made.targets = None, 'softmax', Classes()
  return made, '\n'.join(report + weights.notes)


# Fine-tuning: what a training run takes from the weights that it starts from.


def from_weights(
  init_from: InitFrom | None, keep_aspect: bool = False, **fields: Any
) -> types.Model:
  """Return the model of weights as it is fine-tuned.

  By default there is no dropout, no stochastic depth and no remat; the head has
  a new number of classes and no tanh layer, unless init_from.head is 'keep'. A
  workdir says the dtype; published files do not and compute in bfloat16. The
  model of masked patches gets a pooling: its class token, or else the mean over
  patches. With `keep_aspect` it takes the images of `keep_aspect`. **fields are
  other fields, as in `bundle.replace`.
  """
  weights = _describe(init_from)
  if keep_aspect:
    weights = bundle.keep_aspect(weights)
  model = weights.model
  changes: dict[str, Any] = {
    **{'dropout': 0.0, 'stochastic_depth': 0.0, 'remat': 'none'},
    **{'block.attention_dropout': 0.0, 'embedding.mask_token': False},
    'attention': 'auto',
  }
  if not weights.is_described:
    changes['dtype'] = 'bfloat16'
  if init_from is None or init_from.head != 'keep':
    changes['num_classes'] = None
    if hasattr(model, 'head'):
      changes |= {'head': model.head.new(), 'head.bias_init': 0.0}
  pooling = getattr(model, 'pooling', None)
  if isinstance(pooling, NoPooling):
    new = ClassToken if pooling.class_token else Mean
    changes['pooling'] = new(num_registers=pooling.num_registers)
  changes = {
    k: x for k, x in changes.items() if hasattr(model, k.partition('.')[0])
  }
  return bundle.replace(bundle.replace(model, **changes), **fields)


def finetuning_size(init_from: InitFrom | None) -> types.ComputedSize:
  """Return the image size (H, W) at which weights are fine-tuned by default.

  Weights of 224 px get 384 px, and 518 px with patches of 14, as in the paper.
  Smaller weights grow by the same factor (24 px to 40 px with patches of 4),
  larger ones up to these sizes. Weights of these sizes keep theirs, and Mixers
  cannot change it. The patches tile the image.
  """
  weights = _describe(init_from)
  model, old = weights.model, weights.image_shape[:2]
  if isinstance(model, MlpMixer):
    return old
  embedding: Any = getattr(model, 'embedding', None)
  patch = getattr(embedding, 'patch_size', None)
  usual = 518 if patch and as_pair(patch)[0] == 14 else 384
  height, width = (min(n * usual / 224, max(n, usual)) for n in old)
  if embedding is None:
    return round(height), round(width)
  rows, columns = embedding.grid(old)
  grid = round(rows * height / old[0]), round(columns * width / old[1])
  return embedding.image_size(grid)


def transforms(init_from: InitFrom | None) -> tuple[Transform, ...]:
  """Return the transforms of test images for these weights."""
  return _describe(init_from).transforms


def keep_aspect(
  init_from: InitFrom | None,
  max_patches: types.Count,
  area: Bounds | None = None,
) -> tuple[Transform, ...]:
  """Return KeepAspect for these weights; with `area`, after random flips."""
  keep: Any
  (keep,) = bundle.keep_aspect(_describe(init_from), max_patches).transforms
  return (FlipLR(), dataclasses.replace(keep, area=area)) if area else (keep,)


def interpolation(init_from: InitFrom | None) -> Interpolation:
  """Return the interpolation of these weights' images, with antialiasing."""
  return antialiased(transforms(init_from))


def preprocess(init_from: InitFrom | None) -> types.Preprocess:
  """Return the function that converts uint8 images for these weights."""
  return _describe(init_from).preprocess


def decode(init_from: InitFrom | None) -> types.Decode | None:
  """Return what decodes rasters for these weights; None: files of colours."""
  if init_from is None or init_from.path is None:  # another part says it
    return None
  found = _describe(init_from).decode
  return None if isinstance(found, Colours) else found


def _describe(init_from):
  if init_from is None:
    raise types.UserError(
      'The model is taken from init_from, which is None. Set '
      '--config.init_from.path=PATH, or name a model in the argument of the '
      'config, such as B/16.'
    )
  return surgery.read(init_from, values=False)
