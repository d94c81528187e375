r"""Classify images with weights of any known format.

  python -m vit_jax.tools.predict --weights=WEIGHTS IMAGE|FOLDER|GLOB ...
  python -m vit_jax.tools.predict --weights=WEIGHTS --features=F.npz FOLDER

WEIGHTS is a workdir, a file or a folder (see vit_jax/weights/formats.py).
Folders of images are searched recursively. Images are preprocessed as stored
with the weights. --features writes the arrays 'paths' [N] and 'features'
[N, ...] to F.npz, or a row per image, 'path' and 'features', to F.parquet.

Results go to stdout, everything else to stderr. A terminal shows a table; pipes
and files get CSV (path, rank, class_id, class_name, probability). The exit
status is 0; 1 after an error, or if images could not be read (they are listed
at the end); 2 for wrong arguments.
"""

import argparse
import itertools
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import pretrained
from vit_jax.data.sources import image_files
from vit_jax.io import terminal
from vit_jax.io.files import csv_line, replacing
from vit_jax.models.vit import VisionTransformer
from vit_jax.parallel import sharding
from vit_jax.tools import arguments, parsers
from vit_jax.types import Params, PathLike, UserError
from vit_jax.weights.bundle import Weights

_ACTIVATIONS = {'softmax': jax.nn.softmax, 'sigmoid': jax.nn.sigmoid}
# (path, rank from 1, class_id, name or None, probability)
Row = tuple[str, int, int, str | None, float]


def predict(
  weights: Weights,
  paths: Sequence[str],
  *,
  layer: str | None = None,
  batch_size: int = 32,
) -> Iterator[dict[str, Any]]:
  """Yield the model's output for each image (see `image_files.find`), in order.

  These are dicts with 'path'; 'probabilities' float32 [K] if the model has a
  head; 'features' float32 [...] if a layer is given, a name in the model's
  `features`: 'pre_logits', 'pooled', 'tokens', 'block_0', 'map_0', ... . An
  image that cannot be read has 'path' and 'error'.
  """
  model, params = pretrained.build(weights)
  forward = forward_fn(weights, model, layer)
  images = jax.ShapeDtypeStruct((1, *weights.image_shape), jnp.uint8)
  out = jax.eval_shape(forward, params, images)
  if layer is None and (not out or out['probabilities'].ndim != 2):
    what = 'logits for each patch, not for the image' if out else 'no head'
    raise UserError(
      f'The weights have {what}. Use --features=FILE.npz (in Python, layer=) '
      'for their features.'
    )
  return in_batches(forward, params, weights, paths, batch_size)


def forward_fn(
  weights: Weights, model: Any, layer: str | None = None
) -> Callable[..., dict[str, Any]]:
  """Return the function (params, uint8 [B, H, W, C]) -> {name: [B, ...]}."""
  options: dict[str, Any] = {'per_layer': str(layer).startswith('block_')}
  found = re.fullmatch(r'map_(-1|\d+)', layer or '')
  if found and isinstance(model, VisionTransformer):
    options['maps'] = tuple({int(found[1])} & {*range(-1, model.depth)})

  def forward(params, images):
    images, variables = weights.preprocess(images), {'params': params}
    out = {}
    if hasattr(model, 'features'):
      found = model.apply(variables, images, method='features', **options)
    else:  # a model of your own needs no more than logits
      found = {'logits': model.apply(variables, images)}
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
  weights: Weights,
  paths: Sequence[str],
  batch_size: int = 1,
) -> Iterator[dict[str, Any]]:
  """Yield the results of `forward(params, images)` for each image, in order.

  All devices of this host compute a batch while the next one is decoded.
  """
  mesh, ways = sharding.make_mesh(), jax.device_count()
  size = -(-min(batch_size, len(paths)) // ways) * ways
  params = jax.device_put(params, sharding.replicated(mesh))
  forward = jax.jit(forward)
  shape = weights.image_shape
  loaded = image_files.load(
    paths, weights.transforms, channels=shape[2], ahead=2 * size
  )
  waiting: tuple[Any, Any] = (), {}
  while group := list(itertools.islice(loaded, size)):
    images = np.zeros((size, *shape), np.uint8)
    for i, (path, image) in enumerate(group):
      if isinstance(image, ValueError):
        continue
      if image.shape != shape:
        raise UserError(
          f'{path} has the shape {image.shape} after the transforms of the '
          f'weights; the model takes {shape}.'
        )
      images[i] = image
    out = forward(params, sharding.put_batch(images, mesh))
    # The device computes this batch while the last is yielded.
    yield from _results(*waiting)
    waiting = group, out
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
) -> Iterator[Row]:
  """Yield a Row for each of the k most likely classes of each image."""
  for result in results:
    p = result['probabilities']
    for rank, i in enumerate(top(p, k), 1):
      yield result['path'], rank, i, names[i] if names else None, float(p[i])


