"""Command-line arguments that tools share: weights, images and sizes."""

import argparse
import contextlib
import json
import re
import sys
from typing import Any

from vit_jax import config, pretrained
from vit_jax.data import images
from vit_jax.data.sources import tables
from vit_jax.tools.parsers import add_counts
from vit_jax.types import Size, UserError
from vit_jax.weights import bundle, formats
from vit_jax.weights.bundle import Weights

IMAGE_BYTES = images.MAX_IMAGE_BYTES, 'most height * width * channels of a file'
AT_ONCE = None, 'images that are computed at once (32, on CPUs 8)'
_EMA: dict[str, Any] = {'auto': 'auto', 'on': True, 'off': False}


def add_weights(
  parser: argparse.ArgumentParser,
  name: str = '--weights',
  *,
  required: bool = True,
) -> None:
  """Add the arguments of `read`; `name` is the flag of the path."""
  options: dict[str, Any] = {'required': required} if name[0] == '-' else {}
  add = parser.add_argument_group('weights').add_argument
  add(name, metavar='WEIGHTS', help='workdir, file, folder or URL', **options)
  add(
    '--image_size',
    type=size,
    metavar='N|HxW',
    help='default: as the weights; position embeddings are resized',
  )
  add('--class_names', metavar='FILE', help='one name per line, or a JSON list')
  add(
    '--ema',
    choices=_EMA,
    default='auto',
    help='of a workdir: the EMA of the parameters (auto: if there is one)',
  )
  add('--step', type=int, help='of a workdir: which checkpoint (the newest)')
  add(
    '--trust',
    metavar='PACKAGE',
    action='append',
    default=[],
    help='package of your own whose models and transforms the weights may name'
    '; may be repeated',
  )
  add(
    '--set',
    metavar='FIELD=VALUE',
    action='append',
    default=[],
    help='field of the model, or grid, that the file does not contain; may be '
    'repeated: --set num_heads=6 --set block.mlp.form=exact --set grid=[7,5] '
    '--set pooling=\'{"target": "vit_jax.models.pooling.Mean"}\'',
  )


def read(args: argparse.Namespace, **changes: Any) -> Weights:
  """Return the Weights that the arguments name, and report on stderr.

  `changes` are other arguments of `pretrained.fit`; None leaves one out.
  """
  options = {'use_size': args.image_size, 'step': args.step}
  options |= {'ema': _EMA[args.ema], 'trust': tuple(args.trust)}
  fields = _fields(args.set, args.trust)
  weights = formats.read(args.weights, **options, **fields)
  changes |= {'image_size': args.image_size}
  if given := {name: x for name, x in changes.items() if x is not None}:
    weights, report = pretrained.fit(weights, **given)
    print(report, file=sys.stderr)
  elif weights.notes:
    print(*weights.notes, sep='\n', file=sys.stderr)
    weights.notes = []
  if args.class_names:
    weights.class_names = tables.read_names(args.class_names)
    bundle.check_names(weights.class_names, weights.model.num_classes)
  return weights


def _fields(assignments, trust):
  """Return {field: value} of texts FIELD=VALUE: text, or JSON, with targets."""
  fields = {}
  for text in assignments:
    name, equals, value = text.partition('=')
    if not equals:
      raise UserError(f'--set {text}: expected FIELD=VALUE.')
    with contextlib.suppress(ValueError):
      value = json.loads(value)
    fields[name] = config.build(value, trust=trust)
  return fields


def add_images(
  parser: argparse.ArgumentParser,
  at_once: tuple[int | None, str] = AT_ONCE,
) -> None:
  """Add image files, and how many are computed at once."""
  group = parser.add_argument_group('images')
  group.add_argument(
    'images', nargs='*', help='images, folders, globs; local or gs://...'
  )
  add_counts(group, batch_size=at_once, max_image_bytes=IMAGE_BYTES)


def size(text: str) -> Size:
  """Return 224 for '224', (224, 192) for '224x192'; for `type` of arguments."""
  found = re.fullmatch(r'([1-9]\d*)(?:x([1-9]\d*))?', text)
  if not found:
    what = 'is not a size; expected N or HEIGHTxWIDTH, as 224 or 224x192'
    raise argparse.ArgumentTypeError(f'{text!r} {what}')
  rows, columns = found.groups()
  return int(rows) if columns is None else (int(rows), int(columns))
