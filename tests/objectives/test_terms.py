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
from vit_jax.models.dense import Normalize
from vit_jax.objectives import terms
from vit_jax.objectives.classification import softmax_xent
from vit_jax.objectives.mixing import Mixed, Mixup
from vit_jax.step import Context, Seen, Term

KEY, RNG = jax.random.key(0), np.random.default_rng(0)
MODEL = tiny.vit(num_classes=4)
PARAMS = tree.unflatten(tiny.normal_params(MODEL, (8, 8, 3), 0.3))
BATCH = {
  'image': RNG.integers(0, 256, (4, 8, 8, 3), np.uint8),
  'label': np.arange(4, dtype=np.int32),
}


def test_values():
  x = RNG.normal(7, size=(5, 2, 3))
  features = {'image': {'pre_logits': x, 'logits': x}}
  seen = Seen({}, {}, KEY, Context(), features)
  made = terms.z_loss, terms.Decorrelation()
  z, correlation = jax.jit(lambda: [term(seen) for term in made])()
  expected = scipy.special.logsumexp(x, axis=-1) ** 2
  np.testing.assert_allclose(z, expected, rtol=1e-5)
  others = np.corrcoef(x.reshape(-1, 3).T)[~np.eye(3, dtype=bool)]
  np.testing.assert_allclose(correlation, np.mean(others**2), rtol=1e-4)


def test_a_term_shares_the_pass_and_of_weight_0_only_measures():
  def call(added):
    inner = functools.partial(softmax_xent, terms=added)
    make = functools.partial(Mixed, mixer=Mixup(0.5), objective=inner)
    loss_fn = make(MODEL, preprocess=Normalize())
    args = PARAMS, BATCH, KEY
    return flops.count(loss_fn, *args), *jax.jit(loss_fn)(*args)

  count, plain, _ = call({})
  for weight in (0, 2.5):
    found, loss, metrics = call({'z': Term(terms.z_loss, weight)})
    expected = plain + weight * metrics['z']
    np.testing.assert_allclose(loss, expected, rtol=1e-6 if weight else 0)
    assert metrics['z'] > 0 and metrics['loss'] == loss and found == count


@pytest.mark.parametrize(
  ('target', 'name', 'message'),
  [
    ('mae.Mae', 'z', "terms: .*Mae has no argument 'terms'"),
    ('classification.softmax_xent', 'loss', "'loss' has the name of a metric"),
    ('lejepa.LeJepa', 'z', "needs 'logits', and this objective has"),
  ],
)
def test_what_cannot_be_added_is_refused_by_name(target, name, message):
  added = {name: {'target': 'vit_jax.objectives.terms.z_loss'}}
  target = f'vit_jax.objectives.{target}'
  with pytest.raises(ValueError, match=message):
    make = config.resolve({'target': target, 'terms': added})
    model = MODEL.clone(num_classes=4 if 'soft' in target else 0)
    loss_fn = make(model, preprocess=Normalize())
    more = jax.eval_shape(loss_fn.init, KEY, jnp.zeros((1, 8, 8, 3)))
    jax.eval_shape(loss_fn, PARAMS | {'objective': more}, BATCH, KEY)
