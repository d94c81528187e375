"""Weights: a model, its parameters, and what is needed to use them.

All formats read to `Weights` and write from them. A model's parameters are
known from the model alone (`shapes`), by jax.eval_shape.
"""

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import config, tree
from vit_jax.data import images, rasters
from vit_jax.data.targets import Classes, Targets
from vit_jax.data.transforms import KeepAspect, Resize, antialiased
from vit_jax.models import posemb, resample
from vit_jax.models.dense import Normalize, Standardize
from vit_jax.models.flexi import FlexiPositions
from vit_jax.models.vit import Classifier
from vit_jax.types import Count, Expect, Model, Shape, Side, UserError

# Fields that change what a model does with its parameters; and fields of these
# that do not, or whose arrays are reported anyway.
_BEHAVIOUR = (
  *('embedding', 'posemb', 'pooling', 'pool_padding', 'block', 'form'),
  *('mlp', 'norm_eps'),
)
_NOT_SHOWN = (
  *('init_std', 'layerscale_init', 'attention_dropout', 'patch_size'),
  *('mask_token', 'resize_method', 'bias'),
)


@dataclasses.dataclass
class Weights:
  """A model and its parameters, and what is needed to use them.

  Attributes:
    model: Flax module, with its number of classes.
    params: {path: array}, layers unrolled ('block_0/...').
    image_shape: (H, W, C) that the model was last trained or used with; of
      images of any aspect ratio, the one with the grid of its positions.
    preprocess: converts images to the model's float images. None: Normalize(),
      and rasters stay as they are.
    transforms: convert a decoded image to one of image_shape, in order. None:
      resized as in the paper's code, without keeping the aspect ratio.
    decode: what decodes image files, see `data.images.Colours`, the default.
    class_names: names of the outputs, or None.
    activation: converts logits to probabilities, 'softmax' or 'sigmoid', or is
      'identity', for numbers.
    targets: kind of the labels that the model was trained on.
    thresholds: probabilities from which on labels are predicted, by name;
      those of others are 0.5.
    origin: text that says what was read.
    notes: what was assumed, and changes of the parameters except new names.
    step: training step, or 0.
    patch_resize: method that resizes patches, see `resample.resize_kernel`.
    is_described: whether model.json or the like says how it was run (dtype).
    keeps_aspect: whether the last transform is KeepAspect.
  """

  model: Annotated[Any, Expect(lambda m: hasattr(m, 'clone'), 'a Flax module')]
  params: dict[str, np.ndarray]
  image_shape: tuple[Side, Side, Count]
  preprocess: Callable[..., Any] = None  # type: ignore[assignment]
  transforms: tuple[Callable[..., Any], ...] = None  # type: ignore[assignment]
  decode: Any = None
  class_names: list[str] | None = None
  activation: Literal['softmax', 'sigmoid', 'identity'] = 'softmax'
  targets: Targets = Classes()
  thresholds: dict[str, float] = dataclasses.field(default_factory=dict)
  origin: str = ''
  notes: list[str] = dataclasses.field(default_factory=list)
  step: int = 0
  patch_resize: resample.Method = 'bicubic_antialias'
  is_described: bool = False

  def __post_init__(self) -> None:
    if self.transforms is None:
      self.transforms = (Resize(self.image_shape[:2]),)
    if self.decode is None or isinstance(self.decode, images.Colours):
      channels: Any = self.image_shape[2]
      kind = images.Colours if channels in (1, 3) else rasters.Raster
      self.decode = kind(channels)
    if self.preprocess is None:
      unknown = ((0.0, 1.0),) * self.image_shape[2]
      is_raster = self.decode.dtype != 'uint8'
      self.preprocess = Standardize(unknown) if is_raster else Normalize()
    last: Any = [None, *self.transforms][-1]
    self.keeps_aspect = isinstance(last, KeepAspect)
    if self.keeps_aspect:  # not the shape of patches side by side
      side = math.isqrt(last.max_patches)
      grid = getattr(self.model.posemb, 'stored', (side, side))
      size = self.model.embedding.image_size(grid)
      self.image_shape = (*size, self.image_shape[2])

  @property
  def grid(self) -> Any:
    """(rows, columns) of patches (hybrids: cells), or None without any."""
    embedding = getattr(self.model, 'embedding', None)
    return embedding and embedding.grid(self.image_shape)


