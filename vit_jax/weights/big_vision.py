"""big_vision's .npz files.

Differs from the original's format (original.py, which says how the two are
told apart): the position table 'pos_embedding' has rows for the patches only,
the class token's is added to 'cls'; there may be a MAP head; layers may be
stacked, 'Transformer/encoderblock/...' with a leading dimension; the model may
be the image tower of two, 'params/img/...'. Fixed positions are in no table:
a file without one is read as posemb='sincos2d' if not said otherwise.
"""

import math
import re

import numpy as np

from vit_jax.weights import grids, linen
from vit_jax.weights.bundle import MIXER, RESNET

_STACKED = r'Transformer/encoderblock_(\d+)/(.*)'


def recognise(names):
  """Whether arrays of these names are a file of this format."""
  prefix = linen.prefix_of(names)
  if prefix is None or not linen.is_transformer(names, prefix):
    return False
  return prefix + linen.TABLE not in names


def read(arrays, config=None, **options):
  """Weights of the arrays of a file; see original.read."""
  del config
  notes = []
  arrays = linen.parameters(arrays, notes)
  return linen.read(
    arrays, _positions, _to_theirs, notes, origin=linen.BIG_VISION, **options
  )


def write(weights, *, scan=False):
  """({name: array}, {}) of weights.

  Args:
    weights: Weights. LayerScale is multiplied into the layers before it, the
      position of the class token added to it.
    scan: whether layers are stacked.

  Raises:
    ValueError: the format cannot hold the model.
  """
  settings = weights.settings
  resnet = settings['target'] == RESNET
  if settings.get('resnet_stages') is not None or (
    resnet and settings.get('form') == 'preact'
  ):
    what = 'a pre-activation ResNet' if resnet else 'a hybrid'
    raise ValueError(
      f"big_vision's .npz cannot hold {what}. Write it as the original .npz."
    )
  params = linen.writable(weights, "big_vision's", holds_map=True)
  if settings['target'] in (RESNET, MIXER):
    return linen.names_of(params, 'linen'), {}
  if settings.get('posemb') == 'none':
    weights.notes.append('  positions, of which there are none, written as 0')
    params['pos_embedding'] = grids.position_rows(weights)
  if np.any(params.get('cls_pos_embedding', 0)):
    weights.notes.append('  position of the class token added to it')
  out = _to_theirs(params, 'linen')
  return _stack(out) if scan else out, {}


def _positions(table, has_cls, grid):
  if table.ndim == 4 or (table.ndim == 3 and table.shape[0] > 1):
    patches = table.reshape(-1, *table.shape[-3:])  # a grid as it is
    cls = None
  else:
    table = linen.check_table(table)
    # Early files have the class token's row still. That there is a class token
    # is in the file; whether its row is, only the count can say, and n² + 1 is
    # no square.
    rows = table.shape[1] - 1
    cells = (
      math.isqrt(rows) ** 2 if grid is None else math.prod(grids.pair(grid))
    )
    prefix = int(has_cls and rows > 0 and rows == cells)
    cls, patches = grids.positions(table, prefix=prefix, grid=grid)
  if not has_cls:
    return {'pos_embedding': patches}
  if cls is None or not cls.shape[1]:
    cls = np.zeros((1, 1, patches.shape[-1]), np.float32)
  return {'pos_embedding': patches, 'cls_pos_embedding': cls}


def _to_theirs(params, generation):
  out = linen.names_of(params, generation)
  if 'pos_embedding' in params:
    table = params['pos_embedding']
    out['pos_embedding'] = table.reshape(1, -1, table.shape[-1])
  if 'cls_pos_embedding' in params:
    out['cls'] = out['cls'] + params['cls_pos_embedding']
  return out


def _stack(arrays):
  out, layers = {}, {}
  for name, array in arrays.items():
    if found := re.fullmatch(_STACKED, name):
      layers.setdefault(found[2], {})[int(found[1])] = array
    else:
      out[name] = array
  for rest, found in layers.items():
    stacked = np.stack([found[i] for i in range(len(found))])
    out[f'Transformer/encoderblock/{rest}'] = stacked
  return out
