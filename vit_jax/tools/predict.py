r"""Predict classes, labels or numbers with weights of any known format.

  python -m vit_jax.tools.predict --weights=WEIGHTS IMAGE|FOLDER|GLOB ...
  python -m vit_jax.tools.predict --weights=WEIGHTS --csv=TABLE [FOLDER]
  python -m vit_jax.tools.predict --weights=WEIGHTS --features=F.npz FOLDER

WEIGHTS is a workdir, a file or a folder (see vit_jax/weights/formats.py).
Folders of images are searched recursively. One name of docs/data.md, such as
hf:beans:test or 'test-*.parquet', also stands for images. Images are
preprocessed as stored with the weights.

--features writes the arrays 'paths' [N] and 'features' [N, ...] to F.npz, or a
row per image, 'path' and 'features', to F.parquet. Until all are computed, they
are in F.npz.parts: after a kill, the same command resumes. Compiled programs
are kept in ~/.cache/vit_jax or $JAX_COMPILATION_CACHE_DIR.

Results go to stdout, everything else to stderr. A terminal shows a table; pipes
and files get CSV, with the same columns: path, rank, class_id, class_name and
probability; or path and each label or number. The column `labels` names those
from --threshold on: cat|dog. The exit status is 0; 1 after an error, or if
images could not be read (they are listed at the end); 2 for wrong arguments.
"""

import argparse
import itertools
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from vit_jax.io import environment

if __name__ == '__main__':
  # Two CPU devices share all cores: no core waits at the end of each product
  # in one half of a batch, as there are products of the other half.
  environment.start(JAX_NUM_CPU_DEVICES='2')

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import pretrained, tree
from vit_jax.data import images as image_lib
from vit_jax.data import subsets
from vit_jax.data.sources import inputs
from vit_jax.data.subsets import Source
from vit_jax.data.targets import top as top
from vit_jax.io import terminal
from vit_jax.io.files import csv_line
from vit_jax.models.vit import VisionTransformer, grid_of
from vit_jax.parallel import compilation_cache, sharding
from vit_jax.tools import arguments, features, parsers
from vit_jax.types import Params, UserError
from vit_jax.weights import formats
from vit_jax.weights.bundle import Weights

_BATCH = 32  # images at once, and in a saved part


def predict(
  weights: Weights,
  images: Source | Sequence[str],
  *,
  layer: str | None = None,
  **options: Any,
) -> Iterator[dict[str, Any]]:
  """Yield the model's output for each image of a source or paths, in order.

  These are dicts with 'path'; if the model has a head, 'probabilities' of the
  classes or labels, or 'numbers', float32 [K]; 'features' float32 [...] if a
  layer is given, a name in the model's `features`: 'pre_logits', 'pooled',
  'tokens', 'block_0', 'map_0', ... . An image that cannot be read has 'path'
  and 'error'. `options` are more arguments of `in_batches`.
  """
  model, params = pretrained.build(weights)
  compute = forward_fn(weights, model, layer)

  def forward(params, images, **grid):
    out = compute(params, images, **grid)
    if layer is None and (not out or out[weights.targets.outputs].ndim != 2):
      what = 'logits for each patch, not for the image' if out else 'no head'
      raise UserError(
        f'The weights have {what}. Use --features=FILE.npz (in Python, layer=) '
        'for their features.'
      )
    return out

  return in_batches(forward, params, weights, images, **options)


