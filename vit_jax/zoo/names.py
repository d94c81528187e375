"""Models by name, ours and timm's.

    names.create('R50+ViT-B/16', num_classes=10)
    names.create('vit_base_patch16_224', num_classes=10)  # ViT-B/16

The names of timm are those of families that a model here can represent. Image
sizes in them are ignored, and so are training sets (after the dot).
"""

import difflib
import re
from collections.abc import Callable
from typing import Any

from vit_jax.config import resolve
from vit_jax.types import UserError

VIT = 'vit_jax.models.vit.VisionTransformer'
RESNET = 'vit_jax.models.resnet.ResNet'
AXIAL_VIT = 'vit_jax.models.axial.AxialViT'
AXIAL_RESNET = 'vit_jax.models.axial.AxialResNet'
MIXER = 'vit_jax.models.mixer.MlpMixer'
PATCHES = 'vit_jax.models.vit.PatchEmbedding'
HYBRID = 'vit_jax.models.resnet.Hybrid'
BLOCK = 'vit_jax.models.dense.BlockOptions'
POOLING = 'vit_jax.models.pooling'
ROTARY = 'vit_jax.models.rotary'

SIZES = {  # width D, depth L, mlp_dim M, num_heads h
  'mu': (32, 1, 128, 2),
  'Ti': (192, 12, 768, 3),
  'S': (384, 12, 1536, 6),
  'M': (512, 12, 2048, 8),
  'B': (768, 12, 3072, 12),  # B, L and H are those of the paper's table 1
  'L': (1024, 24, 4096, 16),
  'So400m': (1152, 27, 4304, 16),
  'XL': (1152, 28, 4608, 16),  # of ViT-5
  'H': (1280, 32, 5120, 16),
  'g': (1408, 40, 6144, 16),
  'g-opt': (1536, 40, 6144, 16),
  'G': (1664, 48, 8192, 16),
  'G-opt': (1536, 48, 8192, 16),
  'e': (1792, 56, 15360, 16),
}

RESNET_STAGES = {  # depth: units in each stage
  26: (2, 2, 2, 2),
  50: (3, 4, 6, 3),
  101: (3, 4, 23, 3),
  152: (3, 8, 36, 3),
  200: (3, 24, 36, 3),
}

# width, depth, tokens_mlp_dim, channels_mlp_dim. B and L are those of the
# released code; S and H are from memory of the Mixer paper.
MIXER_SIZES = {
  'S': (512, 8, 256, 2048),
  'B': (768, 12, 384, 3072),
  'L': (1024, 24, 512, 4096),
  'H': (1280, 32, 640, 5120),
}

_TIMM_SIZES = {
  **{'tiny': 'Ti', 'small': 'S', 'medium': 'M', 'base': 'B', 'large': 'L'},
  **{'huge': 'H', 'giant': 'g', 'gigantic': 'G', 'so400m': 'So400m'},
}

# Listed names, next to ResNets; other sizes, depths and widths have names, too.
_LISTED = """
  ViT-Ti/16 ViT-S/32 ViT-S/16 ViT-S/8 ViT-M/32 ViT-M/16 ViT-B/32 ViT-B/16
  ViT-B/8 ViT-L/32 ViT-L/16 ViT-L/14 ViT-So400m/14 ViT-H/14 ViT-g/14
  ViT-g-opt/16 ViT-G/14 ViT-G-opt/14 ViT-e/14
  R+ViT-Ti/16 R26+ViT-S/32 R26+ViT-B/32 R50+ViT-B/32 R50+ViT-B/16 R50+ViT-L/32
  R50+ViT-L/16
  ViT-5-S/16 ViT-5-B/16 ViT-5-L/16 ViT-5-XL/16
  Mixer-S/32 Mixer-S/16 Mixer-B/32 Mixer-B/16 Mixer-L/32 Mixer-L/16 Mixer-H/14
  Axial-ViT-B/32 Axial-ViT-B/16 Axial-R50x1
"""
_NAMES = _LISTED.split()
_NAMES += [f'BiT-R{depth}x{k}' for depth in RESNET_STAGES for k in range(1, 5)]
_TIMM = """
  vit_tiny_patch16_224 vit_tiny_patch16_384 deit_tiny_patch16_224
  vit_small_patch32_224 vit_small_patch32_384 vit_small_patch16_224
  vit_small_patch16_384 deit_small_patch16_224 vit_small_patch8_224
  vit_base_patch32_224 vit_base_patch32_384 vit_base_patch16_224
  vit_base_patch16_384 deit_base_patch16_224 deit_base_patch16_384
  vit_base_patch8_224 vit_large_patch32_224 vit_large_patch32_384
  vit_large_patch16_224 vit_large_patch16_384 vit_large_patch14_224
  vit_huge_patch14_224 vit_giant_patch14_224 vit_gigantic_patch14_224
  vit_tiny_r_s16_p8_224 vit_tiny_r_s16_p8_384 vit_small_r26_s32_224
  vit_small_r26_s32_384 vit_base_r26_s32_224 vit_base_r50_s16_224
  vit_base_r50_s16_384 vit_large_r50_s32_224 vit_large_r50_s32_384
  resnetv2_50x1_bit resnetv2_50x3_bit resnetv2_101x1_bit resnetv2_101x3_bit
  resnetv2_152x2_bit resnetv2_152x4_bit mixer_s32_224 mixer_s16_224
  mixer_b32_224 mixer_b16_224 mixer_l32_224 mixer_l16_224
  deepseek_vit_412m qwen3_vit_88m qwen3_vit_306m qwen3_vit_416m
"""


