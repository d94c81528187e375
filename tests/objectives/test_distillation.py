"""Distillation: losses by hand, and a teacher that stays as it is."""

import functools

import jax
import numpy as np
import pytest
import scipy.special
import short_run
import tiny
from jax.sharding import PartitionSpec as P
from options import all_set, note_choices
from synthetic import Synthetic

from vit_jax import pretrained, tree
from vit_jax.data.pipeline import Data
from vit_jax.data.rasters import Raster
from vit_jax.data.targets import Labels
from vit_jax.durations import steps
from vit_jax.models.dense import Gelu, Normalize
from vit_jax.models.pooling import DistillationToken
from vit_jax.objectives import mixing
from vit_jax.objectives.classification import sigmoid_xent, softmax_xent
from vit_jax.objectives.distillation import Distillation, Teacher
from vit_jax.parallel import sharding
from vit_jax.parallel.sharding import MeshSizes
from vit_jax.step import Context
from vit_jax.weights import formats

RNG = np.random.default_rng(0)
KEY = jax.random.key(0)
BATCH = {
  'image': RNG.integers(0, 256, (8, 8, 8, 3), np.uint8),
  'label': np.arange(8, dtype=np.int32) % 4,
}
MODEL = tiny.vit(num_classes=4)
TWO_HEADS = MODEL.clone(pooling=DistillationToken())


def make_weights(model, size=8, **attributes):
  return tiny.weights(model, (size, size, 3), **{'seed': 1} | attributes)


def write(path, weights):
  formats.write(weights, path, 'vit_jax')
  return str(path)


@pytest.fixture
def teacher_file(tmp_path):
  """Weights with a preprocessing of their own."""
  made = make_weights(MODEL.clone(depth=2), preprocess=Normalize(100.0, 50.0))
  return write(tmp_path / 'teacher.npz', made)


@functools.cache
def features(model):
  return jax.jit(functools.partial(model.apply, method='features'))


def logits_of(weights, images, name='logits'):
  variables = {'params': tree.unflatten(weights.params)}
  out = features(weights.model)(variables, weights.preprocess(images))
  return np.asarray(out[name], np.float64)


def context_of(loss_fn):
  return Context(teachers=tiny.frozen(loss_fn))


def predict(teacher, student=MODEL):
  opened = teacher.open(student)
  params = opened.load(sharding.make_mesh())

  @jax.jit
  def run(params, images):
    return opened.model.apply({'params': params}, opened.convert(images))

  return run(params, BATCH['image'])


def xent(logits, classes):
  found = scipy.special.log_softmax(logits, axis=1)
  return -found[np.arange(len(classes)), classes].mean()


def kl(teacher, student, temperature):
  theirs = scipy.special.log_softmax(teacher / temperature, axis=1)
  ours = scipy.special.log_softmax(student / temperature, axis=1)
  return temperature**2 * (np.exp(theirs) * (theirs - ours)).sum(1).mean()


