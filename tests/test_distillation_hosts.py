"""A student learns the same from a teacher on one host and on two.

The test starts two processes that run this file, and compares their run with
one of its own. The teacher is split over the devices of both.
"""

import pathlib
import sys

import numpy as np
import pytest
from test_distillation import MODEL, arguments, make_weights, write
from test_meshes_hosts import run_two_processes

from vit_jax.objectives.teacher import Teacher
from vit_jax.parallel import hosts as distributed
from vit_jax.parallel.sharding import MeshSizes, fsdp
from vit_jax.runs import stored
from vit_jax.runs.metrics import read_records
from vit_jax.train import train

KEYS = 'train/loss', 'train/teacher_loss'


def run(folder, name):
  """Train with a teacher, over all devices of all hosts."""
  settings = arguments(
    Teacher(str(folder / 'teacher.npz')),
    mesh=MeshSizes(data=2, fsdp=4),
    sharding=fsdp(min_elements=64),
  )
  train(folder / name, **settings)


def losses(workdir):
  records = [r for r in read_records(workdir) if KEYS[0] in r]
  return np.array([[r[key] for key in KEYS] for r in records])


@pytest.mark.slow
def test_two_hosts_learn_what_one_does(tmp_path):
  write(tmp_path / 'teacher.npz', make_weights(MODEL.clone(depth=2)))
  run(tmp_path, 'one')
  run_two_processes(tmp_path, __file__)
  expected, found = losses(tmp_path / 'one'), losses(tmp_path / 'two')
  assert len(expected) == 4 and (expected[:, 1] > 0).all()
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  params, _ = stored.load_params(tmp_path / 'one')
  others, _ = stored.load_params(tmp_path / 'two')
  for path, value in params.items():
    # Measured: 8e-6. Adam enlarges roundings of small gradients.
    np.testing.assert_allclose(others[path], value, atol=4e-5, err_msg=path)


if __name__ == '__main__':
  distributed.initialize()
  with distributed.failing_together():
    run(pathlib.Path(sys.argv[1]), 'two')
