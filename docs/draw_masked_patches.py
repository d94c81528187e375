"""Draw masked patch prediction: what a model predicts for hidden patches.

  python docs/draw_masked_patches.py --weights=DIR --output=FILE.png [IMAGE ...]

DIR is the workdir of a run of configs/masked_patches.py or a similar config.
Without images, the first ones that the run was evaluated on are drawn. From top
to bottom:

  image      the original
  corrupted  grey: replaced by the mask vector; orange frame: replaced by
             another patch; blue frame: kept, but predicted as well
  predicted  the model's prediction of the corrupted patches
  truth      what a perfect prediction would be (such as mean colours)
"""

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax import config, pretrained
from vit_jax.data.sources import image_files, inputs
from vit_jax.io import terminal
from vit_jax.objectives.masked_patches import (
  LEVELS,
  MaskedPatches,
  Pixels,
  Task,
  cut,
)
from vit_jax.reports import pictures
from vit_jax.tools import arguments, parsers

_GREY = 128
_SWAPPED, _KEPT = 'tab:orange', 'tab:blue'


def corrupt_and_predict(objective, params, images, *, seed=0):
  """Corrupt images and predict their patches.

  Args:
    objective: MaskedPatches.
    params: of its model.
    images: uint8 [N, H, W, C].
    seed: of the corruption.

  Returns:
    images, corrupted, predicted and truth, uint8 [N, H, W, C]; is_corrupted
    [N, n]; sources [N, n], the index of the patch that replaces each patch, -1
    for the mask vector; and the metrics [N], means over the corrupted patches.
  """

  def compute(params, images):
    patches = cut(images, objective.model.embedding.patch_size)
    keys = jax.random.split(jax.random.key(seed), len(images))
    found = objective.predict(params, images, keys)
    sources = found['sources'][:, :, None, None, None]
    moved = jnp.take_along_axis(patches, jnp.maximum(sources, 0), axis=1)
    corrupted = jnp.where(sources < 0, jnp.uint8(_GREY), moved)
    target = objective.target
    predicted = picture(target, found['outputs'], patches)
    is_corrupted = found['corrupted'][:, :, None, None, None]
    truth = jnp.where(is_corrupted, truth_of(target, patches), patches)
    predicted = jnp.where(is_corrupted, predicted, patches)
    return {
      'images': images,
      'corrupted': join(corrupted, images.shape),
      'predicted': join(predicted, images.shape),
      'truth': join(truth, images.shape),
      'is_corrupted': found['corrupted'],
      'sources': found['sources'],
      'metrics': found['metrics'],
    }

  return jax.device_get(jax.jit(compute)(params, images))


def picture(target, outputs, patches):
  """Draw predictions [B, n, K] as patches: uint8 [B, n, ph, pw, C].

  Pixels undo the preprocessing, which scales channels; other targets have each
  cell in its likeliest colour.
  """
  if not isinstance(target, Pixels):
    logits = outputs.reshape(*outputs.shape[:2], target.side**2, -1)
    return _paint(target, jnp.argmax(logits, axis=-1), patches)
  values = outputs.reshape(patches.shape)
  low, high = (
    target.preprocess(jnp.full(patches.shape[1:], x, jnp.uint8))[None]
    for x in (0, 255)
  )
  values = 255 * (values - low) / (high - low)
  return jnp.clip(jnp.round(values), 0, 255).astype(jnp.uint8)


def truth_of(target, patches):
  """Draw what a perfect prediction would be."""
  if isinstance(target, Pixels):
    return patches
  return _paint(target, target.classes(patches), patches)


