"""config.json of a timm model: what its arrays do not tell.

    {'architecture': 'vit_base_patch16_224', 'num_classes': 1000,
     'global_pool': 'token', 'model_args': {...}, 'label_names': [...],
     'pretrained_cfg': {'input_size': [3, 224, 224], 'mean': [...], ...}}

Older files have what is in pretrained_cfg at the top, and no model_args.
Beyond timm's keys we write 'activation', which timm does not look at.
"""

import dataclasses
import re
from typing import Any

from vit_jax.weights import pictures
from vit_jax.weights.bundle import default_heads

# Heads that are not those of any other model of the same width.
_HEADS = {
  'vit_base_patch16_gap_224': 16,
  'test_vit': 2,
  'test_vit2': 2,
  'test_vit3': 3,
  'test_vit4': 3,
}
# The architectures that have the tanh form of the GELU; the others, exact.
_TANH = re.compile(
  r'vit_(so400m|giantopt)_patch16_siglip_.*|vit_base_patch32_siglip_.*|'
  r'vit_large_patch16_siglip_(gap_)?512'
)
_GELU = {'gelu': 'exact', 'gelu_tanh': 'tanh'}
# Arrays named as usual, but another computation.
_OTHERS = {
  r'vit_.*_rpn_.*': 'norms after the branches',
  r'.*quickgelu.*': 'the activation QuickGELU',
  r'test_vit3': 'pooling over the class token and registers too',
}
_POOLING = {'token': 'token', 'avg': 'gap', 'map': 'map'}
# Arguments that change the computation and leave the arrays as they are.
_UNKNOWN_ARGS = {
  'pool_include_prefix': (False, None),
  'norm_layer': (None, 'layernorm'),
  'scale_attn_norm': (False, None),
  'scale_mlp_norm': (False, None),
  'dynamic_img_pad': (False, None),
}


@dataclasses.dataclass(frozen=True)
class TimmConfig:
  """What is wanted of it; None or empty where it is not said."""

  architecture: str = ''
  args: dict[str, Any] = dataclasses.field(default_factory=dict)
  data: dict[str, Any] = dataclasses.field(default_factory=dict)
  class_names: list[str] | None = None
  activation: str = 'softmax'

  @property
  def image_size(self):
    """(H, W), or None."""
    size = self.args.get('img_size') or self.data.get('input_size')
    if size is None:
      return None
    if isinstance(size, list | tuple):
      size = size[-2:]  # of what may be (channels, height, width)
    return pictures.sides(size, 'input_size')

  @property
  def gelu(self):
    """'exact' or 'tanh'."""
    name = self.args.get('act_layer')
    if name is None:
      return 'tanh' if _TANH.fullmatch(self.architecture) else 'exact'
    return pictures.choose(_GELU, name, 'act_layer')

  @property
  def has_positions(self):
    """Whether there is a table of positions."""
    return self.args.get('pos_embed', 'learn') not in ('none', '', None)

  @property
  def pooling(self):
    """Ours, or None."""
    name = self.args.get('global_pool', self.data.get('global_pool'))
    if name is None:
      return None
    return pictures.choose(_POOLING, name, 'global_pool')

  def heads(self, width):
    """Heads that attention of that width has."""
    heads = self.args.get('num_heads', _HEADS.get(self.architecture))
    if heads is None:
      return default_heads(width)
    return pictures.number(heads, 'num_heads')

  def check(self):
    """Raises ValueError if arrays would not show that it is another model."""
    for pattern, why in _OTHERS.items():
      if re.fullmatch(pattern, self.architecture):
        raise ValueError(
          f'config.json: the architecture {self.architecture} has {why}, which '
          'no model here has.'
        )
    for name, usual in _UNKNOWN_ARGS.items():
      if (value := self.args.get(name)) not in usual:
        raise ValueError(
          f'config.json: model_args has {name}={value!r}, which no model here '
          'can.'
        )


