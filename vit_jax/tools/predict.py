r"""Classes of pictures, with probabilities, by weights of any known format.

  python -m vit_jax.tools.predict --weights=WEIGHTS IMAGE|FOLDER|GLOB ...
  python -m vit_jax.tools.predict --weights=WEIGHTS --features=F.npz FOLDER

WEIGHTS is a run's workdir, a file or a folder (see vit_jax/weights/formats.py).
Folders are searched at any depth. Pictures are prepared as is stored with the
weights. --features writes the arrays 'paths' [N] and 'features' [N, ...].

Results go to stdout, everything else to stderr. The exit status is 0; 1 where
something is wrong, or pictures were skipped (--on_error=skip; they are listed
at the end); 2 where the arguments are.
"""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import pretrained, sharding, terminal
from vit_jax.data import image_files
from vit_jax.tools import arguments, outputs
from vit_jax.weights.bundle import make

_ACTIVATIONS = {'softmax': jax.nn.softmax, 'sigmoid': jax.nn.sigmoid}


def predict(
  weights,
  paths,
  *,
  layer=None,
  activation=None,
  batch_size=32,
  num_workers=None,
  on_error='raise',
):
  """Yields what a model says to each picture, in order.

  All devices of this host work on a batch; meanwhile the next pictures are
  decoded. A batch that is not full is padded, so that one program does.

  Args:
    weights: Weights.
    paths: of the pictures, see `image_files.find`.
    layer: whose activations are wanted too, a name that the model's
      `features` has: 'pre_logits', 'pooled', 'tokens', 'block_0', ... .
    activation: 'softmax' or 'sigmoid'; by default what the weights say.
    batch_size: rounded up to a multiple of the number of devices.
    num_workers: threads that decode; by default one for each core, up to 16.
    on_error: of a picture that cannot be read: 'raise', or 'skip': it yields
      'path' and 'error' alone.

  Returns:
    iterator of dicts: 'path'; 'probabilities' float32 [K], where the model
    has a head; 'features' float32 [...], where a layer is given.

  Raises:
    ValueError: there is no such layer, nothing to predict, an argument makes
      no sense.
    ValueError: a picture cannot be read, with its path.
  """
  activation = activation or weights.activation
  for name, value, choices in (
    ('activation', activation, _ACTIVATIONS),
    ('on_error', on_error, ('raise', 'skip')),
  ):
    if value not in choices:
      raise ValueError(f'{name}={value!r}; it can be {" or ".join(choices)}.')
  loaded, shape = load(weights, paths, batch_size, num_workers)
  model, params = pretrained.build(weights)
  forward = _forward(model, make(weights.preprocess), layer, activation)
  _check(forward, params, shape, layer)
  return in_batches(forward, params, loaded, shape, on_error)


def load(weights, paths, batch_size, num_workers):
  """(pictures as the model takes them, the shape [B, H, W, C] of batches).

  Nothing is read before the first is asked for; arguments as of `predict`.

  Raises:
    ValueError: batch_size makes no sense, or the model takes no pictures.
  """
  if batch_size < 1:
    raise ValueError(f'batch_size={batch_size} must be at least 1.')
  channels = weights.image_shape[2]
  if channels not in (1, 3):
    raise ValueError(
      f'The model takes {channels} channels; pictures have 1 or '
      '3. Read the weights with another in_chans.'
    )
  size = max(1, min(batch_size, len(paths)))
  loaded = image_files.load(
    paths,
    [make(settings) for settings in weights.transforms],
    channels=channels,
    num_workers=num_workers,
    ahead=2 * size,
  )
  return loaded, (size, *weights.image_shape)


def _forward(model, preprocess, layer, activation):
  """(params, uint8 [B, H, W, C]) -> {name: [B, ...]}, all that there is."""

  def forward(params, images):
    found = model.apply(
      {'params': params},
      preprocess(images),
      method='features',
      per_layer=str(layer).startswith('block_'),
    )
    out = {}
    if 'logits' in found:
      out['probabilities'] = _ACTIVATIONS[activation](found['logits'])
    if layer is not None:
      if layer not in found:
        raise ValueError(f'No layer {layer!r}; there are {", ".join(found)}.')
      out['features'] = found[layer].astype(jnp.float32)
    return out

  return forward


