"""Weights: a model, its parameters, and what is needed to use them.

All formats read to `Weights` and write from them. A model's parameters are
known from the model alone (`shapes`), by jax.eval_shape.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import config, tree
from vit_jax.data.transforms import Resize
from vit_jax.models.axial import AxialResNet, AxialViT
from vit_jax.models.layers import Normalize, PatchEmbedding
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.pooling import (
  ClassToken,
  DistillationToken,
  Map,
  Mean,
  NoPooling,
)
from vit_jax.models.posemb import Learned, Learned2d, Relative, SinCos2d
from vit_jax.models.resnet import Hybrid, ResNet
from vit_jax.models.vit import VisionTransformer
from vit_jax.types import Model, Shape, UserError

MODELS = (VisionTransformer, ResNet, MlpMixer, AxialViT, AxialResNet)
_OBJECTS: dict[str, dict[str, Any]] = {  # fields that `replace` takes as text
  'posemb': {
    'learned': Learned,
    'learned2d': Learned2d,
    'sincos2d': SinCos2d,
    'relative': Relative,
    'none': lambda: None,
  },
  'pooling': {
    'token': ClassToken,
    'distilled': DistillationToken,
    'gap': Mean,
    'map': Map,
    'none': NoPooling,
  },
}
_FIELDS = {  # short name: field of the model, field of that part
  'patch_size': ('embedding', 'patch_size'),
  'mask_token': ('embedding', 'mask_token'),
  'posemb_at': ('posemb', 'at'),
  'class_token': ('pooling', 'class_token'),
  'num_registers': ('pooling', 'num_registers'),
  'norm_after_pooling': ('pooling', 'norm_after'),
  'representation_size': ('head', 'representation_size'),
  'head_bias_init': ('head', 'bias_init'),
  'attention_dropout': ('block', 'attention_dropout'),
  'layerscale_init': ('block', 'layerscale_init'),
  'qk_norm': ('block', 'qk_norm'),
  'gelu': ('block', 'gelu'),
  'norm_eps': ('block', 'norm_eps'),
}


@dataclasses.dataclass
class Weights:
  """A model and its parameters, and what is needed to use them.

  Attributes:
    model: Flax module, with its number of classes.
    params: {path: array}, layers unrolled ('block_0/...').
    image_shape: (H, W, C) that the model was last trained or used with.
    preprocess: converts uint8 images to the model's float images.
    transforms: convert a decoded image to one of image_shape, in order. None:
      resized as in the paper's code, without keeping the aspect ratio.
    class_names: names of the outputs, or None.
    activation: converts logits to probabilities, 'softmax' or 'sigmoid'.
    origin: text that says what was read.
    notes: changes of the parameters other than renaming.
    step: training step, or 0.
    is_described: whether a description of this project, such as model.json,
      says how the model was run: dtype, dropout, ....
  """

  model: Any
  params: dict[str, np.ndarray]
  image_shape: tuple[int, int, int]
  preprocess: Any = dataclasses.field(default_factory=Normalize)
  transforms: tuple[Callable[..., Any], ...] = None  # type: ignore[assignment]
  class_names: list[str] | None = None
  activation: str = 'softmax'
  origin: str = ''
  notes: list[str] = dataclasses.field(default_factory=list)
  step: int = 0
  is_described: bool = False

  def __post_init__(self) -> None:
    if self.transforms is None:
      self.transforms = (Resize(self.image_shape[:2]),)


def shapes(model: Model, image_shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
  """Return {path: ShapeDtypeStruct} of a model's parameters, layers unrolled.

  Raises:
    ValueError: the model cannot take such images.
  """
  # Fields of your own model may not be hashable.
  trace: Any = _trace if isinstance(model, MODELS) else _trace.__wrapped__
  try:
    return trace(model, tuple(image_shape))
  except ValueError as e:  # patches do not tile the image, ...
    raise UserError(f'{e} (image_size={image_shape[:2]})') from e


@functools.lru_cache(maxsize=256)
def _trace(model, image_shape):
  images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
  scans = isinstance(model, MODELS) and hasattr(model, 'scan')
  if scans:  # one layer is traced instead of all of them
    model = model.clone(scan=True)
  made = jax.eval_shape(model.init, jax.random.key(0), images)
  out = {}
  for path, leaf in tree.flatten(made['params']).items():
    if scans and path.startswith('blocks/'):
      leaf = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
      rest = path.removeprefix('blocks/')
      out |= {f'block_{i}/{rest}': leaf for i in range(model.depth)}
    else:
      out[path] = leaf
  return out


def replace(model: Any, **fields: Any) -> Any:
  """Return a copy of a model with other fields.

  Args:
    model: Flax module.
    **fields: its fields; or short names of the fields of its parts: patch_size,
      mask_token, posemb and pooling as text ('learned', 'gap',
      ...), class_token, num_registers, norm_after_pooling, representation_size,
      layerscale_init, qk_norm, gelu, norm_eps, and others in _FIELDS.

  Raises:
    ValueError: there is no such field.
  """
  known = {f.name for f in dataclasses.fields(model)} - {'parent', 'name'}
  changes: dict[str, Any] = {}
  parts: dict[str, dict[str, Any]] = {}
  for name, value in fields.items():
    if isinstance(value, str) and (table := _OBJECTS.get(name)):
      if value not in table:
        raise UserError(f'{name}={value!r} must be one of {", ".join(table)}.')
      value = table[value]()
    if name in known:
      changes[name] = value
    elif name in _FIELDS and _FIELDS[name][0] in known:
      part, field = _FIELDS[name]
      parts.setdefault(part, {})[field] = value
    else:
      names = [*known, *_FIELDS, 'num_heads', 'grid', 'image_size']
      raise UserError(
        f'{type(model).__name__} has no field {name!r}'
        f'{config.suggest(name, names)}.'
      )
  for part, values in parts.items():
    old = changes.get(part, getattr(model, part))
    has = {f.name for f in dataclasses.fields(old) if f.init} if old else set()
    # A part without a field has it off, or fixed.
    fixed = {k: getattr(old, k, None) for k in values.keys() - has}
    lacks = {k for k, v in fixed.items() if values[k] and values[k] != v}
    if lacks:
      raise UserError(f'{part}={old!r} has no {", ".join(sorted(lacks))}.')
    if values := {k: v for k, v in values.items() if k in has}:
      changes[part] = dataclasses.replace(old, **values)
  return model.clone(**changes)


def without_parts(
  fields: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
  """Return the fields, except short names of parts that are given whole."""
  return {
    k: v for k, v in fields.items() if _FIELDS.get(k, '-')[0] not in given
  }


def from_fields(cls: Any, **fields: Any) -> Any:
  """Return a model of a class in MODELS from the short names of `replace`.

  A ViT with `resnet_stages` is a hybrid.
  """
  top = {f.name for f in dataclasses.fields(cls)} - _OBJECTS.keys()
  first = {k: fields.pop(k) for k in list(fields) if k in top}
  if 'embedding' in top:
    embedding = {'patch_size': fields.pop('patch_size')}
    if (stages := fields.pop('resnet_stages', None)) is not None:
      first['embedding'] = Hybrid(**embedding, stages=stages)
    else:
      first['embedding'] = PatchEmbedding(**embedding)
  return replace(cls(**first), **fields)


def build(settings: Any, trust: Sequence[str] = ()) -> Any:
  """Return the object that settings in a file describe; see `config.build`.

  Raises:
    ValueError: the settings name something that is not trusted, are incomplete
      or wrong.
  """
  built = config.build(settings, trust=trust)
  if isinstance(built, functools.partial):
    raise UserError(f'The file lacks arguments of {built.func.__name__}.')
  return built


def patch_positions(weights: Weights) -> np.ndarray:
  """Return [1, gh * gw, D] float32, the positions of patches; 0 without any."""
  model, posemb = weights.model, weights.model.posemb
  grid = model.embedding.grid(weights.image_shape)
  if posemb is None:
    return np.zeros((1, grid[0] * grid[1], model.width), np.float32)
  table = posemb.table(weights.params, grid, model.width)
  return np.reshape(table, (1, -1, model.width))


def portable(weights: Weights) -> Weights:
  """Return equivalent Weights of a ViT for formats that know tables only.

  Computed positions become a table, and LayerScale is multiplied into the layer
  before it. Other models stay as they are.
  """
  model, params = weights.model, dict(weights.params)
  if not isinstance(model, VisionTransformer):
    return weights
  if model.block.layerscale_init is not None:
    for path in list(params):
      if found := re.fullmatch(r'(block_\d+)/ls([12])', path):
        scale = params.pop(path)
        layer = {'1': 'attn/out', '2': 'mlp/fc2'}[found[2]]
        for part in ('kernel', 'bias'):
          name = f'{found[1]}/{layer}/{part}'
          params[name] = params[name] * scale
    weights.notes.append(
      '  LayerScale multiplied into attn/out and mlp/fc2: the format has none'
    )
    model = replace(model, layerscale_init=None)
  posemb = Learned()
  if isinstance(model.posemb, Learned):
    posemb = dataclasses.replace(model.posemb, prefix=True)
  else:
    weights.notes.append('  positions written as a table, which is learned')
  grid = model.embedding.grid(weights.image_shape)
  table = patch_positions(weights)
  params['pos_embedding'] = table.reshape(1, *grid, model.width)
  if 'cls' in params:
    params.setdefault('cls_pos_embedding', np.zeros_like(params['cls']))
  model = model.clone(posemb=posemb)
  return dataclasses.replace(weights, model=model, params=params)