def settings(name: str, **fields: Any) -> dict[str, Any]:
  """Return {'target': ..., and fields} of the model with that name.

  Fields that are objects are dicts with a target, too. Our names are
  '[ViT-]SIZE/PATCH', 'R50+[ViT-]SIZE/16' and the like, '[ViT-]5-SIZE/PATCH',
  '[BiT-]R50x1', 'Mixer-SIZE/PATCH', 'Axial-[ViT-]SIZE/PATCH', 'Axial-R50x1'.

  Weights of timm also need block.mlp=Gelu('exact'), unless they were converted
  from JAX; `pretrained.load` sets it. Where timm has fewer parameters, ours
  must be zero: the position of the class token in deit3, and the biases of q, k
  and v in vit_medium_patch16_gap. `fields` replace top-level fields.
  """
  for pattern, read in _PATTERNS.items():
    match = re.fullmatch(pattern, str(name).split('.')[0])
    if match and (found := read(**match.groupdict())):
      return found | fields
  known = {x.lower(): x for x in _NAMES + _TIMM.split()}
  near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0)
  raise UserError(
    f'There is no model named {name!r}. Similar names: '
    f'{", ".join(known[x] for x in near)}. '
    '`python -m vit_jax.tools.names` lists all.'
  )


def create(name: str, **fields: Any) -> Any:
  """Return the model with that name; see `settings`."""
  return resolve(settings(name, **fields))


def models() -> dict[str, tuple[str, ...]]:
  """Return {our name: names in timm for the same model}."""
  known = [(name, settings(name)) for name in _TIMM.split()]
  return {
    name: tuple(other for other, found in known if found == settings(name))
    for name in _NAMES
  }


def _vit(size, height, width=None, resnet=None, axial=None):
  """Return settings of a ViT, or of a hybrid if `resnet` is its depth, or None.

  In the name of a hybrid the suffix is the factor by which the image is reduced
  in all (section 3.1). At /32 a cell of the feature map is a patch; at /16 the
  units of stage 4 are in stage 3. 'R+Ti/16' is the root of a ResNet alone, and
  patches of 8x8 cells: despite its name, the released code and weights reduce
  by 32, the root by 4.
  """
  patch_size = int(height), int(width or height)
  embedding = {'target': PATCHES, 'patch_size': patch_size}
  if resnet is not None:
    if width or (height not in ('16', '32') if resnet else height != '16'):
      return None
    patch_size = (1, 1) if resnet else (8, 8)
    stages = RESNET_STAGES[int(resnet)] if resnet else ()
    if height == '16' and resnet:
      stages = (*stages[:2], stages[2] + stages[3])
    embedding = {'target': HYBRID, 'patch_size': patch_size, 'stages': stages}
  fields = ('width', 'depth', 'mlp_dim', 'num_heads')
  return {
    'target': AXIAL_VIT if axial else VIT,
    **dict(zip(fields, SIZES[_TIMM_SIZES.get(size, size)])),
    'embedding': embedding,
  }


def _vit5(size, height, width=None):
  """Return settings of ViT-5 (arXiv 2602.08071), as in its released code."""
  learned = {'target': 'vit_jax.models.posemb.Learned', 'prefix': False}
  gelu = {'target': 'vit_jax.models.dense.Gelu', 'form': 'exact'}
  rotary = {'target': f'{ROTARY}.RotaryAxial', 'registers': 100.0}
  block = {'target': BLOCK, 'norm': 'rms', 'qk_norm': True, 'mlp': gelu}
  block |= {'layerscale_init': 1e-4, 'biases': ('out', 'mlp')}
  found = _vit(size, height, width)
  return found | {
    'embedding': found['embedding'] | {'init_std': 0.02},
    'pooling': {'target': f'{POOLING}.ClassToken', 'num_registers': 4},
    'posemb': rotary | {'learned': learned},
    'block': block | {'init_std': 0.02},
    'head': {'target': 'vit_jax.models.pooling.Head', 'init_std': 0.02},
  }


