"""The figures of the tool, each with its numbers as .npz next to it.

The ending of a figure's `path`, png, jpg or pdf, is its format.
"""

import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.analysis import embeddings as principal
from vit_jax.data.sources import inputs
from vit_jax.data.transforms import scale
from vit_jax.io import terminal
from vit_jax.io.files import replacing
from vit_jax.reports import attention_figures, pictures
from vit_jax.tools.look import arrays
from vit_jax.weights.bundle import Weights

SHEETS = 'rollout', 'pca', 'similarity', 'maps'  # of photographs
PER_SHEET = 50  # images in a figure of rollout, norms, pca and similarity
_PX = 160  # smaller side of the images, at least; of a few images twice as much
_FEW = 12

Looks = Sequence[Mapping[str, Any]]  # dicts of `arrays.look_at`


def filters(weights: Weights, path: pathlib.Path) -> None:
  """Draw the first 28 principal components of the patch embedding (Fig. 7)."""
  components, shares = principal.filters(weights.params['embedding/kernel'])
  kind = 'RGB embedding' if weights.image_shape[2] == 3 else 'Embedding'
  images = [*principal.tiles(components)]
  made, _ = pictures.grid(images, min(7, len(images)), 0.62)
  title = f'{kind} filters\n(first {len(shares)} principal components)'
  made.suptitle(title, fontsize=10)
  pictures.save(made, path, dpi=200, tight=True)
  _write(path, components=components, shares=shares)