def _check(forward, params, shape, layer):
  images = jax.ShapeDtypeStruct(shape, jnp.uint8)
  out = jax.eval_shape(forward, params, images)
  if not out:
    raise ValueError(
      'These weights have no head, so there is nothing to predict; their '
      'features can be had (--features=FILE.npz; in Python, layer=).'
    )
  if layer is None and out['probabilities'].ndim != 2:
    raise ValueError(
      'This model has logits for each patch, not for the picture; its '
      'features can be had (--features=FILE.npz; in Python, layer=).'
    )


def in_batches(forward, params, loaded, shape, on_error):
  """Yields forward's results picture by picture, in order.

  Args:
    forward: (params, uint8 [B, H, W, C]) -> {name: [B, ...]}.
    params: of it.
    loaded: iterator of `image_files.load`.
    shape: (B, H, W, C); B is rounded up to a multiple of the devices.
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
          hint = "on_error='skip' goes on without such pictures."
          raise ValueError(f'{image} ({hint})') from image
      elif image.shape != shape[1:]:
        raise ValueError(
          f'{path} came out of the transforms as {image.shape}, and the model '
          f'takes {shape[1:]}. The transforms are those of the weights.'
        )
      else:
        images[i] = image
    out = forward(params, sharding.put_batch(images, mesh))
    if waiting:  # the device is busy with this batch when the last is handed on
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


def main(argv=None):
  args = parser().parse_intermixed_args(argv)
  with terminal.one_message():
    sys.exit(_run(args))


def parser():
  parser = arguments.parser(__doc__, 'predict --weights=WEIGHTS PICTURES ...')
  add = parser.add_argument
  add('pictures', nargs='+', help='images, folders, globs; local or gs://...')
  add('--weights', required=True, help='workdir, file or folder')
  add('--activation', choices=_ACTIVATIONS, help='(as the weights say)')
  add('--batch_size', type=arguments.count, default=32, metavar='N')
  add(
    '--num_workers',
    type=arguments.count,
    metavar='N',
    help='threads that decode (one for each core, at most 16)',
  )
  add(
    '--on_error',
    choices=('raise', 'skip'),
    default='raise',
    help='of pictures that cannot be read',
  )
  _add_writing(parser)
  return parser


def _add_writing(parser):
  add = parser.add_argument_group('what is written').add_argument
  add('--top_k', type=arguments.count, default=5, metavar='N', help='(5)')
  add('--format', choices=outputs.FORMATS, help='of the predictions (table)')
  add('--output', metavar='FILE', help='for the predictions, not stdout')
  add('--class_names', metavar='FILE', help='a name a line, or a JSON list')
  add(
    '--features',
    metavar='FILE.npz',
    help='for features, in place of predictions; with --format or --output '
    'these are written too',
  )
  add(
    '--layer',
    default='pre_logits',
    help='of the features: pre_logits (what the head reads; default), pooled, '
    'tokens, block_0, block_1, ...',
  )


def _run(args):
  """Exit status."""
  for path in (args.output, args.features):
    outputs.check_folder(path)
  paths = image_files.find(args.pictures)
  weights = arguments.read(args.weights, args)
  weights, report = arguments.fit(weights, image_size=args.image_size)
  if report:
    print(report, file=sys.stderr)
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
  )
  wanted = not args.features or args.format or args.output
  shown = wanted and not args.output and sys.stdout.isatty()
  results = terminal.track(results, len(paths), unit='pictures', shown=shown)
  skipped = []
  results = _without(results, skipped)
  if args.features:
    results = outputs.save_features(results, args.features)
  if wanted:
    write = outputs.FORMATS[args.format or 'table']
    with outputs.opened(args.output) as file:
      write(file, results, names, args.top_k)
  else:
    for _ in results:
      pass
  if skipped:
    print(f'{len(skipped)} of {len(paths)} skipped:', file=sys.stderr)
    print('\n'.join(skipped), file=sys.stderr)
  return 1 if skipped else 0


def _without(results, skipped):
  """The results without errors, which are appended to `skipped`."""
  for result in results:
    if 'error' in result:
      skipped.append(result['error'])
    else:
      yield result


if __name__ == '__main__':
  main()
