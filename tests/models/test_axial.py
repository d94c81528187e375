"""Axial attention: its numbers by other means."""

import jax
import numpy as np
import pytest
from contract import IMAGES, TINY_VIT, apply, random_params
from flax import linen as nn

from vit_jax.models.axial import AxialAttention, AxialViT
from vit_jax.models.pooling import ClassToken
from vit_jax.models.posemb import Learned
from vit_jax.models.vit import Block

RNG = np.random.default_rng(0)


def test_rows_then_columns():
  """Each layer against Blocks on one line of one image at a time."""
  model = AxialViT(**TINY_VIT)
  params = random_params(model)
  out = apply(model, params, method='features')
  x = out['patches'] + params['pos_embedding'].reshape(1, 12, 16)
  x = np.asarray(x).reshape(4, 2, 6, 16)
  block = Block(num_heads=2, mlp_dim=24)

  def run(name, line):
    return apply(block, params[f'block_{i}'][name], line[None])[0]

  for i in range(2):
    x = np.stack([[run('row', row) for row in image] for image in x])
    x = np.stack(
      [
        np.stack([run('column', image[:, c]) for c in range(6)], axis=1)
        for image in x
      ]
    )
    expected = x.reshape(4, 12, 16)
    np.testing.assert_allclose(out[f'block_{i}'], expected, atol=2e-5)
  normed = apply(nn.LayerNorm(), params['norm'], expected)
  np.testing.assert_allclose(out['pooled'], normed.mean(1), atol=2e-5)


def test_a_stride_of_axial_attention_takes_means_of_the_cells_there_are():
  layer = AxialAttention(16, 3, stride=2, form='preact')
  x = RNG.standard_normal((1, 5, 7, 16)).astype('f')
  params = random_params(layer, x)
  assert apply(layer, params, x).shape == (1, 3, 4, 16)
  for kernel in ('out', 'value'):  # columns become the identity of nothing
    params['column'][kernel] = jax.tree.map(
      np.zeros_like, params['column'][kernel]
    )
  params['column']['out']['bias'] += 1
  np.testing.assert_allclose(apply(layer, params, x), 1)


def test_what_makes_no_sense():
  for fields, message in (
    ({'pooling': ClassToken()}, 'cannot have a class token.*got ClassToken'),
    ({'posemb': Learned(at='layers')}, "positions in the layers.*'layers'"),
  ):
    with pytest.raises(ValueError, match=message):
      jax.eval_shape(
        AxialViT(**TINY_VIT, **fields).init, jax.random.key(0), IMAGES
      )
