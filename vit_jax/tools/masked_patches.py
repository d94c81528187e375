r"""Draw masked patch prediction: what a model predicts for hidden patches.

  python -m vit_jax.tools.masked_patches --workdir=DIR --output=FILE.png
  python -m vit_jax.tools.masked_patches --workdir=DIR --output=F.png IMAGES

DIR is the workdir of a run of configs/masked_patches.py or a similar config.
Without images, the first ones that the run was evaluated on are drawn. From top
to bottom:

  image      the original
  corrupted  grey: replaced by the mask vector; orange frame: replaced by
             another patch; blue frame: kept, but predicted as well
  predicted  the model's prediction of the corrupted patches
  truth      what a perfect prediction would be (such as mean colours)

The numbers are in FILE.npz: images, corrupted, predicted, truth (uint8
[N, H, W, C]); is_corrupted [N, n]; sources [N, n], the index of the patch that
replaces each patch, -1 for the mask vector; loss and accuracy [N], means over
the corrupted patches.
"""

import argparse
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax import config, pretrained
from vit_jax.data import image_files
from vit_jax.objectives import patch_targets
from vit_jax.objectives.masked_patches import Prediction, Task
from vit_jax.reports import pictures
from vit_jax.runs import terminal
from vit_jax.runs.files import PathLike
from vit_jax.tools import arguments, parsers, predict
from vit_jax.types import Params

_OBJECTIVE = 'vit_jax.objectives.masked_patches.masked_patches'
_EVALUATOR = 'vit_jax.evals.masked_patches.MaskedPatches'
_METRICS = ('loss', 'accuracy')
_GREY = 128
_SWAPPED, _KEPT = 'tab:orange', 'tab:blue'


def corrupt_and_predict(
  prediction: Prediction, params: Params, images: np.ndarray, *, seed: int = 0
) -> dict[str, np.ndarray]:
  """Corrupt images and predict their patches.

  Args:
    prediction: Prediction of the objective.
    params: of its model.
    images: uint8 [N, H, W, C].
    seed: of the corruption.

  Returns:
    {name: array}, as listed in the module docstring.
  """

  def compute(params, images):
    patches = patch_targets.cut(images, prediction.model.embedding.patch_size)
    keys = jax.random.split(jax.random.key(seed), len(images))
    found = prediction(params, images, keys)
    sources = found['sources'][:, :, None, None, None]
    moved = jnp.take_along_axis(patches, jnp.maximum(sources, 0), axis=1)
    corrupted = jnp.where(sources < 0, jnp.uint8(_GREY), moved)
    target = prediction.target
    predicted = target.picture(found['outputs'], patches.shape[2:])
    is_corrupted = found['corrupted'][:, :, None, None, None]
    truth = jnp.where(is_corrupted, target.truth(patches), patches)
    predicted = jnp.where(is_corrupted, predicted, patches)
    return {
      'images': images,
      'corrupted': patch_targets.join(corrupted, images.shape),
      'predicted': patch_targets.join(predicted, images.shape),
      'truth': patch_targets.join(truth, images.shape),
      'is_corrupted': found['corrupted'],
      'sources': found['sources'],
      **found['metrics'],
    }

  return jax.device_get(jax.jit(compute)(params, images))


def draw(
  found: Mapping[str, Any], patch_size: tuple[int, int], path: PathLike
) -> None:
  """Write what `corrupt_and_predict` returned as a figure, .png or .pdf."""
  rows = ('images', 'corrupted', 'predicted', 'truth')
  count = len(found['images'])
  figure = pictures.canvas(1.5 * count + 0.4, 6.2)
  panels = figure.subplots(len(rows), count, squeeze=False)
  for axes_of_row, name in zip(panels, rows):
    axes_of_row[0].set_ylabel('image' if name == 'images' else name)
    for axes, image in zip(axes_of_row, found[name]):
      axes.imshow(image.squeeze(), cmap='gray', vmin=0, vmax=255)
      axes.set(xticks=[], yticks=[])
  metrics = [name for name in _METRICS if name in found]
  for i, (corrupted, truth) in enumerate(zip(panels[1], panels[-1])):
    _frame(corrupted, found, i, patch_size)
    text = '\n'.join(f'{name} {found[name][i]:.2f}' for name in metrics)
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


def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_intermixed_args(argv)
  with terminal.one_message():
    _run(args)


def parser() -> argparse.ArgumentParser:
  parser = parsers.parser(
    __doc__, 'tools.masked_patches --workdir=DIR --output=F'
  )
  arguments.add_weights(parser, '--workdir')
  add = parser.add_argument
  add('images', nargs='*', help='images, folders, globs; local or gs://...')
  add('--output', required=True, metavar='FILE.png', help='or FILE.pdf')
  arguments.add_counts(parser, examples=(8, 'images to draw'))
  add('--seed', type=int, default=0, help='of the corruption (0)')
  return parser


def _run(args):
  output = pathlib.Path(args.output)
  if output.suffix not in ('.png', '.pdf'):
    raise ValueError(f'--output={output} must end with .png or .pdf.')
  run = _read_config(args.weights)
  weights = arguments.read(args)
  if args.images:
    images = _load(args, weights)
  else:
    data = _open_data(run, args.trust, args.examples)
    batch = next(iter(data.eval_batches()))
    images = batch['image'][batch['mask']]
  model, params = pretrained.build(weights)
  task = run['objective'].get('task', {})
  prediction = Prediction(model, weights.preprocess, Task(**task))
  found = corrupt_and_predict(prediction, params, images, seed=args.seed)
  predict.write_arrays(output.with_suffix('.npz'), found)
  draw(found, model.embedding.patch_size, output)
  for name in _METRICS:
    if name in found:
      print(f'{name} of {len(images)} images: {found[name].mean():.4f}')
  print(output, output.with_suffix('.npz'))


def _read_config(workdir):
  """Return config.json of a run of masked patch prediction."""
  file = epath.Path(workdir) / 'config.json'
  if not file.exists():
    raise ValueError(f'{workdir} is not the workdir of a run: no config.json.')
  found = json.loads(file.read_text())
  target = found.get('objective', {}).get('target')
  if target != _OBJECTIVE:
    raise ValueError(
      f'{workdir} is a run with the objective {target}; expected {_OBJECTIVE}.'
    )
  return found


def _open_data(run, trust, batch_size):
  """Return the Data that a run was evaluated on, or else trained on."""
  evals = (run.get('evals') or {}).values()
  found = next((e for e in evals if e.get('target') == _EVALUATOR), run)
  settings = found['data'] | {'labels': False, 'batch_size': batch_size}
  settings['target'] = 'vit_jax.data.pipeline.Data'
  return config.build(settings, trust=('vit_jax.data', *trust))


def _load(args, weights):
  """Return the images of the command line, uint8 [N, H, W, C]."""
  paths = image_files.find(args.images)[: args.examples]
  loaded, _ = predict.load(weights, paths, args.examples)
  return np.stack(list(predict.images_of(loaded)))


if __name__ == '__main__':
  main()
