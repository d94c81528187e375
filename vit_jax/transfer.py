"""Fits the parameters of one model to another: the paper's fine-tuning surgery.

Section 3.2: both layers of the pre-training head go, a zero-initialised D x K
layer takes their place, and the pre-trained position embeddings are
interpolated in 2-D to the new sequence length.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import checkpoint, tree
from vit_jax.build import ConfigError, call
from vit_jax.models import posemb

HEAD = r'(pre_logits|head)/.*'
POSITIONS = r'(?:.*/)?pos_embedding'


@dataclasses.dataclass
class Report:
  """What became of each parameter that was not simply taken over."""

  loaded: int = 0
  notes: list[str] = dataclasses.field(default_factory=list)

  def __str__(self):
    notes = self.notes or ['everything taken over as it was']
    return '\n'.join([f'{self.loaded} arrays loaded;', *notes])


def load_into(state, **arguments):
  """A fresh state with parameters of another run; arguments of `load`.

  Returns:
    (state, report); only params and ema differ from the given state.
  """
  params, _, report = call(load, arguments, state.params)
  average = None if state.ema is None else jax.tree.map(jnp.copy, params)
  return dataclasses.replace(state, params=params, ema=average), report


def load(params, *, path, step=None, ema='auto', **adapt_arguments):
  """Parameters of another run, in the shapes and shardings of fresh ones.

  Args:
    params: as initialised.
    path, step, ema: which to load, see `checkpoint.load_params`.
    **adapt_arguments: how they are made to fit, see `adapt`.

  Returns:
    (params, directory of the checkpoint, report as text).
  """
  loaded, directory = checkpoint.load_params(path, step=step, ema=ema)
  adapted, report = call(adapt, adapt_arguments, loaded, tree.flatten(params))
  shardings = jax.tree.map(lambda x: x.sharding, params)
  params = jax.device_put(tree.unflatten(adapted), shardings)
  return params, directory, f'parameters of {directory}: {report}'


def adapt(
  loaded, fresh, *, head='reset', head_rule=HEAD, posemb_resize='paper'
):
  """Parameters of a new model from those of another.

  Args:
    loaded: {path: array} of the old model.
    fresh: {path: array} of the new one as initialised.
    head: 'reset': the head is the fresh one (the paper's way); 'keep': it is
      taken over, and must fit.
    head_rule: path rule of what belongs to the head.
    posemb_resize: how position grids of another size are interpolated, see
      `posemb.resize`.

  Returns:
    ({path: array}, Report). Scanned and unrolled layers are converted.

  Raises:
    ConfigError: anything left unmatched, all of it, as a diff.
  """
  if head not in ('reset', 'keep'):
    raise ConfigError(f"head={head!r} must be 'reset' or 'keep'.")
  report = Report()
  loaded = _as_laid_out(loaded, fresh, report)
  out, unmatched = {}, {}
  for path, value in fresh.items():
    old = loaded.get(path)
    if head == 'reset' and re.fullmatch(head_rule, path):
      out[path] = value
      report.notes.append(f'  {path} {_shape(value)} initialised anew')
    elif old is not None and old.shape == value.shape:
      out[path] = np.asarray(old, value.dtype)
      report.loaded += 1
    elif old is not None and _resizable(path, old, value):
      size = value.shape[-3:-1]
      resized = posemb.resize(np.asarray(old), size, method=posemb_resize)
      out[path] = np.asarray(resized, value.dtype)
      report.loaded += 1
      report.notes.append(
        f'  {path} {_shape(old)} resized to {_shape(value)} ({posemb_resize})'
      )
    else:
      unmatched[path] = value
  dropped = {
    path: value
    for path, value in loaded.items()
    if head == 'reset' and re.fullmatch(head_rule, path) and path not in fresh
  }
  report.notes += [f'  {p} {_shape(v)} dropped' for p, v in dropped.items()]
  wrong = {
    path: value
    for path, value in loaded.items()
    if path in unmatched or (path not in fresh and path not in dropped)
  }
  if unmatched or wrong:
    raise ConfigError(
      'The parameters do not fit this model. Loaded (-), needed (+):\n'
      f'{tree.diff(wrong, unmatched)}\n'
      'Give the model the settings it was trained with (size, patch, pooling, '
      "...); only the head (head='reset') and position grids may differ."
    )
  return out, report


def _as_laid_out(loaded, fresh, report):
  """The loaded layers stacked or not, as the fresh ones are."""
  if tree.is_stacked(fresh) and not tree.is_stacked(loaded):
    report.notes.append('  layers stacked, as this model scans over them')
    return tree.stack_blocks(loaded)
  if tree.is_stacked(loaded) and not tree.is_stacked(fresh):
    report.notes.append('  layers unstacked, as this model is unrolled')
    return tree.unstack_blocks(loaded)
  return loaded


def _resizable(path, old, new):
  return (
    re.fullmatch(POSITIONS, path)
    and old.ndim == new.ndim
    and old.shape[-1] == new.shape[-1]
    and old.shape[:-3] == new.shape[:-3]
  )


def _shape(array):
  return 'x'.join(map(str, array.shape)) or 'scalar'
