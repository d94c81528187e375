"""Axial attention: its contract, its cost, and its numbers by other means."""

import jax
import numpy as np
import pytest
from contract import (
  IMAGES,
  TINY_VIT,
  apply,
  assert_scan_is_the_loop,
  assert_trees_close,
  compare_to_bfloat16,
  logits_and_grads,
  random_params,
  stack_layers,
)

from vit_jax.models.axial import AxialAttention, AxialResNet, AxialViT
from vit_jax.models.layers import Head, LayerNorm
from vit_jax.models.pooling import ClassToken, Map, NoPooling
from vit_jax.models.posemb import Learned, Learned2d, SinCos2d
from vit_jax.models.vit import Block

RNG = np.random.default_rng(0)


def tiny(**fields):
  return AxialViT(**(TINY_VIT | fields))


def tiny_resnet(**fields):
  return AxialResNet(**({'stages': (1, 1), 'num_classes': 5} | fields))


def test_rows_then_columns():
  """Each layer against Blocks on one line of one image at a time."""
  model = tiny()
  params = random_params(model)
  out = apply(model, params, method='features')
  x = out['patches'] + params['pos_embedding'].reshape(1, 12, 16)
  x = np.asarray(x).reshape(4, 2, 6, 16)
  block = Block(num_heads=2, mlp_dim=24)
  run_block = jax.jit(block.apply)

  def run(name, line):
    layer = params[f'block_{i}'][name]
    return run_block({'params': layer}, line[None])[0]

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
  normed = LayerNorm().apply({'params': params['norm']}, expected)
  np.testing.assert_allclose(out['pooled'], normed.mean(1), atol=2e-5)


def test_scan_is_the_loop():
  assert_scan_is_the_loop(tiny())


@pytest.mark.slow
@pytest.mark.parametrize(
  'fields',
  [
    {'head': Head(representation_size=12)},
    {'pooling': Map(), 'posemb': Learned2d()},
    {'pooling': NoPooling(), 'posemb': SinCos2d()},
  ],
)
def test_contract(fields):
  model = tiny(**fields)
  params = random_params(model)
  expected, grads = logits_and_grads(model, params)
  each = NoPooling() in fields.values()
  assert expected.shape == ((4, 12, 5) if each else (4, 5))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))
  scanned = model.clone(scan=True, remat='full')
  actual, scanned_grads = logits_and_grads(scanned, stack_layers(params))
  np.testing.assert_allclose(actual, expected, atol=1e-5)
  assert_trees_close(scanned_grads, stack_layers(grads), atol=1e-4, rtol=1e-3)
  assert max(compare_to_bfloat16(model, params, (expected, grads))) < 0.1


@pytest.mark.parametrize('stride', [1, 2])
def test_axial_attention_is_of_lines(stride):
  """A cell changes those of its row and, by these, all; not before them."""
  layer = AxialAttention(16, 3, stride, 'preact')
  x = RNG.standard_normal((1, 5, 7, 16)).astype('f')
  params = random_params(layer, x)
  out = layer.apply({'params': params}, x)
  assert out.shape == ((1, 5, 7, 16) if stride == 1 else (1, 3, 4, 16))
  for kernel in ('out', 'value'):  # columns become the identity of nothing
    params['column'][kernel] = jax.tree.map(
      np.zeros_like, params['column'][kernel]
    )
  params['column']['out']['bias'] += 1
  np.testing.assert_allclose(layer.apply({'params': params}, x), 1)


def test_what_makes_no_sense():
  for fields, message in (
    ({'pooling': ClassToken()}, 'cannot have a class token.*got ClassToken'),
    (
      {'posemb': Learned(at='layers')},
      "positions in the layers.*'layers'",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      jax.eval_shape(tiny(**fields).init, jax.random.key(0), IMAGES)