def _resnet(depth, factor, axial=None):
  return {
    'target': AXIAL_RESNET if axial else RESNET,
    'stages': RESNET_STAGES[int(depth)],
    'width_factor': int(factor),
  }


def _mixer(size, patch):
  fields = ('width', 'depth', 'tokens_mlp_dim', 'channels_mlp_dim')
  patch_size = int(patch), int(patch)
  return {
    'target': MIXER,
    **dict(zip(fields, MIXER_SIZES[size.upper()])),
    'embedding': {'target': PATCHES, 'patch_size': patch_size},
  }


def _timm_vit(family, size, patch, distilled, registers, siglip, gap):
  out = _vit(size, patch)
  kinds = {'Mean': gap, 'Map': siglip, 'DistillationToken': distilled}
  kind = next((kind for kind, found in kinds.items() if found), 'ClassToken')
  pooling = {'num_registers': int(registers)} if registers else {}
  if gap and registers:
    pooling['norm'] = 'after'
  if pooling or kind != 'ClassToken':
    out['pooling'] = {'target': f'{POOLING}.{kind}'} | pooling
  if gap and size == 'base' and not registers and not siglip:
    out['num_heads'] = 16  # as in timm, unlike every other ViT-B
  if family == 'deit3' or (gap and size == 'medium' and not siglip):
    scale = 1e-5 if registers else 1e-6
    out['block'] = {'target': BLOCK, 'layerscale_init': scale}
  return out


def _timm_vlm(size, encoder):
  """Return settings of the encoders of Qwen, or of DeepSeek without a size."""
  out = _vit({'88m': 'B', '416m': 'So400m'}.get(size, 'L'), 16 if size else 14)
  pooling = {'target': f'{POOLING}.Mean', 'unit_norm': not encoder}
  posemb = {'target': f'{ROTARY}.RotaryAxial', 'pairs_axis': -2}
  if size:
    pooling['norm'] = None
    posemb['learned'] = {'target': 'vit_jax.models.posemb.Learned'}
  else:
    glu = {'target': 'vit_jax.models.dense.SwiGlu'}
    biases = ('query', 'key', 'value', 'out')
    block = {'target': BLOCK, 'norm': 'rms', 'mlp': glu, 'biases': biases}
    out |= {'depth': 32, 'mlp_dim': 2816, 'block': block}
  return out | {'pooling': pooling, 'posemb': posemb}


_SIZE = f'(?P<size>{"|".join(SIZES)})'
_PATCH = r'(?P<height>[1-9]\d*)(?:x(?P<width>[1-9]\d*))?'
_DEPTHS = '|'.join(map(str, RESNET_STAGES))
_RESNET = f'(?P<resnet>{_DEPTHS}|)'  # of hybrids
_FACTOR = r'x(?P<factor>[1-9]\d*)'
_TIMM_SIZE = f'(?P<size>{"|".join(_TIMM_SIZES)})'
_PIXELS = r'(?:_\d+)?'
_PATTERNS: dict[str, Callable[..., dict[str, Any] | None]] = {
  rf'(?:(?P<axial>Axial-)|R{_RESNET}\+)?(?:ViT-)?{_SIZE}/{_PATCH}': _vit,
  rf'(?:ViT-)?5-{_SIZE}/{_PATCH}': _vit5,
  rf'(?:BiT-|(?P<axial>Axial-))?R(?P<depth>{_DEPTHS}){_FACTOR}': _resnet,
  rf'Mixer-(?P<size>{"|".join(MIXER_SIZES)})/(?P<patch>[1-9]\d*)': _mixer,
  # timm's
  rf'(?P<family>vit|deit|deit3)_{_TIMM_SIZE}(?P<distilled>_distilled)?'
  rf'_patch(?P<patch>\d+)(?:_reg(?P<registers>\d+))?(?P<siglip>_siglip)?'
  rf'(?P<gap>_gap)?{_PIXELS}': _timm_vit,
  rf'vit_{_TIMM_SIZE}_r{_RESNET}_s(?P<height>\d+)(?:_p8)?{_PIXELS}': _vit,
  rf'resnetv2_(?P<depth>{_DEPTHS}){_FACTOR}_bit': _resnet,
  r'(?:deepseek_vit_412m|qwen3_vit_(?P<size>88m|306m|416m))'
  r'(?P<encoder>_enc)?': _timm_vlm,
  rf'mixer_(?P<size>[sblh])(?P<patch>\d+){_PIXELS}': _mixer,
}
