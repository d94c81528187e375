"""The cases of golden/record_families.py, with other weights and live."""

import pathlib
import sys

import numpy as np
import pytest
from live import needs

sys.path.append(str(pathlib.Path(__file__).parents[1] / 'weights'))

import family_cases
import record_families

from vit_jax.weights import formats

pytestmark = needs('timm', 'transformers')


@pytest.mark.parametrize('name', record_families.CASES)
def test_families(name, tmp_path):
  if name == 'original_vit5':
    pytest.importorskip('models_vit5')  # of its repository
  about, recorded = record_families.CASES[name](seed=1)
  arrays = family_cases.arrays_of(about, recorded, seed=1)
  weights, errors = family_cases.check(about, recorded, arrays)
  text = ', '.join(f'{k} {x:.0e}' for k, x in errors.items())
  print(f'\n| {name} | {text} | {"written, too" if about["back"] else ""} |')
  if about['back']:
    family_cases.check_back(about, weights, arrays)
    formats.write(weights, tmp_path, about['format'])
    model = record_families.load(about['format'], tmp_path)
    forward = getattr(record_families, f'{about["format"]}_outputs')(model)
    found = record_families.run(forward, about['image'])
    for key, array in found.items():
      spread = np.ptp(recorded[key])
      np.testing.assert_allclose(array, recorded[key], atol=1e-5 * spread)
