"""Checkpoints of runs of ours, and model.json beside them."""

from vit_jax import checkpoint, tree, workdirs
from vit_jax.weights.bundle import Weights, infer
from vit_jax.weights.grids import image_shape


def read(directory, ema, options):
  """Weights of a checkpoint.

  Args:
    directory: WORKDIR/checkpoints/STEP; the workdir may be gone.
    ema: see `checkpoint.load_params`.
    options: of `formats.read`.

  Raises:
    ValueError: `grid`, which a run says itself, is among the options.
  """
  if 'grid' in options:
    raise ValueError(f'{directory} says its own grid; leave grid out.')
  params, _ = checkpoint.load_params(directory, ema=ema)
  if tree.is_stacked(params):
    params = tree.unstack_blocks(params)
  run = workdirs.description(directory, missing_ok=True)
  fields = {k: v for k, v in options.items() if k != 'image_size'}
  if run is None:  # the checkpoint alone, without its workdir
    settings = infer(params, **fields)
    size = options.get('image_size')
    use = {'image_shape': image_shape(params, settings, image_size=size)}
  else:
    unrolled = {'scan': False} if 'scan' in run['model'] else {}
    settings, use = run['model'] | unrolled | fields, besides_model(run)
    if not settings.get('mask_token'):  # asked for without it
      params.pop('mask', None)
  return Weights(
    settings=settings,
    params=params,
    origin=str(directory),
    step=int(directory.name),
    **use,
  )


def besides_model(content):
  """The part of model.json, or of NAME.json, that is not the model."""
  names = 'preprocess', 'transforms', 'class_names', 'activation'
  found = {k: content[k] for k in names if content.get(k) is not None}
  return found | {'image_shape': tuple(map(int, content['image_shape']))}
