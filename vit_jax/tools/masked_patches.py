r"""A picture of masked patch prediction: what a run makes of hidden patches.

  python -m vit_jax.tools.masked_patches --workdir=DIR --output=FILE.png
  python -m vit_jax.tools.masked_patches --workdir=DIR --output=F.png PICTURES

DIR is that of a run of configs/masked_patches.py or alike. Without pictures it
shows the first images that the run was evaluated on. From top to bottom:

  image      as it was
  corrupted  grey: hidden behind the mask vector; framed in orange: another
             patch is in its place; framed in blue: kept, but to be predicted
  predicted  the corrupted patches as the model has them
  truth      as they are, in what can be predicted (such as mean colours)

The numbers are in FILE.npz: images, corrupted, predicted, truth (uint8
[N, H, W, C]); is_corrupted [N, n]; sources [N, n], the number of the patch that
stands in each one's place, -1 for the mask vector; loss and accuracy [N], means
over the corrupted patches.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax import pretrained, terminal
from vit_jax.config import resolve
from vit_jax.data import image_files, pipeline
from vit_jax.data.pipeline import Unlabelled
from vit_jax.objectives import patch_targets
from vit_jax.objectives.masked_patches import Prediction, Task
from vit_jax.reports import pictures
from vit_jax.tools import arguments, outputs

_OBJECTIVE = 'objectives.masked_patches.masked_patches'
_GREY = 128
_SWAPPED, _KEPT = 'tab:orange', 'tab:blue'


def show(weights, task, images, *, seed=0):
  """Corrupts images and predicts their patches.

  Args:
    weights: Weights of a model with a mask vector.
    task: arguments of the objective, but for model and preprocess.
    images: uint8 [N, H, W, C].
    seed: of the corruption.

  Returns:
    {name: array} as listed above.

  Raises:
    ValueError: no such model, or images that do not suit it.
  """
  model, params = pretrained.build(weights)
  preprocess = weights.preprocess
  prediction = Prediction(model, preprocess, Task(**task))
  target = prediction.target

  def all_of_it(params, images):
    patches = patch_targets.cut(images, model.embedding.patch_size)
    keys = jax.random.split(jax.random.key(seed), len(images))
    found = prediction(params, images, keys)
    shown = {
      'predicted': target.picture(found['outputs'], patches.shape[2:]),
      'truth': target.truth(patches),
      'corrupted': _corrupted(patches, found['sources']),
    }
    hidden = found['corrupted'][:, :, None, None, None]
    for name in ('predicted', 'truth'):
      shown[name] = jnp.where(hidden, shown[name], patches)
    whole = {k: patch_targets.join(x, images.shape) for k, x in shown.items()}
    told = {'is_corrupted': found['corrupted'], 'sources': found['sources']}
    return {'images': images, **whole, **told, **found['metrics']}

  return jax.device_get(jax.jit(all_of_it)(params, images))


def _corrupted(patches, sources):
  """What the model is given: other patches, and grey for the mask vector."""
  sources = sources[:, :, None, None, None]
  moved = jnp.take_along_axis(patches, jnp.maximum(sources, 0), axis=1)
  return jnp.where(sources < 0, jnp.uint8(_GREY), moved)


def draw(found, patch_size, path):
  """Writes what `show` found as a picture: PNG, or PDF by the name's end."""
  rows = ('images', 'corrupted', 'predicted', 'truth')
  count = len(found['images'])
  figure = pictures.canvas(1.5 * count + 0.4, 6.2)
  all_axes = figure.subplots(len(rows), count, squeeze=False)
  for axes_of_row, name in zip(all_axes, rows):
    axes_of_row[0].set_ylabel('image' if name == 'images' else name)
    for axes, image in zip(axes_of_row, found[name]):
      axes.imshow(image.squeeze(), cmap='gray', vmin=0, vmax=255)
      axes.set(xticks=[], yticks=[])
  for i, axes in enumerate(all_axes[1]):
    _frame(axes, found, i, patch_size)
  for i, axes in enumerate(all_axes[-1]):
    metrics = [k for k in ('loss', 'accuracy') if k in found]
    text = '\n'.join(f'{name} {found[name][i]:.2f}' for name in metrics)
    axes.set_xlabel(text, fontsize=8)
  with outputs.replacing(path) as partial:
    figure.savefig(partial, dpi=130, format=pathlib.Path(path).suffix[1:])


