"""Fitting the parameters of one model to another: the paper's fine-tuning.

Section 3.2: both layers of the pre-training head are removed, a
zero-initialised D x K layer replaces them, and the pre-trained position
embeddings are interpolated in 2-D to the new sequence length.
"""

import dataclasses
import re
import tempfile
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax import tree
from vit_jax.config.checks import one_of
from vit_jax.config.domains import Count, Natural, OneOf, PathRule, checked
from vit_jax.models import resample
from vit_jax.models.layers import as_pair
from vit_jax.runs.files import PathLike, write_atomically
from vit_jax.types import FlatParams, Model, Params
from vit_jax.weights import bundle, formats
from vit_jax.weights.bundle import Weights

HEAD = r'(pre_logits|head)/.*'
MASK = 'mask'  # used by the pre-training of masked_patches.py only
# Fields that change what a model does with its parameters.
_BEHAVIOUR = (
  'embedding',
  'posemb',
  'pooling',
  'block',
  'form',
  'gelu',
  'norm_eps',
)

# Fields of their parts that do not, or whose arrays are reported anyway.
_NOT_SHOWN = (
  *('init_std', 'layerscale_init', 'attention_dropout'),
  *('patch_size', 'mask_token'),
)


class Mismatch(ValueError):
  """Parameters that do not fit a model; the message is the whole diff.

  Attributes:
    loaded, needed: {path: array} of what does not fit, on either side.
  """

  def __init__(self, loaded: FlatParams, needed: FlatParams) -> None:
    self.loaded, self.needed = loaded, needed
    super().__init__(
      'The parameters do not fit this model. Loaded (-), needed (+):\n'
      f'{tree.diff(loaded, needed)}\n'
      'Give the model the fields it was trained with (size, patches, pooling, '
      "...). Only the head (head='reset') and position grids may differ; with "
      'patch_resize also patches, and with adapt_channels also channels.'
    )


_CHANNELS = 'image channels'
# Fields of models and their parts that do not change the parameters.
_NO_PARAMETERS = (
  *('parent', 'name', 'num_classes', 'dropout', 'stochastic_depth', 'dtype'),
  *('scan', 'remat', 'attention', 'bias_init', 'init_std', 'attention_dropout'),
  *('gelu', 'norm_eps'),
)


@dataclasses.dataclass
class Report:
  """Human-readable report of the parameters that were adapted."""

  loaded: int = 0
  notes: list[str] = dataclasses.field(default_factory=list)

  def __str__(self) -> str:
    notes = self.notes or ['everything unchanged']
    return '\n'.join([f'{self.loaded} arrays loaded;', *notes])


@checked
@dataclasses.dataclass(frozen=True)
class InitFrom:
  """Weights to start from, and how they are adapted to the model.

  Attributes:
    path: a workdir, a checkpoint, or weights of any format of formats.py.
    step, ema: which checkpoint of a workdir, and whether its EMA; see
      `stored.load_params`.
    grid: (rows, columns) of a position table that is not square.
    options: more of what a file does not say, see `formats.read`.
    trust: packages that the file may name classes of.
    head: 'reset': the head stays as initialised (the paper's fine-tuning);
      'keep': it is loaded, and must fit. None: 'reset' in training, 'keep' in
      evaluation.
    head_rule: path rule of the parameters of the head.
    posemb_resize: method that resizes position embeddings, see `posemb.resize`.
    patch_resize: method that resizes patch kernels; None: they must fit.
    adapt_channels: whether images may have another number of channels. Kernels
      are summed to one channel, or repeated and scaled to more (as timm).
    pooling: of the model of the weights, where a run uses that model: 'gap',
      the mean over patches, or 'token', the class token. Masked patch
      prediction does not pool. None: as the weights say.
  """

  path: PathLike
  step: Natural | None = None
  ema: bool | Annotated[str, OneOf('auto')] = 'auto'
  grid: tuple[Count, Count] | None = None
  options: Mapping[str, Any] | None = None
  trust: tuple[str, ...] = ()
  head: Annotated[str, OneOf('reset', 'keep')] | None = None
  head_rule: PathRule = HEAD
  posemb_resize: Annotated[str, OneOf(*resample.METHODS)] = 'paper'
  patch_resize: Annotated[str, OneOf(*resample.METHODS)] | None = None
  adapt_channels: bool = False
  pooling: Annotated[str, OneOf('gap', 'token')] | None = None


