"""Fitting the parameters of one model to another: the paper's fine-tuning.

Section 3.2: both layers of the pre-training head are removed, a
zero-initialised D x K layer replaces them, and the pre-trained position
embeddings are interpolated in 2-D to the new sequence length.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import tree
from vit_jax.models import resample
from vit_jax.models.posemb import PositionEmbedding
from vit_jax.models.resample import Method
from vit_jax.types import (
  Count,
  FlatParams,
  Model,
  Natural,
  Params,
  PathLike,
  PathRule,
  UserError,
)
from vit_jax.weights import bundle, formats
from vit_jax.weights.bundle import Weights

HEAD = r'(pre_logits|head)/.*'
MASK = 'mask'  # used by the pre-training of masked_patches.py only
_MISMATCH = 'The weights do not fit the model. Weights (-), model (+):'
_REMEDY = """
Only the head (head='reset') and position grids may differ; with patch_resize
also patches, and with adapt_channels also image channels. To use the model of
the weights, name no model in the argument of the config: finetune.py:folder.
""".strip()


@dataclasses.dataclass(frozen=True)
class InitFrom:
  """Weights to start from, and how they are adapted to the model.

  Attributes:
    path, step, ema, grid, prefix, trust: see `formats.read`.
    options: more options of `formats.read`.
    head: 'reset': it stays as initialised (the paper's fine-tuning); 'keep': it
      is loaded, and must fit. None: 'reset' in training, else 'keep'.
    head_rule: path rule of the parameters of the head.
    posemb_resize, patch_resize, adapt_channels: see
      `resample.resize_parameter`. None: positions as the model's `posemb` says,
      'paper' unless the family of the weights has another method.
  """

  path: PathLike
  step: Natural | None = None
  ema: bool | Literal['auto'] = 'auto'
  grid: tuple[Count, Count] | None = None
  prefix: str | None = None
  options: Mapping[str, Any] | None = None
  trust: tuple[str, ...] = ()
  head: Literal['reset', 'keep'] | None = None
  head_rule: PathRule = HEAD
  posemb_resize: Method | None = None
  patch_resize: Method | None = None
  adapt_channels: bool | Literal['mean'] = False


def read(init_from: InitFrom, *, values: bool = True) -> Weights:
  """Return the Weights that an InitFrom names; see `formats.read`."""
  return formats.read(
    init_from.path,
    step=init_from.step,
    ema=init_from.ema,
    trust=init_from.trust,
    values=values,
    grid=init_from.grid,
    prefix=init_from.prefix,
    new_head=init_from.head != 'keep',
    **(init_from.options or {}),
  )


def load_into(state: Any, model: Model, init_from: InitFrom) -> tuple[Any, str]:
  """Return (state, report): a TrainState with the parameters of weights.

  What the objective adds to the parameters stays as initialised.
  """
  fresh = {k: x for k, x in state.params.items() if k != 'objective'}
  found, report = fit(read(init_from), fresh, model, init_from)
  params = {**state.params, **found}
  ema = None if state.ema is None else jax.tree.map(jnp.copy, params)
  return dataclasses.replace(state, params=params, ema=ema), report


def fit(
  weights: Weights, params: Params, model: Model, init_from: InitFrom
) -> tuple[Params, str]:
  """Return (weights in the shapes and shardings of `params`, report).

  `params` are those of the model that will use the weights, as initialised; see
  `adapt`.
  """
  adapted, notes = adapt(weights.params, tree.flatten(params), model, init_from)
  notes += weights.notes + [
    f'  {name}={here!r} here, {there!r} in the file'
    for name, (here, there) in bundle.differences(model, weights.model).items()
  ]
  shardings = jax.tree.map(lambda x: x.sharding, params)
  params = jax.device_put(tree.unflatten(adapted), shardings)
  text = '\n'.join(notes)
  return params, f'parameters of {weights.origin}: {text}'


def adapt(
  loaded: FlatParams, fresh: FlatParams, model: Model, init_from: InitFrom
) -> tuple[dict[str, Any], list[str]]:
  """Return (parameters of a model made from those of another, report lines).

  Scanned and unrolled layers are converted. A mask vector is dropped if only
  the old model has one, and stays as initialised if only the new model has
  (head 'reset'). The position of a token is added to the token if the new model
  has none, and is 0 if only the new model has one.

  `loaded` is {path: array} of the old model, `fresh` of the new one, `model`,
  as initialised. The head is reset unless `init_from` says 'keep'. Other
  differences are listed in a UserError.
  """
  notes: list[str] = []
  posemb = getattr(model, 'posemb', None) or PositionEmbedding()
  method = init_from.posemb_resize or posemb.resize_method
  patch_resize = init_from.patch_resize
  if (stacks := tree.is_stacked(fresh)) != tree.is_stacked(loaded):
    loaded = (tree.stack_blocks if stacks else tree.unstack_blocks)(loaded)
    notes.append(f'  layers {"stacked" if stacks else "unstacked"}')
  loaded = _with_positions(loaded, fresh, notes)
  rule = init_from.head_rule + ('' if MASK in loaded else f'|{MASK}')
  reset = re.compile('(?!)' if init_from.head == 'keep' else rule)
  kept = {path: x for path, x in loaded.items() if not reset.fullmatch(path)}
  if MASK not in fresh:
    kept.pop(MASK, None)
  needed = {path: x for path, x in fresh.items() if not reset.fullmatch(path)}
  for path, value in fresh.items():
    old = kept.get(path)
    if path not in needed:
      notes.append(f'  {path} {_shape(value)} newly initialised')
    elif old is not None and old.shape != value.shape:
      new = resample.resize_parameter(
        model,
        path,
        old,
        value.shape,
        posemb_resize=method,
        patch_resize=patch_resize,
        adapt_channels=init_from.adapt_channels,
      )
      if new is not None:
        kept[path] = new
        notes.append(_resized(path, old, new, method, patch_resize))
  dropped = {p: x for p, x in loaded.items() if p not in {**kept, **fresh}}
  notes += [f'  {p} {_shape(x)} dropped' for p, x in dropped.items()]
  if lines := tree.diff(kept, needed).splitlines():
    lines.sort(key=lambda line: 'block' in line)  # layers last: they are alike
    if len(lines) > 20:
      lines[19:] = [f'and {len(lines) - 19} more']
    raise UserError('\n'.join([_MISMATCH, *lines, _REMEDY]))
  out = {p: np.asarray(kept[p], x.dtype) for p, x in needed.items()}
  notes = notes or ['everything unchanged']
  return {**fresh, **out}, [f'{len(out)} arrays loaded;', *notes]


def _with_positions(loaded, fresh, notes):
  """Return the loaded tokens with positions of their own, or without."""
  loaded = dict(loaded)
  names = 'cls', 'dist', 'registers'
  for token in [x for x in names if x in loaded and x in fresh]:
    position = f'{token}_pos_embedding'
    if position in loaded and position not in fresh:
      loaded[token] = loaded[token] + loaded.pop(position)
      notes.append(f'  {position} added to {token}')
    elif position in fresh and position not in loaded:
      loaded[position] = np.zeros_like(loaded[token])
      notes.append(f'  {position} is 0: only the patches have positions')
  return loaded


def _resized(path, old, new, posemb_resize, patch_resize):
  """Return a line of the report."""
  line = f'  {path} {_shape(old)} resized to {_shape(new)}'
  if not path.endswith('/kernel'):
    return f'{line} ({posemb_resize})'
  if old.shape[2] != new.shape[2]:
    line += ' (channels adapted)'
  if old.shape[:2] != new.shape[:2]:
    line += f' ({patch_resize})'
  return line


def _shape(array):
  return 'x'.join(map(str, array.shape)) or 'scalar'
