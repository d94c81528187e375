"""transformers' ViT, DeiT, MSN, MAE, I-JEPA, BEiT and data2vec-vision.

ViTs have a pooled class token and no registers, MAP head or LayerScale. The
tanh layer of a ViTModel, `pooler`, is our representation layer; a classifier
does not read it, and then it is left out. Without a config: exact GELU, and
LayerNorms with an epsilon of 1e-12.
"""

import functools
from typing import Any

from vit_jax.models.dense import Gelu, SwiGlu
from vit_jax.models.pooling import Mean
from vit_jax.models.posemb import RelativeBias
from vit_jax.types import FlatParams, UserError
from vit_jax.weights import bundle, image_configs
from vit_jax.weights.architecture import PLAIN
from vit_jax.weights.bundle import Weights
from vit_jax.weights.family import Config, Family
from vit_jax.weights.keymap import TABLE, Key, KeyMap, conv, linear, norm

_ACTS: dict[str, Gelu | SwiGlu] = {  # hidden_act: block.mlp
  'gelu': Gelu('exact'),
  'gelu_new': Gelu(),
  'gelu_pytorch_tanh': Gelu(),  # the name that is written
  'quick_gelu': Gelu('quick'),
  'silu': SwiGlu(),
}


def layers(layer: str, norms: str, attention: str, mlp: str) -> list[Key]:
  """Return the rows of the layers.

  Arguments are the prefix with '{i}', and names in it, with spaces between: of
  both norms; of query, key and value, and the output; of the MLP and its gate.
  """
  matrix, out = attention.split()
  rows = linear(f'{layer}.{out}', 'block_{i}/attn/out', 'merged')
  for x in ('query', 'key', 'value'):
    rows += linear(f'{layer}.{matrix.format(x=x)}', f'block_{{i}}/attn/{x}')
  for n, theirs in enumerate(norms.split(), 1):
    rows += norm(f'{layer}.{theirs}', f'block_{{i}}/norm{n}')
  for theirs, ours in zip(mlp.split(), ('fc1', 'fc2', 'gate')):
    rows += linear(f'{layer}.{theirs}', f'block_{{i}}/mlp/{ours}')
  return rows


OLD = 'attention.attention.{x} attention.output.dense'
NEW = 'attention.{x[0]}_proj attention.o_proj'
DENSE = 'intermediate.dense output.dense'
_NORMS = 'layernorm_before layernorm_after'
OUTSIDE = (  # of the layers
  Key('embeddings.position_embeddings', TABLE, 'table'),
  *conv('embeddings.patch_embeddings.projection', 'embedding'),
  *norm('layernorm', 'norm'),
)
_ROWS = (
  *OUTSIDE,
  *layers('encoder.layer.{i}', _NORMS, OLD, DENSE),
  *layers('layers.{i}', _NORMS, NEW, 'mlp.fc1 mlp.fc2'),
  *linear('classifier', 'head'),
)
_CLS = Key('embeddings.cls_token', 'cls')
_KEYS = KeyMap(_CLS, *_ROWS, *linear('pooler.dense', 'pre_logits'))
# Only a classifier with a teacher reads DeiT's distillation token.
_TEACHER = KeyMap(
  Key('embeddings.distillation_token', 'dist'),
  *linear('cls_classifier', 'head/cls'),
  *linear('distillation_classifier', 'head/dist'),
  *_KEYS.keys,
)
_VIT = KeyMap(Key('embeddings.distillation_token', 'registers'), *_KEYS.keys)
_RELATIVE = 'relative_position_bias.relative_position_bias_table'
_OF_LAYER = 'encoder.layer.{i}.attention.attention.' + _RELATIVE
_BEIT = KeyMap(
  _CLS,
  *_ROWS,
  Key('encoder.layer.{i}.lambda_{n}', 'block_{i}/ls{n}'),
  Key(_OF_LAYER, 'block_{i}/attn/relative_bias|class_bias', 'relative'),
  *norm('pooler.layernorm', 'norm'),
)


def configure(config: Config, arrays: FlatParams) -> dict[str, Any]:
  """Return the fields that most configs of transformers have."""
  found = {
    'num_heads': config.get('num_attention_heads'),
    'block.norm_eps': config.get('layer_norm_eps', config.get('rms_norm_eps')),
  }
  if 'hidden_act' in config:
    name = config['hidden_act']
    found['block.mlp'] = image_configs.choose(_ACTS, name, 'hidden_act')
  return {name: value for name, value in found.items() if value is not None}


def _one_or_two(height, width):
  return height if height == width else [height, width]


