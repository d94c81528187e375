"""Families of timm and transformers: features as recorded, and back."""

import json
import pathlib
import sys

import numpy as np
import pytest

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
sys.path.insert(0, str(GOLDEN))
import family_cases  # noqa: E402


@pytest.mark.parametrize(
  'name', sorted(path.stem for path in GOLDEN.glob('families/*.npz'))
)
def test_features_are_those_of_the_source_and_arrays_come_back(name):
  recorded = dict(np.load(GOLDEN / 'families' / f'{name}.npz'))
  about = json.loads(str(recorded.pop('about')))
  arrays = family_cases.arrays_of(about, recorded)
  weights, _ = family_cases.check(about, recorded, arrays)
  if about['back']:
    family_cases.check_back(about, weights, arrays)
