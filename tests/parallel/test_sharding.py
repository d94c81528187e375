"""Meshes, path rules and batches over 8 fake devices."""

import types

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from vit_jax import tree
from vit_jax.models.dense import BlockOptions, SwiGlu
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.pooling import Map
from vit_jax.models.resnet import ResNet
from vit_jax.models.vit import PatchEmbedding
from vit_jax.parallel import sharding

TREE = {
  'kernel': jax.ShapeDtypeStruct((6, 16), 'float32'),
  'bias': jax.ShapeDtypeStruct((16,), 'float32'),
}


def test_meshes():
  mesh = sharding.make_mesh(data=-1, model=2)
  assert dict(mesh.shape) == {'data': 4, 'model': 2}
  assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
  devices = jax.devices()[2:6]
  mesh = sharding.make_mesh(devices, data=2, model=-1)
  assert mesh.devices.tolist() == [devices[:2], devices[2:]]
  for wrong in (
    {'data': 4},
    {'data': 3, 'model': -1},
    {'data': -1, 'model': -1},
    {'data': 0, 'model': -1},
    {'data': -8, 'model': -1},
  ):
    with pytest.raises(ValueError, match='does not fit 8 devices'):
      sharding.make_mesh(**wrong)


@pytest.mark.parametrize(
  ('slices', 'sizes', 'expected'),
  [
    (2, {}, {'data': [0, 2, 4, 6, 1, 3, 5, 7]}),
    (2, {'fsdp': -1}, {'data': 2, 'fsdp': [[0, 2, 4, 6], [1, 3, 5, 7]]}),
    (2, {'model': 2}, {'data': 4, 'model': [[0, 2], [4, 6], [1, 3], [5, 7]]}),
    (4, {'fsdp': -1}, {'data': 4, 'fsdp': [[0, 4], [1, 5], [2, 6], [3, 7]]}),
  ],
)
def test_only_data_spans_slices(slices, sizes, expected, monkeypatch):
  monkeypatch.setattr(sharding, 'slice_of', lambda device: device.id % slices)
  mesh = sharding.MeshSizes(**sizes).make()
  *_, ids = expected.values()
  assert mesh.axis_names == tuple(expected)
  np.testing.assert_array_equal(np.vectorize(lambda x: x.id)(mesh.devices), ids)
  with pytest.raises(ValueError, match=rf'data={slices} or a multiple'):
    sharding.MeshSizes(data=1, fsdp=8).make()


def test_devices_of_several_hosts_share_no_examples():
  def devices(*shape, per_host=4):
    hosts = np.arange(np.prod(shape)) // per_host
    found = [types.SimpleNamespace(process_index=int(h)) for h in hosts]
    return np.array(found).reshape(shape)

  sharding._check_hosts(devices(8), ('data',))
  sharding._check_hosts(devices(2, 4), ('data', 'model'))
  sharding._check_hosts(devices(2, 2, 2), ('data', 'model', 'model_b'))
  for shape, names in (
    ((1, 8), ('data', 'model')),
    ((4, 2), ('model', 'data')),
    ((2, 2, 2), ('model_a', 'model_b', 'data')),
  ):
    with pytest.raises(ValueError, match='belong to several hosts'):
      sharding._check_hosts(devices(*shape), names)


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
    (
      ('kernel', ('data',)),
      r'kernel of shape \(6, 16\) cannot be split 4 ways',
    ),
    (('bias', (None, 'model')), r'bias.*along dimension 1'),
    (('kernel', sharding.fsdp()[0][1]), "'fsdp'.*Set --config.mesh.fsdp"),
  ],
)
def test_rules_that_cannot_be_followed(rule, message):
  mesh = sharding.make_mesh(data=4, model=2)
  with pytest.raises(ValueError, match=message):
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
    (9, 1, r'batch_size=9 is global and must be a multiple of 4: '),
    (12, 2, r'of 8: it is split over 4 devices in 2 micro-batches\.'),
  ):
    with pytest.raises(ValueError, match=message):
      sharding.check_batch_size(size, mesh, parts=parts)


def shapes(model, pixels=32):
  images = jax.ShapeDtypeStruct((1, pixels, pixels, 3), 'float32')
  return jax.eval_shape(model.init, jax.random.key(0), images)['params']


def vit(scan=False):
  sizes = {'width': 64, 'depth': 4, 'mlp_dim': 256, 'num_heads': 4}
  parts = {'embedding': PatchEmbedding(8), 'pooling': Map()}
  parts['block'] = BlockOptions(mlp=SwiGlu(), gate=True)
  return tiny.vit(**sizes, **parts, num_classes=10, scan=scan)


@pytest.mark.parametrize('scan', [False, True])
def test_tensor_parallel_is_megatrons(scan):
  mesh = sharding.make_mesh(data=4, model=2)
  found = sharding.infer(shapes(vit(scan)), sharding.tensor_parallel(), mesh)
  split = {k: s.spec for k, s in tree.flatten(found).items() if any(s.spec)}
  inside = {
    **{f'attn/{x}/kernel': (None, 'model') for x in ('query', 'key', 'gate')},
    **{f'attn/{name}/bias': ('model',) for name in ('query', 'key', 'value')},
    'attn/value/kernel': (None, 'model'),
    'attn/out/kernel': ('model',),
    **{f'mlp/{x}/kernel': (None, 'model') for x in ('fc1', 'gate')},
    **{f'mlp/{x}/bias': ('model',) for x in ('fc1', 'gate')},
    'mlp/fc2/kernel': ('model',),
  }
  expected = {f'map_head/{path}': P(*spec) for path, spec in inside.items()}
  for layer in ['blocks'] if scan else [f'block_{i}' for i in range(4)]:
    for path, spec in inside.items():
      expected[f'{layer}/{path}'] = P(None, *spec) if scan else P(*spec)
  assert split == expected


