"""Terms of a loss: their values, no second pass, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import tiny

from vit_jax import config, tree
from vit_jax.analysis import flops
from vit_jax.durations import Timeline
from vit_jax.models.dense import Normalize
from vit_jax.objectives import terms
from vit_jax.objectives.classification import softmax_xent
from vit_jax.objectives.feature_distillation import FeatureDistillation
from vit_jax.objectives.frozen_teacher import FrozenTeacher
from vit_jax.objectives.mixing import Mixup, mixed
from vit_jax.step import Context, Seen, Term
from vit_jax.weights import formats

KEY = jax.random.key(0)
MODEL = tiny.vit(num_classes=4)
BATCH = {
  'image': np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8),
  'label': np.arange(4, dtype=np.int32),
}


def test_values():
  x = np.random.default_rng(0).normal(7, size=(5, 2, 3))
  features = {'image': dict.fromkeys(('pre_logits', 'logits'), x)}
  seen = Seen({}, {}, KEY, Context(), features)
  made = terms.z_loss, terms.Decorrelation(), terms.Koleo()
  found = jax.jit(lambda: [term(seen) for term in made])()
  others = np.corrcoef(x.reshape(-1, 3).T)[~np.eye(3, dtype=bool)]
  unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
  away = np.linalg.norm(unit[:, None] - unit, axis=-1)
  nearest = np.sort(away, axis=1)[:, 1]  # of another image, in each view
  expected = [
    scipy.special.logsumexp(x, axis=-1) ** 2,
    np.mean(others**2),
    -np.log(nearest).mean(axis=0).sum(),
  ]
  for pair in zip(found, expected):
    np.testing.assert_allclose(*pair, rtol=1e-4)


def test_a_term_of_weight_0_only_measures():
  params = tree.unflatten(tiny.normal_params(MODEL, (8, 8, 3), 0.3))

  def call(added):
    loss_fn = softmax_xent(MODEL, preprocess=Normalize(), terms=added)
    return jax.jit(loss_fn)(params, BATCH, KEY)

  plain, _ = call({})
  for weight in (0, 2.5):
    loss, metrics = call({'z': Term(terms.z_loss, weight)})
    expected = plain + weight * metrics['z']
    np.testing.assert_allclose(loss, expected, rtol=1e-6 if weight else 0)
    assert metrics['z'] > 0 and metrics['loss'] == loss


def traced(make, model=MODEL):
  """Return (FLOPs, names of the metrics) of an objective."""
  images, names = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32), set()
  loss_fn = make(model, preprocess=Normalize())
  loss_fn = loss_fn.of_run(Timeline(4, 8, 10), images)
  params = jax.eval_shape(model.init, KEY, images)['params']
  params['objective'] = jax.eval_shape(loss_fn.init, KEY, images)
  context = Context(carried=loss_fn.carried(), teachers={'teacher': params})

  def loss(params, context):
    found, metrics, *_ = loss_fn(params, BATCH, KEY, context)
    names.update(metrics)
    return found

  return flops.count(loss, params, context), names


@pytest.mark.parametrize('name', ['features', 'mixed'])
def test_one_pass_serves_the_loss_and_its_terms(name, tmp_path):
  path = str(tmp_path / 'weights.npz')
  formats.write(tiny.weights(MODEL, (8, 8, 3)), path, 'vit_jax')
  make = functools.partial(FeatureDistillation, teacher=FrozenTeacher(path))

  def count(added):
    made = functools.partial(make, terms=added)
    if name == 'mixed':
      inner = functools.partial(softmax_xent, terms=added)
      made = functools.partial(mixed, mixer=Mixup(0.5), objective=inner)
    return traced(made)

  plain, names = count({})
  added = {'mean': Term(lambda seen: terms.find(seen, 'pre_logits'))}
  assert count(added) == (plain, names | {'mean'})


@pytest.mark.parametrize(
  ('target', 'name', 'message'),
  [
    ('mae.Mae', 'z', r"terms: .*Mae has no argument 'terms'"),
    ('classification.softmax_xent', 'loss', "metric 'loss' already"),
    ('lejepa.LeJepa', 'z', "needs 'logits' of the model, which has"),
  ],
)
def test_what_cannot_be_added_is_refused_by_name(target, name, message):
  added = {name: {'target': 'vit_jax.objectives.terms.z_loss'}}
  target = f'vit_jax.objectives.{target}'
  with pytest.raises(ValueError, match=message):
    make = config.resolve({'target': target, 'terms': added})
    traced(make, MODEL.clone(num_classes=4 if 'soft' in target else 0))
