"""Write families.md: each family of weights, and how exactly it is read.

    python docs/table_families.py > docs/families.md

Errors are those of features of seeded weights in tests/golden/families, which
timm and transformers computed, in units of the features' spread.
"""

import json
import pathlib
import sys

import numpy as np

TESTS = pathlib.Path(__file__).parents[1] / 'tests'
sys.path += [str(TESTS / name) for name in ('golden', 'weights')]
import family_cases  # noqa: E402

from vit_jax.zoo import published  # noqa: E402

HEAD = """# Families of weights

`python docs/table_families.py > docs/families.md` writes this table. timm
and transformers build small models with random weights and compute their
features. An error is the largest difference from the features that this project
computes, divided by their spread. *Resized*: the error at another resolution.
*Written*: whether our file loads in the source library with equal outputs.
The name of a case begins with the form of its files.

| case | model | features | resized | written |
|---|---|---|---|---|"""
REFUSED = """
## Not supported

These ViTs of timm are refused; `python -m vit_jax.tools.names refused` prints
the list. BEiT is refused with both absolute and relative positions, and without
any. Arrays do not show whether norms come before or after attention and MLP,
nor the activation, the epsilon of norms and rotary positions: a file without a
`config.json` is read with assumptions, which the report lists.

| name in timm | reason |
|---|---|"""
WRITTEN = {'same': 'bit-identical', 'equal': 'equivalent', '': 'no'}


def row(path):
  recorded = dict(np.load(path))
  about = json.loads(str(recorded.pop('about')))
  arrays = family_cases.arrays_of(about, recorded)
  _, errors = family_cases.check(about, recorded, arrays)
  resized = errors.pop('other', None)
  config = about['config'] or {}
  name = config.get('architecture', config.get('model_type', ''))
  cells = path.stem, name, f'{max(errors.values()):.0e}'
  last = f'{resized:.0e}' if resized else '', WRITTEN[about['back']]
  return ' | '.join(['', *cells, *last, '']).strip()


if __name__ == '__main__':
  print(HEAD)
  for path in sorted(TESTS.glob('golden/families/*.npz')):
    print(row(path))
  print(REFUSED)
  for name, reason in published.REFUSED.items():
    print(f'| `{name}` | {reason} |')
