"""Representations of views that are smaller than the images of the model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from vit_jax import tree
from vit_jax.models import resample
from vit_jax.models.posemb import Learned, Learned2d, RelativeBias
from vit_jax.objectives.encode import encode

RNG = np.random.default_rng(0)
GLOBAL = RNG.standard_normal((2, 2, 16, 20, 3), np.float32)
LOCAL = RNG.standard_normal((2, 3, 8, 12, 3), np.float32)


def make(posemb, **fields):
  """Return a model, and noisy parameters for grids of 4 x 5."""
  model = tiny.vit(**{'depth': 2, 'posemb': posemb} | fields)
  params = tiny.normal_params(model, GLOBAL.shape[2:], 0.5, seed=1)
  return model, tree.unflatten(params)


@pytest.mark.parametrize(
  ('posemb', 'method', 'fields'),
  [
    (Learned(), 'dinov2_offset', {}),
    (Learned(at='layers'), 'bicubic_antialias', {'scan': True}),
    (Learned2d(), 'bicubic', {}),
    (RelativeBias(), 'paper', {}),
  ],
  ids=str,
)
def test_tables_are_resized_as_in_weights(posemb, method, fields):
  posemb = dataclasses.replace(posemb, resize_method=method)
  model, params = make(posemb, **fields)
  apply = jax.jit(lambda params, x: encode(model, params, x)['pre_logits'])
  added = {**params, 'objective': {'pos_embedding': np.ones((1, 3, 3, 2), 'f')}}
  for views in (GLOBAL, LOCAL):
    images = views.reshape(-1, *views.shape[2:])
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)['params']
    fitted = {
      path: resample.resize_parameter(
        *(model, path, x, tree.flatten(shapes)[path].shape),
        posemb_resize=method,
      )
      if x.shape != tree.flatten(shapes)[path].shape
      else x
      for path, x in tree.flatten(params).items()
    }
    expected = jax.jit(model.apply)({'params': tree.unflatten(fitted)}, images)
    found = apply(added, views)
    assert found.shape == (*views.shape[:2], 16)
    np.testing.assert_allclose(
      found.reshape(expected.shape), expected, rtol=2e-5, atol=2e-5
    )


def test_small_views_train_the_table():
  """By the transposed matrices of the interpolation."""
  model, params = make(Learned(resize_method='bicubic'), depth=1)

  def loss(table, views):
    fitted = {**params, 'pos_embedding': table}
    return jnp.sum(encode(model, fitted, views)['pre_logits'])

  table = params['pos_embedding']

  @jax.jit
  def through_the_small_one(table):
    resize = lambda x: resample.resize(x, (2, 3), 'bicubic')  # noqa: E731
    small, pull = jax.vjp(resize, table)
    return pull(jax.grad(loss)(small, LOCAL))[0]

  gradient = jax.jit(jax.grad(loss))(table, LOCAL)
  expected = through_the_small_one(table)
  np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)
  assert np.abs(gradient).min() > 0
