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

HEAD = """# Families of weights

`python docs/table_families.py > docs/families.md` writes this table. Small
models with random weights are built by timm and transformers, which also
compute their features; the errors are largest differences from ours, divided
by the spread of the features. *Resized* is at another resolution. What is
*written* loads there again with equal outputs.

| case | form | model | features | resized | written |
|---|---|---|---|---|---|"""
WRITTEN = {'same': 'bit-identical', 'equal': 'equivalent', '': 'no'}


def row(path):
  recorded = dict(np.load(path))
  about = json.loads(str(recorded.pop('about')))
  arrays = family_cases.arrays_of(about, recorded)
  _, errors = family_cases.check(about, recorded, arrays)
  resized = errors.pop('other', None)
  config = about['config'] or {}
  name = config.get('architecture', config.get('model_type', ''))
  cells = path.stem, about['format'], name, f'{max(errors.values()):.0e}'
  last = f'{resized:.0e}' if resized else '', WRITTEN[about['back']]
  return ' | '.join(['', *cells, *last, '']).strip()


if __name__ == '__main__':
  print(HEAD)
  for path in sorted(TESTS.glob('golden/families/*.npz')):
    print(row(path))
