"""The architecture of a model, read off the arrays of a file.

Facts come from the arrays, then from the file's config and the user, and
defaults are applied last.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.config.values import walk
from vit_jax.kernels import sizes
from vit_jax.models import pooling
from vit_jax.models.dense import BlockOptions, SwiGlu
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.posemb import Learned
from vit_jax.models.resnet import ROOT_WIDTH, Hybrid, ResNet
from vit_jax.models.vit import PatchEmbedding, VisionTransformer, as_pair
from vit_jax.types import FlatParams, Size, UserError
from vit_jax.weights import bundle
from vit_jax.weights.bundle import Weights
from vit_jax.weights.family import Config, Family, renamed
from vit_jax.weights.keymap import HEAD

_ROOT = 'resnet/root/conv/kernel'
# Fields that arrays show, of models without later additions to the paper's.
PLAIN = {
  'block.biases': BlockOptions().biases,
  'block.sub_norm': (),
  'block.norm': 'layer',
  'embedding.bias': True,
  'embedding.norm': None,
  'pooling.norm': 'before',
  'head.bias': True,
}


def read(
  family: Family,
  arrays: FlatParams,
  config: Config,
  *,
  name: str = '',
  new_head: bool = False,
  image_size: Size | None = None,
  use_size: Size | None = None,
  grid: tuple[int, int] | None = None,
  **given: Any,
) -> Weights:
  """Return the Weights of all arrays in a file of a family.

  `config` is flat, and empty if there is none; `name` is that of the model in
  it. Other options are those of `formats.read`.
  """
  arrays, unused = _used(family, arrays, config, name, new_head)
  known = {**family.fields, **family.configure(config, arrays)}
  if family.posemb_resize.endswith('_square'):  # RADIO has a larger table
    image_size, use_size = None, image_size
  keys = family.keys.having(arrays)
  notes: list[str] = []
  params = keys.to_ours(arrays)
  try:
    if {'pos_embedding', 'embedding/kernel'} <= params.keys():
      params |= _place(params, family.rows, grid, (image_size, use_size), notes)
    heads = family.heads if name or family.images else {}
    model = _infer(params, heads, known, given)
  except KeyError as e:
    raise UserError(f'No model here has such arrays: there is no {e}.') from e
  patch = params['embedding/kernel'].shape[0] if 'grid' in family.images else 0
  size = as_pair(image_size or patch * family.images.get('grid', 0) or 224)
  if 'pos_embedding' in params:
    size = model.embedding.image_size(params['pos_embedding'].shape[1:3])
  elif isinstance(model, MlpMixer):
    tokens = params['block_0/token_mixing/fc1/kernel'].shape[0]
    size = model.embedding.image_size(grid_of([tokens], grid))
  kernel: Any = params.get(_ROOT, params.get('embedding/kernel'))
  shape = (*size, kernel.shape[2])
  params = keys.fit(arrays, params, bundle.shapes(model, shape))
  if posemb := getattr(model, 'posemb', None):
    posemb = dataclasses.replace(posemb, resize_method=family.posemb_resize)
    model = model.clone(posemb=posemb)
  if unused:
    notes.append(
      f'  {len(unused)} arrays left out, which features do not depend on, such '
      f'as {min(unused)}'
    )
  how = family.patch_resize
  return Weights(model, params, shape, notes=notes, patch_resize=how)


def _used(family, arrays, config, name, new_head):
  """Return arrays as the key map knows them, and the names of others."""
  for arg, values in family.args.items():
    if (value := config.get(arg, values[0])) not in values:
      raise UserError(f'{name} needs {arg}={value!r}, which is not supported.')
  unused = {k for k in arrays if re.fullmatch(family.unused, k)}
  used = {k: family.bare(k) for k in arrays if k not in unused}
  arrays = family.prepare(renamed(arrays, used), config)
  if new_head:
    heads = {k for k in arrays if re.fullmatch(HEAD, k)}
    unused |= {k for k in heads if not family.keys.to_ours({k: arrays[k]})}
    arrays = {k: x for k, x in arrays.items() if k not in unused}
  return arrays, unused


def _place(params, rows, grid, sizes, notes):
  """Return positions of tokens and of a grid of patches, apart.

  The table is [1, tokens + gh * gw, D], perhaps without the leading 1, or one
  of patches only, [1, gh, gw, D] or [gh, gw, D]. Positions of registers after
  other tokens are added to them.
  """
  tokens = {}  # by the number of rows
  for names in rows:
    names = [name for name in names if name in params]
    tokens[sum(params[name].shape[1] for name in names)] = names
  table = params['pos_embedding']
  if table.ndim == 4 or (table.ndim == 3 and len(table) > 1):  # already a grid
    tokens, grid = {0: []}, table.shape[-3:-1]
  table = table.reshape(1, -1, table.shape[-1])
  cut = _facts(params)[1]['embedding'].grid
  fits = [size and cut(as_pair(size)) for size in sizes]
  counts = [table.shape[1] - count for count in tokens]
  gh, gw = grid_of(counts, grid, fits)
  if not grid and (gh, gw) != fits[0]:
    notes.append(f'  assumed: positions are of a grid of {gh}x{gw} patches')
  count = table.shape[1] - gh * gw
  found, table = np.split(table, [count], axis=1)
  out = {'pos_embedding': table.reshape(1, gh, gw, -1)}
  for name in tokens.get(count, ()):
    part, found = np.split(found, [params[name].shape[1]], axis=1)
    if name != 'registers' or tokens[count] == ['registers']:
      out[f'{name}_pos_embedding'] = part
    elif part.any():
      out[name] = params[name] + part
      notes.append('  positions of registers added to them')
  return out


def _infer(params, heads, known, given):
  """Return the model that parameters belong to.

  Arrays do not show num_heads, if its axes are merged, nor mlp and norm_eps;
  nor pooling and posemb if these have no parameters. Fixed positions are never
  guessed.
  """
  cls, facts = _facts(params)
  given = {path: x for path, x in walk(given) if path}
  known = {k: x for k, x in known.items() if k.partition('.')[0] not in given}
  if 'block.mlp' in facts:  # whatever activation others have
    known.pop('block.mlp', None)
  fields = facts | known | given
  if cls is VisionTransformer:
    fields = {'pooling': pooling.Mean()} | fields
    if 'posemb' not in fields:
      raise UserError(
        'The file has no table of positions, and no config.json that says how '
        'they are computed. If they are fixed, pass posemb=SinCos2d() of '
        'vit_jax.models.posemb (for MAE, endpoint=False); a tool takes --set '
        'posemb=\'{"target": "..."}\'. If the model has none, posemb=None.'
      )
    if fields['width'] in heads:
      fields = {'num_heads': heads[fields['width']]} | fields
    if 'num_heads' not in fields:
      example = f'num_heads={max(fields["width"] // 64, 1)}'
      raise UserError(
        'The file does not contain the number of heads. For heads of 64, give '
        f'{example}: a tool takes --set {example}, a config '
        f'--config.init_from.options.{example}.'
      )
  return bundle.from_fields(cls, **fields)


def _facts(params):
  """Return (class, fields) of what the parameters show."""
  shape = {path: array.shape for path, array in params.items()}
  head = params.get('head/kernel', params.get('head/cls/kernel'))
  facts = {'num_classes': None if head is None else head.shape[-1]}
  parts = {tuple(path.split('/')[:3]) for path in params}
  depth = len({name for name, *_ in parts if name.startswith('block_')})
  units = Counter(x[1] for x in parts if x[1:] and x[1].startswith('stage'))
  stages = tuple(units[stage] for stage in sorted(units))
  if not depth:
    return ResNet, facts | {
      'stages': stages,
      'width_factor': shape[_ROOT][3] // ROOT_WIDTH,
      'form': 'preact' if 'norm/scale' in params else 'postact',
    }
  *patch_size, _, width = shape['embedding/kernel']
  embedding = PatchEmbedding(tuple(patch_size))
  facts |= {'width': width, 'depth': depth, 'embedding': embedding}
  if 'block_0/token_mixing/fc1/kernel' in params:
    return MlpMixer, facts | {
      f'{x}s_mlp_dim': sizes(params, f'block_0/{x}_mixing/fc1/kernel')['hidden']
      for x in ('token', 'channel')
    }
  norm = params.get('block_0/attn/query_norm/scale')
  names = 'query', 'key', 'value', 'out'
  biased = [x for x in names if f'block_0/attn/{x}/bias' in params]
  biased += ['mlp'] if 'block_0/mlp/fc1/bias' in params else []
  subs = [x for x in ('attn', 'mlp') if f'block_0/{x}/norm/scale' in params]
  facts |= {
    'mlp_dim': sizes(params, 'block_0/mlp/fc1/kernel')['hidden'],
    'block.layerscale_init': 1e-5 if 'block_0/ls1' in params else None,
    'block.qk_norm': norm is not None,
    'block.gate': 'block_0/attn/gate/kernel' in params,
    'block.biases': tuple(biased),
    'block.sub_norm': tuple(subs),
    'block.norm': 'layer' if 'block_0/norm1/bias' in params else 'rms',
    'embedding.bias': 'embedding/bias' in params,
    'embedding.norm': 'tokens' if 'embedding_norm/scale' in params else None,
  }
  if 'block_0/mlp/gate/kernel' in params:
    facts['block.mlp'] = SwiGlu()
  if 'norm/scale' not in params:
    facts['pooling.norm'] = None
  if head is not None:
    facts['head.bias'] = bool({'head/bias', 'head/cls/bias'} & params.keys())
  if query := sizes(params, 'block_0/attn/query/kernel'):
    facts['num_heads'] = query['heads']
  elif norm is not None:
    facts['num_heads'] = width // norm.size
  if 'cls' in params:
    facts |= {'pooling': pooling.ClassToken(), 'pooling.class_token': True}
  if 'dist' in params:
    facts['pooling'] = pooling.DistillationToken()
  if 'map_head/probe' in params:
    facts['pooling'] = pooling.Map()
  if 'pos_embedding' in params:
    has_row = 'cls' not in params or 'cls_pos_embedding' in params
    registers = 'registers_pos_embedding' in params
    facts['posemb'] = Learned(prefix=has_row, registers=registers)
  if 'pre_logits/kernel' in params:
    facts['head.representation_size'] = shape['pre_logits/kernel'][1]
  if 'registers' in params:
    facts['pooling.num_registers'] = shape['registers'][1]
  if _ROOT in params:
    facts['embedding'] = Hybrid(embedding.patch_size, stages=stages)
  return VisionTransformer, facts


def grid_of(
  counts: Sequence[int],
  grid: tuple[int, int] | None = None,
  sizes: Sequence[tuple[int, int] | None] = (),
) -> tuple[int, int]:
  """Return the grid of patches whose number is one of `counts`.

  It is `grid`; or else the one of `sizes` that fits; or else, if the first, of
  the file, is None, a square, unless a count before it has any grid.
  """
  known: Any = [tuple(grid)] if grid else [x for x in sizes if x]
  found = {x for x in known if math.prod(x) in counts}
  for n in () if grid or found or any(sizes[:1]) else counts:
    side = math.isqrt(max(n, 0))
    if n == side**2 > 0:
      found = {(side, side)}
    if found or any(n % i == 0 for i in range(2, side + 1)):
      break
  if len(found) == 1:
    return found.pop()
  tried = f' (tried {", ".join(map(str, known))})' if known else ''
  raise UserError(
    f'The file has positions of {" or ".join(map(str, counts))} patches, in an '
    f'unknown grid{tried}. Give grid=(rows, columns) whose product is that.'
  )
