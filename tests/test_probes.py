"""Probes: what they measure, in which steps, and how it is written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import scalars

from vit_jax.durations import Timeline, steps
from vit_jax.probes import EDGES, Histograms, Norms, Probe
from vit_jax.runs.monitor import Monitor, NonFiniteError
from vit_jax.runs.records import read_records


def test_norms_and_histograms_of_each_layer():
  layers = np.float32([[[0, 3], [-4, np.inf]], [[1e-20, -1e-3], [2e9, 0.25]]])
  grads = {'blocks': {'fc1': {'kernel': layers, 'bias': layers[0]}}}
  norms, found = Norms()(grads=grads), Histograms()(grads=grads)
  assert [*norms] == [f'grads/block_{i}/fc1/kernel' for i in range(2)]
  np.testing.assert_allclose([*norms.values()], [np.inf, 2e9], rtol=1e-6)
  for name, layer in zip(norms, np.clip(layers, EDGES[0], EDGES[-1])):
    assert found[name].tolist() == np.histogram(layer, EDGES)[0].tolist()
  with pytest.raises(ValueError, match=r"probes: paths: \['fc1'\] match no"):
    Norms(paths=['fc1'])(grads=grads)


def test_a_probe_is_called_in_its_steps_and_the_last():
  probe = Probe(lambda step: {'square': step**2}, steps(3))
  call = jax.jit(lambda n: probe(Timeline(1, 9, total_steps=7), step=n))
  found = [(bool(due), int(x['square'])) for due, x in map(call, range(1, 8))]
  off = (False, 0)
  assert found == [off, off, (True, 9), off, off, (True, 36), (True, 49)]


def test_records_and_events(tmp_path):
  monitor = Monitor(tmp_path, Timeline(1, 9, total_steps=9))
  counts = np.zeros(len(EDGES) - 1, np.int32)
  counts[[10, 40, 70]] = 1, 2, 1
  values = {'norm': jnp.float32(2), 'counts': jnp.asarray(counts)}
  probes = {'a': (np.array(True), values), 'b': (np.array(False), values)}
  monitor.step(1, {'loss': jnp.float32(1), 'probes': probes})
  bad = dict.fromkeys('wxyz', np.float32(np.nan))
  monitor.step(2, {'probes': {'c': (np.array(True), bad)}})
  with pytest.raises(NonFiniteError, match=r'/w=nan, .*/y=nan, \.\.\. in ste'):
    monitor.flush()
  monitor.close()
  found = {k: x for k, x in read_records(tmp_path)[0].items() if 'probes' in k}
  assert [*found.values()] == [2, *EDGES[[11, 41, 71]]]
  assert scalars(tmp_path)['train/probes/a/counts'] == [(1, counts.tolist())]
