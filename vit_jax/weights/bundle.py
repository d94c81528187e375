"""Weights: a model, its parameters, and what is needed to use them.

All formats read to `Weights` and write from them. `infer` reads the
architecture off the parameters; their shapes are known from the model alone
(`shapes`), by jax.eval_shape.
"""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import config, tree
from vit_jax.data.transforms import Resize
from vit_jax.models.axial import AxialResNet, AxialViT
from vit_jax.models.layers import PatchEmbedding, as_pair
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.names import SIZES
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
from vit_jax.preprocess import Normalize
from vit_jax.types import FlatParams, Model, Shape, Size
from vit_jax.weights.keymap import KeyMap

# Limits of what files say, because a mistake must not cost all memory.
MAX_LAYERS = 9999
_MAX_UNITS = 500  # of a ResNet, which are traced one by one
_MAX_TABLE = 1 << 26  # numbers in a table of positions
_MAX_NUMBER = 1 << 20  # such as the number of classes
IMAGE_SIZE = 224  # if neither the file nor the user says
MODELS = (VisionTransformer, ResNet, MlpMixer, AxialViT, AxialResNet)
POSEMBS = {
  'learned': Learned,
  'learned2d': Learned2d,
  'sincos2d': SinCos2d,
  'relative': Relative,
  'none': None,
}
POOLINGS = {
  'token': ClassToken,
  'distilled': DistillationToken,
  'gap': Mean,
  'map': Map,
  'none': NoPooling,
}
_FIELDS = {  # short name: field of the model, field of that part
  'patch_size': ('embedding', 'patch_size'),
  'patch_stride': ('embedding', 'stride'),
  'mask_token': ('embedding', 'mask_token'),
  'posemb_init_std': ('posemb', 'init_std'),
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
# Errors that a constructor raises for fields of a wrong type.
_ANY_FIELDS = (LookupError, ArithmeticError, TypeError, AttributeError)
_HEADS = {width: heads for width, _, _, heads in SIZES.values()}


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

  def __post_init__(self) -> None:
    if self.transforms is None:
      self.transforms = (Resize(self.image_shape[:2]),)


def shapes(model: Model, image_shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
  """Return {path: ShapeDtypeStruct} of a model's parameters, layers unrolled.

  Raises:
    ValueError: the model cannot be made, or not for such images.
  """
  # Fields of your own model may not be hashable.
  trace: Any = _trace if isinstance(model, MODELS) else _trace.__wrapped__
  try:
    return trace(model, tuple(image_shape))
  except ValueError as e:  # patches do not tile the image, ...
    raise ValueError(f'{e} (image_size={image_shape[:2]})') from e
  except Exception as e:  # the fields in a file may be of any type
    name = type(model).__name__
    raise ValueError(f'The model {name} cannot be initialised: {e!r}') from e


@functools.lru_cache(maxsize=256)
def _trace(model, image_shape):
  images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
  if isinstance(model, MODELS):
    _check_layers(model)
  if isinstance(getattr(model, 'posemb', None), SinCos2d):
    grid = model.embedding.grid(image_shape)
    if math.prod(grid) * model.width > _MAX_TABLE:  # computed, in no file
      raise ValueError(
        f'SinCos2d would compute positions of {grid[0]}x{grid[1]} patches with '
        f'width {model.width}; expected at most {_MAX_TABLE} numbers.'
      )
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


def _check_layers(model):
  depth = getattr(model, 'depth', 0)
  stages = getattr(getattr(model, 'embedding', model), 'stages', None) or ()
  if depth > MAX_LAYERS or sum(stages) > _MAX_UNITS:
    raise ValueError(
      f'depth={depth}, stages={stages!s:.80}; expected at most {MAX_LAYERS} '
      f'layers and {_MAX_UNITS} units.'
    )


def replace(model: Any, **fields: Any) -> Any:
  """Return a copy of a model with other fields.

  Args:
    model: Flax module.
    **fields: its fields; or short names of the fields of its parts: patch_size,
      patch_stride, mask_token, posemb and pooling as text ('learned', 'gap',
      ...), class_token, num_registers, norm_after_pooling, representation_size,
      layerscale_init, qk_norm, gelu, norm_eps, and others in _FIELDS.

  Raises:
    ValueError: there is no such field.
  """
  known = {f.name for f in dataclasses.fields(model)} - {'parent', 'name'}
  changes: dict[str, Any] = {}
  parts: dict[str, dict[str, Any]] = {}
  for name, value in fields.items():
    table: Any = {'posemb': POSEMBS, 'pooling': POOLINGS}.get(name, {})
    if isinstance(value, str) and table:
      if value not in table:
        raise ValueError(f'{name}={value!r} must be one of {", ".join(table)}.')
      value = table[value] and table[value]()
    if name in known:
      changes[name] = value
    elif name in _FIELDS and _FIELDS[name][0] in known:
      part, field = _FIELDS[name]
      parts.setdefault(part, {})[field] = value
    else:
      names = [*known, *_FIELDS, 'num_heads', 'grid', 'image_size']
      raise ValueError(
        f'{type(model).__name__} has no field {name!r}'
        f'{config.suggest(name, names)}.'
      )
  for part, values in parts.items():
    old = changes.get(part, getattr(model, part))
    has = {f.name for f in dataclasses.fields(old) if f.init} if old else ()
    values = {
      field: value
      for field, value in values.items()
      # A part without the field has it off, or does not need it.
      if field in has or value not in (None, False, 0, getattr(old, field, 0))
    }
    if old is None or values.keys() - has:
      values.pop('init_std', None)
    if unknown := values.keys() - has:
      raise ValueError(f'{part}={old!r} has no {", ".join(sorted(unknown))}.')
    if values:
      changes[part] = dataclasses.replace(old, **values)
  return model.clone(**changes)


def build_model(settings: Any, trust: Sequence[str] = ()) -> Any:
  """Return the model that settings in a file describe.

  Before models were composed of parts, model.json had the short names of
  `replace` at the top; these are read, too.

  Raises:
    ValueError: the settings name something that is not trusted, or are wrong.
  """
  if not isinstance(settings, dict):
    raise ValueError(f'The model is {settings!r:.80}, not a JSON object.')
  _check_numbers(settings, _MAX_NUMBER)
  for cls in MODELS:
    names = {f.name for f in dataclasses.fields(cls)}
    is_flat = bool(settings.keys() & (_FIELDS.keys() - names))
    if settings.get('target') == f'{cls.__module__}.{cls.__name__}' and is_flat:
      fields = {k: _tuples(v) for k, v in settings.items() if k != 'target'}
      try:
        return from_fields(cls, **fields)
      except _ANY_FIELDS as e:
        raise ValueError(f'{settings} is not a {cls.__name__}: {e!r}.') from e
  model = build(settings, trust)
  if not callable(getattr(model, 'apply', None)):
    raise ValueError(f'{settings!r:.200} is not a model.')
  return model


def _check_numbers(value, most, name='settings'):
  """Raise ValueError for a number that would take all memory."""
  if isinstance(value, dict):
    for key, inner in value.items():
      _check_numbers(inner, most, key)
  elif isinstance(value, list | tuple):
    for inner in value:
      _check_numbers(inner, most, name)
  elif isinstance(value, int) and value > most:
    raise ValueError(f'{name}={value}; expected at most {most}.')


def build(
  settings: Any, trust: Sequence[str] = (), *, most: int = _MAX_NUMBER
) -> Any:
  """Return `config.build` of settings from a file, of whatever types.

  Args:
    settings, trust: as of `config.build`.
    most: largest integer that the settings may have.

  Raises:
    ValueError: the settings name something that is not trusted, are incomplete
      or wrong.
  """
  _check_numbers(settings, most)
  try:
    built = config.build(settings, trust=trust)
  except ValueError:
    raise
  except Exception as e:
    raise ValueError(f'{settings!r:.200} cannot be built: {e!r}') from e
  if isinstance(built, functools.partial):
    raise ValueError(f'The file lacks arguments of {built.func.__name__}.')
  return built


def from_fields(cls: Any, **fields: Any) -> Any:
  """Return a model of a class in MODELS from the short names of `replace`."""
  top = {f.name for f in dataclasses.fields(cls)}
  first = {k: fields.pop(k) for k in list(fields) if _is_first(k, top)}
  if 'embedding' in top:
    embedding = {'patch_size': fields.pop('patch_size')}
    stages = fields.pop('resnet_stages', None)
    make = PatchEmbedding
    if stages is not None:
      make, embedding['stages'] = Hybrid, stages
    first['embedding'] = make(**embedding)
  return replace(cls(**first), **fields)


def _is_first(name, top):
  return name in top and name not in ('posemb', 'pooling')


def _tuples(value):
  return tuple(map(_tuples, value)) if isinstance(value, list) else value


def infer(params: FlatParams, **given: Any) -> Any:
  """Return the model that parameters belong to.

  The file does not contain these, and the defaults are: gelu 'tanh', norm_eps
  1e-6, norm_after_pooling False; posemb 'sincos2d' where there is no table;
  posemb_at 'stem' where there is one; patch_stride None; pooling 'gap' where
  there is neither class token nor MAP head, 'none' with a mask vector; a
  ResNet with a final norm is 'preact'; the number of heads, where a kernel
  does not have it, is that of the published model of this width, else
  width / 64.

  Args:
    params: {path: array}, unrolled; some may be missing or of a wrong shape.
    **given: fields of the model as in `replace`.

  Raises:
    ValueError: there is no such model, or the file contradicts `given`.
  """
  with _readable(params):
    cls, found = _facts(_whole(params), given)
    wrong = {
      name: (value, found[name])
      for name, value in given.items()
      if name in found and _plain(value) != _plain(found[name])
    }
    if wrong:
      text = '; '.join(f'{k}={f!r}, not {g!r}' for k, (g, f) in wrong.items())
      raise ValueError(
        f'The file has {text} as was given. Leave out what the file has.'
      )
    return from_fields(cls, **found | given)


def finish(
  model: Model,
  params: FlatParams,
  names: Mapping[str, str],
  arrays: FlatParams,
  keys: KeyMap,
  *,
  image_size: Size | None = None,
  grid: tuple[int, int] | None = None,
  hint: str = '',
) -> tuple[dict[str, np.ndarray], tuple[int, int, int]]:
  """Return (parameters, image_shape), if a file is exactly this model.

  Args:
    model: as `infer` returns it.
    params, names, arrays, keys, hint: see `KeyMap.fit`.
    image_size, grid: see `infer_image_shape`.
  """
  with _readable(params):
    shape = infer_image_shape(model, params, image_size=image_size, grid=grid)
    made = shapes(model, shape)
  return keys.fit(params, names, made, arrays, hint=hint), shape


@contextlib.contextmanager
def _readable(params):
  """Turn errors about parameters that no model has into one ValueError."""
  try:
    yield
  except _ANY_FIELDS as e:
    raise ValueError(
      f'No architecture can be read off the file ({e!r:.200}). It has '
      f'{len(params)} arrays: {_some(params)}.'
    ) from e


def _whole(params):
  """Return params; what layer 0 lacks is taken from any other layer."""
  out = dict(params)
  for path, array in params.items():
    if any(len(n) > 4 for n in re.findall(r'\d+', path)):
      raise ValueError(f'The file has a layer with too high a number: {path}.')
    if found := re.fullmatch(r'block_\d+/(.*)', path):
      out.setdefault(f'block_0/{found[1]}', array)
  return out


def _plain(value):
  return tuple(value) if isinstance(value, list) else value


def _some(names):
  return ', '.join(sorted(names)[:8]) + (', ...' if len(names) > 8 else '')


def _facts(params, given):
  """Return (class, {short name: value}) of what the parameters show."""
  head = params.get('head/kernel', params.get('head/cls/kernel'))
  found = {'num_classes': None if head is None else head.shape[-1]}
  if 'block_0/token_mixing/fc1/kernel' in params:
    fc1 = 'block_0/{}_mixing/fc1/kernel'
    kernel = params['embedding/kernel']
    return MlpMixer, found | {
      'width': kernel.shape[3],
      'depth': _depth(params),
      'tokens_mlp_dim': params[fc1.format('token')].shape[1],
      'channels_mlp_dim': params[fc1.format('channel')].shape[1],
      'patch_size': tuple(kernel.shape[:2]),
    }
  if 'embedding/kernel' in params and any(
    path.startswith('block_0/') for path in params
  ):
    return VisionTransformer, found | _vit_facts(params, given)
  if 'resnet/root/conv/kernel' in params:
    return ResNet, found | {
      'stages': _stages(params),
      'width_factor': params['resnet/root/conv/kernel'].shape[3] // 64,
      'form': 'preact' if 'norm/scale' in params else 'postact',
    }
  raise ValueError(
    'No model of vit_jax has such parameters (neither a ViT, nor a hybrid, a '
    f'ResNet or a Mixer): {_some(params)}.'
  )


def _vit_facts(params, given):
  kernel, query = (
    params['embedding/kernel'],
    params['block_0/attn/query/kernel'],
  )
  pooling = given.get('pooling')
  found = {
    'width': kernel.shape[3],
    'depth': _depth(params),
    'mlp_dim': params['block_0/mlp/fc1/kernel'].shape[1],
    'patch_size': tuple(kernel.shape[:2]),
    'qk_norm': 'block_0/attn/query_norm/scale' in params,
  }
  if query.ndim == 3:
    found['num_heads'] = query.shape[1]
  elif not given.get('num_heads'):
    found['num_heads'] = _num_heads(found['width'], params)
  if 'mask' in params:  # pre-training of masked_patches.py
    found |= {'mask_token': True, 'class_token': 'cls' in params}
    found['pooling'] = 'none'
  elif 'dist' in params:
    found['pooling'] = 'distilled'
  elif 'cls' in params:
    found['pooling'] = 'token'
  elif 'map_head/probe' in params:
    found['pooling'] = 'map'
  elif pooling not in (None, 'gap', 'none'):
    raise ValueError(f'The file has no parameters for pooling={pooling!r}.')
  else:
    found['pooling'] = pooling or 'gap'
  found |= _posemb_facts(params, given)
  for name, path, axis in (
    ('representation_size', 'pre_logits/kernel', -1),
    ('representation_size', 'pre_logits/cls/kernel', -1),
    ('num_registers', 'registers', 1),
  ):
    if path in params:
      found[name] = params[path].shape[axis]
  if 'block_0/ls1' in params and 'layerscale_init' not in given:
    found['layerscale_init'] = 1e-5  # its initial value is not in the file
  if 'resnet/root/conv/kernel' in params:
    found['resnet_stages'] = _stages(params)
  return found


def _posemb_facts(params, given):
  if 'block_0/attn/offset_embedding' in params:
    return {'posemb': 'relative'}
  for name, kind in (
    ('pos_embedding', 'learned'),
    ('pos_embedding_x', 'learned2d'),
  ):
    if f'block_0/{name}' in params:
      return {'posemb': kind, 'posemb_at': 'layers'}
    if name in params:
      return {'posemb': kind}
  return {'posemb': 'none' if given.get('posemb') == 'none' else 'sincos2d'}


def _num_heads(width, params):
  norm = params.get('block_0/attn/query_norm/scale')
  if norm is not None and norm.size and width % norm.size == 0:
    return width // norm.size
  heads = _HEADS.get(width, max(width // 64, 1))
  if width % heads:
    raise ValueError(
      f'The file does not contain the number of heads, and no published model '
      f'has its width, {width}. Give num_heads.'
    )
  return heads


def _depth(params):
  """Return the number of layers block_0, block_1, ... ."""
  found = (re.match(r'block_(\d+)/', path) for path in params)
  return 1 + max(int(m[1]) for m in found if m)


def _stages(params):
  """Return the number of units in each stage of a ResNet; () for a root."""
  units = {}
  for path in params:
    if found := re.match(r'resnet/stage(\d+)/unit(\d+)/', path):
      stage, unit = int(found[1]), int(found[2])
      units[stage] = max(unit, units.get(stage, 0))
  if sorted(units) != list(range(1, len(units) + 1)):
    raise ValueError(f'The file has the ResNet stages {sorted(units)}.')
  return tuple(units[i + 1] for i in range(len(units)))


def infer_image_shape(
  model: Model,
  params: FlatParams,
  *,
  image_size: Size | None = None,
  grid: tuple[int, int] | None = None,
) -> tuple[int, int, int]:
  """Return (H, W, C) of the images that the parameters were made for.

  Args:
    model: as `infer` returns it.
    params: {path: array}.
    image_size: int or (H, W), for models without a table of positions.
    grid: (rows, columns) of a Mixer's patches if they are not a square.
  """
  root = params.get('resnet/root/conv/kernel', params.get('embedding/kernel'))
  channels = root.shape[2]
  if 'pos_embedding' in params:
    grid = params['pos_embedding'].shape[1:3]
  elif isinstance(model, MlpMixer):
    tokens = _whole(params)['block_0/token_mixing/fc1/kernel'].shape[0]
    grid = square(tokens, grid, 'token_mixing')
  else:
    return (*as_pair(image_size or IMAGE_SIZE), channels)
  return (*model.embedding.image_size(grid), channels)


def square(
  count: int, grid: tuple[int, int] | None, what: str
) -> tuple[int, int]:
  """Return `grid` if it has `count` cells; if it is None, the square that has.

  Raises:
    ValueError: it has another number of cells, or there is no such square.
  """
  side = int(max(count, 0) ** 0.5 + 0.5)
  grid = (side, side) if grid is None else as_pair(grid)
  if count < 1 or grid[0] * grid[1] != count:
    raise ValueError(
      f'{what} has {count} patches, not a grid of {grid[0]}x{grid[1]}; give '
      'grid=(rows, columns) whose product is that.'
    )
  return grid


def split_table(
  table: np.ndarray, *, prefix: int, grid: tuple[int, int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Split [1, prefix + gh * gw, D] into [1, prefix, D] and [1, gh, gw, D].

  Args:
    table: position table; the leading 1 may be missing.
    prefix: number of rows that do not belong to patches.
    grid: (gh, gw) of the patches; a square if None.
  """
  if table.ndim not in (2, 3) or table.size != math.prod(table.shape[-2:]):
    raise ValueError(
      f'The position table has shape {table.shape}; expected (1, N, D).'
    )
  table = table.reshape(1, *table.shape[-2:])
  grid = square(table.shape[1] - prefix, grid, 'The position table')
  return table[:, :prefix], table[:, prefix:].reshape(1, *grid, table.shape[-1])


def patch_positions(weights: Weights) -> np.ndarray | float:
  """Return [1, gh * gw, D] float32, the positions of patches; 0 without any."""
  model, params = weights.model, weights.params
  grid = model.embedding.grid(weights.image_shape)
  posemb = model.posemb
  table = None if posemb is None else posemb.table(params, grid, model.width)
  if table is None:
    table = np.zeros((*grid, model.width), np.float32)
  return table.reshape(1, -1, model.width)


def fold_layerscale(
  params: dict[str, np.ndarray], notes: list[str]
) -> dict[str, np.ndarray]:
  """Multiply LayerScale into the layer before it, which is equivalent."""
  if 'block_0/ls1' not in params:
    return params
  out = {}
  for path, value in params.items():
    found = re.fullmatch(r'(block_\d+)/(attn/out|mlp/fc2)/(kernel|bias)', path)
    if found:
      value = value * params[f'{found[1]}/ls{1 if "attn" in path else 2}']
    if not re.fullmatch(r'block_\d+/ls[12]', path):
      out[path] = value
  notes.append(
    '  LayerScale multiplied into attn/out and mlp/fc2: the format has none'
  )
  return out
