"""The arrays that a model of ours has, from its settings, without jax."""

import re

import numpy as np

from vit_jax import tree
from vit_jax.weights.bundle import MIXER, RESNET, infer


def expected(settings, params):
  """{path: array of zeros that takes no memory} of a model, unrolled.

  Args:
    settings: as `bundle.infer` gives them.
    params: {path: array}; tells only what settings do not: image channels,
      and the grid of positions.
  """
  if settings['target'] == RESNET:
    shapes = _resnet(settings, params)
  elif settings['target'] == MIXER:
    shapes = _mixer(settings, params)
  else:
    shapes = _vit(settings, params)
  zero = np.float32(0)
  return {path: np.broadcast_to(zero, shape) for path, shape in shapes.items()}


def settings_of(params, rest, arrays, to_theirs, **given):
  """`bundle.infer`, and a check that params are that model's, all of them.

  Args:
    params: {path: array}, as read.
    rest: names of arrays in the file that are none of ours.
    arrays: {name: array} of the file.
    to_theirs: function of {path: array} that gives the names of the file.
    **given: see `bundle.infer`.

  Raises:
    ValueError: with all that is missing, too many or of another shape.
  """
  for path in params:  # a number in a name must not cost memory
    if any(len(n) > 4 for n in re.findall(r'\d+', path)):
      raise ValueError(f'The file has a layer of a number too high: {path}.')
  try:
    whole = _with_first_layer(params)
    settings = infer(whole, **given)
    want = expected(settings, whole)
  except (LookupError, ArithmeticError) as e:
    raise ValueError(
      f'No architecture can be read off the file ({e!r}). It has '
      f'{len(arrays)} arrays: {", ".join(sorted(arrays)[:8])}, ...'
    ) from e
  have = {path: array.shape for path, array in params.items()}
  if rest or have != {path: array.shape for path, array in want.items()}:
    raise ValueError(
      'The file is not one whole model. In the file (-), needed (+):\n'
      + tree.diff(arrays, to_theirs(want))
    )
  return settings


def _with_first_layer(params):
  """Where layer 0, which tells the architecture, lacks parts: any other's."""
  out = dict(params)
  for path, array in params.items():
    if found := re.fullmatch(r'block_\d+/(.*)', path):
      out.setdefault(f'block_0/{found[1]}', array)
  return out


def _vit(settings, params):
  width, mlp = settings['width'], settings['mlp_dim']
  ph, pw = settings['patch_size']
  out = {}
  channels = params['embedding/kernel'].shape[2]
  if settings.get('resnet_stages') is not None:
    units = settings['resnet_stages']
    out |= _backbone(units, 64, params, 'postact')
    channels = 256 * 2 ** (len(units) - 1) if units else 64
  out |= _affine('embedding', (ph, pw, channels), (width,))
  if settings['pooling'] == 'token':
    out['cls'] = 1, 1, width
  if settings['posemb'] == 'learned':
    grid = params['pos_embedding'].shape[1:3]
    out['pos_embedding'] = 1, *grid, width
    if settings['pooling'] == 'token':
      out['cls_pos_embedding'] = 1, 1, width
  if settings.get('num_registers'):
    out['registers'] = 1, settings['num_registers'], width
  for i in range(settings['depth']):
    out |= _block(f'block_{i}', settings)
  out |= _norm('norm', width)
  if settings['pooling'] == 'map':
    out['map_head/probe'] = 1, 1, width
    out |= _attention('map_head/attn', width, settings['num_heads'])
    out |= _norm('map_head/norm', width)
    out |= _mlp('map_head/mlp', width, mlp)
  if settings.get('representation_size'):
    outputs = settings['representation_size']
    out |= _affine('pre_logits', (width,), (outputs,))
    width = outputs
  return out | _head(width, settings)


def _block(name, settings):
  width, heads = settings['width'], settings['num_heads']
  out = _norm(f'{name}/norm1', width) | _norm(f'{name}/norm2', width)
  out |= _attention(f'{name}/attn', width, heads)
  out |= _mlp(f'{name}/mlp', width, settings['mlp_dim'])
  if settings.get('qk_norm'):
    out |= _norm(f'{name}/attn/query_norm', width // heads)
    out |= _norm(f'{name}/attn/key_norm', width // heads)
  if settings.get('layerscale_init') is not None:
    out |= {f'{name}/ls1': (width,), f'{name}/ls2': (width,)}
  return out


def _mixer(settings, params):
  width, mlp = settings['width'], settings['tokens_mlp_dim']
  kernel = params['embedding/kernel'].shape
  tokens = params['block_0/token_mixing/fc1/kernel'].shape[0]
  out = _affine('embedding', kernel[:3], (width,)) | _norm('norm', width)
  for i in range(settings['depth']):
    name = f'block_{i}'
    out |= _norm(f'{name}/norm1', width) | _norm(f'{name}/norm2', width)
    out |= _mlp(f'{name}/token_mixing', tokens, mlp)
    channels = settings['channels_mlp_dim']
    out |= _mlp(f'{name}/channel_mixing', width, channels)
  return out | _head(width, settings)


def _resnet(settings, params):
  units, form = settings['stages'], settings['form']
  root = 64 * settings['width_factor']
  out = _backbone(units, root, params, form)
  width = 4 * root * 2 ** (len(units) - 1) if units else root
  if form == 'preact':
    out |= _norm('norm', width)
  return out | _head(width, settings)


def _backbone(stages, root, params, form):
  channels = params['resnet/root/conv/kernel'].shape[2]
  out = {'resnet/root/conv/kernel': (7, 7, channels, root)}
  if form == 'postact':
    out |= _norm('resnet/root/norm', root)
  inputs = root
  for s, units in enumerate(stages):
    inside = root * 2**s
    for u in range(1, units + 1):
      name = f'resnet/stage{s + 1}/unit{u}'
      out |= _unit(name, inputs, inside, form, project=u == 1)
      inputs = 4 * inside
  return out


def _unit(name, inputs, inside, form, project):
  outside = 4 * inside
  out = {
    f'{name}/conv1/kernel': (1, 1, inputs, inside),
    f'{name}/conv2/kernel': (3, 3, inside, inside),
    f'{name}/conv3/kernel': (1, 1, inside, outside),
  }
  if project:
    out[f'{name}/conv_proj/kernel'] = 1, 1, inputs, outside
  widths = {'norm1': inputs, 'norm2': inside, 'norm3': inside}  # before a conv
  if form == 'postact':  # after it
    widths = {'norm1': inside, 'norm2': inside, 'norm3': outside}
    if project:
      widths['norm_proj'] = outside
  for norm, width in widths.items():
    out |= _norm(f'{name}/{norm}', width)
  return out


def _head(width, settings):
  classes = settings.get('num_classes')
  return _affine('head', (width,), (classes,)) if classes else {}


def _attention(name, width, heads):
  split = heads, width // heads
  out = _affine(f'{name}/out', split, (width,))
  for part in ('query', 'key', 'value'):
    out |= _affine(f'{name}/{part}', (width,), split)
  return out


def _mlp(name, width, hidden):
  return _affine(f'{name}/fc1', (width,), (hidden,)) | _affine(
    f'{name}/fc2', (hidden,), (width,)
  )


def _affine(name, inputs, outputs):
  return {f'{name}/kernel': (*inputs, *outputs), f'{name}/bias': outputs}


def _norm(name, width):
  return {f'{name}/scale': (width,), f'{name}/bias': (width,)}
