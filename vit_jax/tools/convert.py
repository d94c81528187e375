r"""Weights of any known format, our own runs included, to another format.

  python -m vit_jax.tools.convert FROM TO

FROM is a run's workdir, a checkpoint in it, a file, a folder, or a URL (see
vit_jax/weights/formats.py). TO says the format, and --format says it where two
have the same ending:

  NAME.npz         npz (the papers' authors), or --format=big_vision
  NAME.stablehlo   a function that runs without this code (vit_jax/export.py)
  FOLDER           timm (model.safetensors, config.json), or --format=hf

Preprocessing and class names go along: beside an npz in NAME.json, beside a
function in NAME.stablehlo.json. Files that are there are replaced by --force
only. The exit status is 0; 1 where something is wrong; 2 where the arguments
are.
"""

import json
import pathlib
import tempfile

import numpy as np
import rich.filesize

from vit_jax import export, terminal
from vit_jax.models.resample import METHODS as RESIZE_METHODS
from vit_jax.tools import arguments
from vit_jax.weights import formats

FORMATS = (*formats.FORMATS, 'stablehlo')
_ENDINGS = {'npz': '.npz', 'big_vision': '.npz', 'stablehlo': '.stablehlo'}


def save(weights, target, format, *, images='uint8', force=False):
  """Writes weights; nothing is there under its name before all of it is.

  Args:
    weights: Weights.
    target: path of the file or folder, see the top of this file.
    format: one of FORMATS.
    images: of 'stablehlo', see `export.stablehlo`.
    force: whether files are replaced; others in a folder stay.

  Returns:
    list of the files written.

  Raises:
    ValueError: a file is there already; the format cannot hold the model.
  """
  target = pathlib.Path(target)
  target.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(
    dir=target.parent, prefix=f'.{target.name}.'
  ) as staging:
    staged = pathlib.Path(staging) / target.name
    if format == 'stablehlo':
      content, description = export.stablehlo(weights, images=images)
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


def format_of(target, format=None):
  """(path to write to, format) of what the user named.

  Raises:
    ValueError: the ending tells no format, or another than `format`.
  """
  path = pathlib.Path(target).expanduser()
  if '://' in str(target):
    raise ValueError(f'{target}: write to a local path, and copy it there.')
  if path.name == 'model.safetensors':  # the name that both formats have
    path = path.parent
  is_folder = path.is_dir() or str(target).endswith('/')
  ending = '' if is_folder else path.suffix
  if format is None:
    by_ending = {'.npz': 'npz', '.stablehlo': 'stablehlo', '': 'timm'}
    format = by_ending.get(ending)
  if format is None or (ending in _ENDINGS.values()) != (format in _ENDINGS):
    raise ValueError(
      f'{target} does not tell a format'
      + (f' as {format!r} has it' if format else '')
      + '. Name NAME.npz (npz, big_vision), NAME.stablehlo, or a folder '
      '(timm, hf), and --format where that leaves two.'
    )
  if _ENDINGS.get(format, ending) != ending:
    raise ValueError(
      f'{target}: a file of format {format!r} ends in {_ENDINGS[format]}.'
    )
  return path, format


def _check_free(paths):
  if there := [str(path) for path in paths if path.exists()]:
    raise ValueError(f'{", ".join(there)} exists already; --force replaces it.')


def main(argv=None):
  args = parser().parse_args(argv)
  with terminal.one_message():
    _run(args)


def parser():
  parser = arguments.parser(__doc__, 'convert FROM TO [options]')
  add = parser.add_argument
  add('source', metavar='FROM', help='workdir, file, folder or URL')
  add('target', metavar='TO', help='file or folder')
  add('--format', choices=FORMATS, help='(as TO says)')
  add('--force', action='store_true', help='replace files that are there')
  add('--posemb_resize', choices=RESIZE_METHODS, help='how they are (paper)')
  add(
    '--patch_size',
    type=arguments.size,
    metavar='N|HxW',
    help="other than the weights'; their kernel is resized",
  )
  add(
    '--patch_resize',
    choices=RESIZE_METHODS,
    help='how it is (bicubic_antialias)',
  )
  add(
    '--num_classes',
    type=int,
    metavar='N',
    help='0 leaves the head out; other than 0: a new head, of zeros',
  )
  add(
    '--input',
    choices=export.INPUTS,
    default='uint8',
    help='stablehlo: of pixels 0..255 (default), or already normalised',
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
  weights, report = arguments.fit(
    weights,
    image_size=args.image_size,
    patch_size=args.patch_size,
    num_classes=args.num_classes,
    posemb_resize=args.posemb_resize,
    patch_resize=args.patch_resize,
  )
  if report:
    _show(say, 'fitted', str(report))
  files = save(weights, path, format, images=args.input, force=args.force)
  for note in weights.notes:
    _show(say, 'note', note.strip())
  for file in files:
    size = rich.filesize.decimal(file.stat().st_size)
    _show(say, 'wrote', f'{size:>8}  {file}')


def describe(weights):
  """One line: class, fields, parameters, images and classes."""
  settings = dict(weights.settings)
  name = settings.pop('target').rsplit('.', 1)[-1]
  classes = settings.pop('num_classes', None)
  fields = [f'{k}={v}' for k, v in settings.items() if v not in (None, False)]
  count = sum(np.size(x) for x in weights.params.values())
  shape = 'x'.join(map(str, weights.image_shape))
  return (
    f'{name}({", ".join(fields)}): {count:,} parameters, images {shape}, '
    + (f'{classes} classes' if classes else 'no head')
    + (' with names' if weights.class_names else '')
  )


def _show(say, what, text):
  say(f'{what:7}', text, highlight=False, markup=False, soft_wrap=True)


if __name__ == '__main__':
  main()
