"""Checksums on devices and on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.parallel import sharding
from vit_jax.runs import checksums


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'int32', 'bool'])
@pytest.mark.parametrize('shape', [(), (5,), (0, 3), (8, 4, 6), (3, 70_000)])
def test_host_and_device_agree(shape, dtype):
  values = 10 * np.random.default_rng(0).normal(size=shape)
  array = np.asarray(values).astype(jnp.dtype(dtype))
  on_device = checksums.of_device(jnp.asarray(array))
  assert int(on_device) == checksums.of_host(array)


def test_a_checksum_does_not_depend_on_the_sharding():
  array = np.random.default_rng(0).normal(size=(8, 4, 6)).astype(np.float32)
  mesh = sharding.make_mesh(data=4, model=2)
  for spec in (P('data'), P(None, 'data', 'model'), P(('data', 'model'))):
    sharded = jax.device_put(array, NamedSharding(mesh, spec))
    assert int(checksums.of_device(sharded)) == checksums.of_host(array)


def test_arrays_of_a_cpu_are_read_by_the_host(monkeypatch):
  items = {'state': {'a': jnp.arange(6.0), 'key': jax.random.key(1)}}
  by_host = checksums.Checksums.of(items, {}, None)
  monkeypatch.setattr(checksums, 'in_host_memory', lambda _: False)
  by_program = checksums.Checksums.of(items, {}, None)
  for path, (*described, checksum) in by_host.arrays['state'].items():
    *expected, on_device = by_program.arrays['state'][path]
    assert isinstance(on_device, jax.Array)
    assert described == expected
    assert checksum == int(on_device)


def test_each_bit_and_each_place_counts():
  array = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
  expected = checksums.of_host(array)
  for bit in range(8 * array.nbytes):
    data = bytearray(array.tobytes())
    data[bit // 8] ^= 1 << bit % 8
    flipped = np.frombuffer(data, np.float32).reshape(array.shape)
    assert checksums.of_host(flipped) != expected
  for other in (array[::-1], array[:, ::-1], -array, array.reshape(4, 3)):
    assert checksums.of_host(other) != expected
