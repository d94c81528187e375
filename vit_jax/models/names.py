"""Models by name, ours and timm's; `python -m vit_jax.names` lists them.

    names.create('R50+ViT-B/16', num_classes=10)
    names.create('vit_base_patch16_224', num_classes=10)  # ViT-B/16

A name stands for a target and its fields, which a config can hold. The names of
timm are those of families that a model here can represent: plain and DeiT ViTs,
the hybrids and BiT ResNets of the paper's authors, and Mixers. Image sizes in
timm's names are ignored, and so are training sets (after the dot).
"""

import difflib
import functools
import math
import re
from typing import Any

from vit_jax.config import resolve

VIT = 'vit_jax.models.vit.VisionTransformer'
RESNET = 'vit_jax.models.resnet.ResNet'
AXIAL_VIT = 'vit_jax.models.axial.AxialViT'
AXIAL_RESNET = 'vit_jax.models.axial.AxialResNet'
MIXER = 'vit_jax.models.mixer.MlpMixer'
PATCHES = 'vit_jax.models.layers.PatchEmbedding'
HYBRID = 'vit_jax.models.resnet.Hybrid'
BLOCK = 'vit_jax.models.layers.BlockOptions'
POOLING = 'vit_jax.models.pooling'

SIZES = {  # width D, depth L, mlp_dim M, num_heads h
  'mu': (32, 1, 128, 2),
  'Ti': (192, 12, 768, 3),
  'S': (384, 12, 1536, 6),
  'M': (512, 12, 2048, 8),
  'B': (768, 12, 3072, 12),  # B, L and H are those of the paper's table 1
  'L': (1024, 24, 4096, 16),
  'So400m': (1152, 27, 4304, 16),
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
  'tiny': 'Ti',
  'small': 'S',
  'medium': 'M',
  'base': 'B',
  'large': 'L',
  'huge': 'H',
  'giant': 'g',
  'gigantic': 'G',
  'so400m': 'So400m',
}