def positions(weights: Weights, path: pathlib.Path) -> None:
  """Draw the map of similarities of every n-th position (Figs. 7, 10)."""
  cosines = principal.similarity(arrays.table(weights))
  gh, gw = cosines.shape[:2]
  n = -(-max(gh, gw) // 16)
  width = 4.4 if gw <= 8 else 7
  made = pictures.canvas(width + 0.5, width * min(gh / gw, 3))
  axes = made.subplots()
  shown = pictures.mosaic(axes, cosines[::n, ::n], vmin=-1, vmax=1)
  axes.set_yticks(axes.get_yticks(), range(1, gh + 1, n))
  axes.set_xticks(axes.get_xticks(), range(1, gw + 1, n))
  axes.set(
    title='Position embedding similarity',
    xlabel='Input patch column',
    ylabel='Input patch row',
  )
  right = axes.inset_axes([1.03, 0, 0.035, 1])
  bar = made.colorbar(shown, cax=right, ticks=[-1, 0, 1])
  bar.set_label('Cosine similarity')
  # At least two dots per patch of a map.
  dpi = max(150, min(400, 2.2 * gw * gw / n / width))
  pictures.save(made, path, dpi=dpi, tight=True)
  _write(path, similarity=cosines)


def distance(weights: Weights, path: pathlib.Path, looks: Looks) -> None:
  """Draw mean attention distances (Figs. 7, 11); a line: uniform attention."""
  from matplotlib import colormaps

  values = np.stack([look['distance'] for look in looks])
  mean, uniform = values.mean(0), arrays.cell_distances(weights).mean()
  depth, heads = mean.shape
  made, (axes,) = pictures.figure(1)
  axes.set_prop_cycle(color=colormaps['turbo'](np.linspace(0.05, 0.95, heads)))
  names = [f'Head {head + 1}' for head in range(heads)]
  axes.plot(np.arange(1, depth + 1), mean, '.', markersize=10, label=names)
  axes.axhline(uniform, color='grey', linestyle='--', label='uniform')
  axes.set(
    xlabel='Network depth (layer)',
    ylabel='Mean attention distance (pixels)',
    xlim=(0.5, depth + 0.5),
    ylim=(0, 1.05 * max(mean.max(), uniform)),
  )
  axes.xaxis.get_major_locator().set_params(integer=True)
  place = {'loc': 'center left', 'bbox_to_anchor': (1, 0.5)}
  axes.legend(frameon=False, fontsize=7, ncols=-(-heads // 16), **place)
  pictures.save(made, path)
  numbers = {'distance': mean, 'of_each_image': values, 'uniform': uniform}
  _write(path, looks, **numbers)


def maps(weights: Weights, path: pathlib.Path, looks: Looks) -> None:
  """Draw a figure per image: maps-1, maps-2, ... for the path maps.

  It has the attention of each layer (row) and head (column) below the image.
  Each map is divided by its maximum: heads that attend to all would be dark.
  """
  images = _images(weights, looks, 2 * _PX)
  for i, (look, image) in enumerate(zip(looks, images), 1):
    values, file = look['maps'], path.with_stem(f'{path.stem}-{i}')
    depth, heads, gh, gw = values.shape
    side = min(1.1, 14 / max(depth, heads))  # inches per map
    width = max(heads * side, 2.2) + 0.7
    height = depth * side * gh / gw
    above = min(2.0, 0.8 * width * image.shape[0] / image.shape[1])
    made = pictures.canvas(width, height + above + 0.9)
    top, below = made.subplots(2, 1, height_ratios=[above, height])
    top.imshow(pictures.rgb(image))
    top.set_axis_off()
    top.set_title(_caption(look), fontsize=10, parse_math=False)
    scale = np.maximum(values.max(axis=(2, 3), keepdims=True), 1e-30)
    pictures.mosaic(below, values / scale, vmin=0, vmax=1)
    below.set(xlabel='Head', ylabel='Layer')
    # At least two dots per patch.
    dpi = max(130, min(400, 2.2 * gw / side))
    pictures.save(made, file, dpi=dpi, tight=True)
    _write(file, maps=values, path=look['path'])


def rollout(
  weights: Weights, path: pathlib.Path, looks: Looks, style: str = 'mask'
) -> None:
  """Draw sheets of images next to their rollout; the second is PATH-2.

  Each image of several also has what exceeds the mean over all images, because
  small models attend to some places in all images.
  """
  mean = np.mean([look['rollout'] for look in looks], axis=0)

  def draw(image, found):
    drawn = [attention_figures.overlay(image, found, style=style)]
    if len(looks) > 1:
      above = np.maximum(found - mean, 0)
      drawn.append(attention_figures.overlay(image, above, style='heat'))
    return drawn

  title = f'image, rollout, rollout above the mean of {len(looks):,} images'
  title = title if len(looks) > 1 else ''
  for start in range(0, len(looks), PER_SHEET):
    sheet = looks[start : start + PER_SHEET]
    rollouts = np.stack([look['rollout'] for look in sheet])
    number = start // PER_SHEET + 1
    file = path.with_stem(f'{path.stem}-{number}') if start else path
    _sheet(weights, file, sheet, rollouts, title, draw)
    _write(file, sheet, rollout=rollouts, mean=mean)


def tsne(weights: Weights, path: pathlib.Path, looks: Looks) -> None:
  """Draw a point per image, colored by class."""
  from matplotlib import colormaps

  points = arrays.tsne([look['features'] for look in looks])
  classes = [look.get('class', '') for look in looks]
  names, labels = np.unique(classes, return_inverse=True)
  colors = colormaps['turbo'](np.linspace(0.05, 0.95, len(names)))
  made = pictures.canvas(7.2, 7)
  axes = made.subplots()
  axes.set(xticks=[], yticks=[], title=f't-SNE of {len(points):,} images')
  axes.set_aspect('equal', adjustable='datalim')
  size = float(np.clip(9000 / len(points), 5, 60))
  axes.scatter(*points.T, s=size, c=colors[labels], alpha=0.8, linewidths=0)
  style = {'fontsize': 8, 'va': 'center', 'parse_math': False}
  style |= {'xytext': (4, 0), 'textcoords': 'offset points'}  # beside a point
  for label, name in enumerate(names):
    own = points[labels == label]
    text = pictures.shorten(name, 24)
    axes.annotate(text, own[np.argmax(own[:, 0])], **style)
  pictures.save(made, path, dpi=150, tight=True)
  _write(path, looks, points=points, classes=classes)


def norms(weights: Weights, path: pathlib.Path, looks: Looks) -> None:
  """Draw norms of tokens by layer, and sheets of their maps: PATH-maps.

  Norms of patches are a histogram in each layer, medians of others are lines.
  """
  from matplotlib import colormaps, ticker
  from matplotlib.colors import LogNorm

  layout = arrays.layout(weights)
  values = np.stack([look['norms'] for look in looks])
  patches, depth = values[..., layout.prefix :], values.shape[1]
  low, high = np.log10([values.min(), values.max()])
  edges = np.logspace(low - 0.02, high + 0.02, 41)
  counts = [np.histogram(patches[:, i], edges)[0] for i in range(depth)]
  shares = np.stack(counts, axis=1) * depth / patches.size
  made, (axes,) = pictures.figure(1)
  axes.grid(visible=False)
  at, seen = np.arange(depth + 1) + 0.5, np.ma.masked_equal(shares, 0)
  scale = LogNorm(seen.min() / 20, seen.max())  # a single patch is visible
  shown = axes.pcolormesh(at, edges, seen, norm=scale, cmap='Blues')
  axes.set_prop_cycle(color=colormaps['autumn'](np.linspace(0, 0.8, 9)))
  names = ['class token'][: layout.class_token]
  names += ['distillation token'][: layout.distillation_token]
  names += [f'register {i + 1}' for i in range(layout.num_registers)]
  for name, medians in zip(
    names, np.median(values[..., : layout.prefix], axis=0).T
  ):
    axes.plot(at[1:] - 0.5, medians, '.-', label=name)
  axes.set(
    yscale='log',
    xlabel='Network depth (layer)',
    ylabel='Norm',
    title=f'Norms of the patches of {len(patches):,} images',
  )
  axes.xaxis.get_major_locator().set_params(integer=True)
  plain = ticker.LogFormatter(minor_thresholds=(1.5, 0.5))
  axes.yaxis.set_major_formatter(plain)
  axes.yaxis.set_minor_formatter(plain)
  made.colorbar(shown, label='Fraction of the patches of the layer')
  if names:
    axes.legend(frameon=False, fontsize=8, loc='upper left')
  pictures.save(made, path)
  _write(path, looks, norms=values)
  chosen = np.unique(np.ceil(np.arange(1, 5) / 4 * depth).astype(int))
  maps = patches[:PER_SHEET, chosen - 1]
  low, high = (f(maps, axis=(0, 2))[:, None] for f in (np.min, np.max))
  maps = (maps - low) / np.maximum(high - low, 1e-30)
  maps = maps.reshape(*maps.shape[:2], *layout.grid)
  colors = np.uint8(255 * colormaps['viridis'](maps)[..., :3])
  title = f'image, norms of its patches after layers {str(chosen)[1:-1]}'
  file = path.with_stem(f'{path.stem}-maps')
  file = file.with_suffix('.jpg') if path.suffix == '.png' else file
  _sheet(weights, file, looks, colors, title)


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


def _enlarged(image, maps):
  """Return maps in colors, uint8 [m, gh, gw, 3], as large as the image."""
  return [principal.enlarge(x, image.shape) for x in maps]


def _sheet(weights, path, looks, found, title, draw=_enlarged):
  """Draw images, each with what `draw` makes of it and an item of `found`."""
  looks = looks[: len(found)]
  px = 2 * _PX if len(looks) <= _FEW else _PX
  images = _images(weights, looks, px)
  rows = [(image, *draw(image, x)) for x, image in zip(found, images)]
  names = [_caption(look) for look in looks]
  attention_figures.sheet(rows, path, names=names, title=title)


def _write(file, looks=(), **numbers):
  """Write the numbers of a figure, of these images, and print its path."""
  if looks:
    numbers['paths'] = np.array([look['path'] for look in looks], str)
  with replacing(file.with_suffix('.npz')) as path, path.open('wb') as opened:
    np.savez_compressed(opened, **numbers)
  print(file, flush=True)


def _images(weights, looks, px):
  images = finer_images(weights, [look['path'] for look in looks], px)
  return terminal.track(images, len(looks), unit='images to draw')


def finer_images(
  weights: Weights, paths: Sequence[str], px: int
) -> Iterator[np.ndarray]:
  """Yield the part of each image that the model sees, to look at.

  The transforms of the weights are scaled to the smallest multiple of their
  image size whose smaller side has at least `px` pixels. There is no limit on
  the size of a file, as the model has seen it.
  """
  shape = weights.image_shape
  factor = -(-px // min(shape[:2]))
  finer = shape[0] * factor, shape[1] * factor
  transforms = scale(weights.transforms, finer, old=shape)
  source = inputs.Paths(paths, weights.decode)
  for _, example in inputs.load(source, transforms, sys.maxsize):
    if isinstance(example, ValueError):
      raise example
    yield weights.decode.show(example['image'])


def _caption(look):
  """Return the class folder, if there is one, file name and prediction."""
  name = pathlib.PurePosixPath(look['path']).stem
  name = ' / '.join(filter(None, (look.get('class'), name)))
  return ': '.join(filter(None, (name, look.get('prediction'))))