def read(init_from: InitFrom) -> Weights:
  """Return the Weights that an InitFrom names."""
  weights = formats.read(
    init_from.path,
    step=init_from.step,
    ema=init_from.ema,
    trust=init_from.trust,
    grid=init_from.grid,
    **(init_from.options or {}),
  )
  return _with_pooling(weights, init_from)


def describe(init_from: InitFrom) -> tuple[Weights, bool]:
  """Return `formats.describe` of the weights that an InitFrom names."""
  weights, is_described = formats.describe(
    init_from.path,
    step=init_from.step,
    trust=init_from.trust,
    grid=init_from.grid,
    **(init_from.options or {}),
  )
  return _with_pooling(weights, init_from), is_described


def _with_pooling(weights, init_from):
  """Return the weights with the pooling that an InitFrom names."""
  name = init_from.pooling
  if name is None:
    return weights
  old = getattr(weights.model, 'pooling', None)
  if old is None:
    raise ValueError(
      f'init_from.pooling={name!r}: the weights are of a '
      f'{type(weights.model).__name__}, whose pooling is fixed. Remove it.'
    )
  if name == 'token' and not old.class_token:
    raise ValueError(
      "init_from.pooling='token': the weights have no class token. Use "
      'init_from.pooling=gap, the mean over patches.'
    )
  model = bundle.replace(
    weights.model,
    pooling=name,
    class_token=old.class_token,
    num_registers=old.num_registers,
  )
  return dataclasses.replace(weights, model=model)


def load_into(
  state: Any, model: Model, init_from: InitFrom, folder: PathLike | None = None
) -> tuple[Any, str]:
  """Return (state, report) with the parameters of other weights.

  Args:
    state: TrainState as initialised.
    model: of the state.
    init_from: InitFrom.
    folder: for the file with all differences, see `fit`.

  Raises:
    ValueError: the weights do not fit the model; a summary of 15 lines at most.
  """
  options = dict(init_from.options or {})
  options.setdefault('num_heads', getattr(model, 'num_heads', None))
  init_from = dataclasses.replace(init_from, options=options)
  weights = read(init_from)
  params, report = fit(weights, state.params, model, init_from, folder)
  ema = None if state.ema is None else jax.tree.map(jnp.copy, params)
  state = dataclasses.replace(state, params=params, ema=ema)
  return state, report


def fit(
  weights: Weights,
  params: Params,
  model: Model,
  init_from: InitFrom = InitFrom(path=''),
  folder: PathLike | None = None,
) -> tuple[Params, str]:
  """Return (params, report): weights in the shapes and shardings of others.

  Args:
    weights: Weights.
    params: of the model, as initialised.
    model: that will use them.
    init_from: how they are adapted.
    folder: where a file with all differences is written if the weights do not
      fit; None: the folder for temporary files.

  Raises:
    ValueError: the weights do not fit the model. The message is a summary of 15
      lines at most, which names the file.
  """
  try:
    adapted, report = adapt(
      weights.params,
      tree.flatten(params),
      model,
      head=init_from.head or 'reset',
      head_rule=init_from.head_rule,
      posemb_resize=init_from.posemb_resize,
      patch_resize=init_from.patch_resize,
      adapt_channels=init_from.adapt_channels,
    )
  except Mismatch as error:
    folder = epath.Path(folder or tempfile.gettempdir())
    file = folder / 'init_from_differences.txt'
    if jax.process_index() == 0:
      write_atomically(file, f'{weights.origin}:\n{error}\n')
    raise ValueError(_summary(error, weights, model, init_from, file)) from None
  report.notes += weights.notes + _differences(model, weights.model)
  shardings = jax.tree.map(lambda x: x.sharding, params)
  params = jax.device_put(tree.unflatten(adapted), shardings)
  return params, f'parameters of {weights.origin}: {report}'


