"""Records goldens from timm: ResNets, hybrids, a Mixer, a ViT with fc_norm.

As record_timm.py, whose environment it needs: small models with random
weights, and the logits that timm computes with them in float64. Weights of
ResNets are not stored but made by resnet_weights.py. timm's epsilons are set to
ours. It also lists how large timm's models are whose names we take.

  python tests/golden/record_timm_families.py
"""

import functools
import json
import pathlib
import re

import numpy as np
import record_timm
import record_timm_npz
import resnet_weights
import torch

HERE = pathlib.Path(__file__).parent
CLASSES, WIDTH, DEPTH, MLP, TOKENS_MLP = 5, 24, 2, 48, 12
UNITS = (1, 2)  # per stage

NAMES = (  # timm's models that are compared in size
  r'(vit|deit|deit3)_(tiny|small|medium|base|large|huge|giant|gigantic|so400m)'
  r'_patch\d+(_reg\d+)?(_siglip)?(_gap)?_\d+'
  r'|vit_[a-z]+_r(50|26|)_s\d+(_p8)?_\d+|resnetv2_\d+x\d+_bit|mixer_.\d+_224'
)
OTHERS = 'patch14_siglip.*_384'  # 384 px, of which timm ignores some


def resnet_name(theirs):
  """Our path of one of timm's parameters."""
  ours = theirs.replace('stem.', 'root/')
  ours = re.sub(
    r'^stages\.(\d+)\.blocks\.(\d+)\.',
    lambda m: f'stage{int(m[1]) + 1}/unit{int(m[2]) + 1}/',
    ours,
  )
  ours = re.sub(r'downsample\.(conv|norm)', r'\1_proj', ours)
  ours = ours.replace('head.fc', 'head').replace('.', '/')
  kernel = 'conv' in ours or ours.startswith('head')
  ours = ours.replace('weight', 'kernel' if kernel else 'scale')
  return ours if ours.startswith(('norm/', 'head/')) else f'resnet/{ours}'


def fill_resnet(module):
  """Sets the parameters of timm's ResNet to those of resnet_weights.py."""
  for theirs, param in module.named_parameters():
    ours = resnet_name(theirs)
    shape = tuple(param.shape)
    if len(shape) == 4:  # [out, in, kh, kw]
      shape = *shape[2:], shape[1], shape[0]
      if ours.startswith('head'):
        shape = shape[2:]
    value = resnet_weights.array(ours, shape)
    if value.ndim > 1:
      value = value.reshape(*param.shape[2:], *shape[-2:])
      value = value.transpose(3, 2, 0, 1)
    param.copy_(torch.from_numpy(value.copy()))


def preact():
  model = record_timm_npz.bit(UNITS).double()
  record_timm_npz.set_epsilons(model, 'preact')
  fill_resnet(model)
  return model, (38, 27), {}


def hybrid(rng, units, image, patch):
  from timm.layers import HybridEmbed
  from timm.models.vision_transformer_hybrid import _resnetv2

  backbone = _resnetv2(units)
  model = record_timm.make_model(
    *(rng, 'patch_embed.backbone.'),
    embed_layer=functools.partial(HybridEmbed, backbone=backbone),
    **{'img_size': image, 'patch_size': patch},
  )
  record_timm_npz.set_epsilons(backbone, 'postact')
  fill_resnet(backbone if units else torch.nn.ModuleDict({'stem': backbone}))
  with torch.no_grad():  # so that the small feature map is not lost
    model.patch_embed.proj.weight *= 512
  return model, image, record_timm.to_ours(model)


def fc_norm(rng):
  fields = {'class_token': False, 'global_pool': 'avg', 'fc_norm': True}
  model = record_timm.make_model(rng, **fields)
  return model, record_timm.IMAGE, record_timm.to_ours(model)


def mixer(rng):
  from timm.models.mlp_mixer import MlpMixer

  image, patch = (16, 16), 4
  model = MlpMixer(
    num_classes=CLASSES,
    img_size=image,
    patch_size=patch,
    num_blocks=DEPTH,
    embed_dim=WIDTH,
    mlp_ratio=(TOKENS_MLP / WIDTH, MLP / WIDTH),
  ).double()
  record_timm.randomize(model, rng)
  return model, image, record_timm.read(model, image_size=image)


def record(name, model, image, params):
  rng = np.random.default_rng(1)
  images = rng.uniform(-1, 1, (2, *image, 3)).astype(np.float32)
  record_timm.save(name, model, images, params)


def record_sizes():
  """{name: [image side, parameters, heads or None]} of timm's models."""
  import timm

  sizes = {}
  for name in timm.list_models():
    if not re.fullmatch(NAMES, name) or re.search(OTHERS, name):
      continue
    # R-Ti's feature map must be computed, which abstract tensors cannot be.
    with torch.device('cpu' if '_r' in name else 'meta'):
      model = timm.create_model(name, num_classes=1000)
    heads = [m.num_heads for m in model.modules() if hasattr(m, 'qkv')]
    side = model.pretrained_cfg['input_size'][-1]
    if name.startswith('resnet'):
      side = 224
    count = sum(p.numel() for p in model.parameters())
    sizes[name] = [side, count, heads[0] if heads else None]
  lines = ',\n'.join(f'  "{k}": {json.dumps(v)}' for k, v in sizes.items())
  (HERE / 'timm_sizes.json').write_text(f'{{\n{lines}\n}}\n')


@torch.no_grad()
def main():
  record_timm.import_timm()
  rng = np.random.default_rng(2)
  record('preact', *preact())
  record('hybrid', *hybrid(rng, UNITS, (23, 32), 1))
  record('hybrid_root', *hybrid(rng, (), (24, 32), 2))
  record('fc_norm', *fc_norm(rng))
  record('mixer', *mixer(rng))
  record_sizes()


if __name__ == '__main__':
  main()
