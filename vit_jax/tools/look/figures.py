"""The figures of the tool, each with its numbers as .npz next to it.

The ending of a figure's `path`, png or pdf, is its format.
"""

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.analysis import embeddings as principal
from vit_jax.data.sources import image_files
from vit_jax.data.transforms import scale
from vit_jax.io import terminal
from vit_jax.reports import attention_figures, embedding_figures
from vit_jax.tools import predict
from vit_jax.tools.look import arrays
from vit_jax.weights.bundle import Weights

PER_SHEET = 50  # images in a figure of rollout, norms, pca and similarity
_PX = 256  # smaller side of the images, at least; of a few images twice as much
_FEW = 12

Looks = Sequence[Mapping[str, Any]]  # dicts of `arrays.look_at`


def filters(weights: Weights, path: pathlib.Path) -> None:
  """Draw the first 28 principal components of the patch embedding."""
  components, shares = principal.filters(weights.params['embedding/kernel'])
  kind = 'RGB embedding' if weights.image_shape[2] == 3 else 'Embedding'
  title = f'{kind} filters\n(first {len(shares)} principal components)'
  embedding_figures.filters(principal.tiles(components), path, title=title)
  _write(path, components=components, shares=shares)


def positions(weights: Weights, path: pathlib.Path) -> None:
  """Draw the similarity of position embeddings."""
  cosines = principal.similarity(arrays.table(weights))
  embedding_figures.positions(cosines, path)
  _write(path, similarity=cosines)


def distance(weights: Weights, path: pathlib.Path, looks: Looks) -> None:
  """Draw the mean attention distance over the images."""
  values = np.stack([look['distance'] for look in looks])
  mean, uniform = values.mean(0), arrays.cell_distances(weights).mean()
  attention_figures.distance(mean, path, uniform=float(uniform))
  numbers = {'distance': mean, 'of_each_image': values, 'uniform': uniform}
  _write(path, looks, **numbers)


def maps(weights: Weights, path: pathlib.Path, looks: Looks) -> None:
  """Draw a figure per image: maps-1, maps-2, ... for the path maps."""
  images = _images(weights, looks, 2 * _PX)
  for i, (look, image) in enumerate(zip(looks, images), 1):
    file = path.with_stem(f'{path.stem}-{i}')
    attention_figures.maps(look['maps'], image, file, title=_caption(look))
    _write(file, maps=look['maps'], path=look['path'])


def rollout(
  weights: Weights, path: pathlib.Path, looks: Looks, style: str = 'mask'
) -> None:
  """Draw sheets of images next to their rollout; the second is PATH-2.

  Each image of several also has what exceeds the mean over all images, because
  small models attend to some places in all images.
  """
  few = min(len(looks), PER_SHEET) <= _FEW
  images = _images(weights, looks, 2 * _PX if few else _PX)
  mean = np.mean([look['rollout'] for look in looks], axis=0)
  title = f'image, rollout, rollout above the mean of {len(looks):,} images'
  title = title if len(looks) > 1 else ''
  for start in range(0, len(looks), PER_SHEET):
    sheet = looks[start : start + PER_SHEET]
    rollouts = np.stack([look['rollout'] for look in sheet])
    rows = [  # rollouts first: zip would drop an image of the next sheet
      [x, attention_figures.overlay(x, found, style=style)]
      for found, x in zip(rollouts, images)
    ]
    for row, found in zip(rows, rollouts if len(looks) > 1 else ()):
      above = np.maximum(found - mean, 0)
      row.append(attention_figures.overlay(row[0], above, style='heat'))
    names = [_caption(x) if few else x.get('class', '') for x in sheet]
    number = start // PER_SHEET + 1
    file = path.with_stem(f'{path.stem}-{number}') if start else path
    names = names if any(names) else None
    attention_figures.sheet(rows, file, names=names, title=title)
    _write(file, sheet, rollout=rollouts, mean=mean)


def tsne(weights: Weights, path: pathlib.Path, looks: Looks) -> None:
  """Draw a point per image, colored by class."""
  points = arrays.tsne([look['features'] for look in looks])
  classes = [look.get('class', '') for look in looks]
  embedding_figures.scatter(points, path, classes if any(classes) else None)
  _write(path, looks, points=points, classes=classes)


