r"""Classify images with weights of any known format.

  python -m vit_jax.tools.predict --weights=WEIGHTS IMAGE|FOLDER|GLOB ...
  python -m vit_jax.tools.predict --weights=WEIGHTS --features=F.npz FOLDER

WEIGHTS is a workdir, a file or a folder (see vit_jax/weights/formats.py).
Folders of images are searched recursively. Images are preprocessed as stored
with the weights. --features writes the arrays 'paths' [N] and 'features'
[N, ...].

Results go to stdout, everything else to stderr. A terminal shows a table; pipes
and files get CSV (path, rank, class_id, class_name, probability). The exit
status is 0; 1 after an error, or if images were skipped (--on_error=skip; they
are listed at the end); 2 for wrong arguments.
"""

import argparse
import csv
import io
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
import rich.text

from vit_jax import pretrained
from vit_jax.data import image_files
from vit_jax.parallel import sharding
from vit_jax.runs import terminal
from vit_jax.runs.files import PathLike, write_atomically
from vit_jax.tools import arguments, parsers
from vit_jax.types import Params, Shape, UserError
from vit_jax.weights.bundle import Weights

_ACTIVATIONS = {'softmax': jax.nn.softmax, 'sigmoid': jax.nn.sigmoid}
OnError = Literal['raise', 'skip']
# (class_id, name or None, probability) of the most likely classes, in order.
Ranking = list[tuple[int, str | None, float]]


def predict(
  weights: Weights,
  paths: Sequence[str],
  *,
  layer: str | None = None,
  batch_size: int = 32,
  on_error: OnError = 'raise',
) -> Iterator[dict[str, Any]]:
  """Yield the model's output for each image, in order.

  A batch is computed on all devices of this host while the next images are
  decoded. Batches that are not full are padded, so one program is compiled.

  Args:
    weights: Weights.
    paths: of the images, see `image_files.find`.
    layer: a name in the model's `features` whose activations are returned too:
      'pre_logits', 'pooled', 'tokens', 'block_0', ... .
    batch_size: rounded up to a multiple of the number of devices.
    on_error: for images that cannot be read: 'raise', or 'skip' to yield only
      'path' and 'error'.

  Returns:
    iterator of dicts: 'path'; 'probabilities' float32 [K] if the model has a
    head; 'features' float32 [...] if a layer is given.

  Raises:
    ValueError: there is no such layer, nothing to predict, or an image cannot
      be read.
  """
  loaded, shape = load(weights, paths, batch_size)
  model, params = pretrained.build(weights)
  forward = forward_fn(weights, model, layer)
  out = jax.eval_shape(forward, params, jax.ShapeDtypeStruct(shape, jnp.uint8))
  if layer is None and (not out or out['probabilities'].ndim != 2):
    what = 'logits for each patch, not for the image' if out else 'no head'
    raise UserError(
      f'The weights have {what}. Use --features=FILE.npz (in Python, layer=) '
      'for their features.'
    )
  return in_batches(forward, params, loaded, shape, on_error)


def load(
  weights: Weights, paths: Sequence[str], batch_size: int
) -> tuple[Iterator[tuple[str, Any]], Shape]:
  """Return (items of `image_files.load`, shape [B, H, W, C] of batches)."""
  size = max(1, min(batch_size, len(paths)))
  shape = weights.image_shape
  loaded = image_files.load(
    paths, weights.transforms, channels=shape[2], ahead=2 * size
  )
  return loaded, (size, *shape)


def images_of(loaded: Iterable[tuple[str, Any]]) -> Iterator[np.ndarray]:
  """Yield the images of `image_files.load`, or raise the error of one."""
  for _, image in loaded:
    if isinstance(image, ValueError):
      raise image
    yield image


def forward_fn(
  weights: Weights, model: Any, layer: str | None = None
) -> Callable[..., dict[str, Any]]:
  """Return the function (params, uint8 [B, H, W, C]) -> {name: [B, ...]}.

  Weights and model are those of `pretrained.build`; names as of `predict`.
  """
  has_features = hasattr(model, 'features')
  if layer is not None and not has_features:
    raise UserError(f'{type(model).__name__} has no method `features`.')

  def forward(params, images):
    images, out = weights.preprocess(images), {}
    if has_features:
      found = model.apply(
        {'params': params},
        images,
        method='features',
        per_layer=str(layer).startswith('block_'),
      )
    else:  # a model of your own needs no more than logits
      found = {'logits': model.apply({'params': params}, images)}
    if 'logits' in found:
      out['probabilities'] = _ACTIVATIONS[weights.activation](found['logits'])
    if layer is not None:
      if layer not in found:
        raise UserError(f'No layer {layer!r}; there are {", ".join(found)}.')
      out['features'] = found[layer].astype(jnp.float32)
    return out

  return forward