def forward_fn(
  weights: Weights, model: Any, layer: str | None = None
) -> Callable[..., dict[str, Any]]:
  """Return the function (params, batch) -> {name: [B, ...]}.

  The batch is uint8 [B, H, W, C], and 'grid' of KeepAspect.
  """
  options: dict[str, Any] = {'per_layer': str(layer).startswith('block_')}
  found = re.fullmatch(r'map_(-1|\d+)', layer or '')
  if isinstance(model, VisionTransformer):
    options['tokens'] = layer not in (None, 'pooled', 'pre_logits')
    if found:
      options['maps'] = tuple({int(found[1])} & {*range(-1, model.depth)})

  def forward(params, images, **grid):
    images, variables = weights.preprocess(images), {'params': params}
    out = {}
    if hasattr(model, 'features'):
      given = options | grid_of(model, grid)
      found = model.apply(variables, images, method='features', **given)
    else:  # a model of your own needs no more than logits
      found = {'logits': model.apply(variables, images)}
    if 'logits' in found:
      convert = getattr(jax.nn, weights.activation)
      out[weights.targets.outputs] = convert(found['logits'])
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
  images: Source | Sequence[str],
  *,
  batch_size: int | None = None,
  max_image_bytes: int = image_lib.MAX_IMAGE_BYTES,
) -> Iterator[dict[str, Any]]:
  """Return the results of `forward(params, batch)` for each image, in order.

  The first images are decoded while this traces `forward`. All devices of this
  host compute a batch while the next one is decoded. By default it has 32
  images, and 8 on CPUs, whose caches hold more of their activations.
  """
  source: Any = images
  if batch_size is None:
    batch_size = 8 if jax.default_backend() == 'cpu' else _BATCH
  if isinstance(images, Sequence):
    source = inputs.Paths(images, weights.decode)
  mesh, ways = sharding.make_mesh(), jax.device_count()
  size = -(-min(batch_size, len(source) or 1) // ways) * ways
  loaded = inputs.load(
    source, weights.transforms, max_image_bytes, ahead=2 * size
  )
  # The first value starts the threads.
  loaded = itertools.chain([*itertools.islice(loaded, 1)], loaded)
  like = {'image': np.zeros(weights.image_shape, weights.decode.dtype)}
  if weights.keeps_aspect:
    like = weights.transforms[-1](like['image'], np.random.default_rng(0))
  params = jax.device_put(params, sharding.replicated(mesh))
  program = jax.jit(forward)

  def compute(group, how=program):
    batch = sharding.put_batch(_stacked(group, like, size), mesh)
    return how(params, batch.pop('image'), **batch)

  compute([], program.eval_shape)
  return _computed(loaded, size, compute)


def _computed(loaded, size, compute):
  """Yield the results of examples, of which `compute` takes a list of `size`.

  The device computes a list while the results of the last one are yielded.
  """
  waiting: tuple[Any, Any] = (), {}
  while group := list(itertools.islice(loaded, size)):
    out = compute(group)
    yield from _results(*waiting)
    waiting = group, out
  yield from _results(*waiting)


def _stacked(group, like, size):
  """Return {name: [size, ...]} of up to `size` examples; others are `like`."""
  batch = {k: np.stack([x] * size) for k, x in like.items()}
  for i, (path, example) in enumerate(group):
    if isinstance(example, ValueError):
      continue
    if example['image'].shape != like['image'].shape:
      raise UserError(
        f'{path} has the shape {example["image"].shape} after the transforms '
        f'of the weights; the model takes {like["image"].shape}.'
      )
    for name, rows in batch.items():
      rows[i] = example[name]
  return batch


def _results(group, out):
  out = {name: np.asarray(array) for name, array in out.items()}
  for i, (path, example) in enumerate(group):
    if isinstance(example, ValueError):
      yield {'path': path, 'error': str(example)}
    else:
      yield {'path': path} | {name: array[i] for name, array in out.items()}


def names_of(weights: Weights) -> list[str]:
  """Return the names of the outputs, 'class 0' and so on if there are none."""
  count = weights.model.num_classes or 0
  return weights.class_names or [f'class {i}' for i in range(count)]


def rows(
  weights: Weights, results: Iterable[Mapping[str, Any]], *options: Any
) -> Iterator[dict[str, Any]]:
  """Yield {column: cell} of each image, by `Targets.rows` with the options."""
  kind, names = weights.targets, names_of(weights)
  for result in results:
    for row in kind.rows(result[kind.outputs], names, *options):
      shown = {k: f'{x:.6g}' for k, x in row.items() if isinstance(x, float)}
      yield {'path': result['path'], **row, **shown}


def show(rows: Iterable[Mapping[str, Any]]) -> None:
  """Print rows: on a terminal aligned, else as CSV."""
  if sys.stdout.isatty():
    rows = list(rows)
    cells = [[*map(str, row.values())] for row in rows]
    terminal.table(None, [*rows[0]] if rows else [], cells, box=None)
  else:
    for i, row in enumerate(rows):
      lines = [row.values()] if i else [row, row.values()]
      text = ''.join(map(csv_line, lines))
      sys.stdout.write(text.encode(errors='backslashreplace').decode())


def write_features(
  path: pathlib.Path,
  weights: Weights,
  source: Source,
  *,
  layer: str,
  batch_size: int | None = None,
  max_image_bytes: int = image_lib.MAX_IMAGE_BYTES,
) -> list[str]:
  """Write features of a source to a file, see `Parts`; return the errors."""
  use, total = formats.describe_use(weights), len(source)
  asked = {
    'weights': [tree.fingerprint(weights.params), use],
    'images': subsets.fingerprint(source),
    'layer': layer,
    'max_image_bytes': max_image_bytes,
  }
  parts = features.Parts(path, asked)
  rest = subsets.View(source, range(parts.done, total))
  options = {'batch_size': batch_size, 'max_image_bytes': max_image_bytes}
  results = predict(weights, rest, layer=layer, **options)
  results = terminal.track(results, total, unit='images', done=parts.done)
  parts.write(results, batch_size or _BATCH)
  return parts.finish()


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
  arguments.add_images(made)
  made.add_argument('--csv', metavar='FILE', help='table of images')
  made.add_argument('--image_key', help='column or field with the image')
  group = made.add_argument_group('output')
  parsers.add_counts(group, top_k=(5, 'classes of each image'))
  help = 'least probability of the labels that are named (that of each label '
  help += 'with the best F1 in training, if the weights have it; else 0.5)'
  group.add_argument('--threshold', type=float, help=help)
  help = '.npz or .parquet: write features instead of predictions'
  group.add_argument(
    '--features', metavar='FILE', type=_features_file, help=help
  )
  help = 'for --features: pre_logits (input of the head; default), pooled, '
  help += (
    'tokens, block_0, block_1, ...; or map_0, ..., the grid of patches of '
  )
  help += 'a layer, and map_-1, that of tokens'
  group.add_argument('--layer', default='pre_logits', help=help)
  return made


def _features_file(text):
  path = pathlib.Path(text).expanduser()
  if path.suffix not in ('.npz', '.parquet') or path.is_dir():
    raise argparse.ArgumentTypeError(f'{text!r} is no .npz or .parquet file')
  return path


@terminal.one_message()
def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_intermixed_args(argv)
  compilation_cache.enable()
  weights = arguments.read(args)
  named = {'csv': args.csv, 'image_key': args.image_key}
  source = inputs.find(args.images, decode=weights.decode, **named)
  total, limit = len(source), args.max_image_bytes
  options = {'batch_size': args.batch_size, 'max_image_bytes': limit}
  skipped: list[str] = []
  if args.features:
    options |= {'layer': args.layer}
    skipped = write_features(args.features, weights, source, **options)
  else:
    results = readable(predict(weights, source, **options), total, skipped)
    own = args.threshold is None
    threshold = weights.thresholds if own else args.threshold
    show(rows(weights, results, args.top_k, threshold))
  sys.exit(exit_status(skipped, total))


if __name__ == '__main__':
  main()
