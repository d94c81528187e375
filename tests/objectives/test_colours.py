"""Colours of views: equal to torchvision's, as often and as far as they say."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from options import all_set
from tiny import golden

from vit_jax import config
from vit_jax.objectives import colours
from vit_jax.objectives.colours import LEJEPA, Colour, Views
from vit_jax.parallel import sharding
from vit_jax.types import UserError

NEVER = Colour(0.0, jitter_probability=0.0, grey=0.0, blur=0.0)
RNG = np.random.default_rng(0)
BATCH = {
  'image': RNG.integers(0, 256, (16, 2, 12, 10, 3), np.uint8),
  'local': RNG.integers(0, 256, (16, 3, 8, 8, 3), np.uint8),
  'label': np.arange(16, dtype=np.int32),
}


def change(case):
  """Return the function of images [C, H, W] that a recorded case is of."""
  name, *values = case.split()
  if name == 'jitter':
    order = [int(x) for x in values[0]]
    order += sorted({0, 1, 2, 3} - {*order})  # by factors that change nothing
    factors = jnp.array(values[1:], jnp.float32)
    return lambda x: colours.jitter(x, jnp.array(order), factors)
  if name == 'blur':
    return lambda x: colours.blur(x, jnp.float32(values[0]), int(values[1]))
  if name == 'luma':
    return lambda x: jnp.broadcast_to(colours.luma(x), x.shape)
  options = dict.fromkeys(('flip', 'grey', 'blur', 'solarize'), 1.0)
  options |= {'jitter': (0.0,) * 4, 'jitter_probability': 1.0}
  colour = all_set(Colour, blur_sigma=(1.3, 1.3), **options)
  key = jax.random.key(0)
  return lambda x: jnp.moveaxis(colour(jnp.moveaxis(x, 0, -1), key), -1, 0)


@pytest.mark.parametrize('channels', ['colour', 'one'])
def test_changes_are_those_of_torchvision(channels):
  file = golden('views')
  image = file[channels].transpose(2, 0, 1).astype(np.float32)
  cases = {k: v for k, v in file.items() if k.startswith(f'{channels}/')}
  assert len(cases) == 22
  for name, expected in cases.items():
    found = change(name.partition('/')[2])(image) / 255
    expected = expected.transpose(2, 0, 1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5, err_msg=name)


def test_a_batch_has_the_changes_of_its_images():
  """XLA may round a number differently where it computes it again."""
  images = RNG.integers(0, 256, (16, 3, 64, 64)).astype(np.float32)
  draws = jax.random.uniform(jax.random.key(0), (2, 16, 4))
  orders, factors = jnp.argsort(draws[0]), draws[1] + jnp.array([[0.5] * 4])
  together = jax.jit(jax.vmap(colours.jitter))(images, orders, factors)
  for i in range(0, 16, 3):
    with jax.disable_jit():
      alone = colours.jitter(images[i], orders[i], factors[i])
    np.testing.assert_allclose(together[i], alone, rtol=0, atol=0.02)


def test_solarize_starts_at_128():
  image = jnp.array([[[127.0], [128.0], [255.0]]])
  found = dataclasses.replace(NEVER, solarize=1.0)(image, jax.random.key(0))
  assert found.ravel().tolist() == [127, 127, 0]


def many(colour):
  """Return what `colour` makes of an image [1, 4, 3] with 6000 keys."""
  image = jnp.arange(10.0, 250, 20).reshape(1, 4, 3)
  keys = jax.random.split(jax.random.key(1), 6000)
  found = jax.jit(jax.vmap(functools.partial(colour, image)))(keys)
  return np.asarray(image), np.asarray(found)


@pytest.mark.parametrize(
  'field', ['flip', 'jitter_probability', 'grey', 'blur', 'solarize']
)
def test_probabilities(field):
  image, found = many(dataclasses.replace(NEVER, **{field: 0.3}))
  changed = (abs(found - image) > 1e-3).any((1, 2, 3))
  if field == 'blur':  # a standard deviation below 0.3 changes nothing
    changed = abs(found - image).max((1, 2, 3)) > 0
  assert abs(changed.mean() - 0.3) < 0.025


def test_order_and_factors_of_the_jitter(monkeypatch):
  def show(x, order, factors):
    return jnp.stack([order * 1.0, factors, factors])[:, None]

  monkeypatch.setattr(colours, 'jitter', show)
  widths = 1.5, 0.4, 0.2, 0.1
  always = dataclasses.replace(NEVER, jitter=widths, jitter_probability=1.0)
  orders, factors, _ = np.moveaxis(many(always)[1][:, 0], -1, 0)
  counts = collections.Counter(map(tuple, orders))
  assert len(counts) == 24
  assert scipy.stats.chisquare([*counts.values()]).pvalue > 1e-3
  bounds = (0, 2.5), (0.6, 1.4), (0.8, 1.2), (-0.1, 0.1)
  for values, (low, high) in zip(factors.T, bounds):
    uniform = scipy.stats.uniform(low, high - low)
    assert scipy.stats.kstest(values, uniform.cdf).pvalue > 1e-3


def test_strength_of_the_blur(monkeypatch):
  def show(x, sigma, radius):
    return jnp.full_like(x, sigma) + 100 * radius

  monkeypatch.setattr(colours, 'blur', show)
  always = dataclasses.replace(NEVER, blur=1.0, blur_sigma=(0.5, 1.5))
  values = many(always)[1][:, 0, 0, 0] - 500
  uniform = scipy.stats.uniform(0.5, 1.0)
  assert scipy.stats.kstest(values, uniform.cdf).pvalue > 1e-3


def test_each_view_has_its_colour():
  flip, plain = Colour(1.0, (0.0,) * 4, grey=0.0, blur=0.0), NEVER
  prepare = jax.jit(Views((flip, plain), local=flip).prepare)
  images = BATCH['image'].repeat(2, axis=1)  # 4 views
  found = prepare({**BATCH, 'image': images}, jax.random.key(0))
  assert found.keys() == BATCH.keys()
  assert found['image'].dtype == found['local'].dtype == jnp.float32
  close = functools.partial(np.testing.assert_allclose, atol=1e-3)
  close(found['image'][:, 0], images[:, 0, :, ::-1])
  close(found['image'][:, 1:], images[:, 1:])
  close(found['local'], BATCH['local'][..., ::-1, :])
  single = prepare({'image': images[:, 0]}, jax.random.key(0))
  assert [*single] == ['image']
  close(single['image'], found['image'][:, 0])


def test_the_same_on_any_mesh_and_in_any_batch():
  prepare = jax.jit(LEJEPA.prepare)
  whole = jax.device_get(prepare(BATCH, jax.random.key(3)))
  rows = {name: x[:4] for name, x in BATCH.items()}
  few = jax.device_get(prepare(rows, jax.random.key(3)))
  mesh = sharding.make_mesh(data=2, fsdp=2, model=2)
  with jax.set_mesh(mesh):
    batch = sharding.put_batch(BATCH, mesh)
    program = prepare.lower(batch, jax.random.key(3)).compile()
    split = program(batch, jax.random.key(3))
  for name in ('image', 'local'):
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=0.01)
    close(whole[name][:4], few[name])
    close(whole[name], split[name])
  assert 'all-gather' not in program.as_text()
  assert prepare._cache_size() == 2  # of 16 and of 4 examples
  other = prepare(BATCH, jax.random.key(4))
  views_changed = abs(whole['image'] - other['image']).max((2, 3, 4)) > 1
  assert views_changed.mean() > 0.9
  same = {**BATCH, 'local': BATCH['local'][:1, :1].repeat(16, 0).repeat(3, 1)}
  local = np.asarray(prepare(same, jax.random.key(3))['local'])
  assert len(np.unique(local.reshape(48, -1).round(), axis=0)) > 40
  assert prepare._cache_size() == 2


def test_views_of_rasters():
  images, key = BATCH['image'].astype(np.float32) * 300, jax.random.key(0)
  images[:, :, 0] = np.nan
  with pytest.raises(UserError, match=r'float32 .*Use .*colours\.Channels'):
    Views().prepare({'image': images}, key)

  def changed(*options):
    views = Views((colours.Channels(*options),))
    return np.asarray(views.prepare({'image': images}, key)['image'])

  found = changed(0.0, 0.5, 1.0)
  np.testing.assert_array_equal(np.isnan(found), np.isnan(images))
  slope = np.nanstd(found, (2, 3)) / np.nanstd(images, (2, 3))
  assert 0.5 < slope.min() < 0.6 and 1.4 < slope.max() < 1.5
  np.testing.assert_array_equal(changed(1.0, 0.0, 0.0), images[:, :, :, ::-1])


def test_views_of_a_config():
  name = f'{colours.__name__}.Views'
  trust = ('vit_jax',)
  assert config.build(config.describe(LEJEPA), trust=trust) == LEJEPA
  colour = {'target': f'{colours.__name__}.Colour', 'blur_sigma': [0.1, 1.0]}
  made = config.build({'target': name, 'globals': [colour]}, trust=trust)
  assert made == Views((Colour(blur_sigma=(0.1, 1.0)),))
  assert hash(made)  # steps are compiled once for equal objectives
