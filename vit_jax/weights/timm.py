"""timm: model.safetensors and config.json, read and written.

Supported: VisionTransformer (DeiT, also distilled, DeiT III, SigLIP's image
tower, DINOv2 except with SwiGLU), its hybrids, BiT and MLP-Mixers. A class
token that is not pooled is read as our first register, which is equivalent.

    {'architecture': 'vit_base_patch16_224', 'num_classes': 1000,
     'global_pool': 'token', 'model_args': {...}, 'label_names': [...],
     'pretrained_cfg': {'input_size': [3, 224, 224], 'mean': [...], ...}}

is config.json. Older files have the content of pretrained_cfg at the top and no
model_args. We also write 'activation', which timm ignores. Without config.json:
exact GELU, heads as in `bundle.infer`, and the class token is pooled unless
there is `fc_norm`. timm's LayerNorms have an epsilon of 1e-6, as ours.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vit_jax.data.transforms import CentralCrop, Resize, ResizeSmall
from vit_jax.models import names
from vit_jax.models.layers import PatchEmbedding, as_pair
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.pooling import (
  ClassToken,
  DistillationToken,
  Map,
  Mean,
  NoPooling,
)
from vit_jax.models.resnet import ResNet
from vit_jax.types import FlatParams, Size
from vit_jax.weights import bundle, image_configs
from vit_jax.weights.bundle import Weights
from vit_jax.weights.keymap import Key, KeyMap, conv, linear, norm

_WRAPPER = 'timm_model.'  # of the class in transformers that wraps them


@functools.cache
def _vit_keys(last_norm='norm', root_only=False, distilled=False):
  backbone = 'patch_embed.backbone'
  heads = linear('head', 'head')
  if distilled:
    heads = [*linear('head', 'head/cls'), *linear('head_dist', 'head/dist')]
  return KeyMap(
    Key('cls_token', 'cls'),
    Key('dist_token', 'dist'),
    Key('reg_token', 'registers'),
    Key('pos_embed', 'pos_embedding'),
    *conv('patch_embed.proj', 'embedding'),
    *norm('blocks.{i}.norm{n}', 'block_{i}/norm{n}'),
    *linear('blocks.{i}.attn.qkv', 'block_{i}/attn/query|key|value'),
    *linear('blocks.{i}.attn.proj', 'block_{i}/attn/out', merge_inputs=True),
    *norm('blocks.{i}.attn.q_norm', 'block_{i}/attn/query_norm'),
    *norm('blocks.{i}.attn.k_norm', 'block_{i}/attn/key_norm'),
    *linear('blocks.{i}.mlp.fc{n}', 'block_{i}/mlp/fc{n}'),
    Key('blocks.{i}.ls{n}.gamma', 'block_{i}/ls{n}'),
    *norm(last_norm, 'norm'),
    Key('attn_pool.latent', 'map_head/probe'),
    *linear('attn_pool.q', 'map_head/attn/query'),
    *linear('attn_pool.kv', 'map_head/attn/key|value'),
    *linear('attn_pool.proj', 'map_head/attn/out', merge_inputs=True),
    *norm('attn_pool.norm', 'map_head/norm'),
    *linear('attn_pool.mlp.fc{n}', 'map_head/mlp/fc{n}'),
    *linear('pre_logits.fc', 'pre_logits'),
    *heads,
    *_backbone_keys(
      f'{backbone}.' if root_only else f'{backbone}.stem.', f'{backbone}.'
    ),
  )


def _backbone_keys(stem, prefix=''):
  unit = f'{prefix}stages.{{s}}.blocks.{{u}}'
  ours = 'resnet/stage{s+1}/unit{u+1}'
  return [
    *conv(f'{stem}conv', 'resnet/root/conv'),
    *norm(f'{stem}norm', 'resnet/root/norm'),
    *conv(f'{unit}.downsample.conv', f'{ours}/conv_proj'),
    *norm(f'{unit}.downsample.norm', f'{ours}/norm_proj'),
    *conv(f'{unit}.conv{{n}}', f'{ours}/conv{{n}}'),  # not of _proj
    *norm(f'{unit}.norm{{n}}', f'{ours}/norm{{n}}'),
  ]


_RESNET_KEYS = KeyMap(
  *_backbone_keys('stem.'),
  *norm('norm', 'norm'),
  Key(  # a convolution of 1x1
    'head.fc.weight',
    'head/kernel',
    lambda x: x[:, :, 0, 0].T if x.shape[2:] == (1, 1) else x,
    lambda x: x.T[:, :, None, None],
    ndim=4,
  ),
  Key('head.fc.bias', 'head/bias'),
)
_MIXER_KEYS = KeyMap(
  *conv('stem.proj', 'embedding'),
  *norm('blocks.{i}.norm{n}', 'block_{i}/norm{n}'),
  *linear('blocks.{i}.mlp_tokens.fc{n}', 'block_{i}/token_mixing/fc{n}'),
  *linear('blocks.{i}.mlp_channels.fc{n}', 'block_{i}/channel_mixing/fc{n}'),
  *norm('norm', 'norm'),
  *linear('head', 'head'),
)
_FIRST_CONVS = (
  *('patch_embed.backbone.stem.conv', 'patch_embed.backbone.conv'),
  *('patch_embed.proj', 'stem.conv', 'stem.proj'),
)
# Why a timm model has no counterpart here, by the names of its arrays.
_REASONS = {
  r'norm_pre\..*': 'it has a norm before the layers (CLIP)',
  r'.*\.(w12|fc1_g|w1)\..*': 'its MLPs have gates (SwiGLU)',
  r'.*rel_pos.*|.*relative_position.*': 'it has relative positions',
  r'.*rope.*': 'it has rotary positions',
  r'.*\.(attns|ffns|in_proj)\..*': 'its branches are in parallel',
  r'.*\.running_(mean|var)': 'it has batch norm',
  r'stem\.conv1\..*|patch_embed\.backbone\.(conv1|0)\..*': 'its stem is deep',
  r'.*\.(q_bias|v_bias)|.*\.q_proj\..*': 'its attention has another form',
}
# Models with other heads than all other models of the same width.
_HEADS = {
  'vit_base_patch16_gap_224': 16,
  'test_vit': 2,
  'test_vit2': 2,
  'test_vit3': 3,
  'test_vit4': 3,
}
# Architectures with the tanh form of the GELU; all others have the exact one.
_TANH = re.compile(
  r'vit_(so400m|giantopt)_patch16_siglip_.*|vit_base_patch32_siglip_.*|'
  r'vit_large_patch16_siglip_(gap_)?512'
)
_GELU = {'gelu': 'exact', 'gelu_tanh': 'tanh'}
# Architectures whose arrays have the usual names, but which compute otherwise.
_OTHERS = {
  r'vit_.*_rpn_.*': 'norms after the branches',
  r'.*quickgelu.*': 'the activation QuickGELU',
  r'test_vit3': 'pooling over the class token and registers too',
}
_POOLING = {'token': 'token', 'avg': 'gap', 'map': 'map'}
# Arguments that change the computation but not the arrays: supported values.
_KNOWN_ARGS = {
  'pool_include_prefix': (False, None),
  'norm_layer': (None, 'layernorm'),
  'scale_attn_norm': (False, None),
  'scale_mlp_norm': (False, None),
  'dynamic_img_pad': (False, None),
}


def recognise(names: Iterable[str]) -> bool:
  """Return whether arrays of these names are a timm model."""
  names = {name.removeprefix(_WRAPPER) for name in names}
  firsts = 'patch_embed.proj.weight', 'stem.proj.weight', 'stem.conv.weight'
  return any(name in names for name in firsts) and any(
    re.match(r'(stages\.0\.)?blocks\.0\.', name) for name in names
  )


def needed(names: Iterable[str]) -> set[str]:
  """Return the names: `read` uses all arrays."""
  return set(names)


def read(
  arrays: FlatParams,
  config: Mapping[str, Any] | None = None,
  *,
  grid: tuple[int, int] | None = None,
  image_size: Size | None = None,
  **fields: Any,
) -> Weights:
  """Return Weights of timm's arrays.

  Args:
    arrays: {name: array}.
    config: content of config.json, or None.
    grid, image_size: see `formats.read`.
    **fields: of the model, which override the config: gelu, pooling, ....

  Raises:
    ValueError: no model of vit_jax has these arrays.
  """
  arrays = {k.removeprefix(_WRAPPER): np.asarray(v) for k, v in arrays.items()}
  config, last_norm = _Config.parse(config), 'norm'
  notes: list[str] = []
  if 'stem.proj.weight' in arrays:
    keys, fields = _MIXER_KEYS, {'gelu': config.gelu} | fields
  elif 'patch_embed.proj.weight' in arrays:
    last_norm = 'fc_norm' if 'fc_norm.weight' in arrays else 'norm'
    keys = _vit_keys(
      last_norm,
      'patch_embed.backbone.conv.weight' in arrays,
      'dist_token' in arrays,
    )
    arrays = _add_biases(arrays, notes)
  else:
    keys = _RESNET_KEYS
  params, found_in = keys.to_ours(arrays)
  if 'patch_embed.proj.weight' in arrays:
    fields = _vit_fields(params, config, last_norm) | fields
    model = _place_tokens(params, fields, last_norm, config, grid, notes)
  else:
    model = bundle.infer(params, **fields)
  why = '; '.join(
    reason
    for pattern, reason in _REASONS.items()
    if any(re.fullmatch(pattern, name) for name in arrays)
  )
  params, shape = bundle.finish(
    model,
    params,
    found_in,
    arrays,
    keys,
    image_size=image_size or config.image_size,
    grid=grid,
    hint=why and f': {why}',
  )
  return Weights(
    model=model,
    params=params,
    image_shape=shape,
    class_names=config.class_names,
    activation=config.activation,
    origin=f'timm {config.architecture}'.strip(),
    **config.preprocess(shape, notes),
    notes=notes,
  )


def _add_biases(arrays, notes):
  """Return the arrays with zero biases of qkv, if no layer has any."""
  weights = {k: v for k, v in arrays.items() if k.endswith('.qkv.weight')}
  biases = {
    k.replace('weight', 'bias'): np.broadcast_to(np.float32(0), v.shape[:1])
    for k, v in weights.items()
  }
  if not biases or biases.keys() & arrays.keys():
    return arrays
  notes.append('  biases of queries, keys and values are zero: there are none')
  return arrays | biases


def _vit_fields(params, config, last_norm):
  """Return fields of a ViT that the config says, or else the arrays."""
  pooling = config.pooling
  if 'map_head/probe' in params:
    pooling = 'map'
  elif 'dist' in params and pooling in (None, 'token'):
    pooling = 'distilled'
  elif not pooling:
    pooling = 'token' if 'cls' in params and last_norm == 'norm' else 'gap'
  fields = {'gelu': config.gelu, 'pooling': pooling}
  if config.heads:
    fields['num_heads'] = config.heads
  if 'pos_embedding' not in params and config.args.get(
    'pos_embed', 'learn'
  ) in ('none', '', None):
    fields['posemb'] = 'none'
  return fields


def _place_tokens(params, fields, last_norm, config, grid, notes):
  """Give positions, and the tokens before the patches, our form.

  Returns:
    the model; params are changed.
  """
  pooling = fields['pooling']
  if last_norm == 'fc_norm' and pooling != 'token':
    # For a single token, the norm before and after pooling are the same.
    if pooling != 'gap':
      raise ValueError(f'The file has fc_norm, with pooling {pooling!r}.')
    fields = {'norm_after_pooling': True} | fields
  if 'pos_embedding' not in params and 'posemb' not in fields:
    raise ValueError(
      'The file has no pos_embed, and nothing says that its model has none. '
      "If it has none, pass posemb='none'."
    )
  tokens = [params.pop(name, None) for name in ('cls', 'dist', 'registers')]
  has_cls = tokens[0] is not None
  tokens = [x for x in tokens if x is not None]
  if any(x.ndim != 3 or x.shape[0] != 1 for x in tokens):
    raise ValueError(
      'cls_token, dist_token and reg_token must have the shape (1, n, D).'
    )
  prefix = np.concatenate(tokens, axis=1) if tokens else np.zeros((1, 0, 0))
  pooled = {'token': ('cls',), 'distilled': ('cls', 'dist')}.get(pooling, ())
  first = len(pooled)
  if pooled and not has_cls:
    raise ValueError(
      f'The file has no cls_token; pooling cannot be {pooling!r}.'
    )
  for i, name in enumerate(pooled):
    params[name] = prefix[:, i : i + 1]
  if not pooled and has_cls:
    notes.append('  the class token, which is not pooled, is register 0')
  if prefix.shape[1] > first:
    params['registers'] = prefix[:, first:]
  model = bundle.infer(params, **fields)
  if 'pos_embedding' not in params:
    return model
  table = params['pos_embedding']
  count = table.shape[-2] if table.ndim > 1 else 0
  grid = _grid(count, prefix.shape[1], config, grid, model.embedding)
  rows, params['pos_embedding'] = bundle.split_table(
    table, prefix=count - math.prod(grid), grid=grid
  )
  if rows.shape[1] not in (0, prefix.shape[1]):
    raise ValueError(
      f'pos_embed has {rows.shape[1]} rows before those of the patches, and '
      f'there are {prefix.shape[1]} tokens.'
    )
  for i, name in enumerate(pooled):
    row = rows[:, i : i + 1] if rows.shape[1] else np.zeros_like(params[name])
    params[f'{name}_pos_embedding'] = row
  if rows[:, first:].any():
    params['registers'] = params['registers'] + rows[:, first:]
    notes.append('  positions of registers added to them: ours have none')
  return model


def _grid(count, prefix, config, grid, embedding):
  """Return (rows, columns) of a table with or without the prefix's rows."""
  if config.image_size and not grid:
    grid = embedding.grid(config.image_size)
    if math.prod(grid) not in (count, count - prefix):
      grid = None  # the table is of another size than the config says
  if grid:
    return as_pair(grid)
  has_prefix = not config.args.get('no_embed_class', False)
  for patches in (count - prefix, count)[:: 1 if has_prefix else -1]:
    if patches > 0 and math.isqrt(patches) ** 2 == patches:
      return bundle.square(patches, None, 'pos_embed')
  return bundle.square(count - prefix, None, 'pos_embed')


