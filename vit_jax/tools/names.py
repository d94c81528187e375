r"""List models and published weights by name, or summarise one model.

python -m vit_jax.tools.names                       all listed names
python -m vit_jax.tools.names 'patch16*384'         those with this text
python -m vit_jax.tools.names dinov3                published weights
python -m vit_jax.tools.names refused               timm's unsupported ViTs
python -m vit_jax.tools.names ViT-B/16 --summary    modules of a model
"""

import fnmatch
import re
from collections.abc import Sequence

from vit_jax.io import terminal
from vit_jax.tools import parsers
from vit_jax.types import UserError
from vit_jax.zoo import names, published


@terminal.one_message()
def main(argv: Sequence[str] | None = None) -> None:
  parser = parsers.parser(__doc__, 'tools.names [NAME] [OPTIONS]')
  add = parser.add_argument
  add('name', nargs='?', default='', help='a name or, in a list, part of it')
  add('--summary', action='store_true', help='shapes, parameters and FLOPs')
  add('--image_size', type=int, help='pixels (those in the name, or 224)')
  args = parser.parse_args(argv)
  if args.summary:
    print(summary(args.name, args.image_size))
  else:
    print(table(args.name))


def table(text: str) -> str:
  """Return the listed models and weights whose names contain the text."""
  pattern = re.compile(fnmatch.translate(f'*{text}*'), re.IGNORECASE)
  rows = [
    f'{name:<16}{" ".join(others)}'.strip()
    for name, others in names.models().items()
    if any(pattern.match(x) for x in (name, *others))
  ]
  ours = '\n'.join(['name            also (in timm)', *rows]) if rows else ''
  refused = (f'Refused: {x}: {why}' for x, why in published.REFUSED.items())
  refused = '\n'.join(x for x in refused if text.lower() in x.lower())
  found = '\n\n'.join(filter(None, (ours, published.table(text), refused)))
  if not found:
    raise UserError(f'No name contains {text!r}.')
  return found


def summary(name: str, image_size: int | None = None) -> str:
  """Return the modules of a model with shapes, parameters and FLOPs."""
  import jax  # the table does not need it
  import jax.numpy as jnp

  from vit_jax.analysis import flops

  in_name = re.search(r'_(\d{3})(?:\.|$)', name)  # vit_base_patch16_384
  size = image_size or int(in_name[1] if in_name else 224)
  model = names.create(name, num_classes=1000)
  if hasattr(model, 'scan'):  # all layers share a row
    model = model.clone(scan=True)
  key, images = jax.random.key(0), jnp.zeros((1, size, size, 3))
  console = {'width': 120, 'color_system': None}
  text = model.tabulate(key, images, depth=2, console_kwargs=console)
  count = flops.forward(model, jax.typeof(images)) / 1e9
  return f'{size}x{size} pixels\n{text}\n{count:,.3f} GFLOPs for one image.'


if __name__ == '__main__':
  main()
