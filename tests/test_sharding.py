"""Meshes, path rules and batches over 8 fake devices."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from vit_jax import sharding
from vit_jax.build import ConfigError

TREE = {
  'kernel': jax.ShapeDtypeStruct((6, 16), 'float32'),
  'bias': jax.ShapeDtypeStruct((16,), 'float32'),
}


def test_meshes():
  assert dict(sharding.make_mesh().shape) == {'data': 8}
  mesh = sharding.make_mesh(data=-1, model=2)
  assert dict(mesh.shape) == {'data': 4, 'model': 2}
  assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
  for wrong in (
    {'data': 4},
    {'data': 3, 'model': -1},
    {'data': -1, 'model': -1},
    {'data': 0, 'model': -1},
    {'data': -8, 'model': -1},
  ):
    with pytest.raises(ConfigError, match='does not fit 8 devices'):
      sharding.make_mesh(**wrong)


def test_the_first_matching_rule_shards():
  mesh = sharding.make_mesh(data=4, model=2)
  rules = [('kernel', (None, ('data', 'model'))), ('.*', ('model',))]
  found = sharding.infer(TREE, rules, mesh)
  assert found['kernel'].spec == P(None, ('data', 'model'))
  assert found['bias'].spec == P('model')
  assert sharding.infer(TREE, [], mesh)['kernel'].is_fully_replicated


@pytest.mark.parametrize(
  ('rule', 'message'),
  [
    (('kernel', ('fsdp',)), r"no mesh axis 'fsdp'; there are \['data', 'mod"),
    (
      ('kernel', ('data',)),
      r'kernel of shape \(6, 16\) cannot be split 4-fold',
    ),
    (('bias', (None, 'model')), r'bias.*along dimension 1'),
  ],
)
def test_rules_that_cannot_be_followed(rule, message):
  mesh = sharding.make_mesh(data=4, model=2)
  with pytest.raises(ConfigError, match=message):
    sharding.infer(TREE, [rule], mesh)


def test_batches_are_split_over_all_but_model_axes():
  mesh = sharding.make_mesh(replica=2, data=2, model=2)
  batch = {'image': np.arange(24, dtype=np.uint8).reshape(8, 3)}
  image = sharding.put_batch(batch, mesh)['image']
  assert image.sharding.spec == P(('replica', 'data'))
  assert {s.data.shape for s in image.addressable_shards} == {(2, 3)}
  np.testing.assert_array_equal(image, batch['image'])


def test_batch_size_is_checked():
  mesh = sharding.make_mesh(data=4, model=2)
  sharding.check_batch_size(8, mesh, parts=2)
  for size, parts, message in (
    (9, 1, r'batch_size=9 is global and must divide by 4.*Nearest: 8, 12'),
    (3, 1, r'Nearest: 4, 4'),
    (12, 2, r'over 4 devices in 2 micro-batches\. Nearest: 8, 16'),
    (0, 1, 'integer of 1 or more'),
    ('8', 1, "batch_size='8' must be an integer"),
  ):
    with pytest.raises(ConfigError, match=message):
      sharding.check_batch_size(size, mesh, parts=parts)


def test_annotate_and_replicated():
  mesh = sharding.make_mesh()
  shardings = sharding.infer(TREE, [('bias', ('data',))], mesh)
  annotated = sharding.annotate(TREE, shardings)
  assert annotated['bias'].sharding.spec == P('data')
  assert sharding.replicated(mesh).is_fully_replicated