@dataclasses.dataclass(frozen=True)
class _Config:
  """Checked content of config.json; None or empty where it says nothing."""

  architecture: str = ''
  args: dict[str, Any] = dataclasses.field(default_factory=dict)
  data: dict[str, Any] = dataclasses.field(default_factory=dict)
  class_names: list[str] | None = None
  activation: str = 'softmax'

  @classmethod
  def parse(cls, config: Mapping[str, Any] | None) -> '_Config':
    """Check the content of config.json.

    Raises:
      ValueError: it has another form, or the model computes differently.
    """
    if config is None:
      return cls()
    data = image_configs.item(config, 'pretrained_cfg', dict) or config
    data = dict(data)
    for name in ('global_pool', 'num_classes'):
      if config.get(name) is not None:
        data[name] = config[name]
    names = config.get('label_names') or data.get('label_names')
    made = cls(
      architecture=image_configs.item(config, 'architecture', str) or '',
      args=image_configs.item(config, 'model_args', dict) or {},
      data=data,
      class_names=image_configs.class_names(names or config.get('labels')),
      activation=image_configs.activation(config.get('activation')),
    )
    for pattern, why in _OTHERS.items():
      if re.fullmatch(pattern, made.architecture):
        raise ValueError(
          f'config.json: the architecture {made.architecture} has {why}, which '
          'no model here has.'
        )
    for name, known in _KNOWN_ARGS.items():
      if (value := made.args.get(name)) not in known:
        raise ValueError(
          f'config.json: model_args has {name}={value!r}, which no model here '
          'supports.'
        )
    return made

  @property
  def image_size(self):
    size = self.args.get('img_size') or self.data.get('input_size')
    if size is None:
      return None
    if isinstance(size, list | tuple):
      size = size[-2:]  # of what may be (channels, height, width)
    return image_configs.sides(size, 'input_size')

  @property
  def gelu(self):
    name = self.args.get('act_layer')
    if name is None:
      return 'tanh' if _TANH.fullmatch(self.architecture) else 'exact'
    return image_configs.choose(_GELU, name, 'act_layer')

  @property
  def pooling(self):
    name = self.args.get('global_pool', self.data.get('global_pool'))
    if name is None:
      return None
    return image_configs.choose(_POOLING, name, 'global_pool')

  @property
  def heads(self):
    heads = self.args.get('num_heads', _HEADS.get(self.architecture))
    return None if heads is None else image_configs.size(heads, 'num_heads')

  def preprocess(self, image_shape, notes):
    """Return arguments of Weights for timm's evaluation of images.

    crop_mode 'center' resizes the shorter side to the image size / crop_pct
    and crops the centre, 'squash' resizes both sides. timm antialiases, and
    rounds as torchvision does.
    """
    data = self.data
    if not data:
      return {}
    mode = data.get('crop_mode') or 'center'
    fraction = data.get('crop_pct') or 0.875
    method = image_configs.interpolation(data.get('interpolation') or 'bicubic')
    if type(fraction) not in (int, float) or not 0.1 <= fraction <= 1:
      raise ValueError(f'config.json: crop_pct={fraction!r} is not 0.1 to 1.')
    size = tuple(image_shape[:2])
    large = tuple(int(side / fraction) for side in size)
    if mode == 'center' and large[0] == large[1]:
      resize = ResizeSmall(large[0], **method, rounding='down')
    else:
      resize = Resize(large, **method)
      if mode != 'squash':
        notes.append(
          f'  images are resized to {large} without keeping the aspect ratio; '
          f'timm has crop_mode {mode!r}'
        )
    crops = fraction < 1 or isinstance(resize, ResizeSmall)
    preprocess = image_configs.normalize(
      data.get('mean', (0.485, 0.456, 0.406)),
      data.get('std', (0.229, 0.224, 0.225)),
      1 / 255,
      image_shape[2],
    )
    crop = CentralCrop(size, rounding='even')
    transforms = (resize, crop) if crops else (resize,)
    return {'preprocess': preprocess, 'transforms': transforms}