def _paint(target, classes, patches):
  """Draw cells of these classes as patches of the same shape."""
  *batch, ph, pw, channels = patches.shape
  classes = classes.reshape(*batch, target.side, target.side)
  levels = [classes // LEVELS**i % LEVELS for i in reversed(range(channels))]
  step = 256 // LEVELS
  cells = jnp.stack(levels, axis=-1) * step + step // 2
  cells = jnp.repeat(cells, ph // target.side, axis=-3)
  return jnp.repeat(cells, pw // target.side, axis=-2).astype(jnp.uint8)


def join(patches, shape):
  """Invert `cut`: [B, n, ph, pw, C] -> images of that shape."""
  batch, height, width, channels = shape
  ph, pw = patches.shape[2:4]
  grid = patches.reshape(batch, height // ph, width // pw, ph, pw, channels)
  return grid.swapaxes(2, 3).reshape(shape)


def draw(found, patch_size, path):
  """Write what `corrupt_and_predict` returned as a figure."""
  rows = ('images', 'corrupted', 'predicted', 'truth')
  count = len(found['images'])
  figure = pictures.canvas(1.5 * count + 0.4, 6.2)
  panels = figure.subplots(len(rows), count, squeeze=False)
  for axes_of_row, name in zip(panels, rows):
    axes_of_row[0].set_ylabel('image' if name == 'images' else name)
    for axes, image in zip(axes_of_row, found[name]):
      axes.imshow(image.squeeze(), cmap='gray', vmin=0, vmax=255)
      axes.set(xticks=[], yticks=[])
  for i, (corrupted, truth) in enumerate(zip(panels[1], panels[-1])):
    _frame(corrupted, found, i, patch_size)
    metrics = found['metrics'].items()
    text = '\n'.join(f'{name} {each[i]:.2f}' for name, each in metrics)
    truth.set_xlabel(text, fontsize=8)
  pictures.save(figure, path)


def _frame(axes, found, i, patch_size):
  """Frame the patches of image i that were swapped or kept."""
  from matplotlib.patches import Rectangle

  ph, pw = patch_size
  columns = found['images'].shape[2] // pw
  for patch in np.flatnonzero(found['is_corrupted'][i]):
    source = found['sources'][i, patch]
    if source >= 0:
      y, x = divmod(patch, columns)
      corner = x * pw - 0.5, y * ph - 0.5
      colour = _KEPT if source == patch else _SWAPPED
      axes.add_patch(Rectangle(corner, pw, ph, fill=False, ec=colour, lw=1.5))


def main(argv=None):
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  arguments.add_weights(parser)
  parser.add_argument('images', nargs='*', help='images, folders, globs')
  parser.add_argument('--output', required=True, help='FILE.png or FILE.pdf')
  parsers.add_counts(parser, examples=(8, 'images to draw'))
  parser.add_argument('--seed', type=int, default=0, help='of the corruption')
  args = parser.parse_intermixed_args(argv)
  with terminal.one_message():
    weights = arguments.read(args)
    run = json.loads((epath.Path(args.weights) / 'config.json').read_text())
    if args.images:
      paths = image_files.find(args.images)[: args.examples]
      source = inputs.Paths(paths, weights.decode)
      loaded = inputs.load(source, weights.transforms)
      images = np.stack([example['image'] for _, example in loaded])
    else:
      images = _images_of(run, args.trust, args.examples)
    model, params = pretrained.build(weights)
    task = Task(**run['objective'].get('task', {}))
    objective = MaskedPatches(model, preprocess=weights.preprocess, task=task)
    found = corrupt_and_predict(objective, params, images, seed=args.seed)
    draw(found, model.embedding.patch_size, epath.Path(args.output))


def _images_of(run, trust, count):
  """Return the first images that a run was evaluated on, or trained on."""
  evals = (run.get('evals') or {}).values()
  evaluators = (e for e in evals if e['target'].endswith('.MaskedPatches'))
  settings = next(evaluators, run)['data']
  data = config.build(
    settings
    | {
      'target': 'vit_jax.data.pipeline.Data',
      'labels': False,
      'batch_size': count,
    },
    trust=('vit_jax.data', *trust),
  )
  batch = next(iter(data.eval_batches()))
  return batch['image'][batch['mask']]


if __name__ == '__main__':
  main()