def _prepare(arrays, config):
  if 'classifier.weight' not in arrays:
    return arrays
  return {k: x for k, x in arrays.items() if not k.startswith('pooler.')}


def write(
  weights: Weights, keys: KeyMap, name: str, kind: str, prefix: str = ''
) -> tuple[FlatParams, dict[str, Any]]:
  """Return (arrays, config.json) of a model_type and class.

  Names of heads do not have the prefix.
  """
  posemb = weights.model.posemb
  if not (posemb and posemb.in_layers):
    weights = bundle.with_table(weights)
  arrays = keys.to_theirs(weights.params)
  heads = 'classifier', 'visual_projection'
  arrays = {
    k if k.startswith(heads) else prefix + k: x for k, x in arrays.items()
  }
  model, (height, width, channels) = weights.model, weights.image_shape
  acts = {mlp: name for name, mlp in _ACTS.items()}
  return arrays, {
    'architectures': [kind],
    'model_type': name,
    'hidden_size': model.width,
    'num_hidden_layers': model.depth,
    'num_attention_heads': model.num_heads,
    'intermediate_size': model.mlp_dim,
    'hidden_act': acts.get(model.block.mlp),
    'layer_norm_eps': model.block.norm_eps,
    'image_size': _one_or_two(height, width),
    'patch_size': _one_or_two(*model.embedding.patch_size),
    'num_channels': channels,
    'qkv_bias': True,
    'hidden_dropout_prob': 0.0,
    'attention_probs_dropout_prob': 0.0,
  }


def _write_vit(weights):
  model, params = weights.model, weights.params
  has_tanh = 'pre_logits/kernel' in params
  if 'cls' not in params or (has_tanh and model.num_classes):
    raise UserError(
      "transformers' ViT has a class token; its classifier has no tanh layer."
    )
  kind = 'ViTForImageClassification' if model.num_classes else 'ViTModel'
  prefix = 'vit.' if model.num_classes else ''
  arrays, config = write(weights, _KEYS, 'vit', kind, prefix)
  config['pooler_act'] = 'tanh'
  if model.head.representation_size:
    config['pooler_output_size'] = model.head.representation_size
  return arrays, config


def _write_ijepa(weights):
  names = 'ijepa', 'IJepaModel'
  if weights.model.num_classes:
    names = 'ijepa', 'IJepaForImageClassification', 'ijepa.'
  return write(weights, KeyMap(*_ROWS), *names)


def _configure_beit(config, arrays):
  found = configure(config, arrays)
  if 'pooler.layernorm.weight' in arrays:
    found |= {'pooling': Mean(norm='after')}
  return found


def _share(arrays, config):
  """Return arrays with a bias that all layers share in each of them."""
  if not config.get('use_shared_relative_position_bias'):
    return arrays
  table, depth = arrays.pop(f'encoder.{_RELATIVE}'), config['num_hidden_layers']
  return arrays | {_OF_LAYER.format(i=i): table for i in range(depth)}


UNUSED = (
  r'(\w+\.)?embeddings\.(mask_token|position_ids)|logit_.*|text_.*|'
  r'decoder\..*|lm_head\..*|.*\.relative_position_index'
)
family = functools.partial(  # (pattern, anchor, keys, write=..., ...)
  Family,
  heads={768: 12},
  configure=configure,
  prefix=r'(vit|deit|ijepa|beit|data2vec_\w*|dinov2\w*|pixio|model|vision_\w*)\.',
  unused=UNUSED,
  rows=(('cls', 'dist', 'registers'), ('cls',)),
  posemb_resize='bicubic',
)
_beit = functools.partial(
  family, 'beit|data2vec-vision', keys=_BEIT, configure=_configure_beit
)
_ANCHOR = r'(encoder\.layer|layers)\.0\.layernorm_before\.weight'
_OWN = {'block.mlp': Gelu('exact'), 'block.norm_eps': 1e-12}
_PLAIN = PLAIN | _OWN
FAMILIES = (
  family('(deit)?', r'cls_classifier\.weight', _TEACHER, _PLAIN),
  family(
    '(vit|vit_msn|deit)?',
    _ANCHOR,
    _VIT,
    fields=_PLAIN,
    args={'pooler_act': ('tanh',)},
    prepare=_prepare,
    write=_write_vit,
  ),
  family(
    'vit_mae|ijepa', _ANCHOR, KeyMap(_CLS, *_ROWS), _PLAIN, write=_write_ijepa
  ),
  _beit(r'embeddings\.position_embeddings', fields=_OWN),
  _beit(
    _ANCHOR,
    fields=_OWN | {'posemb': RelativeBias()},
    prepare=_share,
    posemb_resize='bilinear',
  ),
)