@pytest.mark.parametrize(
  'student, fields',
  [
    (MODEL, {}),
    (MODEL, {'temperature': 3.0, 'weight': 0.1}),
    (TWO_HEADS, {'kind': 'hard', 'weight': 0.5}),
  ],
  ids=['patient', 'soft', 'hard'],
)
def test_loss_of_models(teacher_file, student, fields):
  """Each head has its loss; the teacher normalises as its file says."""
  mine, theirs = make_weights(student, seed=2), formats.read(teacher_file)
  inner = functools.partial(softmax_xent, label_smoothing=0.1)
  loss_fn = Distillation(
    student,
    preprocess=Normalize(),
    teacher=Teacher(teacher_file),
    objective=inner,
    **fields,
  ).of_run(None, None)
  params = tree.unflatten(mine.params)
  loss, metrics = jax.jit(loss_fn)(params, BATCH, KEY, context_of(loss_fn))
  names = ('logits', 'logits')
  if student is TWO_HEADS:
    names = ('class_logits', 'distillation_logits')
  by_label, by_teacher = (logits_of(mine, BATCH['image'], x) for x in names)
  targets = logits_of(theirs, BATCH['image'])
  label_loss = 0.9 * xent(by_label, BATCH['label'])
  label_loss += 0.1 * np.mean([xent(by_label, [k] * 8) for k in range(4)])
  found = kl(targets, by_teacher, fields.get('temperature', 1.0))
  if fields.get('kind') == 'hard':
    found = xent(by_teacher, targets.argmax(1))
  weight = fields.get('weight', 1.0)
  expected = (1 - weight) * label_loss + weight * found
  np.testing.assert_allclose(loss, expected, rtol=2e-5)
  np.testing.assert_allclose(metrics['label_loss'], label_loss, rtol=2e-5)
  np.testing.assert_allclose(metrics['teacher_loss'], found, rtol=2e-5)
  same = (by_teacher.argmax(1) == targets.argmax(1)).mean()
  np.testing.assert_allclose(metrics['agreement'], same)
  right = (by_label.argmax(1) == BATCH['label']).mean()
  np.testing.assert_allclose(metrics['accuracy'], right)


def test_another_head_replaces_both(tmp_path):
  path = write(tmp_path / 'student.npz', make_weights(TWO_HEADS))
  model, params = pretrained.load(path, num_classes=7, report=None)
  assert model.pooling == DistillationToken()
  for name in ('cls', 'dist'):
    assert params['head'][name]['kernel'].shape == (16, 7)
    assert not params['head'][name]['kernel'].any()
  bare, params = pretrained.load(path, num_classes=0, report=None)
  assert 'head' not in params and bare.num_classes is None


def test_weight_0_leaves_loss_and_gradient_of_the_objective(teacher_file):
  """So the student runs as it does without a teacher, dropout included."""
  student = MODEL.clone(dropout=0.5)
  params = tree.unflatten(make_weights(student).params)
  plain = softmax_xent(student, preprocess=Normalize())
  wrapped = Distillation(
    student, preprocess=Normalize(), teacher=Teacher(teacher_file), weight=0.0
  ).of_run(None, None)
  found, expected = (
    jax.jit(jax.value_and_grad(f, has_aux=True))(params, BATCH, KEY, *more)
    for f, more in ((wrapped, (context_of(wrapped),)), (plain, ()))
  )
  np.testing.assert_allclose(found[0][0], expected[0][0], rtol=1e-6)
  tiny.assert_trees_close(found[1], expected[1], atol=1e-6)
  assert found[0][1]['accuracy'] == expected[0][1]['accuracy']


def test_activation_is_that_of_what_is_learned(teacher_file):
  make = functools.partial(
    Distillation,
    MODEL,
    preprocess=Normalize(),
    teacher=Teacher(teacher_file),
    objective=sigmoid_xent,
  )
  assert make().activation == 'softmax'
  assert make(weight=0.5).activation == 'sigmoid'


def test_the_teacher_sees_mixed_images(teacher_file):
  half = mixing.Blend(*np.full(2, 0.5, 'f'), np.array([0, 0, 8, 8]))
  outer = mixing.Mixed(
    MODEL,
    preprocess=Normalize(),
    objective=functools.partial(Distillation, teacher=Teacher(teacher_file)),
    mixer=lambda rng, size: half,
  ).of_run(None, None)
  weights = make_weights(MODEL, seed=2)
  params = tree.unflatten(weights.params)
  loss, _ = jax.jit(outer)(params, BATCH, KEY, context_of(outer))
  images = BATCH['image'].astype(np.float32)
  images = (images + np.roll(images, 4, axis=0)) / 2
  targets = logits_of(formats.read(teacher_file), images)
  expected = kl(targets, logits_of(weights, images), 1.0)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize('scan', [False, True])
