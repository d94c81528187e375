"""Feature distillation: formulas in float64, and any teacher."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import record_feature_distillation as recorder
import tiny
from synthetic import Synthetic

from vit_jax import pretrained, tree
from vit_jax.data.pipeline import Data
from vit_jax.durations import Timeline
from vit_jax.evals.representation import Representation
from vit_jax.models.dense import Normalize
from vit_jax.models.pooling import ClassToken, Mean
from vit_jax.models.resnet import ResNet
from vit_jax.models.vit import PatchEmbedding
from vit_jax.objectives import feature_distillation
from vit_jax.objectives.colours import Colour, Views
from vit_jax.objectives.feature_distillation import FeatureDistillation
from vit_jax.objectives.frozen_teacher import FrozenTeacher
from vit_jax.parallel import sharding
from vit_jax.step import Context
from vit_jax.weights import formats

KEY = jax.random.key(0)
PLAIN = Views((Colour(flip=0, jitter_probability=0, grey=0, blur=0),))
STUDENT = tiny.vit(width=8, mlp_dim=16, num_classes=0)
TEACHER = tiny.vit(width=12, pooling=ClassToken(num_registers=2))
GOLDEN = tiny.golden('feature_distillation')
IMAGES = np.random.default_rng(0).integers(0, 256, (8, 16, 16, 3), np.uint8)


part = functools.partial(tiny.under, GOLDEN)


def write(path, model=TEACHER, size=24, **attributes):
  """Write a teacher with a normalisation of its own; return its path."""
  attributes = {'preprocess': Normalize(100.0, 50.0), 'seed': 1} | attributes
  weights = tiny.weights(model, (size, size, 3), **attributes)
  formats.write(weights, path, 'vit_jax')
  return str(path)


@pytest.fixture(scope='module')
def teacher_file(tmp_path_factory):
  return write(tmp_path_factory.mktemp('teacher') / 'teacher.npz')


def make(path, kind=FeatureDistillation, model=STUDENT, **fields):
  given = {'views': PLAIN, 'queue': 12, 'preprocess': Normalize()}
  loss_fn = kind(model, teacher=FrozenTeacher(path), **given | fields)
  return loss_fn.of_run(Timeline(8, 50), None)


def start(loss_fn, model=STUDENT, size=16):
  """Return the first parameters, and the context of the first step."""
  images = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
  params = tree.unflatten(tiny.normal_params(model, (size, size, 3), 0.3))
  params['objective'] = loss_fn.init(KEY, images)
  frozen = tiny.frozen(loss_fn)
  return params, Context(carried=loss_fn.carried(), teachers=frozen)


# Against the formulas.


class Given(FeatureDistillation):
  """Distillation of the recorded features, for a linear student."""

  def prepare(self, batch, rng):
    return batch

  def encode(self, seen):
    return seen

  def features(self, seen):
    params, batch = seen.params, seen.batch
    if 'stem' in params:
      patches = jnp.matmul(batch['student_patches'], params['stem'])
      student = jnp.mean(patches, axis=(1, 2)), patches
    else:
      student = params['student'], params['student_patches']
    return student, (batch['teacher'], batch['teacher_patches'])


@pytest.fixture
def recorded(teacher_file):
  return make(teacher_file, Given, queue=recorder.QUEUE, weight=recorder.WEIGHT)


def weights(**more):
  """Return the first recorded parameters."""
  arrays = recorder.weights()
  params = {'objective/' + k: x for k, x in arrays.items() if k != 'stem'}
  return tree.unflatten(params | more)


def test_loss_gradient_and_queue_are_those_of_the_formulas(recorded):
  batch = recorder.inputs(0)
  params = weights(**{k: x for k, x in batch.items() if 'student' in k})
  queue = np.float32(recorder.unit(np.float64(batch['queue'])))

  def loss(params):
    value, *aux = recorded(params, batch, KEY, Context(carried=queue))
    return value, aux

  grads, (metrics, queue) = jax.jit(jax.grad(loss, has_aux=True))(params)
  names = 'loss', 'global_loss', 'local_loss'
  found = [metrics[name] for name in names]
  np.testing.assert_allclose(found, GOLDEN['loss/values'], rtol=1e-6)
  np.testing.assert_allclose(queue, GOLDEN['loss/queue'], atol=2e-7)
  found, expected = tree.flatten(grads), part('grad/')
  for path, x in expected.items():
    path = path if 'student' in path else f'objective/{path}'
    np.testing.assert_allclose(found[path], x, 0, 1e-6 * abs(x).max())


def test_ten_steps_are_those_of_the_formulas(recorded):
  tx = optax.adamw(**recorder.ADAMW)
  params = weights(stem=recorder.weights()['stem'])
  queue = np.zeros((recorder.QUEUE, recorder.TEACHER), np.float32)
  state = tiny.first_state(params, tx, carried=queue)
  step = tiny.compiled_step(recorded, tx)
  losses = []
  for i in range(recorder.STEPS):
    state, metrics = step(state, recorder.inputs(i + 1))
    losses.append(metrics['loss'])
  np.testing.assert_allclose(losses, GOLDEN['losses'][:, 0], rtol=1e-5)
  np.testing.assert_allclose(state.carried, GOLDEN['queue'], atol=2e-7)
  found = tree.flatten(state.params)
  for path, x in part('last/').items():
    path = path if path == 'stem' else f'objective/{path}'
    np.testing.assert_allclose(found[path], x, 1e-4, 1e-5)


def test_loss_of_models(teacher_file):
  """Each sees the images as it is used to; 4x4 patches meet 6x6."""
  preprocess = Normalize(80.0, 50.0)
  options = {'temperature': 0.1, 'weight': 0.5, 'preprocess': preprocess}
  fn = make(teacher_file, **options)
  params, context = start(fn)
  loss, _, queue = jax.jit(fn.__call__)(params, {'image': IMAGES}, KEY, context)
  teacher = formats.read(teacher_file)
  big = jax.image.resize(teacher.preprocess(IMAGES), (8, 24, 24, 3), 'bilinear')
  batch = {}
  for name, model, arrays, images in (
    ('student', STUDENT, params, preprocess(IMAGES)),
    ('teacher', TEACHER, tree.unflatten(teacher.params), big),
  ):
    run = jax.jit(functools.partial(model.apply, method='features'))
    out = jax.device_get(run({'params': arrays}, images))
    grid = model.embedding.grid(images.shape[1:])
    patches = out['tokens'][:, -grid[0] * grid[1] :]
    batch[name] = np.float64(out['pooled'])
    batch[f'{name}_patches'] = np.float64(patches).reshape(8, *grid, -1)
  queue_before = np.zeros((12, 12))
  maps = recorder.wide(tree.flatten(params['objective']))
  with pytest.MonkeyPatch.context() as patch:
    for name, value in {
      **{'QUEUE': 12, 'WEIGHT': 0.5, 'IMAGES': 8, 'TEACHER': 12},
      **{'TEACHER_GRID': (6, 6), 'TEMPERATURE': 0.1},
    }.items():
      patch.setattr(recorder, name, value)
    expected, queue_after = recorder.distil(maps, batch, queue_before)
  np.testing.assert_allclose(loss, expected[0], rtol=1e-4)
  np.testing.assert_allclose(queue, queue_after, atol=1e-5)


# Images, the queue and teachers.


def test_the_whole_batch_is_mixed_with_a_permutation_of_it(teacher_file):
  assert FeatureDistillation.views == Views((Colour(blur=0.0),))  # of v3
  prepare = jax.jit(make(teacher_file).prepare)
  mixed = prepare({'image': IMAGES}, KEY)['image']
  flat = IMAGES.reshape(8, -1).astype(np.float64)
  found = np.asarray(mixed, np.float64).reshape(8, -1)
  # Each is a weighted mean of two images; the weights are the same for all.
  shares, *_ = np.linalg.lstsq(flat.T, found.T, rcond=None)
  np.testing.assert_allclose(shares.sum(0), 1, atol=1e-5)
  values = np.unique(shares[abs(shares) > 1e-4].round(3))
  assert len(values) <= 3 and (values > 0).all()
  np.testing.assert_allclose(shares.sum(1), 1, atol=1e-5)  # each once


def test_the_queue_follows_from_the_number_of_images(teacher_file):
  sizes = {1: 2, 50: 16, 4000: 1024, 20_000: 8192, 10**7: 8192}
  assert {n: feature_distillation.queue_length(n) for n in sizes} == sizes
  assert make(teacher_file, queue=None).carried().shape == (16, 12)
  assert make(teacher_file).queue == 12


@pytest.mark.parametrize(
  'model, size',
  [
    (tiny.vit(pooling=Mean(norm='after'), embedding=PatchEmbedding(2)), 8),
    (ResNet(stages=(1,), width_factor=1), 16),
  ],
  ids=['mean', 'resnet'],
)
def test_other_teachers_one_image_and_a_short_queue(model, size, tmp_path):
  """A batch of 1 is mixed with itself; 8 images leave 2 in the queue."""
  path = write(tmp_path / 'other.npz', model, size)
  loss_fn = make(path, queue=2)
  params, context = start(loss_fn)

  @jax.jit
  @jax.value_and_grad
  def fn(params, batch, context):
    return loss_fn(params, loss_fn.prepare(batch, KEY), KEY, context)[0]

  for count in (1, 8):
    loss, grads = fn(params, {'image': IMAGES[:count]}, context)
    assert loss > 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))
    assert np.any(grads['embedding']['kernel'])


def test_a_teacher_sees_images_of_another_size(teacher_file):
  teacher = FrozenTeacher(teacher_file, image_size=(16, 8)).open(STUDENT)
  found = teacher.load(sharding.make_mesh())
  how = {'image_size': (16, 8), 'num_classes': 0, 'report': None}
  _, expected = pretrained.load(teacher_file, **how)
  tiny.assert_trees_close(found, expected, atol=0)
  assert teacher.convert(IMAGES).shape == (8, 16, 8, 3)


def test_images_of_other_channels_are_refused(teacher_file):
  loss_fn = make(teacher_file)
  with pytest.raises(ValueError, match='of 3 channels, and these have 1'):
    loss_fn.teacher.convert(IMAGES[..., :1])


# The student against the teacher.


def test_shared_neighbours_and_colours_of_both(teacher_file):
  source = Synthetic(image_size=24, num_classes=3, num_examples=40)
  given = {'mesh': sharding.make_mesh(), 'data': Data(source, 8), 'k': 5}
  teacher = formats.read(teacher_file)

  def compare(model, params, preprocess):
    watch = Representation(
      model, preprocess=preprocess, teacher=FrozenTeacher(teacher_file), **given
    )
    return watch, watch.run(tree.unflatten(params))['shared_neighbours']

  watch, same = compare(TEACHER, teacher.params, teacher.preprocess)
  assert same == 1
  found = watch.pictures(tree.unflatten(teacher.params))
  (title, rows), _ = found.items()
  assert title.startswith('PCA of patches (student ') and '; teacher ' in title
  assert len(rows) == 8 and {x.shape for x in rows[0]} == {(24, 24, 3)}
  np.testing.assert_allclose(rows[0][1], np.int32(rows[0][2]), atol=1)
  params = tiny.normal_params(STUDENT, (24, 24, 3))
  _, other = compare(STUDENT, params, Normalize())
  assert 0 < other < 1
  params = {k: np.full_like(x, np.nan) for k, x in params.items()}
  assert np.isnan(compare(STUDENT, params, Normalize())[1])
  one = dataclasses.replace(source, num_examples=1)
  given['data'] = Data(one, 8)
  params = tiny.normal_params(STUDENT, (24, 24, 3))
  assert compare(STUDENT, params, Normalize())[1] == 0  # it has no others
