"""Public weights, or your own, as a model and its parameters.

    model, params = pretrained.load('B_16.npz', image_size=384, num_classes=10)
    logits = model.apply({'params': params}, images)  # [B, H, W, 3] in [-1, 1]

What files are read is told in `weights.formats`; TensorFlow and PyTorch are
never needed, and nothing in a file is executed.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import tree
from vit_jax.weights import formats, grids, sizes
from vit_jax.weights import surgery as transfer
from vit_jax.weights.bundle import Weights, make


def load(
  path,
  *,
  image_size=None,
  num_classes=None,
  posemb_resize='paper',
  patch_size=None,
  patch_resize='bicubic_antialias',
  in_chans=None,
  head='keep',
  step=None,
  ema='auto',
  num_heads=None,
  grid=None,
  report=print,
  **fields,
):
  """Model and parameters of a weights file, or of a run of ours.

  The architecture is read off the file. What a file cannot tell:

  - the heads, where query, key and value are one matrix and no config.json
    stands beside: those of the published model of that width, else width / 64;
  - the GELU: 'tanh' for .npz, 'exact' for timm, as config.json says for both
    timm and HF; the epsilon of LayerNorms: 1e-6, and config.json's for HF;
  - where there is no position table, whether there are positions: sin-cos;
  - the size of images of a model without positions: 224.

  Args:
    path: file or folder, local or remote, see `weights.formats`.
    image_size: int or (H, W) to use the model with; position tables are
      resized. None: the size it was trained for.
    num_classes: None: the file's head. Another number: a new, zero head, and
      the tanh layer before it goes, as in the paper's fine-tuning. 0: no head.
    posemb_resize: 'paper', 'bilinear' or 'bicubic_antialias', see
      `models.posemb.resize`.
    patch_size: int or (height, width) that patches are resized to.
    patch_resize: how, see `models.posemb.resize_kernel`.
    in_chans: channels of the images, where not those of the file.
    head: 'reset': a new, zero head with as many classes as the file's.
    step, ema: of a run of ours: which checkpoint; whether the averaged
      parameters (True, False, or 'auto': where there are any).
    num_heads: for what the file does not tell.
    grid: (rows, columns) of the file's patches, where they are not a square.
    report: called with the text of what was read, and of all that was
      skipped, resized or initialised anew; None for silence.
    **fields: of the model, for what the file does not tell (gelu='tanh',
      norm_eps=1e-12, ...) or how to run it (dtype='bfloat16', scan=True, ...).

  Returns:
    (model, params): model.apply({'params': params}, images) takes float images
    [B, H, W, C] in [-1, 1] (what `weights.formats.read(path).preprocess` makes)
    and gives float32 logits [B, K]. params are on the default device.

  Raises:
    ValueError: no such file, no format that is read, a file that is broken or
      a pickle, or parts of the model missing, too many or of another shape,
      all of them as a diff.
  """
  weights = formats.read(
    path, step=step, ema=ema, num_heads=num_heads, grid=grid, **fields
  )
  weights, changes = fit(
    weights,
    image_size=image_size,
    num_classes=num_classes,
    posemb_resize=posemb_resize,
    patch_size=patch_size,
    patch_resize=patch_resize,
    in_chans=in_chans,
    head=head,
  )
  if report is not None:
    report(f'{weights.origin}: {changes}')
  return build(weights)


def build(weights: Weights):
  """(model, nested parameters on the default device)."""
  model = make(weights.settings)
  params = weights.params
  if getattr(model, 'scan', False) and not tree.is_stacked(params):
    params = tree.stack_blocks(params)
  return model, tree.unflatten(jax.device_put(params))


def fit(
  weights,
  *,
  image_size=None,
  num_classes=None,
  posemb_resize='paper',
  patch_size=None,
  patch_resize='bicubic_antialias',
  in_chans=None,
  head='keep',
):
  """Weights for another use of the model; arguments as of `load`.

  Returns:
    (Weights, transfer.Report). Sizes in the transforms change in proportion.

  Raises:
    ValueError: the model cannot be used so.
  """
  settings, old_shape = dict(weights.settings), weights.image_shape
  size = old_shape[:2] if image_size is None else grids.pair(image_size)
  shape = (*size, in_chans or old_shape[2])
  if patch_size is not None:
    settings['patch_size'] = grids.pair(patch_size)
  old_classes = settings.get('num_classes') or 0
  classes = old_classes if num_classes is None else num_classes
  settings['num_classes'] = classes or None
  if classes and classes != old_classes:
    head = 'reset'
  if head == 'reset' and settings.get('representation_size'):
    settings['representation_size'] = None
  params, names = dict(weights.params), weights.class_names
  if not classes or head == 'reset':
    names = None
  dropped = {}
  if not classes:
    dropped = {p: v for p, v in params.items() if p.startswith('head/')}
    params = {p: v for p, v in params.items() if p not in dropped}
  fresh = _shapes(settings | {'scan': False}, shape)
  params, report = transfer.adapt(
    params,
    fresh,
    head=head,
    posemb_resize=posemb_resize,
    patch_resize=patch_resize,
    adapt_channels=True,
  )
  report.notes += [f'  {p} dropped' for p in dropped] + weights.notes
  made = dataclasses.replace(
    weights,
    settings=settings,
    params={p: _filled(p, v, settings) for p, v in params.items()},
    image_shape=shape,
    transforms=sizes.scale(weights.transforms, old_shape, shape),
    class_names=names,
    notes=[],
  )
  return made, report


def _shapes(settings, image_shape):
  """{path: ShapeDtypeStruct} of a model's parameters."""
  settings = {k: v for k, v in settings.items() if k != 'scan'}
  images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
  try:
    shapes = jax.eval_shape(make(settings).init, jax.random.key(0), images)
  except ValueError as e:  # of the model: patches that do not tile, ...
    raise ValueError(f'{e} (image_size={image_shape[:2]})') from e
  return tree.flatten(shapes['params'])


def _filled(path, value, settings):
  """A head that is initialised anew: zeros, and its bias as the model says."""
  if isinstance(value, np.ndarray):
    return value
  bias = settings.get('head_bias_init', 0.0) if path.endswith('/bias') else 0.0
  return np.full(value.shape, bias, value.dtype)
