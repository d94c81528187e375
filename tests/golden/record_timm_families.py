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
import resnet_weights
import torch

HERE = pathlib.Path(__file__).parent
CLASSES, WIDTH, DEPTH, HEADS = 5, 24, 2, 3
MLP, TOKENS_MLP = 48, 12
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


def released_standardisation(std_conv):
  """timm's StdConv2dSame with an epsilon beside the deviation, as the hybrids'.

  timm has √(variance + epsilon), which no epsilon makes equal.
  """
  from timm.layers.padding import pad_same

  class Conv(std_conv):
    def forward(self, x):
      if self.same_pad:
        x = pad_same(x, self.kernel_size, self.stride, self.dilation)
      weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
      deviation = (weight**2).mean((1, 2, 3), keepdim=True).sqrt()
      weight = weight / (deviation + 1e-5)
      return torch.nn.functional.conv2d(
        x, weight, None, self.stride, self.padding
      )

  return Conv


def set_group_norm_epsilon(module, epsilon):
  for part in module.modules():
    if isinstance(part, torch.nn.GroupNorm):
      part.eps = epsilon


def randomize(model, rng, skip=()):
  for name, param in model.named_parameters():
    if name.startswith(skip):
      continue
    value = 0.3 * rng.standard_normal(tuple(param.shape))
    if 'norm' in name and name.endswith('weight'):
      value += 1
    param.copy_(torch.from_numpy(value.astype(np.float32)))


def preact():
  from timm.layers import StdConv2d
  from timm.models.resnetv2 import ResNetV2

  model = ResNetV2(
    layers=UNITS,
    channels=(256, 512),
    num_classes=CLASSES,
    stem_type='fixed',
    conv_layer=functools.partial(StdConv2d, eps=1e-10),
  ).double()
  set_group_norm_epsilon(model, 1e-5)
  fill_resnet(model)
  return model, (38, 27), {}


def postact_backbone(units):
  from timm.layers import StdConv2dSame
  from timm.models.resnetv2 import ResNetV2, create_resnetv2_stem

  fields = {
    'stem_type': 'same',
    'preact': False,
    'conv_layer': released_standardisation(StdConv2dSame),
  }
  if units:
    backbone = ResNetV2(
      layers=units,
      channels=(256, 512),
      num_classes=0,
      global_pool='',
      **fields,
    )
  else:
    backbone = create_resnetv2_stem(3, **fields)
  return backbone


def vision_transformer(rng, image, patch, prefix=(), **fields):
  from timm.models.vision_transformer import VisionTransformer

  model = VisionTransformer(
    img_size=image,
    patch_size=patch,
    num_classes=CLASSES,
    embed_dim=WIDTH,
    depth=DEPTH,
    num_heads=HEADS,
    mlp_ratio=MLP / WIDTH,
    **fields,
  ).double()
  randomize(model, rng, skip=prefix)
  return model


def hybrid(rng, units, image, patch):
  from timm.layers import HybridEmbed

  backbone = postact_backbone(units)
  embed = functools.partial(HybridEmbed, backbone=backbone)
  prefix = ('patch_embed.backbone.',)
  model = vision_transformer(rng, image, patch, prefix, embed_layer=embed)
  set_group_norm_epsilon(backbone, 1e-6)
  fill_resnet(backbone if units else torch.nn.ModuleDict({'stem': backbone}))
  with torch.no_grad():  # so that the small feature map is not lost
    model.patch_embed.proj.weight *= 512
  state = {
    k: v
    for k, v in model.state_dict().items()
    if not k.startswith('patch_embed.backbone')
  }
  return model, image, record_timm.to_ours(state, {'global_pool': 'token'})


def fc_norm(rng):
  model = vision_transformer(
    rng,
    record_timm.IMAGE,
    record_timm.PATCH,
    class_token=False,
    global_pool='avg',
    fc_norm=True,
  )
  state = {
    k.replace('fc_norm', 'norm'): v for k, v in model.state_dict().items()
  }
  ours = record_timm.to_ours(state, {'global_pool': 'avg'})
  return model, record_timm.IMAGE, ours


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
  randomize(model, rng)
  out = {}
  for theirs, value in model.state_dict().items():
    value = value.float().numpy()
    ours = theirs.replace('stem.proj', 'embedding')
    ours = re.sub(r'^blocks\.(\d+)\.', r'block_\1/', ours)
    ours = ours.replace('mlp_tokens', 'token_mixing')
    ours = ours.replace('mlp_channels', 'channel_mixing').replace('.', '/')
    norm = 'norm' in ours
    ours = ours.replace('weight', 'scale' if norm else 'kernel')
    out[ours] = value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T
  return model, image, out


def record(name, model, image, params):
  rng = np.random.default_rng(1)
  images = rng.uniform(-1, 1, (2, *image, 3)).astype(np.float32)
  theirs = torch.from_numpy(images.transpose(0, 3, 1, 2)).double()
  logits = model.eval()(theirs).numpy()
  np.savez_compressed(
    HERE / f'timm_{name}.npz', images=images, logits=logits, **params
  )


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