# All names that are listed; other sizes, depths and widths have names, too. The
# numbers are `count_parameters` of each, which takes longer to compute than to
# read. A test compares them.
PARAMETERS = {
  'ViT-Ti/16': 5_717_416,
  'ViT-S/32': 22_878_952,
  'ViT-S/16': 22_050_664,
  'ViT-S/8': 22_055_272,
  'ViT-M/32': 39_942_120,
  'ViT-M/16': 38_837_736,
  'ViT-B/32': 88_224_232,
  'ViT-B/16': 86_567_656,
  'ViT-B/8': 86_576_872,
  'ViT-L/32': 306_535_400,
  'ViT-L/16': 304_326_632,
  'ViT-L/14': 304_203_752,
  'ViT-So400m/14': 413_597_656,
  'ViT-H/14': 632_045_800,
  'ViT-g/14': 1_012_611_432,
  'ViT-g-opt/16': 1_136_286_184,
  'ViT-G/14': 1_844_440_680,
  'ViT-G-opt/14': 1_664_842_216,
  'ViT-e/14': 3_807_214_312,
  'R+ViT-Ti/16': 6_337_704,
  'R26+ViT-S/32': 36_431_912,
  'R26+ViT-B/32': 101_383_976,
  'R50+ViT-B/32': 110_945_832,
  'R50+ViT-B/16': 98_659_112,
  'R50+ViT-L/32': 328_994_856,
  'R50+ViT-L/16': 316_483_624,
  'BiT-R26x1': 15_987_496,
  'BiT-R26x2': 59_785_832,
  'BiT-R26x3': 131_396_008,
  'BiT-R26x4': 230_818_024,
  'BiT-R50x1': 25_549_352,
  'BiT-R50x2': 97_988_712,
  'BiT-R50x3': 217_319_080,
  'BiT-R50x4': 383_540_456,
  'BiT-R101x1': 44_541_480,
  'BiT-R101x2': 173_852_776,
  'BiT-R101x3': 387_934_888,
  'BiT-R101x4': 686_787_816,
  'BiT-R152x1': 60_185_128,
  'BiT-R152x2': 236_335_208,
  'BiT-R152x3': 528_451_240,
  'BiT-R152x4': 936_533_224,
  'BiT-R200x1': 64_666_152,
  'BiT-R200x2': 254_210_152,
  'BiT-R200x3': 568_633_000,
  'BiT-R200x4': 1_007_934_696,
  'Mixer-S/32': 19_104_624,
  'Mixer-S/16': 18_528_264,
  'Mixer-B/32': 60_293_428,
  'Mixer-B/16': 59_880_472,
  'Mixer-L/32': 206_939_264,
  'Mixer-L/16': 208_196_168,
  'Mixer-H/14': 432_350_952,
  'Axial-ViT-B/32': 173_277_160,
  'Axial-ViT-B/16': 171_620_584,
  'Axial-R50x1': 24_594_472,
}
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
"""


def settings(name: str, **fields: Any) -> dict[str, Any]:
  """Return {'target': ..., and fields} of the model with that name.

  Fields that are objects are dicts with a target, too. Our names are
  '[ViT-]SIZE/PATCH', 'R50+[ViT-]SIZE/16' and the like, '[BiT-]R50x1',
  'Mixer-SIZE/PATCH', 'Axial-[ViT-]SIZE/PATCH', 'Axial-R50x1'. The names of
  timm, where SIZE is tiny, small, ..., are, without '.tag':

    vit_SIZE_patchP[_regR][_siglip][_gap][_224]
    deit_SIZE_patch16_224, deit_SIZE_distilled_patch16_224,
    deit3_SIZE_patchP_224
    vit_SIZE_r50_s16_224 and the like, vit_SIZE_r_s16_p8_224
    resnetv2_50x1_bit and the like, mixer_b16_224 and the like

  Weights of timm also need block.gelu='exact', unless they were converted from
  JAX; `pretrained.load` sets it. Where timm has fewer parameters, ours must be
  zero: the position of the class token in deit3, and the biases of q, k and v
  in vit_medium_patch16_gap.

  Args:
    name: one of our names, or one of timm's.
    **fields: top-level fields of the model, added or replaced.

  Raises:
    ValueError: there is no such name; the message lists similar ones.
  """
  try:
    return _read(str(name)) | fields
  except ValueError as e:
    reason = f' {e}' if str(e) else ''
    near = ', '.join(_near(str(name)))
    raise ValueError(
      f'There is no model named {name!r}.{reason} Similar names: {near}. '
      '`python -m vit_jax.names` lists all.'
    ) from None


def create(name: str, **fields: Any) -> Any:
  """Return the model with that name; see `settings`."""
  return resolve(settings(name, **fields))


def models() -> dict[str, tuple[str, ...]]:
  """Return {our name: names in timm for the same model}."""
  known = [(name, settings(name)) for name in _TIMM.split()]
  return {
    name: tuple(other for other, found in known if found == settings(name))
    for name in PARAMETERS
  }


def count_parameters(
  name: str, *, image_size: int = 224, num_classes: int = 1000
) -> int:
  """Return the number of parameters; nothing is computed or allocated."""
  import jax  # names are also read where no model is wanted

  model = create(name, num_classes=num_classes)
  if hasattr(model, 'scan'):
    model = model.clone(scan=True)  # one layer is traced, not all
  images = jax.ShapeDtypeStruct((1, image_size, image_size, 3), 'float32')
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def _read(name):
  if name.startswith('Axial-'):
    name = name.removeprefix('Axial-')
    if '/' in name and '+' not in name:
      return _vit(name) | {'target': AXIAL_VIT}
    return _resnet(name) | {'target': AXIAL_RESNET}
  if name.startswith('Mixer-'):
    return _mixer(name)
  if re.fullmatch(r'(BiT-)?R\d+x\d+', name):
    return _resnet(name)
  if '/' in name:
    return _vit(name)
  name = name.split('.')[0]
  for pattern, read in _TIMM_PATTERNS.items():
    if match := re.fullmatch(pattern, name):
      return read(**match.groupdict())
  raise ValueError


def _vit(name):
  """Return settings for a name such as 'B/16', 'ViT-L/16x8' or 'R50+B/16'.

  In the name of a ViT the suffix is the side of a patch, or height x width. In
  the name of a hybrid it is the factor by which the image is reduced in all
  (section 3.1). At /32 the stages of an R50 have 3, 4, 6, 3 units, and a cell
  of the feature map is a patch; at /16 the units of stage 4 are in stage 3.
  'R+Ti/16' is the root of a ResNet alone, and patches of 8x8 cells: despite its
  name, the released code and weights reduce by 32, the root by 4.
  """
  match = re.fullmatch(
    r'(?:R(\d*)\+)?(?:ViT-)?([\w-]+)/([1-9]\d*)(?:x([1-9]\d*))?', name
  )
  if not match or match[2] not in SIZES:
    raise ValueError(
      f'Unknown variant {name!r}; expected SIZE/PATCH or SIZE/HEIGHTxWIDTH, as '
      f"in 'B/16' and 'B/16x8', where SIZE is one of {', '.join(SIZES)}; or a "
      "hybrid such as 'R50+B/16'."
    )
  width, depth, mlp_dim, num_heads = SIZES[match[2]]
  patch_size = int(match[3]), int(match[4] or match[3])
  embedding = {'target': PATCHES, 'patch_size': patch_size}
  if match[1] is not None:
    embedding = _hybrid(name, resnet=match[1], reduction=(match[3], match[4]))
  return {
    'target': VIT,
    'width': width,
    'depth': depth,
    'mlp_dim': mlp_dim,
    'num_heads': num_heads,
    'embedding': embedding,
  }


def _hybrid(name, resnet, reduction):
  if not resnet and reduction == ('16', None):
    return {'target': HYBRID, 'patch_size': (8, 8), 'stages': ()}
  stages = resnet and RESNET_STAGES.get(int(resnet))
  if not stages or reduction not in (('16', None), ('32', None)):
    depths = ', '.join(f'R{depth}' for depth in RESNET_STAGES)
    raise ValueError(
      f'Unknown hybrid {name!r}; expected one of {depths}, and /16 or /32, as '
      "in 'R50+B/16'; or 'R+SIZE/16' for a root alone."
    )
  if reduction[0] == '16':
    stages = (*stages[:2], stages[2] + stages[3])
  return {'target': HYBRID, 'patch_size': (1, 1), 'stages': stages}


def _resnet(name):
  """Return settings for a name such as 'R50x1' or 'BiT-R152x4'."""
  match = re.fullmatch(r'(?:BiT-)?R(\d+)x([1-9]\d*)', name)
  if not match or int(match[1]) not in RESNET_STAGES:
    raise ValueError(
      f'Unknown ResNet {name!r}; expected R, a depth, x and a width factor, as '
      f"in 'R50x1', where the depth is one of "
      f'{", ".join(map(str, RESNET_STAGES))}.'
    )
  stages = RESNET_STAGES[int(match[1])]
  return {'target': RESNET, 'stages': stages, 'width_factor': int(match[2])}


def _mixer(name):
  """Return settings for a name such as 'Mixer-B/16'."""
  match = re.fullmatch(r'Mixer-(\w+)/([1-9]\d*)', name)
  if not match or match[1] not in MIXER_SIZES:
    raise ValueError(
      f'Unknown Mixer {name!r}; expected Mixer-SIZE/PATCH, as in '
      f"'Mixer-B/16', where SIZE is one of {', '.join(MIXER_SIZES)}."
    )
  width, depth, tokens_mlp_dim, channels_mlp_dim = MIXER_SIZES[match[1]]
  patch_size = int(match[2]), int(match[2])
  return {
    'target': MIXER,
    'width': width,
    'depth': depth,
    'tokens_mlp_dim': tokens_mlp_dim,
    'channels_mlp_dim': channels_mlp_dim,
    'embedding': {'target': PATCHES, 'patch_size': patch_size},
  }


def _timm_vit(family, size, patch, registers=None, siglip=None, gap=None):
  out = _vit(f'{_TIMM_SIZES[size]}/{patch}')
  pooling = {}
  if registers:
    pooling = {'target': f'{POOLING}.ClassToken'}
    pooling['num_registers'] = int(registers)
  if siglip:
    pooling['target'] = f'{POOLING}.Map'
  if gap:
    pooling['target'] = f'{POOLING}.Mean'
    if registers:
      pooling['norm_after'] = True
    elif size == 'base' and not siglip:
      out['num_heads'] = 16  # as in timm, unlike every other ViT-B
  layerscale = None
  if family == 'deit3':
    layerscale = 1e-6
  elif gap and size == 'medium' and not siglip:
    layerscale = 1e-5 if registers else 1e-6
  if layerscale:
    out['block'] = {'target': BLOCK, 'layerscale_init': layerscale}
  return out | ({'pooling': pooling} if pooling else {})


def _timm_hybrid(size, resnet, reduction):
  return _vit(f'R{resnet}+{_TIMM_SIZES[size]}/{reduction}')


def _timm_mixer(size, patch):
  return _mixer(f'Mixer-{size.upper()}/{patch}')


def _distilled(size, patch):
  pooling = {'pooling': {'target': f'{POOLING}.DistillationToken'}}
  return _vit(f'{_TIMM_SIZES[size]}/{patch}') | pooling


_SIZE = f'(?P<size>{"|".join(_TIMM_SIZES)})'
_PIXELS = r'(?:_\d+)?'
_TIMM_PATTERNS = {
  rf'(?P<family>vit)_{_SIZE}_patch(?P<patch>\d+)(?:_reg(?P<registers>\d+))?'
  rf'(?P<siglip>_siglip)?(?P<gap>_gap)?{_PIXELS}': _timm_vit,
  rf'(?P<family>deit)_(?P<size>tiny|small|base)_patch(?P<patch>16){_PIXELS}': (
    _timm_vit
  ),
  rf'(?P<family>deit3)_(?P<size>small|medium|base|large|huge)_patch'
  rf'(?P<patch>\d+){_PIXELS}': _timm_vit,
  rf'deit_(?P<size>tiny|small|base)_distilled_patch(?P<patch>16){_PIXELS}': (
    _distilled
  ),
  rf'vit_{_SIZE}_r(?P<resnet>\d+)_s(?P<reduction>\d+){_PIXELS}': _timm_hybrid,
  rf'vit_{_SIZE}_r_s16_p8{_PIXELS}': functools.partial(
    _timm_hybrid, resnet='', reduction='16'
  ),
  r'resnetv2_(?P<name>\d+x\d+)_bit': lambda name: _resnet(f'R{name}'),
  rf'mixer_(?P<size>[sblh])(?P<patch>\d+){_PIXELS}': _timm_mixer,
}


def _near(name):
  """Return three names that are similar, the most similar first."""
  known = {known.lower(): known for known in (*PARAMETERS, *_TIMM.split())}
  found = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0)
  return [known[n] for n in found]