def _frame(axes, found, i, patch_size):
  """Frames the patches of image i that were swapped, or kept."""
  from matplotlib.patches import Rectangle

  ph, pw = patch_size
  columns = found['images'].shape[2] // pw
  for patch in np.flatnonzero(found['is_corrupted'][i]):
    source = found['sources'][i, patch]
    if source < 0:
      continue
    y, x = divmod(patch, columns)
    corner = x * pw - 0.5, y * ph - 0.5
    colour = _KEPT if source == patch else _SWAPPED
    axes.add_patch(Rectangle(corner, pw, ph, fill=False, ec=colour, lw=1.5))


def main(argv=None):
  args = parser().parse_intermixed_args(argv)
  with terminal.one_message():
    _run(args)


def parser():
  parser = arguments.parser(__doc__, 'masked_patches --workdir=DIR --output=F')
  add = parser.add_argument
  add('pictures', nargs='*', help='images, folders, globs; local or gs://...')
  add('--workdir', required=True, help='of a run of masked patch prediction')
  add('--output', required=True, metavar='FILE.png', help='or FILE.pdf')
  add('--examples', type=arguments.count, default=8, metavar='N', help='(8)')
  add('--seed', type=int, default=0, help='of the corruption (0)')
  return parser


def _run(args):
  output = pathlib.Path(args.output)
  if output.suffix not in ('.png', '.pdf'):
    raise ValueError(f'--output={output} must end with .png or .pdf.')
  outputs.check_folder(output)
  config = _config(args.workdir)
  weights = arguments.read(args.workdir, args)
  weights, _ = arguments.fit(weights, image_size=args.image_size)
  images = _images(args, config, weights)
  task = {k: v for k, v in config['objective'].items() if k != 'target'}
  found = show(weights, task, images, seed=args.seed)
  with (
    outputs.replacing(output.with_suffix('.npz')) as partial,
    partial.open('wb') as file,
  ):
    np.savez_compressed(file, **found)
  draw(found, weights.model.embedding.patch_size, output)
  for name in ('loss', 'accuracy'):
    if name in found:
      print(f'{name} of {len(images)} images: {found[name].mean():.4f}')
  print(output, output.with_suffix('.npz'))


def _config(workdir):
  """The run's config; ValueError unless it predicts masked patches."""
  file = epath.Path(workdir) / 'config.json'
  if not file.exists():
    raise ValueError(f'{workdir} is not the workdir of a run: no config.json.')
  config = json.loads(file.read_text())
  target = config.get('objective', {}).get('target', 'none')
  if not target.endswith(_OBJECTIVE):
    raise ValueError(
      f'{workdir} has the objective {target}; this shows runs of {_OBJECTIVE}.'
    )
  return config


def _images(args, config, weights):
  """uint8 [N, H, W, C]: pictures, or those the run was evaluated on."""
  if args.pictures:
    paths = image_files.find(args.pictures)[: args.examples]
    transforms = weights.transforms
    channels = weights.image_shape[2]
    found = []
    loaded = image_files.load(
      paths, transforms, channels=channels, ahead=args.examples
    )
    for _, image in loaded:
      if isinstance(image, ValueError):
        raise image
      found.append(image)
    return np.stack(found)
  evaluators = config.get('evals') or {'training': config}
  data = resolve(next(iter(evaluators.values()))['data'])
  batches = pipeline.eval_batches(
    Unlabelled(data['source']),
    data.get('transforms', ()),
    batch_size=args.examples,
  )
  batch = next(iter(batches))
  return batch['image'][batch['mask']]


if __name__ == '__main__':
  main()
