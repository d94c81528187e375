r"""Classify images with weights of any known format.

  python -m vit_jax.tools.predict --weights=WEIGHTS IMAGE|FOLDER|GLOB ...
  python -m vit_jax.tools.predict --weights=WEIGHTS --features=F.npz FOLDER

WEIGHTS is a workdir, a file or a folder (see vit_jax/weights/formats.py), or a
function NAME.stablehlo that convert wrote, on the platforms it was written for.
Folders of images are searched recursively. Images are preprocessed as stored
with the weights. --features writes the arrays 'paths' [N] and 'features'
[N, ...].

Results go to stdout, everything else to stderr. A terminal shows a table; a
pipe gets CSV (path, rank, class_id, class_name, probability). The exit status
is 0; 1 after an error, or if images were skipped (--on_error=skip; they are
listed at the end); 2 for wrong arguments.
"""

import argparse
import collections
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import pretrained
from vit_jax.config.checks import one_of
from vit_jax.data import image_files
from vit_jax.data.images import MAX_IMAGE_BYTES
from vit_jax.parallel import sharding
from vit_jax.runs import terminal
from vit_jax.tools import arguments, outputs
from vit_jax.types import Params, Preprocess, Shape
from vit_jax.weights.bundle import Weights

_ACTIVATIONS = {'softmax': jax.nn.softmax, 'sigmoid': jax.nn.sigmoid}


def predict(
  weights: Weights,
  paths: Sequence[str],
  *,
  layer: str | None = None,
  activation: str | None = None,
  batch_size: int = 32,
  num_workers: int | None = None,
  on_error: str = 'raise',
  max_image_bytes: int = MAX_IMAGE_BYTES,
) -> Iterator[dict[str, Any]]:
  """Yield the model's output for each image, in order.

  A batch is computed on all devices of this host while the next images are
  decoded. Batches that are not full are padded, so one program is compiled.

  Args:
    weights: Weights.
    paths: of the images, see `image_files.find`.
    layer: a name in the model's `features` whose activations are returned too:
      'pre_logits', 'pooled', 'tokens', 'block_0', ... .
    activation: 'softmax' or 'sigmoid'; by default that of the weights.
    batch_size: rounded up to a multiple of the number of devices.
    num_workers: number of decoding threads; by default one per core, up to 16.
    on_error: for images that cannot be read: 'raise', or 'skip' to yield only
      'path' and 'error'.
    max_image_bytes: limit on H * W * channels of an image file, read from its
      header before it is decoded.

  Returns:
    iterator of dicts: 'path'; 'probabilities' float32 [K] if the model has a
    head; 'features' float32 [...] if a layer is given.

  Raises:
    ValueError: there is no such layer, nothing to predict, an argument is
      invalid, or an image cannot be read.
  """
  activation = activation or weights.activation
  one_of('activation', activation, _ACTIVATIONS)
  one_of('on_error', on_error, ('raise', 'skip'))
  loaded, shape = load(weights, paths, batch_size, num_workers, max_image_bytes)
  model, params = pretrained.build(weights)
  forward = forward_fn(model, weights.preprocess, activation, layer)
  out = jax.eval_shape(forward, params, jax.ShapeDtypeStruct(shape, jnp.uint8))
  if layer is None and (not out or out['probabilities'].ndim != 2):
    what = 'logits for each patch, not for the image' if out else 'no head'
    raise ValueError(
      f'The weights have {what}. Use --features=FILE.npz (in Python, layer=) '
      'for their features.'
    )
  return in_batches(forward, params, loaded, shape, on_error)


def load(
  weights: Weights,
  paths: Sequence[str],
  batch_size: int,
  num_workers: int | None = None,
  max_image_bytes: int = MAX_IMAGE_BYTES,
) -> tuple[Iterator[tuple[str, Any]], Shape]:
  """Return (iterator over transformed images, shape [B, H, W, C] of batches).

  Nothing is read before the first image is requested. Arguments as of
  `predict`.

  Raises:
    ValueError: batch_size is invalid, or the model does not take such images.
  """
  if batch_size < 1:
    raise ValueError(f'batch_size={batch_size} must be at least 1.')
  channels = weights.image_shape[2]
  if channels not in (1, 3):
    raise ValueError(
      f'The model takes {channels} channels; image files have 1 or 3. Read the '
      'weights with another in_chans.'
    )
  size = max(1, min(batch_size, len(paths)))
  loaded = image_files.load(
    paths,
    weights.transforms,
    channels=channels,
    max_image_bytes=max_image_bytes,
    num_workers=num_workers,
    ahead=2 * size,
  )
  return loaded, (size, *weights.image_shape)


def images_of(loaded: Iterable[tuple[str, Any]]) -> Iterator[np.ndarray]:
  """Yield the images of `image_files.load`, or raise the error of one."""
  for _, image in loaded:
    if isinstance(image, ValueError):
      raise image
    yield image