def parse(config):
  """TimmConfig of the content of config.json, or of None.

  Raises:
    ValueError: it is not of that form.
  """
  if config is None:
    return TimmConfig()
  data = pictures.item(config, 'pretrained_cfg', dict) or config
  data = dict(data)
  for name in ('global_pool', 'num_classes'):
    if config.get(name) is not None:
      data[name] = config[name]
  names = config.get('label_names') or data.get('label_names')
  names = names or config.get('labels')
  return TimmConfig(
    architecture=pictures.item(config, 'architecture', str) or '',
    args=pictures.item(config, 'model_args', dict) or {},
    data=data,
    class_names=pictures.names(names),
    activation=pictures.activation(config.get('activation')),
  )


def preprocess(config, image_shape):
  """(preprocess, transforms, notes) of timm's evaluation of pictures.

  'center' resizes the shorter side to the image's / crop_pct and cuts out the
  centre, 'squash' resizes both sides. timm antialiases, and so do these.
  Without a config: those of the paper's code, and no aspect kept.
  """
  if not config.data:
    return None, None, []
  data, notes = config.data, []
  mode = data.get('crop_mode') or 'center'
  share = data.get('crop_pct') or 0.875
  method = data.get('interpolation') or 'bicubic'
  if type(share) not in (int, float) or not 0.1 <= share <= 1:
    raise ValueError(f'config.json: crop_pct is {share!r}, not 0.1 to 1.')
  image_size = image_shape[:2]
  large = [int(side / share) for side in image_size]
  if mode == 'center' and large[0] == large[1]:
    resize = pictures.resize_small(large[0], method)
  else:
    if mode != 'squash':
      notes.append(
        f'  pictures are resized to {large}, aspect not kept, where timm has '
        f'crop_mode {mode!r}'
      )
    resize = pictures.resize(large, method)
  transforms = [resize]
  if share < 1 or resize['target'].endswith('Small'):
    transforms.append(pictures.crop(image_size))
  normalize = pictures.normalize(
    data.get('mean', (0.485, 0.456, 0.406)),
    data.get('std', (0.229, 0.224, 0.225)),
    1 / 255,
    image_shape[2],
  )
  return normalize, transforms, notes


def make(weights, architecture, model_args, first_conv, classifier):
  """Content of config.json: inverse of `parse` and `preprocess`.

  Args:
    weights: Weights.
    architecture: a name of timm's.
    model_args: for the function of that name, beyond its own.
    first_conv, classifier: names of these layers.
  """
  height, width, channels = weights.image_shape
  num_classes = weights.settings.get('num_classes') or 0
  mean, std = pictures.mean_std(weights.preprocess, channels, 1 / 255)
  found = pictures.describe(weights)
  config = {
    'architecture': architecture,
    'num_classes': num_classes,
    'global_pool': model_args.get('global_pool', 'avg'),
    'model_args': {'in_chans': channels} | model_args,
    'pretrained_cfg': {
      'custom_load': False,
      'input_size': [channels, height, width],
      'fixed_input_size': 'img_size' in model_args,
      'interpolation': found['interpolation'],
      'crop_pct': _share(found['large'], (height, width)),
      'crop_mode': 'center' if found['keeps_aspect'] else 'squash',
      'mean': mean,
      'std': std,
      'num_classes': num_classes,
      'pool_size': None,
      'first_conv': first_conv,
      'classifier': classifier,
    },
  }
  if weights.class_names:
    config['label_names'] = list(weights.class_names)
  if weights.activation != 'softmax':
    config['activation'] = weights.activation
  return config


def _share(large, size):
  """crop_pct such that floor(size / crop_pct) is `large`."""
  share = min(s / l for s, l in zip(size, large))
  while share > 0 and any(int(s / share) < l for s, l in zip(size, large)):
    share *= 1 - 1e-9  # rounded the wrong way
  return min(share, 1.0)