def norms(weights: Weights, path: pathlib.Path, looks: Looks) -> None:
  """Draw norms of tokens by layer, and sheets of their maps: PATH-maps."""
  from matplotlib import colormaps

  layout = arrays.layout(weights)
  values = np.stack([look['norms'] for look in looks])
  names = ['class token'][: layout.class_token]
  names += ['distillation token'][: layout.distillation_token]
  names += [f'register {i + 1}' for i in range(layout.num_registers)]
  others = dict(zip(names, np.moveaxis(values, 2, 0)))
  embedding_figures.norms(values[..., layout.prefix :], others, path)
  _write(path, looks, norms=values)
  chosen = np.unique(np.ceil(np.arange(1, 5) / 4 * values.shape[1]).astype(int))
  maps = values[:PER_SHEET, :, layout.prefix :][:, chosen - 1]
  low, high = (f(maps, axis=(0, 2))[:, None] for f in (np.min, np.max))
  maps = (maps - low) / np.maximum(high - low, 1e-30)
  maps = maps.reshape(*maps.shape[:2], *layout.grid)
  colors = np.uint8(255 * colormaps['viridis'](maps)[..., :3])
  title = f'image, norms of its patches after layers {str(chosen)[1:-1]}'
  _sheet(weights, path.with_stem(f'{path.stem}-maps'), looks, colors, title)


def pca(weights: Weights, path: pathlib.Path, looks: Looks) -> None:
  """Draw the first principal components of patches as red, green, blue."""
  looks = looks[:PER_SHEET]
  maps = np.stack([look['patches'] for look in looks])
  components, shares = principal.patch_components(maps)
  colors = principal.colours(components)
  percent = ', '.join(f'{share:.0%}' for share in shares)
  title = f'image, PCA of its patches ({percent} of the variance)'
  _sheet(weights, path, looks, colors[:, None], title)
  _write(path, looks, components=components, shares=shares)


def similarity(weights: Weights, path: pathlib.Path, looks: Looks) -> None:
  """Draw the similarity of four patches of each image to all its patches."""
  from matplotlib import colormaps

  looks = looks[:PER_SHEET]
  cosines = [principal.similarity(look['patches']) for look in looks]
  places = np.stack([principal.representatives(x, 4) for x in cosines])
  maps = np.stack([x[tuple(at.T)] for x, at in zip(cosines, places)])
  colors = 255 * colormaps['viridis'](maps)[..., :3]  # clips at 0
  colors[*np.ogrid[: len(looks), :4], *np.moveaxis(places, 2, 0)] = 255, 0, 0
  title = 'image, similarity of the red patch to all patches (cosine, 0 to 1)'
  _sheet(weights, path, looks, np.uint8(colors), title)
  _write(path, looks, similarity=maps, places=places)


def _sheet(weights, path, looks, colors, title):
  """Draw images, each with maps in colors, uint8 [n, m, gh, gw, 3]."""
  looks = looks[: len(colors)]
  px = 2 * _PX if len(looks) <= _FEW else _PX
  rows = [
    (image, *(principal.enlarge(x, image.shape) for x in maps))
    for maps, image in zip(colors, _images(weights, looks, px))
  ]
  attention_figures.sheet(
    rows, path, names=[_caption(x) for x in looks], title=title
  )


def _write(file, looks=(), **numbers):
  """Write the numbers of a figure, of these images, and print its path."""
  if looks:
    numbers['paths'] = np.array([look['path'] for look in looks], str)
  predict.write_arrays(file.with_suffix('.npz'), numbers)
  print(file, flush=True)


def _images(weights, looks, px):
  images = finer_images(weights, [look['path'] for look in looks], px)
  return terminal.track(images, len(looks), unit='images to draw')


def finer_images(
  weights: Weights, paths: Sequence[str], px: int
) -> Iterator[np.ndarray]:
  """Yield the part of each image that the model sees, uint8 [H, W, C].

  The transforms of the weights are scaled to the smallest multiple of their
  image size whose smaller side has at least `px` pixels.
  """
  shape = weights.image_shape
  factor = -(-px // min(shape[:2]))
  finer = shape[0] * factor, shape[1] * factor
  transforms = scale(weights.transforms, finer, old=shape)
  loaded = image_files.load(paths, transforms, channels=shape[2], ahead=8)
  for _, image in loaded:
    if isinstance(image, ValueError):
      raise image
    yield image


def _caption(look):
  """Return the class folder, if there is one, and the file name."""
  name = pathlib.PurePosixPath(look['path']).stem
  return ' / '.join(filter(None, (look.get('class'), name)))