def _summary(error, weights, model, init_from, file):
  """Return a Mismatch in words: 15 lines at most."""
  there = _facts(weights.model) | _channels(weights.params)
  here = _facts(model)
  here |= _channels(error.needed) or _channels(weights.params)
  if (init_from.head or 'reset') == 'reset':  # neither head is compared
    for facts in (there, here):
      facts.pop('representation_size', None)
  first = ('model', _CHANNELS, 'width', 'depth', 'patch_size')
  names = dict.fromkeys([*first, *here, *there])
  differ = [x for x in names if here.get(x) != there.get(x)]
  if 'model' in differ:  # of two classes with fields of their own
    differ = [x for x in differ if x in here and x in there]
  lines = [
    f'  {name:<20} {there.get(name, "-")!s:<20} {here.get(name, "-")}'
    for name in differ
  ]
  if len(lines) > 6:
    lines[5:] = [f'  and {len(lines) - 5} more fields']
  shapes = len(error.loaded.keys() & error.needed.keys())
  missing, spare = (len(x) - shapes for x in (error.needed, error.loaded))
  remedies = []
  if _CHANNELS in differ:
    remedies = [
      'To adapt the channels, add adapt_channels to the argument of the',
      'config, or set --config.init_from.adapt_channels=True.',
    ]
  if differ != [_CHANNELS]:
    remedies += [
      'To use the model of the weights, name no model in the argument of the',
      'config: finetune.py:folder. To use another model, give its weights.',
    ]
  name = init_from.path or weights.origin
  return '\n'.join(
    [
      f'The weights of {name} do not fit the model.',
      f'  {"":<20} {"weights":<20} this run',
      *(lines or ['  (the same fields)']),
      f'Parameters of another shape: {shapes}, missing: {missing}, not used: '
      f'{spare}. See',
      f'  {file}',
      *remedies,
    ]
  )


def _channels(params):
  """Return {'image channels': number} if the first kernel is in `params`."""
  found = [params[x] for x in resample.PIXEL_KERNELS if x in params]
  return dict.fromkeys([_CHANNELS], found[0].shape[2]) if found else {}


def _facts(module, inside=''):
  """Return {field: value} of what determines the parameters of a model."""
  facts = {}
  if not inside:
    facts['model'] = type(module).__name__
  for field in dataclasses.fields(module):
    name, value = field.name, getattr(module, field.name)
    if name in _NO_PARAMETERS or not field.init:
      continue
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
      if name not in ('block', 'head'):
        facts[name] = type(value).__name__
      facts |= _facts(value, name)
    elif isinstance(value, str | int | float | tuple | list | None):
      if name == 'layerscale_init':
        name, value = 'LayerScale', value is not None
      if name == 'patch_size' and isinstance(value, int | tuple):
        value = 'x'.join(map(str, as_pair(value)))
      facts[name] = value
  return facts


def _differences(model, other):
  """Return a note for each part that two models use parameters differently."""
  notes = []
  for name in _BEHAVIOUR:
    here, there = getattr(model, name, None), getattr(other, name, None)
    if here == there:
      continue
    if type(here) is type(there) and dataclasses.is_dataclass(here):
      notes += [
        f'  {f.name}={getattr(here, f.name)!r} here, '
        f'{getattr(there, f.name)!r} in the file'
        for f in dataclasses.fields(here)
        if getattr(here, f.name) != getattr(there, f.name)
        and f.name not in _NOT_SHOWN
      ]
    else:
      notes.append(f'  {name}={here!r} here, {there!r} in the file')
  return notes


