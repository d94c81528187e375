"""What the tests of timm's and of Hugging Face's files share."""

import copy
import json
import pathlib
import sys

import jax
import numpy as np

from vit_jax import tree

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
sys.path.insert(0, str(GOLDEN))
import seeded  # noqa: E402

# Of the largest logit; the largest found: 5e-7 of ViTs, 1.1e-6 of ResNets.
BOUND = 2e-6
# Without any optimization some CPUs are 10 times less precise, 2.3e-6.
_FAST = {'xla_backend_optimization_level': 1}  # to compile
HOSTILE = ['3', '../x', -1, 0, 2.5, 1e300, float('nan'), True, None, [], {}]
HOSTILE += [[0, 0], [10**9, 10**9], ['a', 'b', 'c'], {'target': 'os.system'}]


def load(name):
  return json.loads((GOLDEN / name).read_text())


def fill(case):
  """The arrays that were given to a recorded model."""
  return seeded.weights({k: tuple(v) for k, v in case['shapes'].items()})


def logits(weights):
  images = seeded.images(weights.image_shape)
  params = {'params': tree.unflatten(weights.params)}
  run = jax.jit(weights.model.apply, compiler_options=_FAST)
  return np.asarray(run(params, images))


def check_logits(weights, case, bound=BOUND):
  expected = np.asarray(case['logits'])
  error = np.abs(logits(weights) - expected).max()
  assert error <= bound * np.abs(expected).max()


def check_row(weights, case):
  """A picture comes out of our preprocessing as it came out of theirs."""
  picture = seeded.picture()
  for transform in weights.transforms:
    picture = transform(picture, None)
  made = np.asarray(weights.preprocess(picture))
  assert made.shape == weights.image_shape
  row = np.asarray(seeded.middle_row(made.transpose(2, 0, 1)))
  level = 1 / 255 / 0.224  # they and we round to uint8 at times
  np.testing.assert_allclose(row, np.asarray(case['row']), atol=1.6 * level)


def equal(a, b):
  return a.keys() == b.keys() and all(
    a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k]) for k in a
  )


def hostile(config, every=1):
  """(path, config with one value replaced), many of them."""
  for i, path in enumerate(_paths(config)):
    for value in HOSTILE[i % every :: every]:
      changed = copy.deepcopy(config)
      node = changed
      for key in path[:-1]:
        node = node[key]
      node[path[-1]] = value
      yield (*path, value), changed


def _paths(value, path=()):
  if path:
    yield path
  if isinstance(value, dict):
    for key in value:
      yield from _paths(value[key], (*path, key))


def reads(read, arrays, config):
  """Whether it is read; all but a ValueError and sound Weights is a fault."""
  try:
    weights = read(arrays, config)
  except ValueError:
    return False
  assert all(0 < side <= 2**15 for side in weights.image_shape)
  assert all(map(callable, (*weights.transforms, weights.preprocess)))
  assert weights.activation in ('softmax', 'sigmoid')
  return True


def broken(arrays):
  """(what, arrays) that are no model any more."""
  for i, (name, array) in enumerate(arrays.items()):
    kinds = {
      'no': {k: v for k, v in arrays.items() if k != name},
      'cut': arrays | {name: array[:-1]},
      'deep': arrays | {name: array[None]},
      'more': arrays | {f'{name}x': array},
      'scalar': arrays | {name: np.float32(0)},
      'empty': arrays | {name: np.zeros((0,) * array.ndim)},
    }
    for kind in ('no', list(kinds)[1 + i % 5]):
      yield f'{kind} {name}', kinds[kind]
