"""Fits the parameters of one model to another: the paper's fine-tuning surgery.

Section 3.2: both layers of the pre-training head go, a zero-initialised D x K
layer takes their place, and the pre-trained position embeddings are
interpolated in 2-D to the new sequence length.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import tree
from vit_jax.models import posemb, resample
from vit_jax.weights import formats

HEAD = r'(pre_logits|head)/.*'
POSITIONS = r'(?:.*/)?pos_embedding(_[xy])?'
OFFSETS = r'(?:.*/)?offset_embedding'  # of relative positions
MASK = 'mask'  # which only the pre-training of masked_patches.py uses
# What the pixels of an image are first multiplied with: [ph, pw, C, D].
PIXELS = ('resnet/root/conv/kernel', 'embedding/kernel')


@dataclasses.dataclass
class Report:
  """What became of each parameter that was not simply taken over."""

  loaded: int = 0
  notes: list[str] = dataclasses.field(default_factory=list)

  def __str__(self):
    notes = self.notes or ['everything taken over as it was']
    return '\n'.join([f'{self.loaded} arrays loaded;', *notes])


@dataclasses.dataclass(frozen=True)
class InitFrom:
  """Weights to start from, and how they are adapted to the model.

  Attributes:
    path: a workdir, a checkpoint, or weights of any format of formats.py.
    step, ema: which checkpoint of a workdir, and whether its EMA; see
      `checkpoint.load_params`.
    grid: (rows, columns) of a position table that is not square.
    options: more of what a file does not say, see `formats.read`.
    trust: packages that the file may name classes of.
    head: 'reset': the head stays as initialised (the paper's fine-tuning);
      'keep': it is loaded, and must fit. None: 'reset' in training, 'keep' in
      evaluation.
    head_rule: path rule of the parameters of the head.
    posemb_resize: how position embeddings are resized, see `resample.resize`.
    patch_resize: method that resizes patch kernels; None: they must fit.
    adapt_channels: whether images may have another number of channels. Kernels
      are summed to one channel, or repeated and scaled to more (as timm).
  """

  path: str | None = None
  step: int | None = None
  ema: Any = 'auto'
  grid: tuple[int, int] | None = None
  options: Mapping[str, Any] | None = None
  trust: tuple[str, ...] = ()
  head: str | None = None
  head_rule: str = HEAD
  posemb_resize: str = 'paper'
  patch_resize: str | None = None
  adapt_channels: bool = False


def read(init_from):
  """Return the Weights that an InitFrom names."""
  return formats.read(
    init_from.path,
    step=init_from.step,
    ema=init_from.ema,
    grid=init_from.grid,
    **(init_from.options or {}),
  )


def load_into(state, model, init_from):
  """Return (state, report) with the parameters of other weights.

  Args:
    state: TrainState as initialised.
    model: of the state.
    init_from: InitFrom.
  """
  options = dict(init_from.options or {})
  options.setdefault('num_heads', getattr(model, 'num_heads', None))
  init_from = dataclasses.replace(init_from, options=options)
  params, report = fit(read(init_from), state.params, model, init_from)
  ema = None if state.ema is None else jax.tree.map(jnp.copy, params)
  return dataclasses.replace(state, params=params, ema=ema), report


def fit(weights, params, model, init_from=InitFrom()):
  """Return (params, report): weights in the shapes and shardings of others.

  Args:
    weights: Weights.
    params: of the model, as initialised.
    model: that will use them.
    init_from: how they are adapted.
  """
  fresh = tree.flatten(params)
  adapted, report = adapt(
    weights.params,
    fresh,
    head=init_from.head or 'reset',
    head_rule=init_from.head_rule,
    posemb_resize=init_from.posemb_resize,
    patch_resize=init_from.patch_resize,
    adapt_channels=init_from.adapt_channels,
  )
  report.notes += weights.notes + _other_settings(weights.settings, model)
  shardings = jax.tree.map(lambda x: x.sharding, params)
  params = jax.device_put(tree.unflatten(adapted), shardings)
  return params, f'parameters of {weights.origin}: {report}'


def _other_settings(settings, model):
  """What the file's model does with its parameters that this one does not."""
  notes = []
  for name in (
    *('gelu', 'norm_eps', 'norm_after_pooling', 'form'),
    *('posemb', 'posemb_at', 'patch_stride'),
  ):
    if hasattr(model, name):
      here, default = getattr(model, name), getattr(type(model), name)
      there = settings.get(name, default)  # what is not said is the default
      if here != there:
        notes.append(f'  {name}={here!r} here, {there!r} in the file')
  return notes


def adapt(
  loaded,
  fresh,
  *,
  head='reset',
  head_rule=HEAD,
  posemb_resize='paper',
  patch_resize=None,
  adapt_channels=False,
):
  """Parameters of a new model from those of another.

  Args:
    loaded: {path: array} of the old model.
    fresh: {path: array} of the new one as initialised.
    head: 'reset': the head is the fresh one (the paper's way); 'keep': it is
      taken over, and must fit.
    head_rule: path rule of what belongs to the head.
    posemb_resize: how position grids of another size are interpolated, see
      `resample.resize`.
    patch_resize: how patch kernels of another size are resized, see
      `resample.resize_kernel`; None: they must not be.
    adapt_channels: whether images may have another number of channels: the
      kernel's are summed to one, or repeated and scaled to more (as timm).

  Returns:
    ({path: array}, Report). Scanned and unrolled layers are converted; a mask
    vector is dropped where only the old model has one, and the fresh one stays
    where only the new model has (head 'reset').

  Raises:
    ValueError: anything left unmatched, all of it, as a diff.
  """
  report = Report()
  loaded = _as_laid_out(loaded, fresh, report)
  anew = _initialised_anew(head, head_rule, loaded)
  ways = {
    'posemb_resize': posemb_resize,
    'patch_resize': patch_resize,
    'adapt_channels': adapt_channels,
  }
  out, unmatched = {}, {}
  for path, value in fresh.items():
    old = loaded.get(path)
    if anew.fullmatch(path):
      out[path] = value
      report.notes.append(f'  {path} {_shape(value)} initialised anew')
    elif old is not None and old.shape == value.shape:
      out[path] = np.asarray(old, value.dtype)
      report.loaded += 1
    elif old is not None and (found := _change(path, old, value, **ways)):
      changed, note = found
      out[path] = np.asarray(changed, value.dtype)
      report.loaded += 1
      report.notes.append(note)
    else:
      unmatched[path] = value
  spare = {path: v for path, v in loaded.items() if path not in fresh}
  dropped = {p: v for p, v in spare.items() if p == MASK or anew.fullmatch(p)}
  report.notes += [f'  {p} {_shape(v)} dropped' for p, v in dropped.items()]
  wrong = {path: v for path, v in spare.items() if path not in dropped}
  wrong |= {path: loaded[path] for path in unmatched if path in loaded}
  if unmatched or wrong:
    raise ValueError(
      'The parameters do not fit this model. Loaded (-), needed (+):\n'
      f'{tree.diff(wrong, unmatched)}\n'
      'Give the model the settings it was trained with (size, patch, pooling, '
      "...); only the head (head='reset') and position grids may differ, and, "
      'if asked for, patches (patch_resize) and channels (adapt_channels).'
    )
  return out, report


def _initialised_anew(head, head_rule, loaded):
  """The path rule, compiled, of what is not taken over."""
  if head not in ('reset', 'keep'):
    raise ValueError(f"head={head!r} must be 'reset' or 'keep'.")
  if head == 'keep':
    return re.compile('(?!)')  # nothing
  return re.compile(head_rule if MASK in loaded else f'{head_rule}|{MASK}')


def _as_laid_out(loaded, fresh, report):
  """The loaded layers stacked or not, as the fresh ones are."""
  if tree.is_stacked(fresh) and not tree.is_stacked(loaded):
    report.notes.append('  layers stacked, as this model scans over them')
    return tree.stack_blocks(loaded)
  if tree.is_stacked(loaded) and not tree.is_stacked(fresh):
    report.notes.append('  layers unstacked, as this model is unrolled')
    return tree.unstack_blocks(loaded)
  return loaded


def _change(path, old, new, *, posemb_resize, patch_resize, adapt_channels):
  """(old in the shape of new, what was done to it); None where it may not."""
  changed, how = np.asarray(old), ''
  if re.fullmatch(POSITIONS, path) and _same_but(old, new, (-3, -2)):
    changed = resample.resize(changed, new.shape[-3:-1], posemb_resize)
    how = f' ({posemb_resize})'
  elif re.fullmatch(OFFSETS, path) and _same_but(old, new, (-4, -3)):
    rows, columns = new.shape[-4:-2]
    changed = posemb.resize_offsets(changed, (rows // 2, columns))
  elif path in PIXELS and _same_but(old, new, (0, 1, 2)):
    if adapt_channels and old.shape[2] != new.shape[2]:
      changed = _to_channels(changed, new.shape[2])
      how = ' (channels adapted)'
    if patch_resize and old.shape[:2] != new.shape[:2]:
      changed = resample.resize_kernel(changed, new.shape[:2], patch_resize)
      how += f' ({patch_resize})'
  note = f'  {path} {_shape(old)} resized to {_shape(new)}{how}'
  return (changed, note) if changed.shape == new.shape else None


def _same_but(old, new, dims):
  """Whether two arrays differ in these dimensions only."""
  if old.ndim != new.ndim or old.ndim < 4:
    return False
  free = {d % old.ndim for d in dims}
  return all(
    a == b
    for d, (a, b) in enumerate(zip(old.shape, new.shape))
    if d not in free
  )


def _to_channels(kernel, channels):
  """[ph, pw, C, D] -> [ph, pw, channels, D]."""
  old = kernel.shape[2]
  if channels == 1:
    return kernel.sum(axis=2, keepdims=True)
  repeated = kernel[:, :, np.arange(channels) % old]
  return repeated * np.asarray(old / channels, kernel.dtype)


def _shape(array):
  return 'x'.join(map(str, array.shape)) or 'scalar'