@functools.cache
def _architectures():
  """Return [(name in timm, model)] of the architectures that both have."""
  return [
    (theirs[0], names.create(ours))
    for ours, theirs in names.models().items()
    if theirs
  ]


def _architecture(model):
  """Return the timm architecture of a written config.json.

  model_args can change a ViT to any size, but not the stages of a hybrid, nor
  a ResNet or a Mixer.

  Raises:
    ValueError: timm has no such ResNet, Mixer or hybrid.
  """
  embedding = getattr(model, 'embedding', None)
  if isinstance(getattr(model, 'pooling', None), DistillationToken):
    if type(embedding) is not PatchEmbedding:
      raise ValueError(
        'timm has no hybrid with a distillation token. Use --format=vit_jax '
        'instead.'
      )
    return 'deit_base_distilled_patch16_224'
  known = [
    (name, other)
    for name, other in _architectures()
    if type(other) is type(model)
    and type(getattr(other, 'embedding', None)) is type(embedding)
  ]

  def key(model):
    if isinstance(model, ResNet):
      return model.stages, model.width_factor, model.form
    if isinstance(model, MlpMixer):
      return model.width, model.depth, model.embedding.patch_size
    return getattr(model.embedding, 'stages', None)

  def distance(pair):
    width, side = pair[1].width, max(pair[1].embedding.patch_size)
    side -= max(embedding.patch_size)
    return abs(math.log(width / model.width)), abs(side)

  if key(model) is None:  # a ViT without ResNet
    return min(known, key=distance)[0]
  for name, other in known:
    if key(other) == key(model):
      return name
  raise ValueError(
    f'timm has no {type(model).__name__} of the kind {key(model)}; it has '
    f'{", ".join(name for name, _ in known)}. Use --format=npz instead.'
  )