def adapt(
  loaded: FlatParams,
  fresh: FlatParams,
  model: Model,
  *,
  head: str = 'reset',
  head_rule: str = HEAD,
  posemb_resize: str = 'paper',
  patch_resize: str | None = None,
  adapt_channels: bool = False,
) -> tuple[dict[str, Any], Report]:
  """Return (parameters of a model made from those of another, Report).

  Scanned and unrolled layers are converted. A mask vector is dropped if only
  the old model has one, and stays as initialised if only the new model has
  (head 'reset'). The position of a token is added to the token if the new model
  has none, and is 0 if only the new model has one.

  Args:
    loaded: {path: array} of the old model.
    fresh: {path: array} of the new model as initialised.
    model: the new model.
    head, head_rule, posemb_resize, patch_resize, adapt_channels: see InitFrom.

  Raises:
    Mismatch: parameters that do not match; lists all, as a diff.
  """
  one_of('head', head, ('reset', 'keep'))
  report = Report()
  loaded = _with_positions(_with_layout(loaded, fresh, report), fresh, report)
  reset = re.compile('(?!)')  # matches nothing
  if head == 'reset':
    reset = re.compile(head_rule if MASK in loaded else f'{head_rule}|{MASK}')
  out, unmatched = {}, {}
  for path, value in fresh.items():
    old = loaded.get(path)
    if reset.fullmatch(path):
      out[path] = value
      report.notes.append(f'  {path} {_shape(value)} newly initialised')
      continue
    if old is not None and old.shape != value.shape:
      old = resample.resize_parameter(
        model,
        path,
        old,
        value.shape,
        posemb_resize=posemb_resize,
        patch_resize=patch_resize,
        adapt_channels=adapt_channels,
      )
      if old is not None:
        how = posemb_resize if 'pos_embedding' in path else patch_resize
        report.notes.append(_resized(path, loaded[path], value, how))
    if old is None:
      unmatched[path] = value
    else:
      out[path] = np.asarray(old, value.dtype)
      report.loaded += 1
  spare = {path: v for path, v in loaded.items() if path not in fresh}
  dropped = {p: v for p, v in spare.items() if p == MASK or reset.fullmatch(p)}
  report.notes += [f'  {p} {_shape(v)} dropped' for p, v in dropped.items()]
  wrong = {path: v for path, v in spare.items() if path not in dropped}
  wrong |= {path: loaded[path] for path in unmatched if path in loaded}
  if unmatched or wrong:
    raise Mismatch(wrong, unmatched)
  return out, report


def _with_layout(loaded, fresh, report):
  """Return the loaded layers stacked or not, as the fresh ones are."""
  if tree.is_stacked(fresh) and not tree.is_stacked(loaded):
    report.notes.append('  layers stacked, as this model scans over them')
    return tree.stack_blocks(loaded)
  if tree.is_stacked(loaded) and not tree.is_stacked(fresh):
    report.notes.append('  layers unstacked, as this model is unrolled')
    return tree.unstack_blocks(loaded)
  return loaded


def _with_positions(loaded, fresh, report):
  """Return the loaded tokens with positions of their own, or without."""
  loaded = dict(loaded)
  for token in ('cls', 'dist'):
    position = f'{token}_pos_embedding'
    if token not in loaded or token not in fresh:
      continue
    if position in loaded and position not in fresh:
      loaded[token] = loaded[token] + loaded.pop(position)
      report.notes.append(f'  {position} added to {token}')
    elif position in fresh and position not in loaded:
      loaded[position] = np.zeros_like(loaded[token])
      report.notes.append(f'  {position} is 0: only the patches have positions')
  return loaded


def _resized(path, old, new, how):
  """Return a line of the report."""
  line = f'  {path} {_shape(old)} resized to {_shape(new)}'
  if path.endswith('/kernel'):
    if old.shape[2] != new.shape[2]:
      line += ' (channels adapted)'
    how = how if old.shape[:2] != new.shape[:2] else None
  return line + (f' ({how})' if how else '')


def _shape(array):
  return 'x'.join(map(str, array.shape)) or 'scalar'
