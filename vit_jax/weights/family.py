"""Families: models whose files are read, and written, alike.

The module of a format, timm.py, huggingface.py, original.py or npz.py, lists
its families; the first one that fits a file counts. Others are refused.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.models.resample import PIXEL_KERNELS, Method
from vit_jax.models.vit import VisionTransformer
from vit_jax.types import FlatParams, UserError
from vit_jax.weights import bundle
from vit_jax.weights.bundle import Weights
from vit_jax.weights.keymap import KeyMap

Config = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
  """Models whose files have the same names of arrays, with the same meaning.

  Attributes:
    pattern: regular expression of the name in config.json, which is timm's
      `architecture` or transformers' `model_type`. It fits '' if files without
      a config are read, too.
    anchor: regular expression of an array that such files have.
    keys: key map.
    fields: fields of the model that neither arrays nor the config show, as in
      `bundle.replace`.
    configure: returns fields that the config shows: (config, arrays) -> fields.
    heads: {width: number of heads}, for configs that have a name but no number,
      and for files without a config if `images` are known.
    args: {name in the config: values with which our model is the same}.
    prefix: regular expression of what may precede the names of arrays.
    unused: regular expression of arrays that features do not depend on, with
      the prefix.
    prepare: returns arrays as the key map knows them, where these differ in
      more than names and layouts: (arrays, config) -> arrays.
    rows: tokens with rows before those of patches in a position table, the most
      likely first.
    posemb_resize, patch_resize: methods that resize positions and patches as
      the source does.
    images: what the source does to test images, as in timm's pretrained_cfg.
    keeps_aspect: whether images have any aspect ratio, see KeepAspect.
    write: Weights -> (arrays, config), or raises UserError. None: only read.
  """

  pattern: str
  anchor: str
  keys: KeyMap
  fields: Config = dataclasses.field(default_factory=dict)
  configure: Callable[..., dict[str, Any]] = lambda config, arrays: {}
  heads: Mapping[int, int] = dataclasses.field(default_factory=dict)
  args: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
  prefix: str = ''
  unused: str = '(?!)'  # matches nothing
  prepare: Callable[..., dict[str, Any]] = lambda arrays, config: arrays
  rows: Sequence[Sequence[str]] = (('cls', 'dist', 'registers'), ())
  posemb_resize: Method = 'paper'
  patch_resize: Method = 'bicubic_antialias'
  images: Config = dataclasses.field(default_factory=dict)
  keeps_aspect: bool = False
  write: Callable[[Weights], tuple[FlatParams, Any]] | None = None

  def bare(self, name: str) -> str:
    """Return a name without the prefix."""
    return re.sub(f'^({self.prefix})', '', name)

  def recognises(self, names: Iterable[str]) -> bool:
    """Return whether there is the anchor."""
    return any(re.fullmatch(self.anchor, self.bare(name)) for name in names)


def recognise(families: Sequence[Family], names: Iterable[str]) -> bool:
  """Return whether any family has arrays of these names."""
  return any(family.recognises(names) for family in families)


def prefixes(families: Sequence[Family], names: Sequence[str]) -> set[str]:
  """Return what stands before the names of each model in a file."""
  found: set[str] = set()
  for family in families:
    stems = [x.theirs for x in family.keys.keys if x.ours in PIXEL_KERNELS]
    end = re.compile(f'(?<![^./])({family.prefix})?({"|".join(stems)})$')
    for start in {end.sub('', x) for x in names if x.endswith((*stems,))}:
      own = [x.removeprefix(start) for x in names if x.startswith(start)]
      found |= {start} if family.recognises(own) else set()
  return found


def renamed(arrays: FlatParams, names: Mapping[str, str]) -> dict[str, Any]:
  """Return {new name: array} for {name: new name}, which must differ."""
  found: dict[str, str] = {}
  for old, new in names.items():
    if found.setdefault(new, old) != old:
      raise UserError(
        f'{found[new]} and {old} would both be read as {new}. Give every array '
        'a name of its own, and layers the numbers from 0 to L - 1.'
      )
  return {new: arrays[old] for new, old in found.items()}


def find(families: Sequence[Family], arrays: FlatParams, name: str) -> Family:
  """Return the Family of a file."""
  named = [x for x in families if re.fullmatch(x.pattern, name)]
  for family in named:
    if family.recognises(arrays):
      return family
  known = 'such arrays' if named else f'{name!r}'
  raise UserError(
    f'No family here reads {known}. (The file has {", ".join([*arrays][:4])}, '
    '...) Reasons for timm: `python -m vit_jax.tools.names refused`.'
  )


def write(
  families: Sequence[Family],
  weights: Weights,
  make: Callable[[Weights, Any], dict[str, Any]],
  reread: Callable[..., Weights],
) -> tuple[FlatParams, dict[str, Any]]:
  """Return (arrays, JSON files) of the first family that can hold a model.

  `make` returns the JSON files, from the config of `Family.write`. `reread` is
  `read` of the format, which must give the same model. If no family can hold
  it, UserError says why.
  """
  if type(weights.model) is not VisionTransformer:
    raise UserError(f'It is a {type(weights.model).__name__}.')
  reasons: dict[str, None] = {}
  native = weights.keeps_aspect and hasattr(weights.model.posemb, 'stored')
  for family in families:
    if family.write is not None and family.keeps_aspect <= native:
      notes = [*weights.notes]
      try:
        given = weights if family.keeps_aspect else bundle.squeeze(weights)
        arrays, config = family.write(given)
        texts = make(given, config)
        check(given, arrays, texts, reread)
        return arrays, texts
      except UserError as e:
        weights.notes[:] = notes
        reasons[str(e)] = None
  raise UserError(' '.join(reasons))


def check(
  weights: Weights,
  arrays: FlatParams,
  texts: Mapping[str, Any],
  reread: Callable[..., Weights],
  ignored: Sequence[str] = (),
) -> None:
  """Raise UserError unless what was written is read as the same model."""
  model = weights.model
  blanks = {k: np.zeros(x.shape, np.float32) for k, x in arrays.items()}
  config, size = texts.get('config.json'), weights.image_shape[:2]
  read = reread(blanks, config, image_size=size, grid=weights.grid).model
  posemb = getattr(model, 'posemb', None)
  if hasattr(model, 'posemb') and not (posemb and posemb.in_layers):
    read = read.clone(posemb=posemb)  # written as a table, whatever it is
  differ = bundle.differences(model, read)
  if found := {k: x for k, x in differ.items() if k not in ignored}:
    raise UserError(f'It would be read with others than {found}.')