def write(weights: Weights) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Return (arrays, {'config.json': content}) that timm loads.

  timm.create_model('local-dir:FOLDER', pretrained=True) loads a folder with
  the two, and computes the same.

  Raises:
    ValueError: timm has no such model.
  """
  model, params = weights.model, dict(weights.params)
  name = _architecture(model)
  if isinstance(model, ResNet):
    args, keys = {}, _RESNET_KEYS
  elif isinstance(model, MlpMixer):
    args, keys = _mixer_args(weights), _MIXER_KEYS
  else:
    args = _vit_args(weights, params)
    root_only = getattr(model.embedding, 'stages', None) == ()
    keys = _vit_keys(
      'fc_norm' if args['fc_norm'] else 'norm',
      root_only,
      isinstance(model.pooling, DistillationToken),
    )
  arrays = keys.to_theirs(params)
  arrays = {k: np.asarray(v, np.float32) for k, v in arrays.items()}
  return arrays, {'config.json': _make_config(weights, name, args, arrays)}


def _vit_args(weights, params):
  """Return model_args; params get timm's position table."""
  model = weights.model
  pooling, block = model.pooling, model.block
  if model.head.representation_size:
    raise ValueError(
      'timm has no tanh layer between pooling and head (representation_size='
      f'{model.head.representation_size}). Use --format=npz, or train a head '
      'without it.'
    )
  if isinstance(pooling, NoPooling):
    raise ValueError(
      'timm has no logits of single patches (NoPooling). Use --format=npz or '
      '--format=stablehlo instead.'
    )
  _check_eps(block.norm_eps)
  distilled = isinstance(pooling, DistillationToken)
  if distilled and pooling.num_registers:
    raise ValueError(
      f'timm has no registers (num_registers={pooling.num_registers}) next to '
      'a distillation token. Use --format=vit_jax instead.'
    )
  pools = {
    ClassToken: 'token',
    DistillationToken: 'token',
    Mean: 'avg',
    Map: 'map',
  }
  args = {
    'img_size': list(weights.image_shape[:2]),
    'patch_size': _patch(model),
    'embed_dim': model.width,
    'depth': model.depth,
    'num_heads': model.num_heads,
    'mlp_ratio': _ratio(model.mlp_dim, model.width),
    'class_token': pooling.class_token,
    'global_pool': pools[type(pooling)],
    'fc_norm': pooling.norm_after,
    'reg_tokens': pooling.num_registers,
    'qk_norm': block.qk_norm,
  }
  if block.layerscale_init is not None:
    args['init_values'] = block.layerscale_init
  if block.gelu == 'tanh':
    args['act_layer'] = 'gelu_tanh'
  args['no_embed_class'] = True
  if model.posemb is None and not distilled:
    args['pos_embed'] = 'none'
    return args
  params['pos_embedding'] = rows = bundle.patch_positions(weights)
  prefix = [
    params.pop(f'{name}_pos_embedding', None) for name in ('cls', 'dist')
  ]
  if prefix[0] is not None or distilled:  # a distilled model always has these
    blank = np.zeros((1, 1, model.width), np.float32)
    ours = [blank if x is None else x for x in prefix[: 1 + distilled]]
    blank = np.zeros((1, pooling.num_registers, model.width), np.float32)
    params['pos_embedding'] = np.concatenate([*ours, blank, rows], axis=1)
    args['no_embed_class'] = False
  return args