def shapes(model: Model, image_shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
  """Return {path: ShapeDtypeStruct} of a model's parameters, layers unrolled.

  A model that cannot take such images raises UserError.
  """
  # Fields of your own model may not be hashable.
  trace: Any = _shapes if isinstance(model, Classifier) else _shapes.__wrapped__
  try:
    return trace(model, tuple(image_shape))
  except ValueError as e:  # patches do not tile the image, ...
    raise UserError(f'{e} (image_size={image_shape[:2]})') from e


@functools.lru_cache(maxsize=256)
def _shapes(model, image_shape):
  images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
  scans = isinstance(model, Classifier) and hasattr(model, 'scan')
  if scans:  # one layer is traced instead of all of them
    model = model.clone(scan=True)

  def init(images):
    params = tree.flatten(model.init(jax.random.key(0), images)['params'])
    return tree.unstack_blocks(params) if scans else params

  return jax.eval_shape(init, images)


def replace(model: Any, **fields: Any) -> Any:
  """Return a copy of a model with other fields.

  Names are those of fields of the model, 'pooling', or dotted paths of fields
  of its parts, 'pooling.norm' and 'block.mlp.form'; a dict has several fields
  of one part. None and False are ignored where a part lacks the field.
  """
  flat = {path: value for path, value in config.walk(fields) if path}
  changes: dict[str, Any] = {}
  for path in sorted(flat, key=lambda path: path.count('.')):
    name, _, rest = path.partition('.')
    if name not in _names(model):
      raise UserError(
        f'{type(model).__name__} has no field {path!r}{_suggest(path, model)}.'
      )
    old = changes.get(name, getattr(model, name))
    changes[name] = _changed(old, rest, flat[path], path)
  return model.clone(**changes)


def _changed(part, rest, value, path):
  """Return a part with another value at `rest`, the end of a path."""
  if not rest:
    return value
  name, _, rest = rest.partition('.')
  if name in _names(part):
    new = _changed(getattr(part, name), rest, value, path)
    return dataclasses.replace(part, **{name: new})
  if value and value != getattr(part, name, None):  # fixed, or off
    near = config.suggest(name, _names(part))
    raise UserError(f'{path}={value!r}: {part} has no field {name!r}{near}.')
  return part


def _names(part):
  """Return the names of the fields of a dataclass that can be set."""
  is_part = dataclasses.is_dataclass(part)
  return [x.name for x in dataclasses.fields(part) if x.init] if is_part else []


def _suggest(path, model):
  """Return ' (did you mean ...?)' for a field of a model or of its parts."""
  known = {name: name for name in (*_names(model), 'grid', 'image_size')}
  for part in _names(model):
    paths = {name: f'{part}.{name}' for name in _names(getattr(model, part))}
    known = paths | {x: x for x in paths.values()} | known
  near = difflib.get_close_matches(path, known, n=1)
  return f' (did you mean {known[near[0]]!r}?)' if near else ''


def from_fields(cls: Any, **fields: Any) -> Any:
  """Return a model of a class with the fields of `replace`."""
  top = {name: fields.pop(name) for name in _names(cls) if name in fields}
  return replace(cls(**top), **fields)


def differences(model: Any, other: Any) -> dict[str, tuple[Any, Any]]:
  """Return {field: values} of what two models do with the same parameters."""
  found, there = (_behaviour(x) for x in (model, other))
  return {
    name: (value, there[name])
    for name, value in found.items()
    if name in there and value != there[name]
  }


def _behaviour(model):
  out = {}
  for name in [name for name in _BEHAVIOUR if hasattr(model, name)]:
    part = getattr(model, name)
    if dataclasses.is_dataclass(part):
      for field in dataclasses.fields(part):
        if field.name not in _NOT_SHOWN:
          out[f'{name}.{field.name}'] = getattr(part, field.name)
      part = type(part).__name__
    out[name] = part
  return out


def with_table(weights: Weights) -> Weights:
  """Return equivalent Weights of a ViT whose positions are a table.

  The class token has a position, too.
  """
  model, params = weights.model, dict(weights.params)
  grid = weights.grid
  table = np.zeros((*grid, model.width), np.float32)
  if model.posemb is not None:
    table = model.posemb.table(params, grid, model.width)
  if table is None:
    raise UserError(f'posemb={model.posemb} acts in the layers.')
  if isinstance(model.posemb, FlexiPositions):
    table = resample.resize(table, grid, model.posemb.resize_method)
  params['pos_embedding'] = np.reshape(table, (1, *grid, model.width))
  if 'cls' in params:
    params.setdefault('cls_pos_embedding', np.zeros_like(params['cls']))
  positions = posemb.Learned()
  if type(model.posemb) is posemb.Learned:
    positions = dataclasses.replace(model.posemb, prefix=True)
  else:
    weights.notes.append('  positions written as a table, which is learned')
  model = model.clone(posemb=positions)
  return dataclasses.replace(weights, model=model, params=params)


def assume(weights: Weights, config: Any, names: Sequence[str]) -> Weights:
  """Return the Weights; note how images are converted if names are missing."""
  if missing := [name for name in names if config.get(name) is None]:
    weights.notes.append(
      f'  assumed without {", ".join(missing)}: images by '
      f'{weights.preprocess}, {weights.transforms}'
    )
  return weights


def check_names(names: Sequence[str] | None, count: int | None) -> None:
  """Raise UserError unless each output of a model has a name, or none has."""
  if names and len(names) != (count or 0):
    raise UserError(
      f'The model has num_classes={count}, and there are {len(names)} class '
      f'names, {names[0]!r} to {names[-1]!r}. Expected a name for each output: '
      'correct one of them, in training --config.model.num_classes.'
    )


def keep_aspect(weights: Weights, max_patches: int | None = None) -> Weights:
  """Return Weights for images of any aspect ratio, see KeepAspect.

  `max_patches` is by default the number of patches of images so far.
  """
  model, how = weights.model, antialiased(weights.transforms)
  if type(model.posemb) is posemb.Learned:
    table = FlexiPositions(prefix=model.posemb.prefix, stored=weights.grid)
    model = model.clone(posemb=table)
  count = max_patches or math.prod(weights.grid)
  keep = KeepAspect(model.embedding.patch_size, count, interpolation=how)
  return dataclasses.replace(weights, model=model, transforms=(keep,))


def squeeze(weights: Weights) -> Weights:
  """Return Weights for images of one shape; add a note if that changes any."""
  if not weights.keeps_aspect:
    return weights
  weights.notes.append('  images are resized without keeping the aspect ratio')
  plain = Resize(weights.image_shape[:2])
  return dataclasses.replace(weights, transforms=(plain,))


def build(weights: Weights) -> tuple[Any, dict[str, Any]]:
  """Return (model, nested parameters on the default device)."""
  model, params = weights.model, weights.params
  if isinstance(model, Classifier) and getattr(model, 'scan', False):
    params = tree.stack_blocks(params)
  return model, tree.unflatten(jax.device_put(params))
