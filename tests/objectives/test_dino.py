"""DINO and SimDINO: lightly's numbers, and what the teacher sees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import record_dino as recorder
import scipy.special
import tiny

from vit_jax import tree
from vit_jax.durations import Timeline, epochs, steps
from vit_jax.models.dense import Normalize
from vit_jax.objectives.colours import Colour, Views
from vit_jax.objectives.dino import Dino, DinoHead, SimDino
from vit_jax.optim.optimizers import Optimizer
from vit_jax.step import Seen, TrainState
from vit_jax.weights import timm

KEY = jax.random.key(0)
PLAIN = Colour(flip=0, jitter_probability=0, grey=0, blur=0)
GIVEN = Views((PLAIN,), PLAIN)  # pixels as they are
HEAD = DinoHead(recorder.OUTPUTS, recorder.HIDDEN, recorder.BOTTLENECK)
GOLDEN = tiny.golden('dino')
TIMELINE = Timeline(recorder.BATCH, 2 * recorder.BATCH, recorder.STEPS)
part = functools.partial(tiny.under, GOLDEN)


def read(arrays, lengths=False):
  """Return parameters of arrays named as in timm and lightly."""
  found = {}
  for i in range(3):
    layer = f'head.layers.{2 * i}'
    found[f'objective/fc{i + 1}/kernel'] = arrays[f'{layer}.weight'].T
    found[f'objective/fc{i + 1}/bias'] = arrays[f'{layer}.bias']
  found['objective/last/kernel'] = arrays['head.last_layer.weight_v'].T
  if lengths:
    length = arrays['head.last_layer.weight_g'].T[None]
    found['objective/last/length'] = length
  vit = tiny.under(arrays, 'vit.')
  if vit:
    found |= timm.read(vit, num_heads=2).params
  return tree.unflatten(found)


@functools.cache
def first():
  """Return the model and first parameters of the recorded run."""
  arrays = recorder.weights({k: x.shape for k, x in part('student/').items()})
  vit = tiny.under(arrays, 'vit.')
  return timm.read(vit, num_heads=2).model, read(arrays)


def make(kind=Dino, model=None, **fields):
  given = {'views': GIVEN, 'head': HEAD, 'timeline': TIMELINE}
  if kind is SimDino:
    given['head'] = DinoHead(None, recorder.HIDDEN, recorder.BOTTLENECK)
  model = model or first()[0]
  return kind(model, preprocess=Normalize(), **given | fields)


def start(loss_fn, tx=optax.identity(), step=0):
  """Return the first TrainState, with the recorded parameters."""
  params = jax.tree.map(np.asarray, first()[1])
  if isinstance(loss_fn, SimDino):
    del params['objective']['last']
  fields = {'ema': params, 'carried': loss_fn.carried()}
  return tiny.first_state(params, tx, step, **fields)


def grads_of(loss_fn, state, batch):
  """Return ((loss, [metrics, carried]), gradients)."""
  batch = jax.tree.map(np.float32, batch)
  return compiled(loss_fn)(state.params, batch, KEY, state)


@functools.cache
def compiled(loss_fn):
  def fn(*args):
    loss, *aux = loss_fn(*args)
    return loss, aux

  return jax.jit(jax.value_and_grad(fn, has_aux=True))


def assert_close(found, expected, rtol, atol):
  options = {'rtol': rtol, 'atol': atol, 'without': '.*key/bias'}
  tiny.assert_trees_close(found, expected, **options)


# Against lightly.


def test_loss_gradient_and_centre_are_lightlys():
  @dataclasses.dataclass(frozen=True)
  class Given(Dino):
    def encode(self, seen):
      return seen

    def outputs(self, seen):
      return seen.params['objective']['last'], jnp.asarray(seen.batch)

  student, teacher, centre = recorder.outputs()
  fn = make(Given, teacher_temperature=0.05, warmup_teacher_temperature=0.05)
  params, centre = {'objective': {'last': student}}, jnp.asarray(centre)
  state = TrainState(jnp.int32(2), params, None, KEY, carried=centre)
  (loss, (metrics, carried)), grads = grads_of(fn, state, teacher)
  expected = part('loss/')
  np.testing.assert_allclose(loss, expected['value'], rtol=1e-5)
  np.testing.assert_allclose(
    grads['objective']['last'], expected['gradient'], 1e-5, 1e-7
  )
  np.testing.assert_allclose(carried, expected['centre'], 1e-5, 1e-7)
  p = scipy.special.softmax((teacher - centre) / 0.05, axis=-1)
  mean = p.mean((0, 1))
  for name, value in (
    ('teacher_entropy', -(p * np.log(p)).sum(-1).mean()),
    ('batch_entropy', -(mean * np.log(mean)).sum()),
  ):
    np.testing.assert_allclose(metrics[name], value, rtol=1e-5)


@pytest.mark.parametrize('norm', [True, False])
def test_head_is_lightlys(norm):
  expected = part(f'head/{norm}/')
  shapes = {k: x.shape for k, x in expected.items() if k != 'out'}
  shapes['head.last_layer.weight_g'] = (recorder.OUTPUTS, 1)
  params = read(recorder.weights(shapes), lengths=not norm)['objective']
  last_layer = 'unit' if norm else 'lengths'
  head = dataclasses.replace(HEAD, last_layer=last_layer)
  made = head.init(KEY, recorder.WIDTH)
  assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, params)
  teacher = recorder.outputs()[1]

  def loss(params):
    out = head(params, jnp.asarray(teacher[..., : recorder.WIDTH]))
    return jnp.sum(out * teacher), out

  grads, out = jax.jit(jax.grad(loss, has_aux=True))(params)
  out = out.reshape(expected['out'].shape)
  np.testing.assert_allclose(out, expected['out'], 1e-5, 1e-6)
  found = read(expected, lengths=not norm)['objective']
  assert_close(grads, found, 1e-5, 2e-6)


def test_a_linear_last_layer_is_that_of_free_lengths():
  linear = dataclasses.replace(HEAD, last_layer='linear')
  params = linear.init(KEY, recorder.WIDTH)
  assert params['last']['kernel'].std() == pytest.approx(0.02, rel=0.1)
  x = jnp.asarray(recorder.outputs()[1][..., : recorder.WIDTH])
  found = linear(params, x)
  lengths = np.linalg.norm(params['last']['kernel'], axis=0)[None, None]
  params['last']['length'] = lengths
  expected = dataclasses.replace(HEAD, last_layer='lengths')(params, x)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_ten_steps_are_those_of_pytorch():
  """First gradients to 1e-5; losses, centre and parameters to 1e-3."""
  rule = functools.partial(optax.adamw, weight_decay=recorder.DECAYS[0])
  decayed = ('.*kernel', 'cls', '.*pos_embedding')
  optimizer = Optimizer(
    rule, decay_mask=decayed, final_weight_decay=recorder.DECAYS[1]
  )
  tx = optimizer(first()[1], recorder.LR, TIMELINE)
  low, high = recorder.TEMPERATURES
  loss_fn = make(
    momentum=recorder.MOMENTUM,
    teacher_temperature=high,
    warmup_teacher_temperature=low,
    teacher_warmup=steps(5),
  )
  state = start(loss_fn, tx)
  _, grads = grads_of(loss_fn, state, recorder.crops(0))
  assert_close(grads, read(part('grad/')), 1e-5, 1e-5)
  step = tiny.compiled_step(loss_fn, tx, ema_weight=loss_fn.ema_weight)
  losses = []
  for i in range(recorder.STEPS):
    state, metrics = step(state, recorder.crops(i))
    losses.append(metrics['loss'])
  np.testing.assert_allclose(losses, GOLDEN['losses'], rtol=1e-3)
  np.testing.assert_allclose(state.carried, GOLDEN['centre'], 1e-3, 1e-4)
  for name, params in (('student/', state.params), ('teacher/', state.ema)):
    assert_close(params, read(part(name)), 1e-3, 1e-4)


# What the teacher sees, and what is learned.


def test_the_teacher_is_the_ema_and_sees_global_views():
  """Without stochastic depth. Local views may be missing."""
  model = first()[0].clone(stochastic_depth=0.5)
  loss_fn = make(model=model)
  state, batch = start(loss_fn), recorder.crops(0)

  @jax.jit
  def outputs(params, ema, batch, rng):
    of_teacher = dataclasses.replace(state, ema=ema)
    return loss_fn.outputs(loss_fn.encode(Seen(params, batch, rng, of_teacher)))

  ema = jax.tree.map(lambda x: 0.9 * np.asarray(x), state.ema)
  batch = jax.tree.map(np.float32, batch)
  student, teacher = outputs(state.params, ema, batch, KEY)
  assert student.shape[:2] == (4, 5) and teacher.shape[:2] == (4, 2)
  other = {'image': batch['image'], 'local': 255 - batch['local']}
  moved, same = outputs(state.params, ema, other, jax.random.key(1))
  np.testing.assert_array_equal(same, teacher)
  assert (np.asarray(moved) != student).any(axis=(0, 2)).all()

  # The teacher is the model of the EMA, one view by itself.
  @jax.jit
  def alone(images):
    features = model.apply({'params': ema}, Normalize()(images))[:, None]
    return loss_fn.head(ema['objective'], features)

  expected = alone(batch['image'][:, 1])
  teacher = np.asarray(teacher)[:, 1:]
  np.testing.assert_allclose(teacher, expected, rtol=2e-5, atol=1e-6)
  few, _ = outputs(state.params, ema, {'image': batch['image']}, KEY)
  student = np.asarray(student)[:, :2]
  np.testing.assert_allclose(few, student, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
  ('length', 'frozen'), [(epochs(1), 2), (steps(1), 1), (None, 0)]
)
def test_the_last_layer_waits_as_long_as_given(length, frozen):
  head = dataclasses.replace(HEAD, last_layer='lengths')
  model = first()[0].clone(depth=0)  # the head alone compiles faster
  loss_fn = make(model=model, head=head, freeze_last_layer=length)
  assert Dino.freeze_last_layer == epochs(1)
  for step in range(3):
    moves = step >= frozen
    state = start(loss_fn, step=step)
    state.params['objective']['last']['length'] = jnp.ones((1, 1, head.outputs))
    _, grads = grads_of(loss_fn, state, recorder.crops(0))
    for path, x in tree.flatten(grads['objective']).items():
      assert np.any(x) == (moves or not path.startswith('last/')), path


def test_losses_of_bfloat16_models_are_float32():
  model = first()[0].clone(depth=1)
  loss_fn = make(model=model)
  state, batch = start(loss_fn, step=5), recorder.crops(0)
  expected, *_ = jax.jit(loss_fn)(state.params, batch, KEY, state)
  low = make(model=model.clone(dtype='bfloat16'))
  (loss, metrics), grads = grads_of(low, state, batch)
  assert {x.dtype for x in jax.tree.leaves((loss, metrics, grads))} == {
    jnp.dtype('float32')
  }
  np.testing.assert_allclose(loss, expected, rtol=0.05)


# SimDINO.


def test_coding_rate():
  """By the definition, in float64."""
  loss_fn = make(SimDino, eps=0.1, coefficient=2.0)
  state = start(loss_fn)
  state.ema = jax.tree.map(lambda x: 0.9 * x, state.params)
  batch = jax.tree.map(np.float32, recorder.crops(0))

  @jax.jit
  def run(*args):
    return loss_fn(*args), loss_fn.outputs(loss_fn.encode(Seen(*args)))

  (loss, metrics), outputs = run(state.params, batch, KEY, state)
  student, teacher = (np.asarray(x, np.float64) for x in outputs)
  np.testing.assert_allclose((student**2).sum(-1), 1, rtol=1e-5)
  pairs = [(g, v) for g in range(2) for v in range(5) if g != v]
  cosines = [(teacher[:, g] * student[:, v]).sum(-1).mean() for g, v in pairs]
  b, k, rates = 4, recorder.BOTTLENECK, []
  for g in range(2):
    z = (student[:, g] + teacher[:, g]) / 2
    root = np.eye(k) + k / (b * 0.1) * z.T @ z
    rates.append(np.linalg.slogdet(root)[1] / 2 * (k + b) / (k * b))
  np.testing.assert_allclose(metrics['cosine'], np.mean(cosines), rtol=1e-5)
  np.testing.assert_allclose(metrics['coding_rate'], np.mean(rates), rtol=1e-4)
  expected = -2 * np.mean(cosines) - np.mean(rates)
  np.testing.assert_allclose(loss, expected, rtol=1e-4)
