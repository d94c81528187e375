"""An anchor: other objectives, the frozen start; its numbers are DINOv2's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import record_dinov2 as recorder
import recorded_dinov2 as recorded
import tiny

from vit_jax.durations import Timeline
from vit_jax.models.dense import Normalize
from vit_jax.models.pooling import ClassToken
from vit_jax.models.resnet import ResNet
from vit_jax.objectives.anchor import Anchored, Start
from vit_jax.objectives.dino import Dino, DinoHead
from vit_jax.objectives.feature_distillation import FeatureDistillation
from vit_jax.objectives.frozen_teacher import FrozenTeacher
from vit_jax.objectives.lejepa import LeJepa, Projector
from vit_jax.objectives.mae import Mae
from vit_jax.step import Context
from vit_jax.types import UserError
from vit_jax.weights import formats
from vit_jax.weights.surgery import InitFrom

KEY = jax.random.key(0)
MODEL = tiny.vit(num_classes=0)
IMAGES = jax.ShapeDtypeStruct((1, 16, 16, 3), jnp.float32)
TIMELINE = Timeline(4, 8, 10)
PROJECTOR = Projector(8, (12, 10), 4)
VIEWS = recorded.FIELDS['views']
LEJEPA = functools.partial(LeJepa, projector=PROJECTOR, views=VIEWS)
INNER = {
  'lejepa': LEJEPA,
  'dino': functools.partial(Dino, head=DinoHead(16, 12, 6), views=VIEWS),
}


@pytest.fixture(scope='module')
def path(tmp_path_factory):
  """Weights for images of another size, with a head."""
  path = tmp_path_factory.mktemp('start') / 'weights.npz'
  weights = tiny.weights(MODEL.clone(num_classes=3), (24, 24, 3))
  formats.write(weights, path, 'vit_jax')
  return str(path)


def make(path, name, model=MODEL, **options):
  teacher = functools.partial(FeatureDistillation, teacher=FrozenTeacher(path))
  made = Anchored(
    model,
    preprocess=Normalize(),
    objective=INNER.get(name, teacher),
    start=Start(InitFrom(path)),
    **options,
  )
  return made.of_run(TIMELINE, IMAGES)


def batch_of(i):
  crops = recorder.crops(i)
  return {'image': crops['image'], 'local': crops['local'][:, :, :8, :8]}


@pytest.mark.parametrize('name', [*INNER, 'features'])
def test_an_anchor_adds_to_any_objective_of_views(name, path):
  """The anchor of the start itself is 0. Its table is resized for the crops."""
  loss_fn = make(path, name, weight=2.0)
  frozen = tiny.frozen(loss_fn)
  start = frozen['start']
  assert start['pos_embedding'].shape == (1, 4, 4, 16)
  added = jax.jit(lambda key: loss_fn.init(key, IMAGES))(KEY)
  params = jax.device_get({**start, 'objective': added})
  moved = params | {'norm': {k: x + 0.5 for k, x in params['norm'].items()}}
  batch = jax.tree.map(np.float32, batch_of(0))
  if name == 'features':  # which has a teacher, too, and one view
    assert frozen['teacher']['pos_embedding'].shape == (1, 6, 6, 16)
    batch = {'image': batch['image'][:, 0]}
  whole, inner = (jax.jit(x.__call__) for x in (loss_fn, loss_fn.inner))
  context = Context(0, params, loss_fn.carried(), frozen)
  _, same, *_ = whole(params, batch, KEY, context)
  np.testing.assert_allclose(same['anchor'], 0, atol=1e-12)
  for _ in range(2):  # the second step has what the inner objective carries
    loss, metrics, *carried = whole(moved, batch, KEY, context)
    plain, _, *expected = inner(moved, batch, KEY, context)
    assert metrics['anchor'] > 1e-4
    np.testing.assert_allclose(loss, plain + 2 * metrics['anchor'], rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, carried, expected)
    assert len(carried) == (name in ('dino', 'features'))
    context = context._replace(carried=(*expected, None)[0])
  assert loss_fn.whole_batch == loss_fn.inner.whole_batch
  assert (loss_fn.ema_weight is None) == (name != 'dino')


def test_what_cannot_be_anchored_is_refused(path):
  for model, objective, named in (
    (ResNet(stages=(1,), num_classes=0), INNER['lejepa'], 'a ResNet'),
    (MODEL, Mae, 'objective Mae'),
  ):
    with pytest.raises(UserError, match=named):
      Anchored(
        model,
        preprocess=Normalize(),
        objective=objective,
        start=Start(InitFrom(path)),
      )
  model = MODEL.clone(pooling=ClassToken(num_registers=2))
  loss_fn = make(path, 'lejepa', model)
  with pytest.raises(UserError, match=r'(?s)do not fit.*registers'):
    tiny.frozen(loss_fn)