def in_batches(
  forward: Callable[..., Any],
  params: Params,
  loaded: Iterable[tuple[str, Any]],
  shape: Shape,
  on_error: OnError = 'raise',
) -> Iterator[dict[str, Any]]:
  """Yield the results of `forward(params, images)` for each image, in order.

  Args:
    forward: function such as that of `forward_fn`.
    params: of the model.
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
          raise UserError(
            f"{image} (on_error='skip' continues without such images.)"
          ) from image
      elif image.shape != shape[1:]:
        raise UserError(
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


def top(probabilities: np.ndarray, k: int) -> list[int]:
  """Return the indices of the k largest of [K], in descending order."""
  return np.argsort(-probabilities, kind='stable')[:k].tolist()


def ranked(
  results: Iterable[Mapping[str, Any]], names: Sequence[str] | None, k: int
) -> Iterator[tuple[str, Ranking]]:
  """Yield (path, Ranking of k classes) of the results of `predict`."""
  for result in results:
    p = result['probabilities']
    rows = [(i, names[i] if names else None, float(p[i])) for i in top(p, k)]
    yield result['path'], rows


def write_table(file: TextIO, ranking: Iterable[tuple[str, Ranking]]) -> None:
  """Write aligned columns that fit the terminal."""
  table = rich.table.Table('image', 'rank', 'class', 'probability', box=None)
  for column in (1, 3):
    table.columns[column].justify = 'right'
  for path, rows in ranking:
    for rank, (class_id, name, p) in enumerate(rows, 1):
      table.add_row(
        rich.text.Text(path if rank == 1 else ''),
        str(rank),
        rich.text.Text(name or f'class {class_id}'),
        f'{p:.2%}',
      )
  rich.console.Console(file=file).print(table)


def write_csv(file: TextIO, ranking: Iterable[tuple[str, Ranking]]) -> None:
  """Write a header, and one row per path and rank."""
  writer = csv.writer(file, lineterminator='\n')
  writer.writerow(['path', 'rank', 'class_id', 'class_name', 'probability'])
  for path, rows in ranking:
    for rank, (class_id, name, p) in enumerate(rows, 1):
      writer.writerow([path, rank, class_id, name, f'{p:.6g}'])


def write_arrays(path: PathLike, arrays: Mapping[str, Any]) -> None:
  """Write a dict of arrays as a compressed npz."""
  file = io.BytesIO()
  np.savez_compressed(file, **arrays)
  write_atomically(path, file.getvalue())


def without_errors(
  results: Iterable[Mapping[str, Any]], skipped: list[str]
) -> Iterator[Mapping[str, Any]]:
  """Yield the results without an error; append the errors to `skipped`."""
  for result in results:
    if 'error' in result:
      skipped.append(result['error'])
    else:
      yield result


def exit_status(skipped: Sequence[str], total: int) -> int:
  """Return 1 if images were skipped, and list their errors on stderr."""
  if skipped:
    print(
      f'{len(skipped)} of {total} skipped:', *skipped, sep='\n', file=sys.stderr
    )
  return 1 if skipped else 0


def parser() -> argparse.ArgumentParser:
  """Return the ArgumentParser."""
  made = parsers.parser(__doc__, 'tools.predict --weights=WEIGHTS IMAGES ...')
  arguments.add_weights(made)
  arguments.add_images(made, batch_size=32)
  group = made.add_argument_group('output')
  arguments.add_counts(group, top_k=(5, 'classes of each image'))
  add = group.add_argument
  add('--output', metavar='FILE', help='for CSV, instead of stdout')
  add('--class_names', metavar='FILE', help='one name per line, or a JSON list')
  add(
    '--features',
    metavar='FILE.npz',
    help='write features instead of predictions',
  )
  add(
    '--layer',
    default='pre_logits',
    help='for --features: pre_logits (input of the head; default), pooled, '
    'tokens, block_0, block_1, ...',
  )
  return made


def _run(args):
  paths = image_files.find(args.images)
  weights = arguments.read(args)
  results = predict(
    weights,
    paths,
    layer=args.layer if args.features else None,
    batch_size=args.batch_size,
    on_error=args.on_error,
  )
  skipped: list[str] = []
  results = terminal.track(results, len(paths), unit='images')
  results = without_errors(results, skipped)
  if args.features:
    found = [(result['path'], result['features']) for result in results]
    arrays = {
      'paths': np.array([path for path, _ in found], str),
      'features': np.array([features for _, features in found]),
    }
    write_arrays(pathlib.Path(args.features).expanduser(), arrays)
    return exit_status(skipped, len(paths))
  names = weights.class_names
  if args.class_names:
    names = arguments.class_names(args.class_names, weights)
  ranking = ranked(results, names, args.top_k)
  if args.output:
    text = io.StringIO()
    write_csv(text, ranking)
    path = pathlib.Path(args.output).expanduser()
    write_atomically(path, text.getvalue())
  else:
    write = write_table if sys.stdout.isatty() else write_csv
    write(sys.stdout, ranking)
  return exit_status(skipped, len(paths))


def main(argv: Sequence[str] | None = None) -> None:
  """Run the command, and end with its exit status."""
  args = parser().parse_intermixed_args(argv)
  with terminal.one_message():
    sys.exit(_run(args))


if __name__ == '__main__':
  main()