@pytest.mark.parametrize('beside', [False, True])
@pytest.mark.parametrize('scan', [False, True])
def test_fsdp_takes_the_largest_dimension_left(scan, beside):
  mesh = sharding.make_mesh(fsdp=4, model=2)
  others = sharding.tensor_parallel() if beside else ()
  rules = sharding.fsdp(min_elements=1000, others=others)
  found = sharding.infer(shapes(vit(scan)), rules, mesh)
  found = {path: tuple(s.spec) for path, s in tree.flatten(found).items()}
  layer, lead = ('blocks', (None,)) if scan else ('block_3', ())
  model = 'model' if beside else None
  assert found['embedding/kernel'] == (None, None, None, 'fsdp')
  assert found['head/kernel'] == found['map_head/probe'] == ()  # 640, 64
  query = found[f'{layer}/attn/query/kernel']  # [64, 4, 16]
  assert query == (*lead, 'fsdp', *['model'] * beside)
  out = found[f'{layer}/attn/out/kernel']  # [4, 16, 64]
  assert out == (*lead, model, None, 'fsdp')
  fc1, fc2 = (found[f'{layer}/mlp/{name}/kernel'] for name in ('fc1', 'fc2'))
  if beside:
    assert fc1 == (*lead, 'fsdp', 'model') and fc2 == (*lead, 'model', 'fsdp')
  else:
    assert fc1 == (*lead, None, 'fsdp') and fc2 == (*lead, 'fsdp')
  assert found[f'{layer}/norm1/scale'] == ()  # 64 in each layer
  # 256 in each layer; 1,024, which is above the limit, in the stack.
  bias = found[f'{layer}/mlp/fc1/bias']
  assert bias == ((*lead, 'model') if beside else ())


@pytest.mark.parametrize(
  'model',
  [
    ResNet(stages=(1, 1), width_factor=1, num_classes=10),
    MlpMixer(64, 2, 32, 256, PatchEmbedding(8), num_classes=10),
  ],
)
def test_recipes_hold_for_other_models(model):
  mesh = sharding.make_mesh(fsdp=4, model=2)
  rules = sharding.fsdp(min_elements=64, others=sharding.tensor_parallel())
  params = shapes(model)
  whole = sum(x.size for x in jax.tree.leaves(params))
  found = sharding.infer(params, rules, mesh)
  held = jax.tree.map(
    lambda x, s: np.prod(s.shard_shape(x.shape)), params, found
  )
  assert sum(jax.tree.leaves(held)) < whole / 3.8


def test_what_fsdp_cannot_split_stays_whole():
  state = {'count': jax.ShapeDtypeStruct((), 'int32')}
  state |= {'odd': jax.ShapeDtypeStruct((999, 33), 'float32')}
  mesh = sharding.make_mesh(fsdp=8)
  found = sharding.infer(state, sharding.fsdp(min_elements=0), mesh)
  assert all(s.is_fully_replicated for s in found.values())


def test_optimizer_state_of_another_shape():
  """Adafactor keeps rows and columns under the parameter's name."""
  mesh = sharding.make_mesh(data=4, model=2)
  state = {'v_row': {'block_0': {'mlp': {'fc2': {'kernel': TREE['bias']}}}}}
  number, of_layers = (
    {'mlp': {'fc1': {'bias': jax.ShapeDtypeStruct(shape, 'float32')}}}
    for shape in ((1,), (4, 1))
  )
  state |= {'v_col': {'block_0': number}, 'scanned': {'blocks': of_layers}}
  found = sharding.infer(state, sharding.tensor_parallel(), mesh)
  assert all(s.is_fully_replicated for s in jax.tree.leaves(found))


@pytest.mark.parametrize(
  ('sizes', 'axes'),
  [
    ({}, {'data': 8}),
    ({'fsdp': 8}, {'data': 1, 'fsdp': 8}),
    ({'fsdp': -1, 'model': 2}, {'data': 1, 'fsdp': 4, 'model': 2}),
    ({'data': 2, 'fsdp': -1}, {'data': 2, 'fsdp': 4}),
    ({'model': 2}, {'data': 4, 'model': 2}),
  ],
)
def test_sizes_of_the_mesh(sizes, axes):
  assert dict(sharding.MeshSizes(**sizes).make().shape) == axes


def test_the_mesh_says_how_parameters_are_split():
  def specs(**sizes):
    mesh = sharding.MeshSizes(**sizes).make()
    found = sharding.infer(shapes(vit()), sharding.rules_for(mesh), mesh)
    return {k: tuple(s.spec) for k, s in tree.flatten(found).items()}

  name = 'block_0/mlp/fc1/kernel'
  assert not any(specs().values())
  assert specs(fsdp=8)[name] == (None, 'fsdp')
  assert specs(model=2)[name] == (None, 'model')
  assert specs(fsdp=4, model=2)[name] == ('fsdp', 'model')
