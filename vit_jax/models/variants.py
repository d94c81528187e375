"""Models by name: what a size, a depth and a suffix mean in fields.

Nothing here needs jax: names are read where only settings are wanted.
"""

import re
from typing import Any

VIT = 'vit_jax.models.vit.VisionTransformer'
RESNET = 'vit_jax.models.resnet.ResNet'
AXIAL_VIT = 'vit_jax.models.axial.AxialViT'
AXIAL_RESNET = 'vit_jax.models.axial.AxialResNet'
MIXER = 'vit_jax.models.mixer.MlpMixer'

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

MIXER_SIZES = {  # width, depth, tokens_mlp_dim, channels_mlp_dim
  'S': (512, 8, 256, 2048),  # S and H: from memory of the Mixer paper
  'B': (768, 12, 384, 3072),
  'L': (1024, 24, 512, 4096),
  'H': (1280, 32, 640, 5120),
}


def variant(name: str) -> dict[str, Any]:
  """Fields of VisionTransformer for a name such as 'B/16' or 'R50+B/16'.

  In a ViT's name the suffix is the side of a patch, or its height x width
  ('L/16x8'). In a hybrid's it is by how much the image is reduced in all
  (section 3.1): of R50's stages 3, 4, 6, 3 all are there at /32, where a cell
  of the feature map is a patch; at /16 the units of stage 4 are in stage 3.
  'R+Ti/16' is the root of a ResNet alone, and patches of 8x8 cells. Despite
  its name, the released code and weights reduce by 32: the root by 4.

  Args:
    name: [ResNet +] a size, a slash, a suffix; 'ViT-' may precede the size.

  Raises:
    ValueError: the name is not of that form, or the size is unknown.
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
  fields = {
    'width': width,
    'depth': depth,
    'mlp_dim': mlp_dim,
    'num_heads': num_heads,
    'patch_size': (int(match[3]), int(match[4] or match[3])),
  }
  return fields if match[1] is None else fields | _hybrid(name, match)


def _hybrid(name, match):
  resnet, reduction = match[1], match[3]
  if not resnet and reduction == '16' and not match[4]:
    return {'patch_size': (8, 8), 'resnet_stages': ()}
  stages = resnet and RESNET_STAGES.get(int(resnet))
  if not stages or reduction not in ('16', '32') or match[4]:
    depths = ', '.join(f'R{depth}' for depth in RESNET_STAGES)
    raise ValueError(
      f'Unknown hybrid {name!r}; expected one of {depths}, and /16 or /32, as '
      "in 'R50+B/16'; or 'R+SIZE/16' for a root alone."
    )
  if reduction == '16':
    stages = (*stages[:2], stages[2] + stages[3])
  return {'patch_size': (1, 1), 'resnet_stages': stages}


def resnet_variant(name: str) -> dict[str, Any]:
  """Fields of ResNet for a name such as 'R50x1' or 'BiT-R152x4'.

  Raises:
    ValueError: the name is not of that form, or the depth is unknown.
  """
  match = re.fullmatch(r'(?:BiT-)?R(\d+)x([1-9]\d*)', name)
  if not match or int(match[1]) not in RESNET_STAGES:
    raise ValueError(
      f'Unknown ResNet {name!r}; expected R, a depth, x and a width factor, as '
      f"in 'R50x1', where the depth is one of "
      f'{", ".join(map(str, RESNET_STAGES))}.'
    )
  return {
    'stages': RESNET_STAGES[int(match[1])],
    'width_factor': int(match[2]),
  }


def mixer_variant(name: str) -> dict[str, Any]:
  """Fields of MlpMixer for a name such as 'Mixer-B/16'.

  B and L are those of the released code; S and H are given from memory of the
  Mixer paper.

  Raises:
    ValueError: the name is not of that form, or the size is unknown.
  """
  match = re.fullmatch(r'(?:Mixer-)?(\w+)/([1-9]\d*)', name)
  if not match or match[1] not in MIXER_SIZES:
    raise ValueError(
      f'Unknown Mixer {name!r}; expected Mixer-SIZE/PATCH, as in '
      f"'Mixer-B/16', where SIZE is one of {', '.join(MIXER_SIZES)}."
    )
  width, depth, tokens_mlp_dim, channels_mlp_dim = MIXER_SIZES[match[1]]
  return {
    'width': width,
    'depth': depth,
    'tokens_mlp_dim': tokens_mlp_dim,
    'channels_mlp_dim': channels_mlp_dim,
    'patch_size': (int(match[2]), int(match[2])),
  }
