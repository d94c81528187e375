r"""Convert weights of any known format, workdirs included, to another format.

  python -m vit_jax.tools.convert FROM TO

FROM is a workdir, a checkpoint in it, a file, a folder, or a URL (see
vit_jax/weights/formats.py). TO determines the format; where two formats have
the same ending, add --format:

  NAME.npz         npz (the papers' authors), or --format=vit_jax (any model,
                   also your own)
  NAME.stablehlo   a function that runs without this code (weights/export.py)
  NAME.onnx        a graph for onnxruntime and others, of models that timm has
                   (weights/to_onnx.py)
  FOLDER           timm (model.safetensors, config.json), or --format=hf

NAME.json next to an npz, and NAME.stablehlo.json next to a function, have the
preprocessing and the class names. Existing files are replaced only with
--force. The exit status is 0; 1 after an error; 2 for wrong arguments.
"""

import argparse
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax import pretrained
from vit_jax.io import terminal
from vit_jax.io.files import write_json
from vit_jax.models.flexi import FlexiPatches
from vit_jax.tools import arguments, parsers
from vit_jax.types import PathLike, UserError
from vit_jax.weights import export, formats, to_onnx
from vit_jax.weights.bundle import Weights

FORMATS = ('npz', 'vit_jax', 'stablehlo', 'onnx', 'timm', 'hf')
_ANY_MODEL = ('vit_jax', 'stablehlo')
_OF_ENDING = {
  '.npz': 'npz',
  '.stablehlo': 'stablehlo',
  '.onnx': 'onnx',
  '': 'timm',
}


def save(
  weights: Weights,
  target: PathLike,
  format: str,
  *,
  force: bool = False,
  **options: Any,
) -> list[pathlib.Path]:
  """Write weights as a file or folder, and return the files written.

  Each file appears when all are complete. Existing files are replaced only with
  `force`; others in a folder stay. Options are those of `export.stablehlo`.
  """
  embedding = getattr(weights.model, 'embedding', None)
  if isinstance(embedding, FlexiPatches) and format not in _ANY_MODEL:
    size = embedding.patch_size
    weights, report = pretrained.fit(weights, patch_size=size)
    terminal.say(f'{format} has patches of one size: {size}.\n{report}')
  target = pathlib.Path(target)
  target.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=target.parent) as staging:
    staged = pathlib.Path(staging) / target.name
    if format == 'stablehlo':
      content, description = export.stablehlo(weights, **options)
      staged.write_bytes(content)
      write_json(staged.with_name(f'{staged.name}.json'), description)
    elif format == 'onnx':
      error = to_onnx.write(weights, staged)
      terminal.say(f'onnxruntime differs by {error:.0e} of the spread.')
    else:
      formats.write(weights, staged, format)
    files = sorted(p for p in pathlib.Path(staging).rglob('*') if p.is_file())
    moves = {file: target.parent / file.relative_to(staging) for file in files}
    there = [str(to) for to in moves.values() if to.exists()]
    if there and not force:
      raise UserError(f'{", ".join(there)} exists already; use --force.')
    for file, to in moves.items():
      to.parent.mkdir(exist_ok=True)
      file.replace(to)
  return list(moves.values())


def format_of(target: str, format: str | None = None) -> str:
  """Return the format for the user's TO and --format."""
  format = format or _OF_ENDING.get(pathlib.Path(target).suffix)
  if '://' in target or format is None:
    raise UserError(
      f'{target} does not fit a format. Use NAME.npz (npz, vit_jax), '
      'NAME.stablehlo, NAME.onnx, or a folder (timm, hf), local.'
    )
  return format


def parser() -> argparse.ArgumentParser:
  made = parsers.parser(__doc__, 'tools.convert FROM TO [options]')
  arguments.add_weights(made, 'weights')
  add = made.add_argument
  add('target', metavar='TO', help='file or folder')
  add('--format', choices=FORMATS, help='(determined by TO)')
  add('--force', action='store_true', help='replace existing files')
  add(
    '--patch_size',
    type=arguments.size,
    metavar='N|HxW',
    help='default: as the weights; the patch kernel is resized',
  )
  add(
    '--num_classes',
    type=int,
    metavar='N',
    help='0 leaves the head out; any other number: a new head of zeros',
  )
  group = made.add_argument_group('stablehlo')
  group.add_argument(
    '--platform',
    action='append',
    choices=export.PLATFORMS,
    help='where it runs; may be repeated (on all)',
  )
  parsers.add_counts(group, batch_size=(None, 'fixed number of images (any)'))
  return made


@terminal.one_message()
def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_args(argv)
  format = format_of(args.target, args.format)
  weights = arguments.read(
    args, patch_size=args.patch_size, num_classes=args.num_classes
  )
  count = sum(np.size(x) for x in weights.params.values())
  shape = 'x'.join(map(str, weights.image_shape))
  print(
    f'{weights.origin}: {type(weights.model).__name__}, {count:,} parameters, '
    f'images {shape}, {weights.model.num_classes or "no"} '
    + type(weights.targets).__name__.lower()
  )
  options = {}
  if format == 'stablehlo':
    platforms = args.platform or export.PLATFORMS
    options = {'batch_size': args.batch_size, 'platforms': platforms}
  target = pathlib.Path(args.target).expanduser()
  files = save(weights, target, format, force=args.force, **options)
  print(*weights.notes, *(f'wrote {file}' for file in files), sep='\n')


if __name__ == '__main__':
  main()
