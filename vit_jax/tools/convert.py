r"""Convert weights of any known format, workdirs included, to another format.

  python -m vit_jax.tools.convert FROM TO

FROM is a workdir, a checkpoint in it, a file, a folder, or a URL (see
vit_jax/weights/formats.py). TO determines the format; where two formats have
the same ending, add --format:

  NAME.npz         npz (the papers' authors), or --format=big_vision,
                   or --format=vit_jax (any model, also your own)
  NAME.stablehlo   a function that runs without this code (weights/export.py)
  FOLDER           timm (model.safetensors, config.json), or --format=hf

Preprocessing and class names are written as well: next to an npz in NAME.json,
next to a function in NAME.stablehlo.json. Existing files are replaced only with
--force. The exit status is 0; 1 after an error; 2 for wrong arguments.
"""

import argparse
import json
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import rich.filesize

from vit_jax import config
from vit_jax.models.resample import METHODS
from vit_jax.runs import terminal
from vit_jax.runs.files import PathLike, is_local
from vit_jax.tools import arguments
from vit_jax.weights import export, formats
from vit_jax.weights.bundle import Weights

FORMATS = (*formats.FORMATS, 'stablehlo')


def save(
  weights: Weights,
  target: PathLike,
  format: str,
  *,
  force: bool = False,
  **options: Any,
) -> list[Any]:
  """Write weights; each file appears under its name when all are complete.

  Args:
    weights: Weights.
    target: path of the file or folder.
    format: one of FORMATS.
    force: whether to replace existing files; others in a folder stay.
    **options: for 'stablehlo', see `export.stablehlo`.

  Returns:
    list of the files written.

  Raises:
    ValueError: a file exists already; the format cannot hold the model.
  """
  target = pathlib.Path(target)
  target.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(
    dir=target.parent, prefix=f'.{target.name}.'
  ) as staging:
    staged = pathlib.Path(staging) / target.name
    if format == 'stablehlo':
      content, description = export.stablehlo(weights, **options)
      staged.write_bytes(content)
      text = json.dumps(description, indent=2)
      staged.with_name(f'{staged.name}.json').write_text(text + '\n')
    else:
      formats.write(weights, staged, format)
    files = [p for p in pathlib.Path(staging).rglob('*') if p.is_file()]
    files.sort(key=lambda p: (p.suffix == '.json', p))
    moves = [(f, target.parent / f.relative_to(staging)) for f in files]
    if not force:
      _check_free([to for _, to in moves])
    for file, to in moves:
      to.parent.mkdir(exist_ok=True)
      file.replace(to)
  return [to for _, to in moves]


def format_of(target: str, format: str | None = None) -> tuple[Any, str]:
  """Return (path to write to, format) for the user's TO and --format.

  Raises:
    ValueError: the ending does not determine a format, or contradicts `format`.
  """
  path = pathlib.Path(target).expanduser()
  if not is_local(target):
    raise ValueError(f'{target}: write to a local path, and copy it there.')
  if path.name == 'model.safetensors':  # the file name in timm and hf
    path = path.parent
  is_folder = path.is_dir() or str(target).endswith('/')
  ending = '' if is_folder else path.suffix
  by_ending = {
    '.npz': ('npz', *formats.NPZ_FORMATS),
    '.stablehlo': ('stablehlo',),
  }
  folders = ('timm', 'hf')
  fitting = by_ending.get(ending, folders)
  if format is None and (ending in by_ending or not ending):
    format = fitting[0]
  if format not in fitting:
    raise ValueError(
      f'{target} does not fit a format{f" {format!r}" if format else ""}. Use '
      'NAME.npz (vit_jax, npz, big_vision), NAME.stablehlo, or a folder (timm, '
      'hf), and --format if several remain.'
    )
  return path, format


def _check_free(paths):
  if there := [str(path) for path in paths if path.exists()]:
    raise ValueError(f'{", ".join(there)} exists already; --force replaces it.')


def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_args(argv)
  with terminal.one_message():
    _run(args)


def parser() -> argparse.ArgumentParser:
  parser = arguments.parser(__doc__, 'convert FROM TO [options]')
  add = parser.add_argument
  add('source', metavar='FROM', help='workdir, file, folder or URL')
  add('target', metavar='TO', help='file or folder')
  add('--format', choices=FORMATS, help='(determined by TO)')
  add('--force', action='store_true', help='replace existing files')
  add('--posemb_resize', choices=METHODS, help='for --image_size (paper)')
  add(
    '--patch_size',
    type=arguments.size,
    metavar='N|HxW',
    help='if not that of the weights; the patch kernel is resized',
  )
  add(
    '--patch_resize',
    choices=METHODS,
    help='for --patch_size (bicubic_antialias)',
  )
  add(
    '--num_classes',
    type=int,
    metavar='N',
    help='0 leaves the head out; any other number: a new head of zeros',
  )
  add(
    '--input',
    choices=export.INPUTS,
    default='uint8',
    help='stablehlo: pixels 0..255 (default), or preprocessed images',
  )
  add(
    '--platforms',
    type=arguments.several(export.PLATFORMS),
    default=export.PLATFORMS,
    metavar='A,B,...',
    help=f'stablehlo: where it runs ({",".join(export.PLATFORMS)})',
  )
  arguments.add_counts(
    parser, batch_size=(None, 'stablehlo: fixed number of images (any)')
  )
  return parser


def _run(args):
  path, format = format_of(args.target, args.format)
  if not args.force:  # before the long work
    _check_free([path / 'model.safetensors' if path.is_dir() else path])
  weights = arguments.read(args.source, args)
  say = terminal.console().print
  _show(say, 'read', weights.origin)
  _show(say, 'model', describe(weights))
  changes = ('image_size', 'patch_size', 'num_classes')
  changes += ('posemb_resize', 'patch_resize')
  options = {name: getattr(args, name) for name in changes}
  weights, report = arguments.fit(weights, **options)
  if report:
    _show(say, 'fitted', str(report))
  options = {}
  if format == 'stablehlo':
    options = {'images': args.input, 'batch_size': args.batch_size}
    options['platforms'] = args.platforms
  files = save(weights, path, format, force=args.force, **options)
  for note in weights.notes:
    _show(say, 'note', note.strip())
  for file in files:
    size = rich.filesize.decimal(file.stat().st_size)
    _show(say, 'wrote', f'{size:>8}  {file}')


def describe(weights: Weights) -> str:
  """Return one line: the model, number of parameters, images and classes."""
  settings = config.describe(weights.model)
  classes = settings.pop('num_classes', None)
  count = sum(np.size(x) for x in weights.params.values())
  shape = 'x'.join(map(str, weights.image_shape))
  head = f'{classes} classes' if classes else 'no head'
  names = ' with names' if weights.class_names else ''
  model = f'{_text(settings)}: {count:,} parameters'
  return f'{model}, images {shape}, {head}{names}'


def _text(value):
  """Return {'target': 'a.B', 'c': 1} as B(c=1)."""
  if not isinstance(value, dict) or 'target' not in value:
    return str(value)
  fields = (f'{k}={_text(v)}' for k, v in value.items() if k != 'target')
  return f'{value["target"].rsplit(".", 1)[-1]}({", ".join(fields)})'


def _show(say, what, text):
  say(f'{what:7}', text, highlight=False, markup=False, soft_wrap=True)


if __name__ == '__main__':
  main()
