"""The figures of `inspect`: each as a picture, and its numbers beside it."""

import itertools
import os
import pathlib

import numpy as np

from vit_jax import terminal
from vit_jax.analysis.embeddings import tiles
from vit_jax.data import image_files
from vit_jax.reports import attention, embeddings
from vit_jax.tools import inspection, outputs
from vit_jax.weights import sizes
from vit_jax.weights.bundle import make

_LARGE_PX, _SMALL_PX = 512, 256  # sides of pictures: where they are few, many
_FEW = 12


class Figures:
  """Draws into a folder, tells each path on stdout.

  Args:
    weights: Weights.
    output: folder, made if it is not there.
    format: 'png' or 'pdf'.
  """

  def __init__(self, weights, output, format='png'):
    self._weights = weights
    self._output = pathlib.Path(output).expanduser()
    self._format = format
    try:
      self._output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      raise ValueError(f'{output} cannot be made a folder: {error}') from error

  def filters(self, count=28):
    components, shares = inspection.filters(self._weights, count)
    channels = self._weights.image_shape[2]
    self._write(
      'filters',
      lambda path: embeddings.filters(
        tiles(components),
        path,
        title=('RGB e' if channels == 3 else 'E')
        + f'mbedding filters\n(first {len(shares)} principal components)',
      ),
      components=components,
      shares=shares,
    )

  def positions(self):
    similarity = inspection.positions(self._weights)
    self._write(
      'positions',
      lambda path: embeddings.positions(similarity, path),
      similarity=similarity,
    )

  def distance(self, looks):
    """looks: of `inspection.look`."""
    values = np.stack([look['distance'] for look in looks])
    uniform = inspection.uniform_distance(self._weights)
    self._write(
      'distance',
      lambda path: attention.distance(values.mean(0), path, uniform=uniform),
      distance=values.mean(0),
      of_each_picture=values,
      uniform=uniform,
      paths=_paths(looks),
    )

  def maps(self, looks, *, px=None):
    """looks: of `inspection.look`; px: the smaller side of pictures, at least.

    Each picture has a figure of its own.
    """
    names = _names([look['path'] for look in looks])
    pictures = self._pictures(looks, px or _LARGE_PX)
    for look, name, picture in zip(looks, names, pictures):

      def draw(path, look=look, name=name, picture=picture):
        attention.maps(look['maps'], picture, path, title=name)

      self._write(
        f'maps-{name}',
        draw,
        maps=look['maps'],
        prefix=look['maps_prefix'],
        path=look['path'],
      )

  def rollout(self, looks, style='mask', per_sheet=50, *, px=None):
    """Sheets of per_sheet pictures; arguments else as of `maps`."""
    few = min(len(looks), per_sheet) <= _FEW
    pictures = self._pictures(looks, px or (_LARGE_PX if few else _SMALL_PX))
    pairs = (
      (picture, attention.overlay(picture, look['rollout'], style=style))
      for look, picture in zip(looks, pictures)
    )
    sheets = -(-len(looks) // per_sheet)
    height, width = self._weights.image_shape[:2]
    columns = attention.pairs_to_a_row(
      min(len(looks), per_sheet), width / height
    )
    for number in range(sheets):
      of_sheet = looks[number * per_sheet : (number + 1) * per_sheet]
      drawn = list(itertools.islice(pairs, len(of_sheet)))
      names = _names([look['path'] for look in of_sheet]) if few else None
      self._write(
        'rollout' if not number else f'rollout-{number + 1}',
        lambda path, drawn=drawn, names=names: attention.sheet(
          drawn, path, names=names, columns=columns
        ),
        rollout=np.stack([look['rollout'] for look in of_sheet]),
        prefix=np.stack([look['rollout_prefix'] for look in of_sheet]),
        paths=_paths(of_sheet),
      )

  def _write(self, name, draw, **numbers):
    with (
      outputs.replacing(self._output / f'{name}.npz') as partial,
      open(partial, 'wb') as file,
    ):
      np.savez(file, **numbers)
    path = self._output / f'{name}.{self._format}'
    draw(path)
    print(path, flush=True)

  def _pictures(self, looks, px):
    """Yields uint8 [H, W, C], what the model saw of each picture, but finer.

    The transforms are the model's, for a whole multiple of its size.
    """
    shape = self._weights.image_shape
    factor = max(1, -(-px // min(shape[:2])))
    finer = [side * factor for side in shape[:2]]
    settings = sizes.scale(self._weights.transforms, shape, finer)
    loaded = image_files.load(
      [look['path'] for look in looks],
      [make(s) for s in settings],
      channels=shape[2],
      ahead=8,
    )
    loaded = terminal.track(loaded, len(looks), unit='pictures to draw')
    for _, picture in loaded:
      if isinstance(picture, ValueError):
        raise picture
      yield picture


def _paths(looks):
  return np.array([look['path'] for look in looks], str)


def _names(paths):
  """Names of the files without ending; numbered where some are the same."""
  names = {}
  for path in paths:
    stem = name = os.path.splitext(os.path.basename(path))[0]
    numbers = itertools.count(2)
    while name in names:
      name = f'{stem}-{next(numbers)}'
    names[name] = path
  return list(names)
