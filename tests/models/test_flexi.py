"""Patches of several sizes: parameters of one size, and runs that resume."""

import functools
import types

import jax
import numpy as np
import optax
import pytest
import short_run
import tiny

from vit_jax import tree
from vit_jax.config import Provenance
from vit_jax.durations import steps
from vit_jax.models import flexi, resample
from vit_jax.optim.optimizers import Optimizer
from vit_jax.optim.schedules import Schedule
from vit_jax.pretrained import fit
from vit_jax.runs.checkpoint import Checkpoints
from vit_jax.runs.monitor import Logging
from vit_jax.runs.records import read_records
from vit_jax.tools.convert import save
from vit_jax.training import Evaluation
from vit_jax.weights import formats

EMBEDDING = flexi.FlexiPatches(4, kernel_size=3, method='bilinear_antialias')
MODEL = tiny.vit(
  embedding=EMBEDDING,
  posemb=flexi.FlexiPositions(stored=(3, 3), resize_method='bicubic'),
)
SIZES = flexi.RandomPatches((2, 4))


run = functools.partial(
  short_run.run,
  model=MODEL,
  optimizer=Optimizer(optax.adam),
  schedule=Schedule(lr=0.01, decay='constant'),
  total=steps(8),
  variants=SIZES,
  checkpoints=Checkpoints(every=steps(3)),
  logging=Logging(every=steps(8)),
)


def test_a_run_equals_plain_models_and_resumes(tmp_path, capsys):
  """Evaluators see both sizes, and a converted model is that of its size."""
  images = np.random.default_rng(0).random((2, 8, 8, 1), np.float32)

  def evaluator(model, *, preprocess, mesh):
    def run(params):
      logits = jax.jit(model.apply)({'params': jax.device_get(params)}, images)
      return {str(i): float(x) for i, x in enumerate(logits.flatten())}

    return types.SimpleNamespace(run=run)

  evals = {
    f'patch{n}': Evaluation(evaluator, change=SIZES.changes[f'patch_{n}'])
    for n in (2, 4)
  }
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  final = run(whole, evals=evals)
  run(parts, total=steps(4))
  allowed = Provenance(allow_changes=['total_steps'])
  resumed = run(parts, provenance=allowed)
  shapes = tree.flatten(final.params)
  assert shapes['embedding/kernel'].shape == (3, 3, 1, 16)
  assert shapes['pos_embedding'].shape == (1, 3, 3, 16)
  for a, b in zip(jax.tree.leaves(final), jax.tree.leaves(resumed)):
    if not jax.numpy.issubdtype(a.dtype, jax.dtypes.prng_key):
      np.testing.assert_array_equal(a, b)
  *_, record = (x for x in read_records(whole) if 'train/loss' in x)
  drawn = SIZES.of_steps(8, 0)
  assert {*drawn} == {0, 1}
  each = [record[f'train/patch_{n}/loss'] for n in (2, 4)]
  counts = np.bincount(drawn)
  np.testing.assert_allclose(np.dot(each, counts) / 8, record['train/loss'])

  weights = formats.read(whole)
  assert weights.model.embedding == EMBEDDING
  save(weights, tmp_path / 'timm', 'timm')  # with its own size
  kernel = formats.read(tmp_path / 'timm').params['embedding/kernel']
  assert kernel.shape == (4, 4, 1, 16)
  results = read_records(whole)[-2]
  for n in (2, 4):
    plain, _ = fit(weights, patch_size=n)
    assert type(plain.model.embedding).__name__ == 'PatchEmbedding'
    assert plain.params['embedding/kernel'].shape == (n, n, 1, 16)
    assert plain.params['pos_embedding'].shape == (1, 8 // n, 8 // n, 16)
    params = tree.unflatten(plain.params)
    logits = jax.jit(plain.model.apply)({'params': params}, images).flatten()
    found = [results[f'patch{n}/{i}'] for i in range(logits.size)]
    np.testing.assert_allclose(found, logits, atol=2e-6)


def test_sizes_are_drawn_equally_often_for_any_length():
  sizes = flexi.RandomPatches((2, 4, (4, 2)))
  assert [*sizes.changes] == ['patch_2', 'patch_4', 'patch_4x2']
  drawn = sizes.of_steps(6000, 1)
  assert drawn.dtype == np.uint8
  np.testing.assert_array_equal(sizes.of_steps(100, 1), drawn[:100])
  assert max(abs(np.bincount(drawn) - 2000)) < 150
  assert (sizes.of_steps(100, 2) != drawn[:100]).any()


@pytest.mark.parametrize('size', [(6, 3), 2, (3, 3)])
def test_kernels_are_resized_in_a_program_as_in_numpy(size):
  kernel = np.random.default_rng(0).standard_normal((3, 3, 2, 5), np.float32)
  sides = (size, size) if isinstance(size, int) else size
  expected = resample.resize_kernel(kernel, sides, 'bilinear')
  found = jax.jit(lambda x: resample.resize_kernel(x, sides, 'bilinear'))(
    kernel
  )
  np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize(
  'options, message',
  [
    ({'variants': flexi.RandomPatches((2, 3))}, r'patch_3: .*3x3'),
    ({'model': tiny.vit()}, r'patches of this model have one size'),
    (
      {'model': tiny.vit(embedding=EMBEDDING)},
      r'patch_2: this model or objective has other parameters',
    ),
  ],
)
def test_mistakes_are_refused_before_the_first_step(options, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    run(tmp_path, **options)
