"""Records what timm makes of .npz files with released names.

timm's own readers of .npz load seeded weights, and timm computes logits in
float64. The golden holds the logits; a test makes the same weights.

timm differs in these, which are set to what the files' authors have:
  GELU            erf, theirs tanh
  GroupNorm eps   1e-5 in hybrids, theirs 1e-6 (BiT: both 1e-5)
  std. kernels    (w - mean) / √(var + 1e-8); theirs (w - mean) / (std + 1e-5)
                  in hybrids, √(var + 1e-10) in BiT

Record again in the environment of record_timm.py:

  python tests/golden/record_timm_npz.py
"""

import functools
import pathlib
import sys
import tempfile

import numpy as np
import seeded
import torch
import torch.nn.functional as F

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE.parent / 'weights'))

import released  # noqa: E402
from record_timm import import_timm  # noqa: E402

VIT = {'embed_dim': 16, 'depth': 2, 'num_heads': 4, 'mlp_ratio': 1.5}
NO_CLS = {'class_token': False, 'fc_norm': False}


def standardise(kernel, form):
  """As models/resnet.py has it, for [K, C, kh, kw]."""
  kernel = kernel - kernel.mean((1, 2, 3), keepdim=True)
  variance = (kernel**2).mean((1, 2, 3), keepdim=True)
  if form == 'preact':
    return kernel / torch.sqrt(variance + 1e-10)
  return kernel / (torch.sqrt(variance) + 1e-5)


def set_epsilons(model, form):
  from timm.layers import GroupNormAct, StdConv2d, StdConv2dSame, pad_same

  def forward(conv, x):
    if isinstance(conv, StdConv2dSame):
      x = pad_same(x, conv.kernel_size, conv.stride, conv.dilation)
    weight = standardise(conv.weight, form)
    padding = 0 if isinstance(conv, StdConv2dSame) else conv.padding
    return F.conv2d(x, weight, conv.bias, conv.stride, padding)

  for module in model.modules():
    if isinstance(module, GroupNormAct):
      module.eps = 1e-5 if form == 'preact' else 1e-6
    if isinstance(module, StdConv2d | StdConv2dSame):
      module.forward = functools.partial(forward, module)


def vit(**kwargs):
  return import_timm().VisionTransformer(
    num_classes=5, act_layer='gelu_tanh', **VIT, **kwargs
  )


def hybrid(stages, size, patch):
  import_timm()
  from timm.layers import HybridEmbed
  from timm.models.vision_transformer_hybrid import _resnetv2

  backbone = _resnetv2(layers=stages)
  embed = functools.partial(HybridEmbed, backbone=backbone)
  return vit(img_size=size, patch_size=patch, embed_layer=embed)


def bit(stages):
  import_timm()
  from timm.layers import StdConv2d
  from timm.models.resnetv2 import ResNetV2

  return ResNetV2(
    layers=stages,
    channels=[256 * 2**i for i in range(len(stages))],
    num_classes=5,
    stem_type='fixed',
    conv_layer=StdConv2d,
  )


def model_of(name, size):
  """Return timm's model of the file."""
  plain = {'img_size': size, 'patch_size': (4, 2)}
  if name == 'token':
    return vit(**plain)
  if name == 'gap':
    return vit(**plain, global_pool='avg', **NO_CLS)
  if name == 'map':
    return vit(**plain, global_pool='map', **NO_CLS)
  if name == 'stacked':
    return vit(**plain, no_embed_class=True)
  if name == 'hybrid':
    return hybrid((1, 2), size, 1)
  if name == 'root':
    return hybrid((), size, 8)
  return bit((1, 2))


def load(model, shapes, path):
  np.savez(path, **released.fill_moderately(shapes))
  before = {k: v.clone() for k, v in model.state_dict().items()}
  with torch.no_grad():
    model.load_pretrained(str(path))
  for name, value in model.state_dict().items():
    assert not torch.equal(value, before[name]), f'{name} is not loaded'


def main():
  out = {}
  for name, (shapes, size, _) in released.TIMM.items():
    model = model_of(name, size)
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / 'x.npz'
      load(model, shapes, path)
    set_epsilons(model, 'preact' if name == 'bit' else 'postact')
    model = model.double().eval()
    out[name] = seeded.compute(model, released.images(size)).numpy()
    print(f'{name}: logits {out[name].min():.3f} to {out[name].max():.3f}')
  seeded.save('timm_npz', out)


if __name__ == '__main__':
  main()
