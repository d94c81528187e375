"""Weights: a model, its parameters, and what is needed to use them.

All formats read to `Weights` and write from them. A model's parameters are
known from the model alone (`shapes`), by jax.eval_shape.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import config, tree
from vit_jax.data.transforms import Resize
from vit_jax.models import layers, pooling, posemb
from vit_jax.models.layers import Classifier, Normalize, PatchEmbedding
from vit_jax.models.resnet import Hybrid
from vit_jax.types import Model, Shape, UserError

_OBJECTS: dict[str, dict[str, Any]] = {  # fields that `replace` takes as text
  'posemb': {
    'learned': posemb.Learned,
    'learned2d': posemb.Learned2d,
    'sincos2d': posemb.SinCos2d,
    'relative': posemb.Relative,
    'none': lambda: None,
  },
  'pooling': {
    'token': pooling.ClassToken,
    'distilled': pooling.DistillationToken,
    'gap': pooling.Mean,
    'map': pooling.Map,
    'none': pooling.NoPooling,
  },
  'mlp': {
    'gelu_tanh': layers.Gelu,
    'gelu': functools.partial(layers.Gelu, 'exact'),
    'quick_gelu': functools.partial(layers.Gelu, 'quick'),
    'swiglu': layers.SwiGlu,
  },
}
_FIELDS = {  # short name: field of the model, field of that part
  'patch_size': ('embedding', 'patch_size'),
  'mask_token': ('embedding', 'mask_token'),
  'posemb_at': ('posemb', 'at'),
  'posemb_prefix': ('posemb', 'prefix'),
  'class_token': ('pooling', 'class_token'),
  'num_registers': ('pooling', 'num_registers'),
  'final_norm': ('pooling', 'norm'),
  'representation_size': ('head', 'representation_size'),
  'head_bias_init': ('head', 'bias_init'),
  'attention_dropout': ('block', 'attention_dropout'),
  'layerscale_init': ('block', 'layerscale_init'),
  'qk_norm': ('block', 'qk_norm'),
  'mlp': ('block', 'mlp'),
  'sub_norm': ('block', 'sub_norm'),
  'norm': ('block', 'norm'),
  'biases': ('block', 'biases'),
  'embedding_bias': ('embedding', 'bias'),
  'embedding_norm': ('embedding', 'norm'),
  'head_bias': ('head', 'bias'),
  'norm_eps': ('block', 'norm_eps'),
}
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
    image_shape: (H, W, C) that the model was last trained or used with.
    preprocess: converts uint8 images to the model's float images.
    transforms: convert a decoded image to one of image_shape, in order. None:
      resized as in the paper's code, without keeping the aspect ratio.
    class_names: names of the outputs, or None.
    activation: converts logits to probabilities, 'softmax' or 'sigmoid'.
    origin: text that says what was read.
    notes: changes of the parameters other than renaming.
    step: training step, or 0.
    is_described: whether model.json or the like says how it was run (dtype).
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

  A model that cannot take such images raises UserError.
  """
  # Fields of your own model may not be hashable.
  is_ours = isinstance(model, Classifier)
  trace: Any = _shapes if is_ours else _shapes.__wrapped__
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
  variables = jax.eval_shape(model.init, jax.random.key(0), images)
  out = {}
  for path, leaf in tree.flatten(variables['params']).items():
    if scans and path.startswith('blocks/'):
      leaf = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
      rest = path.removeprefix('blocks/')
      out |= {f'block_{i}/{rest}': leaf for i in range(model.depth)}
    else:
      out[path] = leaf
  return out


def replace(model: Any, **fields: Any) -> Any:
  """Return a copy of a model with other fields.

  They may have the short names of fields of its parts, see _FIELDS; posemb,
  pooling and mlp may be text ('learned', 'gap', 'gelu', ...), see _OBJECTS.
  """
  known = {field.name for field in dataclasses.fields(model)}
  changes = {k: _object(k, x) for k, x in fields.items() if k in known}
  for name in [name for name in fields if name not in known]:
    part, field = _FIELDS.get(name, ('', ''))
    if part not in known:
      names = [*known, *_FIELDS, 'num_heads', 'grid', 'image_size']
      raise UserError(
        f'{type(model).__name__} has no field {name!r}'
        f'{config.suggest(name, names)}.'
      )
    old = changes.get(part, getattr(model, part))
    value = _object(name, fields[name])
    if old and any(f.name == field and f.init for f in dataclasses.fields(old)):
      changes[part] = dataclasses.replace(old, **{field: value})
    elif value and value != getattr(old, field, None):  # fixed, or off
      raise UserError(f'{part}={old!r} has no {field}.')
  return model.clone(**changes)


def _object(name, value):
  table = _OBJECTS.get(name, {})
  if not table or not isinstance(value, str):
    return value
  if value not in table:
    raise UserError(f'{name}={value!r} must be one of {", ".join(table)}.')
  return table[value]()


def part_of(name: str) -> str:
  """Return the field of a model whose part has the field of a short name."""
  return _FIELDS.get(name, ('', ''))[0]


def from_fields(cls: Any, **fields: Any) -> Any:
  """Return a model of a class from the short names of `replace`.

  A ViT with `resnet_stages` is a hybrid.
  """
  names = {field.name for field in dataclasses.fields(cls)}
  stages = fields.pop('resnet_stages', None)
  if 'embedding' in names:
    size = fields.pop('patch_size')
    fields['embedding'] = (
      PatchEmbedding(size) if stages is None else Hybrid(size, stages=stages)
    )
  top = {k: _object(k, fields.pop(k)) for k in names & fields.keys()}
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
  for name in _BEHAVIOUR:
    part = getattr(model, name, None)
    if dataclasses.is_dataclass(part):
      fields = [f.name for f in dataclasses.fields(part)]
      out |= {
        f'{name}.{field}': getattr(part, field)
        for field in fields
        if field not in _NOT_SHOWN
      }
      part = type(part).__name__
    if hasattr(model, name):
      out[name] = part
  return out


def with_table(weights: Weights) -> Weights:
  """Return equivalent Weights of a ViT whose positions are a table.

  The class token has a position, too.
  """
  model, params = weights.model, dict(weights.params)
  grid = model.embedding.grid(weights.image_shape)
  table = np.zeros((*grid, model.width), np.float32)
  if model.posemb is not None:
    table = model.posemb.table(params, grid, model.width)
  if table is None:
    raise UserError(f'posemb={model.posemb} acts in the layers.')
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


def build(weights: Weights) -> tuple[Any, dict[str, Any]]:
  """Return (model, nested parameters on the default device)."""
  model, params = weights.model, weights.params
  if isinstance(model, Classifier) and getattr(model, 'scan', False):
    params = tree.stack_blocks(params)
  return model, tree.unflatten(jax.device_put(params))
