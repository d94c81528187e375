"""Names and shapes of the released .npz files, written out, not by our writer.

Each function gives {name: shape} of one model; `fill` makes a file of it.
"""

import numpy as np

PRE_LINEN = 'MultiHeadDotProductAttention_1', 'LayerNorm_2', 'MlpBlock_3'
LINEN = 'MultiHeadDotProductAttention_0', 'LayerNorm_1', 'MlpBlock_0'


def norm(name, width):
  return {f'{name}/scale': (width,), f'{name}/bias': (width,)}


def dense(name, inputs, outputs):
  return {f'{name}/kernel': (*inputs, *outputs), f'{name}/bias': outputs}


def attention(name, width, heads):
  split, out = (heads, width // heads), {}
  for part in ('query', 'key', 'value'):
    out |= dense(f'{name}/{part}', (width,), split)
  return out | dense(f'{name}/out', split, (width,))


def mlp(name, width, hidden):
  return dense(f'{name}/Dense_0', (width,), (hidden,)) | dense(
    f'{name}/Dense_1', (hidden,), (width,)
  )


def encoder(width, depth, hidden, heads, names):
  mha, norm2, mlp_name = names
  out = norm('Transformer/encoder_norm', width)
  for i in range(depth):
    layer = f'Transformer/encoderblock_{i}'
    out |= norm(f'{layer}/LayerNorm_0', width)
    out |= attention(f'{layer}/{mha}', width, heads)
    out |= norm(f'{layer}/{norm2}', width)
    out |= mlp(f'{layer}/{mlp_name}', width, hidden)
  return out


def vit(
  width=16,
  depth=2,
  hidden=24,
  heads=4,
  patch=(4, 2),
  channels=3,
  *,
  rows=10,
  classes=5,
  cls=True,
  names=PRE_LINEN,
  rep=None,
):
  out = dense('embedding', (*patch, channels), (width,))
  out |= {'cls': (1, 1, width)} if cls else {}
  out['Transformer/posembed_input/pos_embedding'] = 1, rows, width
  out |= encoder(width, depth, hidden, heads, names)
  out |= dense('pre_logits', (width,), (rep,)) if rep else {}
  return out | dense('head', (rep or width,), (classes,))


def big_vision(*, rows=9, map_head=False, table=True, **kwargs):
  kwargs = {'cls': not map_head, 'names': LINEN} | kwargs
  out = vit(rows=rows, **kwargs)
  shape = out.pop('Transformer/posembed_input/pos_embedding')
  out |= {'pos_embedding': shape} if table else {}
  if map_head:
    width, heads = kwargs.get('width', 16), kwargs.get('heads', 4)
    out['MAPHead_0/probe'] = 1, 1, width
    head = 'MAPHead_0/MultiHeadDotProductAttention_0'
    out |= attention(head, width, heads) | norm('MAPHead_0/LayerNorm_0', width)
    out |= mlp('MAPHead_0/MlpBlock_0', width, kwargs.get('hidden', 24))
  return out


def backbone(stages, gn=lambda width: (1, 1, 1, width)):
  out = {'conv_root/kernel': (7, 7, 3, 64)}
  out |= {'gn_root/scale': gn(64), 'gn_root/bias': gn(64)}
  inputs = 64
  for k, units in enumerate(stages, 1):
    n = 64 * 2 ** (k - 1)
    for j in range(1, units + 1):
      unit = f'block{k}/unit{j}'
      convs = {
        'conv1': (1, 1, inputs, n),
        'conv2': (3, 3, n, n),
        'conv3': (1, 1, n, 4 * n),
      }
      gns = {'gn1': n, 'gn2': n, 'gn3': 4 * n}
      if j == 1:
        convs['conv_proj'] = 1, 1, inputs, 4 * n
        gns['gn_proj'] = 4 * n
      out |= {f'{unit}/{name}/kernel': s for name, s in convs.items()}
      for name, width in gns.items():
        out[f'{unit}/{name}/scale'] = out[f'{unit}/{name}/bias'] = gn(width)
      inputs = 4 * n
  return out


def hybrid(stages, **kwargs):
  width = 256 * 2 ** (len(stages) - 1) if stages else 64
  patch = kwargs.pop('patch', (1, 1))
  return vit(patch=patch, channels=width, **kwargs) | backbone(stages)


def resnet(stages, classes=5):
  """big_vision's bit.py, after the sum activated."""
  features = 256 * 2 ** (len(stages) - 1)
  return backbone(stages, lambda width: (width,)) | dense(
    'head', (features,), (classes,)
  )


def mixer(width=16, depth=2, tokens=9, tokens_mlp=6, hidden=24, classes=5):
  out = dense('stem', (4, 2, 3), (width,))
  for i in range(depth):
    block = f'MixerBlock_{i}'
    out |= norm(f'{block}/LayerNorm_0', width)
    out |= mlp(f'{block}/token_mixing', tokens, tokens_mlp)
    out |= norm(f'{block}/LayerNorm_1', width)
    out |= mlp(f'{block}/channel_mixing', width, hidden)
  out |= norm('pre_head_layer_norm', width)
  return out | dense('head', (width,), (classes,))


def bit(stages=(3, 4, 6, 3), factor=1, classes=5):
  """The BiT paper's."""
  conv = 'standardized_conv2d/kernel'
  inputs = 64 * factor
  out = {f'resnet/root_block/{conv}': (7, 7, 3, inputs)}
  for b, units in enumerate(stages, 1):
    n = 64 * factor * 2 ** (b - 1)
    for u in range(1, units + 1):
      unit = f'resnet/block{b}/unit{u:02d}'
      if u == 1:
        out[f'{unit}/a/proj/{conv}'] = 1, 1, inputs, 4 * n
      for letter, kernel, width in (
        ('a', (1, 1, inputs, n), inputs),
        ('b', (3, 3, n, n), n),
        ('c', (1, 1, n, 4 * n), n),
      ):
        out[f'{unit}/{letter}/{conv}'] = kernel
        out[f'{unit}/{letter}/group_norm/gamma'] = (width,)
        out[f'{unit}/{letter}/group_norm/beta'] = (width,)
      inputs = 4 * n
  out |= {'resnet/group_norm/gamma': (inputs,)}
  out |= {'resnet/group_norm/beta': (inputs,)}
  out['resnet/head/conv2d/kernel'] = 1, 1, inputs, classes
  out['resnet/head/conv2d/bias'] = (classes,)
  return out


def big_vision_bit(stages=(3, 4, 6, 3), factor=1, classes=5):
  """big_vision's bit_paper.py: the same models as `bit`."""
  inputs = 64 * factor
  out = {'root_block/conv_root/kernel': (7, 7, 3, inputs)}
  for b, units in enumerate(stages, 1):
    n = 64 * factor * 2 ** (b - 1)
    for u in range(1, units + 1):
      unit = f'block{b}/unit{u:02d}'
      if u == 1:
        out[f'{unit}/conv_proj/kernel'] = 1, 1, inputs, 4 * n
      out[f'{unit}/conv1/kernel'] = 1, 1, inputs, n
      out[f'{unit}/conv2/kernel'] = 3, 3, n, n
      out[f'{unit}/conv3/kernel'] = 1, 1, n, 4 * n
      for i, width in enumerate((inputs, n, n), 1):
        out[f'{unit}/gn{i}/scale'] = out[f'{unit}/gn{i}/bias'] = 1, 1, 1, width
      inputs = 4 * n
  out['norm-pre-head/scale'] = out['norm-pre-head/bias'] = 1, 1, 1, inputs
  return out | dense('head', (inputs,), (classes,))


def fill(shapes, prefix='', seed=0):
  """{prefix + name: float32}; no two numbers are the same, nearly."""
  rng = np.random.RandomState(seed)  # whose numbers never change
  return {
    prefix + name: rng.standard_normal(shape).astype(np.float32)
    for name, shape in shapes.items()
  }


def fill_moderately(shapes):
  """The same, so that every array matters and no layer saturates."""
  return {
    name: (0.3 * array + name.endswith(('scale', 'gamma'))).astype(np.float32)
    for name, array in fill(shapes).items()
  }


def hollow(shapes):
  """The same without memory: zeros of full-size models."""
  zero = np.float32(0)
  return {name: np.broadcast_to(zero, s) for name, s in shapes.items()}


def images(size, seed=1):
  """float32 [2, H, W, 3] in [-1, 1]."""
  rng = np.random.RandomState(seed)
  return rng.uniform(-1, 1, (2, *size, 3)).astype(np.float32)


TIMM = {  # what timm's readers of .npz are given: file, image size, grid
  'token': (vit(), (12, 6), None),
  'gap': (vit(cls=False, rows=9), (12, 6), None),
  'map': (big_vision(map_head=True), (12, 6), None),
  'stacked': (big_vision(), (12, 6), None),
  'hybrid': (hybrid((1, 2), rows=13), (24, 32), (3, 4)),
  'root': (hybrid((), patch=(8, 8), rows=5), (64, 64), None),
  'bit': (bit((1, 2)), (40, 56), None),
}
