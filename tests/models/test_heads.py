"""Heads of numbers and of ordered classes."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import small

from vit_jax.models.pooling import Head, OrdinalHead, ScaledHead
from vit_jax.weights import formats

MOMENTS = ((40.0, 10.0), (-3.0, 0.5))


def test_numbers_are_in_their_units():
  plain = small.tiny(num_classes=2)
  scaled = small.tiny(num_classes=2, head=ScaledHead(moments=MOMENTS))
  mean, std = np.transpose(MOMENTS)
  expected = mean + std * small.logits(plain)
  np.testing.assert_allclose(small.logits(scaled), expected, rtol=1e-6)


@pytest.mark.parametrize('format', ['npz', 'timm'])
def test_numbers_are_folded_into_the_layer_of_other_formats(tmp_path, format):
  weights = small.tiny(num_classes=2, head=ScaledHead(moments=MOMENTS))
  path = tmp_path / ('x.npz' if format == 'npz' else 'x')
  formats.write(weights, path, format)
  read = formats.read(path)
  assert type(read.model.head) is Head
  expected = small.logits(weights)
  np.testing.assert_allclose(small.logits(read), expected, rtol=1e-5)


def test_logits_of_ordered_classes_are_log_probabilities(tmp_path):
  weights = small.tiny(num_classes=4, head=OrdinalHead())
  assert weights.params['head/bias'].shape == (3,)
  p = np.exp(small.logits(weights))
  np.testing.assert_allclose(p.sum(axis=-1), 1, rtol=1e-6)
  with pytest.raises(ValueError, match='ordered classes'):
    formats.write(weights, tmp_path / 'x', 'timm')


def test_log_probabilities_of_conditional_logits():
  outputs = np.array([[0.3, -2.0, 50.0], [-90.0, 1.0, 0.0]], np.float32)
  above = scipy.special.expit(outputs.astype(np.float64))
  # Of class 0: not above it; of class 1: above 0, but not above 1; ...
  expected = np.stack(
    [
      1 - above[:, 0],
      above[:, 0] * (1 - above[:, 1]),
      above[:, 0] * above[:, 1] * scipy.special.expit(-outputs[:, 2]),
      above.prod(axis=1),
    ],
    axis=1,
  )
  found = OrdinalHead().convert(jnp.asarray(outputs))
  assert np.isfinite(found).all()
  np.testing.assert_allclose(np.exp(found), expected, rtol=1e-5, atol=1e-30)
