"""Command-line arguments that tools share: which weights, and how to read."""

import argparse
import contextlib
import json
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from vit_jax import pretrained
from vit_jax.data import images
from vit_jax.runs.files import PathLike
from vit_jax.tools import parsers
from vit_jax.tools.parsers import count
from vit_jax.types import Size
from vit_jax.weights import export, formats
from vit_jax.weights.bundle import Weights

# For `add_counts`.
MAX_IMAGE_BYTES = {
  'max_image_bytes': (
    images.MAX_IMAGE_BYTES,
    'limit on height x width x channels of an image',
  )
}
_EMA: dict[str, bool | str] = {'auto': 'auto', 'on': True, 'off': False}


def plain_parser(doc: str | None, usage: str) -> parsers.Parser:
  """Return an ArgumentParser.

  Args:
    doc: of the tool's module.
    usage: what follows `python -m vit_jax.tools.`.
  """
  return parsers.parser(doc, f'tools.{usage}')


def parser(doc: str | None, usage: str) -> parsers.Parser:
  """Return a `plain_parser` with --image_size and the arguments of `read`."""
  parser = plain_parser(doc, usage)
  parser.add_argument(
    '--image_size',
    type=size,
    metavar='N|HxW',
    help='if not that of the weights; position embeddings are resized',
  )
  group = parser.add_argument_group('how the weights are read')
  group.add_argument(
    '--ema',
    choices=_EMA,
    default='auto',
    help='of a workdir: the EMA of the parameters (auto: if there is one)',
  )
  group.add_argument(
    '--step', type=int, help='of a workdir: which checkpoint (the newest)'
  )
  group.add_argument(
    '--trust',
    metavar='PACKAGE',
    action='append',
    default=[],
    help='package of your own whose models and transforms the weights may name'
    '; may be repeated',
  )
  group.add_argument(
    '--set',
    metavar='FIELD=VALUE',
    action='append',
    default=[],
    help='field of the model, or grid, that the file does not contain; may be '
    'repeated: --set gelu=exact --set num_heads=6 --set grid=[7,5]',
  )
  return parser


def read(path: PathLike, args: argparse.Namespace) -> Weights:
  """Return the Weights at `path`, read as the arguments say."""
  return formats.read(
    path,
    step=args.step,
    ema=_EMA[args.ema],
    trust=tuple(args.trust),
    **_fields(args.set),
  )


def read_fitted(args: argparse.Namespace) -> Weights:
  """Return the Weights at --weights, with --image_size; report on stderr."""
  weights = read(args.weights, args)
  weights, report = fit(weights, image_size=args.image_size)
  if report:
    print(report, file=sys.stderr)
  return weights


def read_to_predict(args: argparse.Namespace) -> Weights:
  """Return the Weights at --weights, which may be an exported function."""
  if args.weights.endswith(export.ENDING):
    return read_function(args.weights, args)
  return read_fitted(args)


def read_function(path: PathLike, args: argparse.Namespace) -> Weights:
  """Return the Weights of an exported function, see `export.load`."""
  given = [f'--{k}' for k in ('image_size', 'step', 'set') if getattr(args, k)]
  given += ['--ema'] * (args.ema != 'auto')
  if given:
    raise ValueError(
      f'{path} is an exported function, whose weights and image size are '
      f'fixed. Leave out {", ".join(given)}, or use other weights.'
    )
  return export.load(path, trust=tuple(args.trust))


def fit(weights: Weights, **options: Any) -> tuple[Weights, Any]:
  """Return (Weights, report) of `pretrained.fit`; options of None are left out.

  Without any, the weights stay as they are, and the report is None.
  """
  options = {k: v for k, v in options.items() if v is not None}
  return pretrained.fit(weights, **options) if options else (weights, None)


def _fields(assignments):
  """Return {field: value} of texts FIELD=VALUE; values are JSON, or text."""
  fields = {}
  for text in assignments:
    name, equals, value = text.partition('=')
    if not name.isidentifier() or not equals:
      raise ValueError(f'--set {text}: expected FIELD=VALUE.')
    if name in fields:
      raise ValueError(f'--set {name} is given twice.')
    with contextlib.suppress(ValueError):
      value = json.loads(value)
    fields[name] = tuple(value) if isinstance(value, list) else value
  return fields


def size(text: str) -> Size:
  """Return 224 for '224', (224, 192) for '224x192'; for `type` of arguments."""
  found = re.fullmatch(r'([1-9]\d*)(?:x([1-9]\d*))?', text)
  if not found:
    raise argparse.ArgumentTypeError(
      f'{text!r} is not a size; expected N or HEIGHTxWIDTH, as 224 or 224x192'
    )
  rows, columns = found.groups()
  return int(rows) if columns is None else (int(rows), int(columns))


def add_images(parser: Any, batch_size: int, nargs: str = '+') -> None:
  """Add --weights, images, and how these are read."""
  add = parser.add_argument
  add('images', nargs=nargs, help='images, folders, globs; local or gs://...')
  add('--weights', required=True, help='workdir, file or folder')
  add(
    '--on_error',
    choices=('raise', 'skip'),
    default='raise',
    help='for images that cannot be read (raise)',
  )
  add_counts(
    parser,
    batch_size=(batch_size, 'images'),
    num_workers=(None, 'decoding threads (one per core, at most 16)'),
    **MAX_IMAGE_BYTES,
  )


def add_counts(group: Any, **counts: tuple[int | None, str]) -> None:
  """Add an argument --NAME=N for each NAME=(default, help)."""
  for name, (default, what) in counts.items():
    help = what if default is None else f'{what} ({default})'
    group.add_argument(
      f'--{name}', type=count, default=default, metavar='N', help=help
    )


def several(
  choices: Sequence[str] | None = None, convert: Callable[[str], Any] = str
) -> Callable[[str], list[Any]]:
  """Return a function 'a,b' -> ['a', 'b']; for `type` of arguments."""

  def read(text):
    items = text.split(',')
    for item in items:
      if choices and item not in choices:
        raise argparse.ArgumentTypeError(
          f'{item!r} must be one of {", ".join(choices)}'
        )
    return [convert(item) for item in items]

  return read


def names(path: str, weights: Weights) -> list[str] | None:
  """Return class names from a JSON list, or from the lines of another file."""
  text = pathlib.Path(path).expanduser().read_text()
  found = json.loads(text) if path.endswith('.json') else text.splitlines()
  classes = weights.model.num_classes or 0
  if not isinstance(found, list) or len(found) != classes:
    raise ValueError(
      f'{path} has {len(found)} names; the model has {classes} classes.'
    )
  return [str(name) for name in found]
