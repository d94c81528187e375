"""Grids of patches: how many, of what image, and where their positions are."""

import math

import numpy as np

from vit_jax.models import posemb
from vit_jax.weights.bundle import MIXER, RESNET

IMAGE_SIZE = 224  # where neither the file nor the user says


def stride(settings):
  """(rows, columns) of pixels to one token."""
  ph, pw = pair(settings.get('patch_stride') or settings['patch_size'])
  units = settings.get('resnet_stages')
  if units is None:
    return ph, pw
  factor = 4 * 2 ** max(len(units) - 1, 0)  # root 4; stages from 2 on double
  return ph * factor, pw * factor


def grid_of(settings, image_shape):
  """(gh, gw) of the patches of an image of that shape."""
  steps = stride(settings)
  last = stride(settings | {'patch_stride': None})  # which is seen whole
  return tuple(
    (n - end) // step + 1 for n, step, end in zip(image_shape, steps, last)
  )


def image_shape(params, settings, *, image_size=None, grid=None):
  """(H, W, C) of the images that the parameters were made for.

  Args:
    params, settings: of the model.
    image_size: int or (H, W), for what a file does not tell: the size for a
      ResNet or a model without position table (224 where not given).
    grid: (gh, gw) of a Mixer's patches, where they are not a square.
  """
  if settings['target'] == RESNET or 'resnet_stages' in settings:
    channels = params['resnet/root/conv/kernel'].shape[2]
  else:
    channels = params['embedding/kernel'].shape[2]
  if 'pos_embedding' in params:
    grid = params['pos_embedding'].shape[1:3]
  elif settings['target'] == MIXER:
    tokens = params['block_0/token_mixing/fc1/kernel'].shape[0]
    grid = square(tokens, grid, 'token_mixing')
  else:
    return (*pair(image_size or IMAGE_SIZE), channels)
  steps = stride(settings)
  last = stride(settings | {'patch_stride': None})
  sides = [(n - 1) * step + end for n, step, end in zip(grid, steps, last)]
  return (*sides, channels)


def positions(table, *, prefix, grid=None):
  """Cuts [1, prefix + gh * gw, D] into ([1, prefix, D], [1, gh, gw, D]).

  Args:
    table: rows of a position table; leading 1 may be missing.
    prefix: how many of them do not belong to patches.
    grid: (gh, gw) of the patches; a square if not given.
  """
  table = np.asarray(table)
  table = table.reshape(1, *table.shape[-2:])
  grid = square(table.shape[1] - prefix, grid, 'The position table')
  patches = table[:, prefix:].reshape(1, *grid, table.shape[-1])
  return table[:, :prefix], patches


def position_rows(weights):
  """[1, gh * gw, D] float32: positions of the patches, fixed ones computed."""
  params, settings = weights.params, weights.settings
  width = settings['width']
  if 'pos_embedding' in params:
    return params['pos_embedding'].reshape(1, -1, width)
  rows, cols = stride(settings)
  grid = weights.image_shape[0] // rows, weights.image_shape[1] // cols
  if settings.get('posemb') == 'sincos2d':
    table = posemb.SinCos2d().table({}, grid, width)
    return table.reshape(1, -1, width)
  return np.zeros((1, math.prod(grid), width), np.float32)


def square(count, grid, what):
  """`grid` if it has that many cells; if None, the square that has."""
  side = math.isqrt(max(count, 0))
  grid = (side, side) if grid is None else pair(grid)
  if count < 1 or math.prod(grid) != count:
    raise ValueError(
      f'{what} has {count} patches, not a grid of {grid[0]}x{grid[1]}; give '
      'grid=(rows, columns) whose product is that.'
    )
  return grid


def pair(size):
  """(n, n) of an int n; a tuple of two as it is."""
  return (size, size) if isinstance(size, int) else tuple(size)
