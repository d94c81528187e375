"""Models by name, ours and timm's; `python -m vit_jax.models.names` lists them.

    names.create('R50+ViT-B/16', num_classes=10)
    names.create('vit_base_patch16_224', num_classes=10)  # ViT-B/16

A name stands for a target and its fields, which a config can hold. timm's names
are those of its families that a model here can be: plain and DeiT ViTs, the
hybrids and BiT ResNets of the paper's authors, and Mixers. Their image size is
not part of a model here, nor is what they were trained on (after the dot).
"""

import difflib
import functools
import math
import re
import textwrap
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax import terminal
from vit_jax.config import instantiate
from vit_jax.models import variants
from vit_jax.models.variants import AXIAL_RESNET, AXIAL_VIT, MIXER, RESNET, VIT

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
_SIZE = f'(?P<size>{"|".join(_TIMM_SIZES)})'
_PIXELS = r'(?:_\d+)?'

_VITS = {  # name of ours, less the prefix: those of timm, less 'patch'
  'Ti/16': 'vit_tiny_16_224 vit_tiny_16_384 deit_tiny_16_224',
  'S/32': 'vit_small_32_224 vit_small_32_384',
  'S/16': 'vit_small_16_224 vit_small_16_384 deit_small_16_224',
  'S/8': 'vit_small_8_224',
  'M/32': '',
  'M/16': '',
  'B/32': 'vit_base_32_224 vit_base_32_384',
  'B/16': ('vit_base_16_224 vit_base_16_384 deit_base_16_224 deit_base_16_384'),
  'B/8': 'vit_base_8_224',
  'L/32': 'vit_large_32_224 vit_large_32_384',
  'L/16': 'vit_large_16_224 vit_large_16_384',
  'L/14': 'vit_large_14_224',
  'So400m/14': '',
  'H/14': 'vit_huge_14_224',
  'g/14': 'vit_giant_14_224',
  'g-opt/16': '',
  'G/14': 'vit_gigantic_14_224',
  'G-opt/14': '',
  'e/14': '',
}
_HYBRIDS = {
  'R+ViT-Ti/16': ('vit_tiny_r_s16_p8_224', 'vit_tiny_r_s16_p8_384'),
  'R26+ViT-S/32': ('vit_small_r26_s32_224', 'vit_small_r26_s32_384'),
  'R26+ViT-B/32': ('vit_base_r26_s32_224',),
  'R50+ViT-B/32': (),
  'R50+ViT-B/16': ('vit_base_r50_s16_224', 'vit_base_r50_s16_384'),
  'R50+ViT-L/32': ('vit_large_r50_s32_224', 'vit_large_r50_s32_384'),
  'R50+ViT-L/16': (),
}
_BITS_IN_TIMM = ('50x1', '50x3', '101x1', '101x3', '152x2', '152x4')
_AXIAL = ('ViT-B/32', 'ViT-B/16', 'R50x1')
_MIXERS = ('S/32', 'S/16', 'B/32', 'B/16', 'L/32', 'L/16', 'H/14')


def settings(name: str, **fields) -> dict[str, Any]:
  """{'target': ..., and its fields} of the model of that name.

  Ours: '[ViT-]SIZE/PATCH', 'R50+[ViT-]SIZE/16' and the like, '[BiT-]R50x1',
  'Mixer-SIZE/PATCH', 'Axial-[ViT-]SIZE/PATCH', 'Axial-R50x1'. timm's, where
  SIZE is tiny, small, ..., less a '.tag':

    vit_SIZE_patchP[_regR][_siglip][_gap][_224]
    deit_SIZE_patch16_224, deit3_SIZE_patchP_224, but not the distilled ones
    vit_SIZE_r50_s16_224 and the like, vit_SIZE_r_s16_p8_224
    resnetv2_50x1_bit and the like, mixer_b16_224 and the like

  A model of the same shape comes out. Weights of timm's need gelu='exact', too,
  unless they are converted from JAX's; `pretrained.load` sees to that. Where
  timm's have fewer parameters, ours are zero to the same effect: the position
  of the class token in deit3, biases of q, k and v in vit_medium_patch16_gap.

  Args:
    name: of ours or timm's.
    **fields: of the model, beside or instead of those that the name implies.

  Raises:
    ValueError: no such name; it says which are near.
  """
  try:
    return _read(str(name)) | fields
  except ValueError as e:
    reason = f' {e}' if str(e) else ''
    near = ', '.join(_near(str(name)))
    raise ValueError(
      f'There is no model named {name!r}.{reason} Near it: {near}. '
      '`python -m vit_jax.models.names` lists all.'
    ) from None


def create(name: str, **fields) -> Any:
  """The model of that name; arguments and errors as of `settings`."""
  return instantiate(settings(name, **fields))


