"""The figures of the tool, each with its numbers as .npz next to it."""

import functools
import itertools
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.analysis.embeddings import tiles
from vit_jax.data import image_files
from vit_jax.data.transforms import scale
from vit_jax.reports import attention, embeddings
from vit_jax.runs import terminal
from vit_jax.runs.files import PathLike
from vit_jax.tools import predict
from vit_jax.tools.look import arrays
from vit_jax.weights.bundle import Weights

_PX = 256  # smaller side of the images, at least; of a few images twice as much
_FEW = 12


class Figures:
  """Draw figures into a folder, and print their paths.

  Args:
    weights: Weights.
    output: folder; it is created if necessary.
    format: 'png' or 'pdf'.
  """

  def __init__(
    self, weights: Weights, output: PathLike, format: str = 'png'
  ) -> None:
    self._weights = weights
    self._output = pathlib.Path(output).expanduser()
    self._format = format
    self._output.mkdir(parents=True, exist_ok=True)

  def filters(self, count: int = 28) -> None:
    """Draw the first principal components of the patch embedding."""
    components, shares = arrays.filters(self._weights, count)
    kind = 'RGB embedding' if self._weights.image_shape[2] == 3 else 'Embedding'
    title = f'{kind} filters\n(first {len(shares)} principal components)'
    draw = functools.partial(embeddings.filters, tiles(components), title=title)
    self._write('filters', draw, components=components, shares=shares)

  def positions(self) -> None:
    """Draw the similarity of position embeddings."""
    similarity = arrays.positions(self._weights)
    draw = functools.partial(embeddings.positions, similarity)
    self._write('positions', draw, similarity=similarity)

  def distance(self, looks: Sequence[Mapping[str, Any]]) -> None:
    """Draw the mean over `looks`, which are those of `arrays.look_at`."""
    values = np.stack([look['distance'] for look in looks])
    mean = values.mean(0)
    uniform = float(np.mean(arrays.cell_distances(self._weights)))
    self._write(
      'distance',
      functools.partial(attention.distance, mean, uniform=uniform),
      distance=mean,
      of_each_image=values,
      uniform=uniform,
      paths=_paths(looks),
    )

  def maps(self, looks: Sequence[Mapping[str, Any]]) -> None:
    """Draw a figure per image of `arrays.look_at`.

    'class' of each is added to its title.
    """
    images = self._images(looks, 2 * _PX)
    names = zip(_names(looks), _captions(looks))
    for look, (name, title), image in zip(looks, names, images):
      self._write(
        f'maps-{name}',
        functools.partial(attention.maps, look['maps'], image, title=title),
        maps=look['maps'],
        prefix=look['maps_prefix'],
        path=look['path'],
      )

  def rollout(
    self,
    looks: Sequence[Mapping[str, Any]],
    style: str = 'mask',
    per_sheet: int = 50,
  ) -> None:
    """Draw sheets of `per_sheet` images of `arrays.look_at`."""
    few = min(len(looks), per_sheet) <= _FEW
    images = self._images(looks, 2 * _PX if few else _PX)
    captions = _captions(looks, files=few)
    for start in range(0, len(looks), per_sheet):
      sheet = looks[start : start + per_sheet]
      pairs = [
        (image, attention.overlay(image, look['rollout'], style=style))
        for look, image in zip(sheet, images)
      ]
      names = captions and captions[start : start + per_sheet]
      self._write(
        f'rollout-{start // per_sheet + 1}' if start else 'rollout',
        functools.partial(attention.sheet, pairs, names=names),
        rollout=np.stack([look['rollout'] for look in sheet]),
        prefix=np.stack([look['rollout_prefix'] for look in sheet]),
        paths=_paths(sheet),
      )

  def tsne(self, looks: Sequence[Mapping[str, Any]], count: int = 2000) -> None:
    """Draw at most `count` of `looks`, at equal distances in the list."""
    looks = arrays.sample(looks, count)
    points = arrays.tsne([look['features'] for look in looks])
    classes = _classes(looks)
    self._write(
      'tsne',
      functools.partial(embeddings.scatter, points, classes=classes),
      points=points,
      paths=_paths(looks),
      classes=np.array(classes or [''] * len(looks), str),
    )

  def _write(self, name, draw, **numbers):
    """Write the numbers and the figure, and print the path of the figure."""
    predict.write_arrays(self._output / f'{name}.npz', numbers)
    path = self._output / f'{name}.{self._format}'
    draw(path=path)
    print(path, flush=True)

  def _images(self, looks, px):
    images = finer_images(self._weights, [x['path'] for x in looks], px)
    return terminal.track(images, len(looks), unit='images to draw')


def finer_images(
  weights: Weights, paths: Sequence[str], px: int
) -> Iterator[np.ndarray]:
  """Yield what the model sees of each image, finer: uint8 [H, W, C].

  The transforms are those of the weights, for the smallest multiple of their
  image size whose smaller side has at least `px` pixels.
  """
  shape = weights.image_shape
  factor = -(-px // min(shape[:2]))
  finer = tuple(side * factor for side in shape[:2])
  transforms = scale(weights.transforms, shape, finer)
  return predict.images_of(
    image_files.load(paths, transforms, channels=shape[2], ahead=8)
  )


def _paths(looks):
  return np.array([look['path'] for look in looks], str)


def _classes(looks):
  """Return the class folder of each image, or None if there are none."""
  found = [look.get('class') for look in looks]
  return None if None in found else found


def _captions(looks, files=True):
  """Return what is written under each image: class folder, file name."""
  classes, names = _classes(looks), _names(looks)
  if not files:
    return classes
  return [' / '.join(words) for words in zip(*filter(None, (classes, names)))]


def _names(looks):
  """Return the file names without ending; duplicates get a number."""
  names = []
  for look in looks:
    stem = name = os.path.splitext(os.path.basename(look['path']))[0]
    numbers = itertools.count(2)
    while name in names:
      name = f'{stem}-{next(numbers)}'
    names.append(name)
  return names