def forward_fn(
  model: Any,
  preprocess: Preprocess,
  activation: str | None,
  layer: str | None = None,
) -> Callable[..., Any]:
  """Return the function (params, uint8 [B, H, W, C]) -> {name: [B, ...]}.

  The names are those of `predict`, as are the arguments.
  """
  has_features = hasattr(model, 'features')
  if layer is not None and not has_features:
    raise ValueError(f'{type(model).__name__} has no method `features`.')

  def forward(params, images):
    images, out = preprocess(images), {}
    if has_features:
      per_layer = {'per_layer': str(layer).startswith('block_')}
      found = model.apply(
        {'params': params}, images, method='features', **per_layer
      )
    else:  # a model of your own needs no more than logits
      found = {'logits': model.apply({'params': params}, images)}
    if 'logits' in found:
      out['probabilities'] = _ACTIVATIONS[activation](found['logits'])
    if layer is not None:
      if layer not in found:
        raise ValueError(f'No layer {layer!r}; there are {", ".join(found)}.')
      out['features'] = found[layer].astype(jnp.float32)
    return out

  return forward


def in_batches(
  forward: Callable[..., Any],
  params: Params,
  loaded: Iterable[tuple[str, Any]],
  shape: Shape,
  on_error: str,
) -> Iterator[dict[str, Any]]:
  """Yield the results of `forward` for each image, in order.

  Args:
    forward: (params, uint8 [B, H, W, C]) -> {name: [B, ...]}.
    params: of it.
    loaded: iterator of `image_files.load`.
    shape: (B, H, W, C); B is rounded up to a multiple of the device count.
    on_error: as of `predict`.
  """
  mesh = sharding.make_mesh()
  ways = jax.device_count()
  size = -(-shape[0] // ways) * ways
  params = jax.device_put(params, sharding.replicated(mesh))
  forward = jax.jit(forward)
  waiting = None
  while group := list(itertools.islice(loaded, size)):
    images = np.zeros((size, *shape[1:]), np.uint8)
    for i, (path, image) in enumerate(group):
      if isinstance(image, ValueError):
        if on_error == 'raise':
          hint = "on_error='skip' continues without such images."
          raise ValueError(f'{image} ({hint})') from image
      elif image.shape != shape[1:]:
        raise ValueError(
          f'{path} has the shape {image.shape} after the transforms of the '
          f'weights; the model takes {shape[1:]}.'
        )
      else:
        images[i] = image
    out = forward(params, sharding.put_batch(images, mesh))
    if waiting:  # the device computes this batch while the last is yielded
      yield from _results(*waiting)
    waiting = group, out
  if waiting:
    yield from _results(*waiting)


def _results(group, out):
  out = {name: np.asarray(array) for name, array in out.items()}
  for i, (path, image) in enumerate(group):
    if isinstance(image, ValueError):
      yield {'path': path, 'error': str(image)}
    else:
      yield {'path': path} | {name: array[i] for name, array in out.items()}


def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_intermixed_args(argv)
  with terminal.one_message():
    sys.exit(_run(args))


def parser() -> argparse.ArgumentParser:
  parser = arguments.parser(__doc__, 'predict --weights=WEIGHTS IMAGES ...')
  arguments.add_images(parser, batch_size=32)
  parser.add_argument(
    '--activation', choices=_ACTIVATIONS, help='(that of the weights)'
  )
  group = parser.add_argument_group('output')
  arguments.add_counts(group, top_k=(5, 'classes of each image'))
  add = group.add_argument
  add(
    '--format',
    choices=outputs.FORMATS,
    help='of the predictions (on a terminal table, in a pipe csv, in a file '
    'that of its ending)',
  )
  add('--output', metavar='FILE', help='for the predictions, instead of stdout')
  add('--class_names', metavar='FILE', help='one name per line, or a JSON list')
  add(
    '--features',
    metavar='FILE.npz',
    help='write features instead of predictions; with --format or --output, '
    'write both',
  )
  add(
    '--layer',
    default='pre_logits',
    help='for --features: pre_logits (input of the head; default), pooled, '
    'tokens, block_0, block_1, ...',
  )
  return parser


def _run(args):
  """Return the exit status."""
  for path in (args.output, args.features):
    outputs.check_folder(path)
  paths = image_files.find(args.images)
  weights = arguments.read_to_predict(args)
  names = weights.class_names
  if args.class_names:
    names = arguments.names(args.class_names, weights)
  results = predict(
    weights,
    paths,
    layer=args.layer if args.features else None,
    activation=args.activation,
    batch_size=args.batch_size,
    num_workers=args.num_workers,
    on_error=args.on_error,
    max_image_bytes=args.max_image_bytes,
  )
  wanted = not args.features or args.format or args.output
  shown = wanted and not args.output and sys.stdout.isatty()
  results = terminal.track(results, len(paths), unit='images', shown=shown)
  skipped = []
  results = outputs.without_errors(results, skipped)
  if args.features:
    results = outputs.save_features(results, args.features)
  if wanted:
    format = args.format or outputs.default_format(args.output)
    write = outputs.FORMATS[format]
    if format == 'table':
      write = functools.partial(write, paths=paths)
    with outputs.opened(args.output) as file:
      write(file, results, names, args.top_k)
  else:
    collections.deque(results, maxlen=0)
  return outputs.exit_status(skipped, len(paths))


if __name__ == '__main__':
  main()