def _mixer_args(weights):
  model = weights.model
  if model.gelu != 'exact':
    raise ValueError(
      "timm's Mixer has the exact GELU, this one gelu='tanh'. Use --format=npz,"
      " or read the weights with gelu='exact' if that is near enough."
    )
  _check_eps(model.norm_eps)
  hidden = model.tokens_mlp_dim, model.channels_mlp_dim
  ratios = [_ratio(h, model.width) for h in hidden]
  return {'img_size': list(weights.image_shape[:2]), 'mlp_ratio': ratios}


def _check_eps(eps):
  if eps != 1e-6:
    raise ValueError(
      f'norm_eps is {eps}, and 1e-06 in timm. Use --format=hf or npz, or read '
      'the weights with norm_eps=1e-6 if that is near enough.'
    )


def _patch(model):
  height, width = model.embedding.patch_size
  return height if height == width else [height, width]


def _ratio(hidden, width):
  """Return the number for which timm computes int(width * ratio) = hidden."""
  ratio = hidden / width
  return ratio if int(width * ratio) == hidden else (hidden + 0.5) / width


def _make_config(weights, architecture, args, arrays):
  """Return the content of config.json; the inverse of _Config."""
  height, width, channels = weights.image_shape
  num_classes = weights.model.num_classes or 0
  mean, std = image_configs.mean_and_std(weights.preprocess, channels, 1 / 255)
  large, keeps_aspect, method = image_configs.describe(weights)
  first_conv = next(name for name in _FIRST_CONVS if f'{name}.weight' in arrays)
  config = {
    'architecture': architecture,
    'num_classes': num_classes,
    'global_pool': args.get('global_pool', 'avg'),
    'model_args': {'in_chans': channels} | args | {'num_classes': num_classes},
    'pretrained_cfg': {
      'custom_load': False,
      'input_size': [channels, height, width],
      'fixed_input_size': 'img_size' in args,
      'interpolation': method,
      'crop_pct': _fraction(large, (height, width)),
      'crop_mode': 'center' if keeps_aspect else 'squash',
      'mean': mean,
      'std': std,
      'num_classes': num_classes,
      'pool_size': None,
      'first_conv': first_conv,
      'classifier': _classifier(arrays),
    },
  }
  if weights.class_names:
    config['label_names'] = list(weights.class_names)
  if weights.activation != 'softmax':
    config['activation'] = weights.activation
  return config


def _classifier(arrays):
  if 'stem.conv.weight' in arrays:
    return 'head.fc'
  return ['head', 'head_dist'] if 'dist_token' in arrays else 'head'


def _fraction(large, size):
  """Return crop_pct such that int(size / crop_pct) is `large`."""
  fraction = min(s / l for s, l in zip(size, large))
  while fraction > 0 and any(
    int(s / fraction) < l for s, l in zip(size, large)
  ):
    fraction *= 1 - 1e-9  # it was rounded up
  return min(fraction, 1.0)
