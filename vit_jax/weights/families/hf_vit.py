"""transformers' ViTModel and ViTForImageClassification.

They have a pooled class token and no registers, MAP head or LayerScale. The
tanh layer of a ViTModel, `pooler`, is our representation layer; a classifier
does not read it, and then it is left out. Without a config: exact GELU, and
LayerNorms with an epsilon of 1e-12.
"""

from collections.abc import Sequence
from typing import Any

from vit_jax.types import FlatParams, UserError
from vit_jax.weights import bundle, image_configs
from vit_jax.weights.architecture import PLAIN
from vit_jax.weights.bundle import Weights
from vit_jax.weights.family import Config, Family
from vit_jax.weights.keymap import Key, KeyMap, conv, linear, norm

_ACTS = {  # hidden_act: mlp
  'gelu': 'gelu',
  'gelu_new': 'gelu_tanh',
  'gelu_pytorch_tanh': 'gelu_tanh',
  'quick_gelu': 'quick_gelu',
  'silu': 'swiglu',
}
_FORMS = {
  'tanh': 'gelu_pytorch_tanh',
  'exact': 'gelu',
  'quick': 'quick_gelu',
  'silu': 'silu',
}
_QKV = 'query', 'key', 'value'


def layers(
  layer: str,
  norms: Sequence[str],
  qkv: Sequence[str],
  out: str,
  mlp: Sequence[str],
) -> list[Key]:
  """Return the rows of the layers.

  Arguments are the prefix with '{i}', and names in it: of both norms, of the
  matrices of query, key and value, and of the output, and of both MLP layers.
  """
  rows = linear(f'{layer}.{out}', 'block_{i}/attn/out', 'merged')
  for theirs, ours in zip(qkv, _QKV):
    rows += linear(f'{layer}.{theirs}', f'block_{{i}}/attn/{ours}')
  for n, (theirs, dense) in enumerate(zip(norms, mlp), 1):
    rows += norm(f'{layer}.{theirs}', f'block_{{i}}/norm{n}')
    rows += linear(f'{layer}.{dense}', f'block_{{i}}/mlp/fc{n}')
  return rows


NORMS = 'layernorm_before', 'layernorm_after'
OLD_QKV = [f'attention.attention.{x}' for x in _QKV]
NEW_QKV = [f'attention.{x}_proj' for x in 'qkv']
POSITIONS = (
  Key(
    'embeddings.position_embeddings', 'cls_pos_embedding|pos_embedding', 'table'
  ),
  *conv('embeddings.patch_embeddings.projection', 'embedding'),
)
KEYS = KeyMap(
  Key('embeddings.cls_token', 'cls'),
  *POSITIONS,
  *layers(
    'encoder.layer.{i}',
    NORMS,
    OLD_QKV,
    'attention.output.dense',
    ('intermediate.dense', 'output.dense'),
  ),
  *layers(
    'layers.{i}',
    NORMS,
    NEW_QKV,
    'attention.o_proj',
    ('mlp.fc1', 'mlp.fc2'),
  ),
  *norm('layernorm', 'norm'),
  *linear('pooler.dense', 'pre_logits'),
  *linear('classifier', 'head'),
)


def configure(config: Config, arrays: FlatParams) -> dict[str, Any]:
  """Return the fields that most configs of transformers have."""
  found = {
    'num_heads': config.get('num_attention_heads'),
    'norm_eps': config.get('layer_norm_eps'),
  }
  if 'hidden_act' in config:
    found['mlp'] = image_configs.choose(
      _ACTS, config['hidden_act'], 'hidden_act'
    )
  return {name: value for name, value in found.items() if value is not None}


def describe(weights: Weights) -> dict[str, Any]:
  """Return the fields of config.json that most models have."""
  model, (height, width, channels) = weights.model, weights.image_shape
  return {
    'hidden_size': model.width,
    'num_hidden_layers': model.depth,
    'num_attention_heads': model.num_heads,
    'intermediate_size': model.mlp_dim,
    'hidden_act': _FORMS[getattr(model.block.mlp, 'form', 'silu')],
    'layer_norm_eps': model.block.norm_eps,
    'image_size': _one_or_two(height, width),
    'patch_size': _one_or_two(*model.embedding.patch_size),
    'num_channels': channels,
    'qkv_bias': True,
    'hidden_dropout_prob': 0.0,
    'attention_probs_dropout_prob': 0.0,
  }


def _one_or_two(height, width):
  return height if height == width else [height, width]


def _prepare(arrays, config):
  if 'classifier.weight' not in arrays:
    return arrays
  return {k: x for k, x in arrays.items() if not k.startswith('pooler.')}


def _write(weights):
  model, params = weights.model, bundle.with_table(weights).params
  if 'cls' not in params or (
    'pre_logits/kernel' in params and model.num_classes
  ):
    raise UserError(
      "transformers' ViT has a class token; its classifier has no tanh layer."
    )
  prefix = 'vit.' if model.num_classes else ''
  arrays = {
    name if name.startswith('classifier') else prefix + name: array
    for name, array in KEYS.to_theirs(params).items()
  }
  kind = 'ViTForImageClassification' if model.num_classes else 'ViTModel'
  config = {'architectures': [kind], 'model_type': 'vit', **describe(weights)}
  config['pooler_act'] = 'tanh'
  if model.head.representation_size:
    config['pooler_output_size'] = model.head.representation_size
  return arrays, config


FAMILIES = (
  Family(
    '(vit)?',
    r'(encoder\.layer|layers)\.0\.layernorm_before\.weight',
    KEYS,
    fields=PLAIN | {'mlp': 'gelu', 'norm_eps': 1e-12},
    configure=configure,
    args={'pooler_act': ('tanh',)},
    prefix=r'vit\.',
    unused=r'(vit\.)?embeddings\.(mask_token|position_ids)',
    prepare=_prepare,
    rows=(('cls',),),
    write=_write,
  ),
)
