"""The paper's released .npz files, in all generations.

Vision Transformers and hybrids (also AugReg's and SAM's), with the names of
Flax's Linen modules or those from before, below 'opt/target/', 'params/' or
nothing; MLP-Mixers; ResNets of both forms. The position table of a
Transformer, [1, N, D], has a row for the class token before those of the
patches where there is a class token, and else has not.

A Transformer's file is of this format if it has that table by the name of
`linen.TABLE`; all others are big_vision's, which keeps it elsewhere, or has
none. So every file is of one of the two. Mixers and ResNets, which both wrote
with the same names, count as this one.

The first release's ImageNet-21k files have the tanh layer 'pre_logits' and a
head that is all zeros; AugReg's have a head that works, and no such layer. Both
are read as they are.
"""

import numpy as np

from vit_jax.weights import bit, grids, linen
from vit_jax.weights.bundle import MIXER, RESNET


def recognise(names):
  """Whether arrays of these names are a file of this format."""
  prefix = linen.prefix_of(names)
  if prefix is None:
    return False
  if linen.is_transformer(names, prefix):
    return prefix + linen.TABLE in names
  return prefix + 'embedding/kernel' not in names


def read(arrays, config=None, **options):
  """Weights of the arrays of a file.

  Args:
    arrays: {name: array}.
    config: unused; the format has no such file.
    **options: num_heads; grid=(rows, columns) of a position table, or a
      Mixer's patches, that are no square; image_size of a ResNet; and fields
      of the model that the file does not tell.

  Raises:
    ValueError: a part is missing, too many, or of another shape.
  """
  del config
  notes = []
  arrays = linen.parameters(arrays, notes)
  if linen.BIT_ROOT in arrays:
    return bit.read(arrays, notes, **options)
  return linen.read(
    arrays, _positions, _to_theirs, notes, origin='npz', **options
  )


def write(weights, *, generation='pre_linen'):
  """({name: array}, {}) of weights.

  Args:
    weights: Weights. Positions that are computed become a table; LayerScale
      is multiplied into the layers before it.
    generation: 'pre_linen', the names in all files that were published and
      the only ones timm reads; or 'linen'. The authors' code reads both.

  Raises:
    ValueError: the format cannot hold the model.
  """
  if generation not in linen.GENERATIONS:
    raise ValueError(
      f'generation={generation!r}; there are {", ".join(linen.GENERATIONS)}.'
    )
  settings = weights.settings
  if settings['target'] == RESNET and settings.get('form') == 'preact':
    return bit.write(weights), {}
  params = linen.writable(weights, 'The original')
  if settings['target'] in (RESNET, MIXER):
    return linen.names_of(params, generation), {}
  if 'pos_embedding' not in params:
    weights.notes.append('  positions written as a table, which is learned')
    rows = grids.position_rows(weights)
    params['pos_embedding'] = rows
    if 'cls' in params:
      params['cls_pos_embedding'] = np.zeros_like(params['cls'])
  return _to_theirs(params, generation), {}


def _positions(table, has_cls, grid):
  table = linen.check_table(table)
  cls, patches = grids.positions(table, prefix=int(has_cls), grid=grid)
  own = {'cls_pos_embedding': cls} if has_cls else {}
  return own | {'pos_embedding': patches}


def _to_theirs(params, generation):
  out = linen.names_of(params, generation)
  if 'pos_embedding' in params:
    table = params['pos_embedding']
    table = table.reshape(1, -1, table.shape[-1])
    if 'cls_pos_embedding' in params:
      table = np.concatenate([params['cls_pos_embedding'], table], axis=1)
    out[linen.TABLE] = table
  return out
