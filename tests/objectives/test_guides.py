"""Guides: numbers as in float64, what the model gets, what is refused."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import tiny

from vit_jax.data.encoded import Encoded
from vit_jax.data.sources.folder import Folder
from vit_jax.data.subsets import Slice
from vit_jax.data.targets import Classes, Numbers
from vit_jax.durations import Timeline, steps
from vit_jax.objectives.classification import softmax_xent
from vit_jax.objectives.feature_distillation import FeatureDistillation
from vit_jax.objectives.guides import (
  Classification,
  Labelling,
  Prototypes,
  Regression,
)
from vit_jax.objectives.terms import kernel_difference, patch_kernel
from vit_jax.step import Context, OfFeatures, Seen, Term, of_examples

KEY, B, G, D, K = jax.random.key(0), 6, 2, 5, 4
RNG, NAN = np.random.default_rng(0), float('nan')
SITES = np.eye(K, dtype=np.float32)
TIMELINE = Timeline(B, 10 * B, total_steps=10)


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def batches():
  """Yield students, teachers, and sites: one is new later, some are missing."""
  for sites in ([0, 0, 1, 1, 1, -1], [2, 2, 0, 1, 1, 0], [2, 2, 2, 0, -1, -1]):
    column = np.array([SITES[i] if i >= 0 else np.full(K, NAN) for i in sites])
    x = RNG.normal(size=(2, B, G, D)).astype(np.float32)
    yield *x, np.float32(column), np.array(sites)


def test_prototypes_are_those_of_loops():
  guide = Prototypes(key='site', temperature=0.5, momentum=0.9)
  guide = guide.of_run(TIMELINE, {'site': SITES[0]}, 'a guide')
  state = guide.carried(D)
  centroids, widths = {}, dict.fromkeys(range(K), 0.5)
  call = jax.jit(
    lambda seen, state: guide(seen, {}, state)._replace(state=None)
  )
  follow = jax.jit(guide.following)
  for x, y, column, sites in batches():
    features = {'image': {'pre_logits': x}, 'teacher': {'pre_logits': y}}
    seen = Seen({}, {'site': column}, KEY, Context(), features)
    pull = call(seen, state)
    state = follow(state, seen, column)

    def loss(x, sites=sites):
      total, count = 0.0, 0
      for b, site in enumerate(sites):
        for g in range(G) if site in centroids else ():
          cosines = [
            unit(x[b, g]) @ unit(m) / widths[c] for c, m in centroids.items()
          ]
          own = cosines[[*centroids].index(site)]
          total += scipy.special.logsumexp(cosines) - own
          count += 1
      return total / max(1, count)

    exact, step = np.float64(x), 1e-6
    np.testing.assert_allclose(pull.loss, loss(exact), rtol=1e-6)
    slopes = np.zeros_like(exact)
    for place in np.ndindex(exact.shape):
      for sign in (1, -1):
        moved = exact.copy()
        moved[place] += sign * step
        slopes[place] += sign * loss(moved) / (2 * step)
    np.testing.assert_allclose(pull.gradient, slopes, rtol=1e-5, atol=1e-7)
    teacher = unit(np.float64(y))
    for site in {*sites} - {-1}:
      own = teacher[sites == site].reshape(-1, D)
      if site in centroids:
        if np.sum(sites == site) > 1:
          far = ((own - centroids[site]) ** 2).sum(1).mean() ** 0.5
          widths[site] = max(0.01, 0.9 * widths[site] + 0.1 * far)
        centroids[site] = 0.9 * centroids[site] + 0.1 * own.mean(0)
      else:
        centroids[site] = own.mean(0)
    for site, centroid in centroids.items():
      found = state['centroids'][site], state['concentrations'][site]
      np.testing.assert_allclose(found[0], centroid, rtol=1e-6, atol=1e-7)
      np.testing.assert_allclose(found[1], widths[site], rtol=1e-6)
    assert [*np.flatnonzero(state['seen'])] == sorted(centroids)


@dataclasses.dataclass(frozen=True, eq=False)
class OfParameters(OfFeatures):
  """An objective whose features are parameters."""

  terms: dict = dataclasses.field()

  def with_terms(self, terms):
    return OfParameters(terms)

  def encode(self, seen):
    return seen._replace(features={'image': {'pre_logits': seen.params['x']}})

  def loss(self, seen):
    loss = jnp.sum(seen.params['x'] ** 2)
    return loss, {'loss': loss}


@pytest.mark.parametrize('step', [1, 2, 9])
def test_the_model_gets_pulls_of_one_length(step):
  made = {
    'site': Classification(key='site', hidden=3, warmup=steps(1)),
    'year': Regression(key='year', hidden=3, adversarial=True),
    'tags': Labelling(key='tags', hidden=3),
  }
  weights = {'site': 0.5, 'year': 2.0, 'tags': 1.0}
  terms = {k: Term(x, weights[k]) for k, x in made.items()}
  column = np.where(RNG.random((B, 2)) < 0.3, NAN, RNG.random((B, 2)))
  batch = {'site': SITES[[0, 1, 2, 3, 0, 0]], 'year': np.float32(column)}
  batch['tags'] = np.round(batch['year'])
  batch['site'][2] = NAN
  example = {k: x[0] for k, x in batch.items()}
  objective = of_examples(OfParameters(terms), example, TIMELINE)
  x = RNG.normal(size=(B, G, D)).astype(np.float32)
  heads = {
    k: jax.tree.map(
      lambda x: RNG.normal(size=x.shape).astype(np.float32),
      term.fn.init(KEY, D),
    )
    for k, term in objective.terms.items()
  }
  params = {'x': x, 'objective': {'terms': heads}}
  state = {'loss': None, 'terms': dict.fromkeys(made)}
  context = Context(step=step, carried=state)

  @jax.jit
  def losses(heads, x):
    def out(name):
      first, second = heads[name]['fc1'], heads[name]['fc2']
      y = jax.nn.gelu(x @ first['kernel'] + first['bias'], approximate=False)
      return y @ second['kernel'] + second['bias']

    sites, years = jax.nn.log_softmax(out('site')), out('year')
    tags = out('tags')
    known = [0, 1, 3, 4, 5]
    site = -sum(sites[b, :, [0, 1, 2, 3, 0, 0][b]].mean() for b in known) / 5
    cells = np.argwhere(~np.isnan(column))
    year = jnp.stack([(years[b, :, k] - column[b, k]) ** 2 for b, k in cells])
    signs = [1 - 2 * round(column[b, k]) for b, k in cells]
    tags = jnp.stack([s * tags[b, :, k] for s, (b, k) in zip(signs, cells)])
    tags = jnp.log1p(jnp.exp(tags))
    return {'site': site, 'year': 0.1 * year.mean(), 'tags': tags.mean()}

  with jax.numpy_rank_promotion('allow'):
    expected = losses(heads, x)
    pulls, slopes = {}, {}
    for name in made:
      fn = jax.jit(jax.grad(lambda *a, name=name: losses(*a)[name], (0, 1)))
      slopes[name], pulls[name] = fn(heads, x)
  lengths = {k: np.linalg.norm(g) for k, g in pulls.items()}
  mean, total = np.mean([*lengths.values()]), 2 * np.float64(x)
  ramps = {'site': max(0, (step - 1) / 9), 'year': step / 10, 'tags': step / 10}
  for name, ramp in ramps.items():
    factor = 2 / (1 + np.exp(-10 * ramp)) - 1
    factor *= weights[name] * (-1 if name == 'year' else 1)
    total += factor * mean / lengths[name] * np.float64(pulls[name])

  @jax.jit
  def run(params):
    loss, metrics, _ = objective(params, batch, KEY, context)
    return loss, metrics

  grads, metrics = jax.jit(jax.grad(run, has_aux=True))(params)
  for name in made:
    np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-6)
    own = jax.tree.map(lambda x, k=name: weights[k] * x, slopes[name][name])
    tiny.assert_trees_close(
      grads['objective']['terms'][name], own, rtol=1e-5, atol=1e-6
    )
  both = sum(weights[k] * expected[k] for k in made)
  np.testing.assert_allclose(metrics['loss'], np.sum(x**2) + both, rtol=1e-6)
  np.testing.assert_allclose(grads['x'], total, rtol=1e-5, atol=1e-6)


def test_kernels_are_compared_as_in_float64():
  x, y = RNG.normal(3, size=(2, 3, 2, 7, 5))
  features = [
    {'tokens': np.float32(t), 'patches': np.zeros((3, 2, 6, 5))} for t in (x, y)
  ]
  found = kernel_difference(*features)
  centre = np.eye(6) - 1 / 6
  for place in np.ndindex(3, 2):
    one, two = (
      centre @ t[place][1:] @ t[place][1:].T @ centre
      for t in np.float64(np.float32([x, y]))
    )
    expected = 1 - (one * two).sum() / np.linalg.norm(one) / np.linalg.norm(two)
    np.testing.assert_allclose(found[place], expected, rtol=1e-6)
  same = kernel_difference(features[0], features[0])
  np.testing.assert_allclose(same, 0, atol=1e-6)
  seen = Seen({}, {}, KEY, Context(), {'image': features[0]})
  with pytest.raises(ValueError, match='this objective has none'):
    patch_kernel(seen)


TABLE = """image,site,year,one,none
a.png,N,1999,x,
b.png,,2001.5,x,
c.png,S,,x,
d.png,N,2004,,
"""


@pytest.fixture
def table(tmp_path):
  for name in 'abcd':
    (tmp_path / f'{name}.png').write_bytes(tiny.encode(tiny.noise()))
  (tmp_path / 'table.csv').write_text(TABLE)
  return Folder(tmp_path, csv='table.csv', classes=False)


def test_columns_become_vectors(table, capsys):
  columns = {'site': Classes(), 'year': Numbers()}
  source = Encoded(table, columns)
  found = [(x['site'].tolist(), x['year'].tolist()) for x in source]
  assert str(found[1][0]) == '[nan, nan]' and str(found[2][1]) == '[nan]'
  assert [found[i][0] for i in (0, 2, 3)] == [[1, 0], [0, 1], [1, 0]]
  assert [found[i][1] for i in (0, 1, 3)] == [[0], [0.5], [1]]
  printed = capsys.readouterr()
  printed = printed.out + printed.err
  assert 'site: N 2, S 1; 1 of 4 are missing' in printed
  assert 'year: year 1999 to 2004' in printed and '(1 missing)' in printed
  part = Encoded(Slice(table, '[:3]'), {'site': Classes()})
  for i, place in enumerate(part.source.indices):
    assert str(part[i]['site']) == str(source[place]['site'])


@pytest.mark.parametrize(
  ('column', 'message'),
  [
    ('one', 'one: x 3; 1 of 4 are missing. Expected two different values'),
    ('none', 'Expected two different values'),
    ('cite', "has no column 'cite'"),
    ('year', 'two readings'),
  ],
)
def test_columns_that_guide_nothing(table, column, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    Encoded(table, {column: Classes()})


@pytest.mark.parametrize(
  ('objective', 'example', 'message'),
  [
    (OfParameters, {}, "config.data.keep = {'site': {'target': '"),
    (OfParameters, {'site': 3}, "reads the column 'site', and examples have 3"),
    (
      functools.partial(softmax_xent, None, preprocess=None),
      {'site': SITES[0]},
      'no place for the guides',
    ),
    (
      functools.partial(
        FeatureDistillation, None, preprocess=None, teacher=None
      ),
      {'site': SITES[0]},
      'FeatureDistillation has no place for the guides',
    ),
  ],
)
def test_guides_that_cannot_run(objective, example, message):
  terms = {'site': Term(Prototypes(key='site'), 0.03)}
  with pytest.raises(ValueError, match=re.escape(message)):
    of_examples(objective(terms=terms), example, TIMELINE)


def test_a_guide_without_a_weight():
  with pytest.raises(ValueError, match='weight=0, so it would learn nothing'):
    Term(Prototypes(key='site'), 0.0)
