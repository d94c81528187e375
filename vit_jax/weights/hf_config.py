"""config.json and preprocessor_config.json of transformers' ViT, both ways.

A picture is resized, to a height and width or to a 'shortest_edge'; its centre
is cut out if do_center_crop; then times rescale_factor, minus image_mean, over
image_std. transformers antialiases, and so do the transforms read from it.
"""

from vit_jax.weights import grids, pictures
from vit_jax.weights.bundle import VIT

_RESAMPLE = ('nearest', 'lanczos', 'bilinear', 'bicubic', 'box')  # Pillow's


_GELU = {
  'gelu': 'exact',
  'gelu_python': 'exact',
  'gelu_new': 'tanh',
  'gelu_fast': 'tanh',
  'gelu_pytorch_tanh': 'tanh',
}


def fields(config):
  """Fields of the model that config.json tells and arrays do not."""
  eps = config.get('layer_norm_eps', 1e-12)
  if type(eps) not in (int, float) or not 0 <= eps < 1:
    raise ValueError(f'config.json: layer_norm_eps is {eps!r:.80}.')
  gelu = pictures.choose(_GELU, config.get('hidden_act', 'gelu'), 'hidden_act')
  return {'gelu': gelu, 'norm_eps': float(eps)}


def class_names(config, num_classes):
  """Of id2label, unless they are the 'LABEL_0' that stand for none."""
  labels = pictures.item(config, 'id2label', dict) or {}
  numbers = range(num_classes or 0)
  found = [labels.get(str(i)) for i in numbers]
  if None in found or found == [f'LABEL_{i}' for i in numbers]:
    return None
  return pictures.names(found)


def check(settings):
  """Raises ValueError unless transformers' ViT can be such a model."""
  wrong = {
    'target': settings['target'] != VIT,
    'pooling': settings.get('pooling', 'token') != 'token',
    'num_registers': settings.get('num_registers', 0),
    'qk_norm': settings.get('qk_norm', False),
    'resnet_stages': settings.get('resnet_stages') is not None,
    'representation_size': settings.get('representation_size')
    and settings.get('num_classes'),
  }
  if found := [name for name, is_wrong in wrong.items() if is_wrong]:
    said = ', '.join(f'{name}={settings[name]!r}' for name in found)
    raise ValueError(
      f"transformers' ViT cannot have {said}: it is a ViT that pools its class "
      'token, without registers, and without a layer between the class token '
      'and a classifier. Write npz, big_vision or timm.'
    )


def make(weights):
  """Content of config.json."""
  settings, shape = weights.settings, weights.image_shape
  num_classes = settings.get('num_classes')
  names = weights.class_names or [f'LABEL_{i}' for i in range(num_classes or 0)]
  config = {
    'architectures': [
      'ViTForImageClassification' if num_classes else 'ViTModel'
    ],
    'model_type': 'vit',
    'hidden_size': settings['width'],
    'num_hidden_layers': settings['depth'],
    'num_attention_heads': settings['num_heads'],
    'intermediate_size': settings['mlp_dim'],
    'hidden_act': {'exact': 'gelu', 'tanh': 'gelu_pytorch_tanh'}[
      settings.get('gelu', 'tanh')
    ],
    'layer_norm_eps': settings.get('norm_eps', 1e-6),
    'image_size': _one(shape[:2]),
    'patch_size': _one(grids.pair(settings['patch_size'])),
    'num_channels': shape[2],
    'qkv_bias': True,
    'hidden_dropout_prob': 0.0,
    'attention_probs_dropout_prob': 0.0,
    'pooler_act': 'tanh',
  }
  if size := settings.get('representation_size'):
    config['pooler_output_size'] = size
  if num_classes:
    config['id2label'] = {str(i): name for i, name in enumerate(names)}
    config['label2id'] = {name: i for i, name in enumerate(names)}
  if weights.activation == 'sigmoid':
    config['problem_type'] = 'multi_label_classification'
  return config


def _one(size):
  return size[0] if size[0] == size[1] else list(size)


def preprocess(config, image_shape, notes):
  """{'preprocess': ..., 'transforms': ...} for Weights; {} if config is None.

  Args:
    config: content of preprocessor_config.json.
    image_shape: (H, W, C) of what comes out.
    notes: what cannot be done as it says is added.
  """
  if config is None:
    return {}
  image_size = tuple(image_shape[:2])
  code = config.get('resample', 2)
  if type(code) is not int or not 0 <= code < len(_RESAMPLE):
    raise ValueError(
      f'preprocessor_config.json: resample is {code!r}; there are 0 to 4: '
      f'{", ".join(_RESAMPLE)}.'
    )
  method, transforms, size = _RESAMPLE[code], [], image_size
  if config.get('do_resize', True):
    size = _size(config.get('size', 224))
    if isinstance(size, int):
      transforms.append(pictures.resize_small(size, method))
    else:
      transforms.append(pictures.resize(size, method))
  if config.get('do_center_crop'):
    size = _size(config.get('crop_size', 224))
    transforms.append(pictures.crop(size))
  if size != image_size:
    notes.append(
      f'  pictures are resized to {image_size}, not as '
      'preprocessor_config.json says, which makes another size'
    )
    transforms = [pictures.resize(image_size, method)]
  factor = config.get('rescale_factor', 1 / 255)
  factor = factor if config.get('do_rescale', True) else 1.0
  mean, std = [0.0], [1.0]
  if config.get('do_normalize', True):
    mean = config.get('image_mean', [0.5] * 3)
    std = config.get('image_std', [0.5] * 3)
  return {
    'preprocess': pictures.normalize(mean, std, factor, image_shape[2]),
    'transforms': transforms,
  }


def _size(size):
  """An int, of the shorter side, or (height, width)."""
  if isinstance(size, dict):
    if edge := size.get('shortest_edge'):
      return pictures.number(edge, 'shortest_edge')
    size = size.get('height'), size.get('width')
  return pictures.sides(size, 'size')


def make_processor(weights):
  """Content of preprocessor_config.json: inverse of `preprocess`."""
  height, width, channels = weights.image_shape
  factor = 1 / 255
  mean, std = pictures.mean_std(weights.preprocess, channels, factor)
  found = pictures.describe(weights)
  large = found['large']
  config = {
    'image_processor_type': 'ViTImageProcessor',
    'do_resize': True,
    'size': {'height': large[0], 'width': large[1]},
    'resample': _RESAMPLE.index(found['interpolation']),
    'do_rescale': True,
    'rescale_factor': factor,
    'do_normalize': True,
    'image_mean': mean,
    'image_std': std,
  }
  if found['keeps_aspect']:
    config['size'] = {'shortest_edge': large[0]}
  if found['keeps_aspect'] or tuple(large) != (height, width):
    config['do_center_crop'] = True
    config['crop_size'] = {'height': height, 'width': width}
  return config