def test_teachers_are_scanned_and_in_the_dtype_of_the_student(
  teacher_file, scan
):
  teacher = Teacher(teacher_file, options={'scan': scan})
  found = predict(teacher, MODEL.clone(dtype='bfloat16'))
  opened = teacher.open(MODEL.clone(dtype='bfloat16'))
  assert opened.model.dtype == 'bfloat16'
  assert ('blocks' in opened.abstract_params(sharding.make_mesh())) == scan
  expected = logits_of(formats.read(teacher_file), BATCH['image'])
  np.testing.assert_allclose(found, expected, atol=0.2)


def test_all_fields_of_a_teacher_act(teacher_file, monkeypatch):
  options, calls = {'step': 3, 'block.mlp': Gelu('exact')}, []

  def read(path, *, step, read=formats.read, **others):
    calls.append((path, step))
    return read(path, **others)

  path, file = teacher_file, formats.read(teacher_file)
  monkeypatch.setattr(formats, 'read', read)
  given = {'options': options, 'image_size': 8, 'same_classes': True}
  teacher = all_set(Teacher, path=path, **given)
  opened = teacher.open(MODEL)
  assert opened.model.block.mlp.form == 'exact'
  rules = [('teacher/head/kernel', (None, 'data'))]
  loaded = opened.load(sharding.make_mesh(data=4, fsdp=2), rules)
  assert loaded['head']['kernel'].sharding.spec == P(None, 'data')
  tiny.assert_trees_close(loaded, tree.unflatten(file.params))
  assert teacher.fingerprint()
  assert calls == [(path, 3)] * 3


def test_mistakes(teacher_file, tmp_path):
  bare = make_weights(MODEL.clone(num_classes=None))
  bare = write(tmp_path / 'bare.npz', bare)
  for path, fields, named in [
    ('nothing.npz', {}, 'nothing.npz'),
    (bare, {}, 'no classes'),
    (teacher_file, {'model': MODEL.clone(num_classes=5)}, '4 .* student 5'),
    (teacher_file, {'kind': 'hard', 'temperature': 2.0}, 'temperature=2'),
    (teacher_file, {'model': TWO_HEADS}, 'weight=1 does not'),
  ]:
    given = {'model': MODEL, 'preprocess': Normalize()} | fields
    with pytest.raises(ValueError, match=named):
      Distillation(teacher=Teacher(path), **given).of_run(None, None)
  labels = make_weights(MODEL, targets=Labels(('a', 'b', 'c', 'd')))
  with pytest.raises(ValueError, match=r'learned Labels.*Classes and Grades'):
    Teacher(write(tmp_path / 'labels.npz', labels)).open(MODEL)


# Training.


def test_other_classes_of_the_teacher_are_refused(tmp_path, monkeypatch):
  weights = make_weights(MODEL, class_names=['a', 'b', 'd', 'c'])
  path = write(tmp_path / 'teacher.npz', weights)

  source = Synthetic(image_size=8, num_classes=4, num_examples=32)
  source.class_names = ['a', 'b', 'c', 'd']

  def run(rules=None, **fields):
    how = {'teacher': Teacher(path, **fields), 'kind': 'hard', 'weight': 0.5}
    return short_run.run(
      tmp_path / 'run',
      model=TWO_HEADS,
      data=Data(source, 8),
      objective=functools.partial(Distillation, **how),
      total=steps(4),
      mesh=MeshSizes(data=2, fsdp=2, model=2),
      sharding=rules,
      dry_run=True,
    )

  with pytest.raises(ValueError, match='and the teacher 4, with other'):
    run()
  chosen = note_choices(monkeypatch)
  assert run(same_classes=True) is None
  assert [x[-1] for x in chosen] == [True, False]  # the teacher has no gradient
  with pytest.raises(ValueError, match="no mesh axis 'x'"):
    run([('teacher/head/.*', ('x',))], same_classes=True)
  weights.decode = Raster(3)
  path = write(tmp_path / 'rasters.npz', weights)
  with pytest.raises(ValueError, match='teacher is for images of float32'):
    run(same_classes=True)
