"""The BiT paper's .npz files: pre-activation ResNets."""

import re

import numpy as np

from vit_jax.weights import grids
from vit_jax.weights.bundle import Weights
from vit_jax.weights.naming import Rule, rename
from vit_jax.weights.shapes import settings_of

_UNIT = 'resnet/block{s}/unit{u}/'
_OURS = 'resnet/stage{s}/unit{u}/'
_CONV = 'standardized_conv2d/kernel'


def _norm(theirs, ours):
  return [
    Rule(f'{theirs}group_norm/gamma', f'{ours}/scale', np.ravel),
    Rule(f'{theirs}group_norm/beta', f'{ours}/bias', np.ravel),
  ]


_RULES = [
  Rule(f'resnet/root_block/{_CONV}', 'resnet/root/conv/kernel'),
  Rule(f'{_UNIT}a/proj/{_CONV}', f'{_OURS}conv_proj/kernel'),
  *_norm('resnet/', 'norm'),
  Rule(
    'resnet/head/conv2d/kernel',
    'head/kernel',
    lambda x: x[0, 0] if x.shape[:2] == (1, 1) else x,
    lambda x: x[None, None],
  ),
  Rule('resnet/head/conv2d/bias', 'head/bias', np.ravel),
]
for _i, _letter in enumerate('abc', 1):
  _RULES += [
    Rule(f'{_UNIT}{_letter}/{_CONV}', f'{_OURS}conv{_i}/kernel'),
    *_norm(f'{_UNIT}{_letter}/', f'{_OURS}norm{_i}'),
  ]


def read(arrays, notes, *, image_size=None, grid=None, **fields):
  """Weights of a file; see original.read."""
  del grid  # a ResNet has none
  given = {k: v for k, v in fields.items() if v is not None}
  params, rest = rename(
    {re.sub(r'/unit0*(\d+)/', r'/unit\1/', k): v for k, v in arrays.items()},
    _RULES,
    to='ours',
  )
  settings = settings_of(params, rest, arrays, _to_theirs, **given)
  shape = grids.image_shape(params, settings, image_size=image_size)
  return Weights(settings, params, shape, origin='BiT npz', notes=notes)


def write(weights):
  """{name: array} of a ResNet of the form 'preact'."""
  params = {k: np.asarray(v, np.float32) for k, v in weights.params.items()}
  return _to_theirs(params)


def _to_theirs(params):
  out, _ = rename(params, _RULES, to='theirs')
  return {
    re.sub(r'/unit(\d+)/', lambda m: f'/unit{int(m[1]):02}/', name): array
    for name, array in out.items()
  }
