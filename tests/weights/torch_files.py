"""What the tests of timm's and of Hugging Face's files share."""

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
