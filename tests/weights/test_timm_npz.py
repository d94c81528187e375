"""Our models with .npz files against timm with its own readers of them.

golden/record_timm_npz.py records timm's logits, of files that went through our
reader and writer; here the same files are read, and computed with our models.
"""

import pathlib

import jax
import numpy as np
import pytest
import released

from vit_jax import tree
from vit_jax.config import instantiate
from vit_jax.weights import big_vision, original

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'timm_npz.npz'


@pytest.mark.parametrize('name', released.TIMM)
def test_logits_are_timms(name):
  with np.load(GOLDEN) as golden:
    expected = golden[name]
  shapes, size, grid = released.TIMM[name]
  images = released.images(size)
  file = released.fill_moderately(shapes)
  format = big_vision if big_vision.recognise(file.keys()) else original
  weights = format.read(file, grid=grid)
  if name != 'bit':
    assert weights.image_shape == images.shape[1:]
  variables = {'params': tree.unflatten(weights.params)}
  logits = jax.jit(instantiate(weights.settings).apply)(variables, images)
  error = np.abs(np.asarray(logits) - expected).max() / np.ptp(expected)
  assert error < 5e-6  # of the logits' spread; measured: at most 7e-7