def write_table(rows: Iterable[Row]) -> None:
  """Print aligned columns that fit the terminal."""
  columns = 'image', 'rank', 'class', 'probability'
  shown = [
    (path if rank == 1 else '', str(rank), name or f'class {i}', f'{p:.2%}')
    for path, rank, i, name, p in rows
  ]
  terminal.table(None, columns, shown, box=None)


def write_csv(rows: Iterable[Row]) -> None:
  """Print a header and the rows."""
  header = ['path', 'rank', 'class_id', 'class_name', 'probability']
  sys.stdout.write(csv_line(header))
  for *row, p in rows:
    sys.stdout.write(csv_line([*row, f'{p:.6g}']))


def write_arrays(path: PathLike, arrays: Mapping[str, Any]) -> None:
  """Write a dict of arrays as a compressed npz."""
  with replacing(path) as partial, partial.open('wb') as file:
    np.savez_compressed(file, **arrays)


def write_parquet(path: PathLike, arrays: Mapping[str, np.ndarray]) -> None:
  """Write the columns 'path', escaped UTF-8, and 'features', nested lists."""
  import pyarrow  # of the extra 'huggingface'
  import pyarrow.parquet

  names = pyarrow.array(map(terminal.printable, arrays['paths']), 'string')
  column = pyarrow.array(arrays['features'].ravel())
  for dim in arrays['features'].shape[:0:-1]:
    column = pyarrow.FixedSizeListArray.from_arrays(column, dim)
  table = pyarrow.table({'path': names, 'features': column})
  with replacing(path) as partial:
    pyarrow.parquet.write_table(table, str(partial))


def readable(
  results: Iterable[Mapping[str, Any]], total: int, skipped: list[str]
) -> Iterator[Mapping[str, Any]]:
  """Yield the results without an error; append the errors to `skipped`."""
  for result in terminal.track(results, total, unit='images'):
    if 'error' in result:
      skipped.append(result['error'])
    else:
      yield result


def exit_status(skipped: Sequence[str], total: int) -> int:
  """Return 1 if images were skipped, and list their errors on stderr."""
  if skipped:
    lines = [f'{len(skipped)} of {total} skipped:', *skipped]
    print(terminal.printable('\n'.join(lines)), file=sys.stderr)
  return int(bool(skipped))


def parser() -> argparse.ArgumentParser:
  made = parsers.parser(__doc__, 'tools.predict --weights=WEIGHTS IMAGES ...')
  arguments.add_weights(made)
  arguments.add_images(made, batch_size=32)
  group = made.add_argument_group('output')
  arguments.add_counts(group, top_k=(5, 'classes of each image'))
  group.add_argument(
    '--features',
    metavar='FILE',
    type=_features_file,
    help='.npz or .parquet: write features instead of predictions',
  )
  group.add_argument(
    '--layer',
    default='pre_logits',
    help='for --features: pre_logits (input of the head; default), pooled, '
    'tokens, block_0, block_1, ...; or map_0, ..., the grid of patches of a '
    'layer, and map_-1, that of tokens',
  )
  return made


def _features_file(text):
  path = pathlib.Path(text).expanduser()
  if path.suffix not in ('.npz', '.parquet') or path.is_dir():
    raise argparse.ArgumentTypeError(f'{text!r} is no .npz or .parquet file')
  try:
    with tempfile.TemporaryFile(dir=path.parent) as file:
      file.write(bytes(4096))  # a full disk takes an empty file
  except OSError as e:
    raise argparse.ArgumentTypeError(f'{text!r}: {e.strerror}') from e
  return path


@terminal.one_message()
def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_intermixed_args(argv)
  paths = image_files.find(args.images)
  weights = arguments.read(args)
  layer = args.layer if args.features else None
  results = predict(weights, paths, layer=layer, batch_size=args.batch_size)
  skipped: list[str] = []
  results = readable(results, len(paths), skipped)
  if args.features:
    found = list(results)
    names = np.array([x['path'] for x in found], str)
    features = np.array([x['features'] for x in found])
    arrays = {'paths': names, 'features': features}
    write = write_arrays if args.features.suffix == '.npz' else write_parquet
    try:
      write(args.features, arrays)
    except Exception as e:  # keep what took long to compute
      spare = f'{tempfile.mkdtemp()}/features.npz'
      write_arrays(spare, arrays)
      raise UserError(f'--features: {e}. The features are in {spare}.') from e
  else:
    show = write_table if sys.stdout.isatty() else write_csv
    show(ranked(results, weights.class_names, args.top_k))
  sys.exit(exit_status(skipped, len(paths)))


if __name__ == '__main__':
  main()