def models() -> dict[str, tuple[str, ...]]:
  """{name of ours: names of timm's for the same model}, all there are.

  Beside these, patches of any other size, ResNets of any other width and
  hybrids of any other ResNet and size can be named.
  """
  out = {}
  for name, timm_names in _VITS.items():
    out[f'ViT-{name}'] = tuple(
      re.sub(r'_(\d+)_', r'_patch\1_', n) for n in timm_names.split()
    )
  out |= _HYBRIDS
  for depth in variants.RESNET_STAGES:
    for width in (1, 2, 3, 4):
      short = f'{depth}x{width}'
      known = short in _BITS_IN_TIMM
      out[f'BiT-R{short}'] = (f'resnetv2_{short}_bit',) if known else ()
  for name in _MIXERS:
    short = name.lower().replace('/', '')
    known = name[0] != 'H'
    out[f'Mixer-{name}'] = (f'mixer_{short}_224',) if known else ()
  out |= {f'Axial-{name}': () for name in _AXIAL}
  return out


def count_parameters(
  name: str, *, image_size: int = 224, num_classes: int = 1000
) -> int:
  """How many parameters the model has; nothing is computed or allocated."""
  fields = settings(name, num_classes=num_classes)
  if 'stages' not in fields:
    fields['scan'] = True  # one layer is traced, not all
  images = jax.ShapeDtypeStruct((1, image_size, image_size, 3), jnp.float32)
  init = instantiate(fields).init
  shapes = jax.eval_shape(init, jax.random.key(0), images)
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def _read(name):
  if name.startswith('Axial-'):
    name = name.removeprefix('Axial-')
    if '/' in name and '+' not in name:
      return {'target': AXIAL_VIT} | variants.variant(name)
    return {'target': AXIAL_RESNET} | variants.resnet_variant(name)
  if name.startswith('Mixer-'):
    return {'target': MIXER} | variants.mixer_variant(name)
  if re.fullmatch(r'(BiT-)?R\d+x\d+', name):
    return {'target': RESNET} | variants.resnet_variant(name)
  if '/' in name:
    return {'target': VIT} | variants.variant(name)
  name = name.split('.')[0]
  for pattern, read in _TIMM.items():
    if match := re.fullmatch(pattern, name):
      return read(**match.groupdict())
  raise ValueError


def _timm_vit(family, size, patch, registers, siglip, gap):
  out = {'target': VIT} | variants.variant(f'{_TIMM_SIZES[size]}/{patch}')
  if family == 'deit3':
    out['layerscale_init'] = 1e-6
  if registers:
    out['num_registers'] = int(registers)
  if siglip:
    out['pooling'] = 'map'
  if gap:
    out['pooling'] = 'gap'
    if size == 'medium' and not siglip:
      out['layerscale_init'] = 1e-5 if registers else 1e-6
    if registers:
      out['norm_after_pooling'] = True
    elif size == 'base' and not siglip:
      out['num_heads'] = 16  # as in timm, unlike every other ViT-B
  return out


def _timm_hybrid(size, resnet, reduction):
  name = f'R{resnet}+{_TIMM_SIZES[size]}/{reduction}'
  return {'target': VIT} | variants.variant(name)


def _timm_root(size):
  return _timm_hybrid(size, '', '16')


def _timm_bit(resnet):
  return {'target': RESNET} | variants.resnet_variant(f'R{resnet}')


def _timm_mixer(size, patch):
  name = f'Mixer-{size.upper()}/{patch}'
  return {'target': MIXER} | variants.mixer_variant(name)


def _distilled():
  raise ValueError(
    'Distilled DeiTs have a second class token and head, which no model here '
    'has.'
  )


_TIMM = {
  rf'(?P<family>vit)_{_SIZE}_patch(?P<patch>\d+)(?:_reg(?P<registers>\d+))?'
  rf'(?P<siglip>_siglip)?(?P<gap>_gap)?{_PIXELS}': _timm_vit,
  rf'(?P<family>deit)_(?P<size>tiny|small|base)_patch(?P<patch>16){_PIXELS}': (
    functools.partial(_timm_vit, registers=None, siglip=None, gap=None)
  ),
  rf'(?P<family>deit3)_(?P<size>small|medium|base|large|huge)_patch'
  rf'(?P<patch>\d+){_PIXELS}': (
    functools.partial(_timm_vit, registers=None, siglip=None, gap=None)
  ),
  rf'deit_\w+_distilled_patch\d+{_PIXELS}': _distilled,
  rf'vit_{_SIZE}_r(?P<resnet>\d+)_s(?P<reduction>\d+){_PIXELS}': _timm_hybrid,
  rf'vit_{_SIZE}_r_s16_p8{_PIXELS}': _timm_root,
  r'resnetv2_(?P<resnet>\d+x\d+)_bit': _timm_bit,
  rf'mixer_(?P<size>[sblh])(?P<patch>\d+){_PIXELS}': _timm_mixer,
}


def _near(name):
  known = {}
  for ours, theirs in models().items():
    known |= {n.lower(): n for n in (ours, *theirs)}
  found = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0)
  return [known[n] for n in found]


def main():
  """Prints the table."""
  print('name             parameters*  also (in timm)')
  for name, timm_names in models().items():
    line = f'{name:<14} {count_parameters(name):>13,}  '
    others = textwrap.wrap(' '.join(timm_names), 48) or ['']
    print((line + f'\n{"":<30}'.join(others)).rstrip(), flush=True)
  print('* with 1,000 classes, for images of 224x224')


if __name__ == '__main__':
  with terminal.one_message():
    main()
