"""Command-line arguments that tools share: which weights, and how read."""

import argparse
import contextlib
import json
import pathlib
import re

from vit_jax import pretrained
from vit_jax.weights import formats

_EMA = {'auto': 'auto', 'on': True, 'off': False}


def parser(doc, usage):
  """An ArgumentParser with what `read` needs beside the path, and image_size.

  Args:
    doc: of the tool's module.
    usage: what follows `python -m vit_jax.tools.`.
  """
  parser = argparse.ArgumentParser(
    description=doc,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    usage=f'python -m vit_jax.tools.{usage}',
  )
  parser.add_argument(
    '--image_size',
    type=size,
    metavar='N|HxW',
    help="other than the weights'; positions are resized",
  )
  group = parser.add_argument_group('how the weights are read')
  group.add_argument(
    '--ema',
    choices=_EMA,
    default='auto',
    help='of a run of ours: the averaged parameters (auto: where it has them)',
  )
  group.add_argument(
    '--step', type=int, help='of a run of ours: which checkpoint (the newest)'
  )
  group.add_argument(
    '--set',
    metavar='FIELD=VALUE',
    action='append',
    default=[],
    help='a field of the model, or num_heads or grid, that the file does not '
    'tell; may be repeated: --set gelu=exact --set grid=[7,5]',
  )
  return parser


def read(path, args):
  """The Weights at `path`, read as the arguments say."""
  return formats.read(
    path, step=args.step, ema=_EMA[args.ema], **_fields(args.set)
  )


def fit(weights, **options):
  """(Weights, report) of `pretrained.fit`; options of None are left out.

  Without any the weights stay as they are, and the report is None.
  """
  options = {k: v for k, v in options.items() if v is not None}
  return pretrained.fit(weights, **options) if options else (weights, None)


def _fields(assignments):
  """{field: value} of texts FIELD=VALUE; values are JSON, or text."""
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


def size(text):
  """'224' as 224, '224x192' as (224, 192); for `type` of an argument."""
  found = re.fullmatch(r'([1-9]\d*)(?:x([1-9]\d*))?', text)
  if not found:
    raise argparse.ArgumentTypeError(
      f'{text!r} is no size; expected N or HEIGHTxWIDTH, as in 224 or 224x192'
    )
  rows, columns = found.groups()
  return int(rows) if columns is None else (int(rows), int(columns))


def count(text):
  """An int of 1 or more; for `type` of an argument."""
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'{text!r} is no whole number from 1 up')
  return int(text)


def names(path, weights):
  """Names of the classes: a JSON list, or the lines of any other file."""
  text = pathlib.Path(path).expanduser().read_text()
  found = json.loads(text) if path.endswith('.json') else text.splitlines()
  classes = weights.settings.get('num_classes') or 0
  if not isinstance(found, list) or len(found) != classes:
    raise ValueError(
      f'{path} holds {len(found)} names; the model has {classes} classes.'
    )
  return [str(name) for name in found]
