"""Write families.md: each family of weights, and how exactly it is read.

    python docs/table_families.py > docs/families.md

timm and transformers computed the features in tests/golden/families, of seeded
weights.
"""

import json
import pathlib
import sys

import numpy as np

TESTS = pathlib.Path(__file__).parents[1] / 'tests'
sys.path += [str(TESTS / name) for name in ('', 'golden', 'weights')]
import family_cases  # noqa: E402

from vit_jax.zoo import published  # noqa: E402

HEAD = """# Families of weights

`python docs/table_families.py > docs/families.md` writes this table. Features
of small models with random weights differ from those of timm and transformers
by at most {features:.0e} of their spread, at another resolution by
{other:.0e}. *Written*: whether our file loads there with equal outputs. The
name of a case begins with the form of its files.

| case | model | written |
|---|---|---|"""
REFUSED = """
## What is pooled

| files | `pooled` |
|---|---|
| DeepSeek and Qwen: shards of an LLM, and timm's `_enc` | mean over patches; \
Qwen has no final norm |
| timm's classifiers of these | this mean, normalised without scale and bias |
| C-RADIO | first class token, without a norm, as in timm; `summary` of \
transformers has the first two, `tokens[:, :2]` |
| TIPSv2 | class token; the second class token is the register |
| Pixio | mean over its eight class tokens, which are registers here |
| MLCD | class token; the final norm is applied to patches, too |

Projectors to an LLM are left out. C-RADIO's table is for 2,048 px: give a
smaller `image_size`. For one that is not square it is cropped, as by the
authors; timm stretches it. DeepSeek has none and gets 546 px.

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
  config = about['config'] or {}
  name = config.get('architecture', config.get('model_type', ''))
  cells = path.stem, name, WRITTEN[about['back']]
  return ' | '.join(['', *cells, '']).strip(), errors


if __name__ == '__main__':
  paths = sorted(TESTS.glob('golden/families/*.npz'))
  rows, errors = zip(*map(row, paths))
  other = max(found.pop('other', 0) for found in errors)
  features = max(max(found.values()) for found in errors)
  print(HEAD.format(features=features, other=other), *rows, sep='\n')
  print(REFUSED)
  for name, reason in published.REFUSED.items():
    print(f'| `{name}` | {reason} |')
