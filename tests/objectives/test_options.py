"""Every option of the objectives has an effect, next to all the others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from nightly import nightly
from options import all_set

from vit_jax import tree
from vit_jax.durations import Timeline, steps
from vit_jax.models.dense import Normalize
from vit_jax.models.pooling import NoPooling
from vit_jax.models.vit import PatchEmbedding
from vit_jax.objectives.block_masks import BlockMasks
from vit_jax.objectives.classification import sigmoid_xent, softmax_xent
from vit_jax.objectives.colours import Colour, Views
from vit_jax.objectives.dino import Centre, Dino, DinoHead, SimDino
from vit_jax.objectives.lejepa import LeJepa, Projector, Sigreg, Visreg
from vit_jax.objectives.mae import Decoder, Mae
from vit_jax.objectives.masked_patches import MaskedPatches, Task
from vit_jax.objectives.terms import Koleo
from vit_jax.objectives.views import OfViews
from vit_jax.step import Context, Term

KEY, STEP = jax.random.key(0), 3
IMAGES = np.random.default_rng(0).integers(0, 256, (4, 2, 8, 8, 3), np.uint8)
LABELS = np.float32([[1, 0], [0.5, 0.5], [0.3, 0.7], [0, 1]])
PIXELS, BRIGHT = Normalize(100.0, 50.0), Normalize(80.0, 50.0)
MODEL = tiny.vit(width=8, num_classes=0)
PLAIN = Colour(flip=0, jitter_probability=0, grey=0, blur=0)
FLIPPED = Colour(flip=1, jitter_probability=0, grey=0, blur=0)
HEAD, PROJECTOR = DinoHead(5, 6, 4), Projector(4, (3,), 2)
TIMELINE = Timeline(4, 8, 10)  # an epoch of 2 steps
GIVEN = {'preprocess': PIXELS, 'views': Views((PLAIN,), PLAIN)}

INPUTS = {
  'model': (MODEL, MODEL.clone(depth=2)),
  'preprocess': (PIXELS, BRIGHT),
}
TERMS = {'terms': tuple({'koleo': Term(Koleo(), x)} for x in (0.5, 1.5))}
VIEWS = INPUTS | TERMS | {'views': (GIVEN['views'], Views((FLIPPED,), PLAIN))}
TEACHER = VIEWS | {
  'momentum': (0.9, 0.8),
  'timeline': (TIMELINE, Timeline(4, 8, 5)),
}
DINO = TEACHER | {
  'head': (HEAD, DinoHead(4, 6, 4)),
  'student_temperature': (0.2, 0.3),
  'teacher_temperature': (0.08, 0.06),
  'warmup_teacher_temperature': (0.05, 0.03),
  'teacher_warmup': (steps(6), steps(4)),
  'centre': (Centre(0.8), Centre(0.7)),
  'freeze_last_layer': (steps(4), None),
}
LOSS = {
  **INPUTS,
  **TERMS,
  'model': (MODEL.clone(num_classes=2), MODEL.clone(num_classes=2, depth=2)),
  'label_smoothing': (0.1, 0.2),
  'class_weights': ((1, 2), (2, 1)),
}
SLICED = {'weight': (0.1, 0.2), 'slices': (8, 9)}


def lejepa(**fields):
  return LeJepa(MODEL, **GIVEN | {'projector': PROJECTOR} | fields)


def masked(task):
  outputs = 512 * task.downsampled_to**2
  model = MODEL.clone(
    embedding=PatchEmbedding(4, mask_token=True),
    pooling=NoPooling(),
    num_classes=outputs,
  )
  return MaskedPatches(model, preprocess=PIXELS, task=task)


def row(make, options, within=lambda x: x, **more):
  """Return a test of `make`, made with {option: (value, another value)}.

  Another value of None: another test has the effect of this option. Those of
  self-distillation take 10 s.
  """
  marks = (pytest.mark.slow,) if make in (Dino, SimDino) else ()
  return pytest.param(
    make, within, options | more, id=make.__name__, marks=marks
  )


@pytest.mark.parametrize(
  ('make', 'within', 'options'),
  [
    row(softmax_xent, LOSS),
    row(
      sigmoid_xent,
      LOSS,
      threshold=(0.4, 0.6),
      mean_over_classes=(True, False),
      positive_weights=((1.0, 2.0), (2.0, 1.0)),
    ),
    row(Dino, DINO),
    row(
      SimDino,
      TEACHER,
      head=(DinoHead(None, 6, 4), DinoHead(None, 6, 3)),
      eps=(0.1, 0.2),
      coefficient=(2.0, 3.0),
    ),
    row(
      BlockMasks,
      {
        **{'views': (0.3, 0.7), 'least': (0.2, 0.6), 'most': (0.8, 0.9)},
        **{'aspect': (0.4, 1.0), 'block': (2, 1)},
      },
    ),
    row(
      DinoHead,
      {'outputs': (5, 4), 'hidden': (6, 5), 'bottleneck': (4, 3)},
      lambda x: Dino(MODEL, **GIVEN, timeline=TIMELINE, head=x),
      last_layer=('lengths', 'unit'),
    ),
    row(
      Mae,
      INPUTS,
      ratio=(0.5, 0.25),
      normalize=(False, True),
      decoder=(Decoder(8, 1, 2), Decoder(8, 1, 1)),
    ),
    row(
      Decoder,
      {'width': (8, 16), 'depth': (1, 2), 'num_heads': (2, 1)},
      lambda x: Mae(MODEL, preprocess=PIXELS, decoder=x),
    ),
    row(
      LeJepa,
      VIEWS,
      projector=(PROJECTOR, Projector(4, (3,), 3)),
      regularizer=(Visreg(), Sigreg()),
    ),
    row(
      Projector,
      {'embedding': (4, 5), 'hidden': ((3,), (4,)), 'outputs': (2, 3)},
      lambda x: lejepa(projector=x),
    ),
    row(Sigreg, SLICED, lambda x: lejepa(regularizer=x), points=(5, 7)),
    row(Visreg, SLICED, lambda x: lejepa(regularizer=x)),
    row(
      Views,
      {'globals': ((PLAIN,), (PLAIN, FLIPPED)), 'local': (PLAIN, FLIPPED)},
      lambda x: lejepa(views=x),
    ),
    row(
      Task,
      {'downsampled_to': (2, 1), 'ratio': (0.25, 0.5)},
      masked,
      predict=('downsampled', None),
    ),
  ],
)
@pytest.mark.parametrize(
  'observe',
  [
    lambda run, *args: run.lower(*args).as_text(),  # without dead code
    *nightly([lambda run, *args: jax.device_get(jax.tree.leaves(run(*args)))]),
  ],
  ids=['program', 'values'],
)
def test_each_option_has_an_effect(make, within, options, observe):
  def see(make, options):
    return observe(*step_of(within(make(**options))))

  values = {name: value for name, (value, _) in options.items()}
  expected = see(functools.partial(all_set, make), values)
  assert is_same(see(make, values), expected)
  for name, (_, other) in options.items():
    if other is not None:
      assert not is_same(see(make, values | {name: other}), expected), name


def is_same(one, other):
  if isinstance(one, str):
    return one == other
  return all(
    x.shape == y.shape and np.allclose(x, y, rtol=1e-4, atol=1e-6)
    for x, y in zip(one, other)
  )


def step_of(objective):
  """Return what a step computes with an objective, and the arguments."""
  if isinstance(objective, BlockMasks):
    return jax.jit(lambda key: objective(key, 4, (8, 8))), KEY
  of_views = isinstance(objective, OfViews)
  batch = {'image': IMAGES if of_views else IMAGES[:, 0], 'label': LABELS}
  batch |= {'local': IMAGES[:, :1]} if of_views else {}
  model = objective.model
  one = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)
  shapes = jax.eval_shape(model.init, KEY, one)['params']
  shapes['objective'] = jax.eval_shape(objective.init, KEY, one)
  # Each parameter has its own seed, so that it does not depend on the others.
  params = {
    path: np.random.default_rng([*path.encode()]).normal(0.1, 0.5, x.shape)
    for path, x in tree.flatten(shapes).items()
  }
  params = {'objective': {}} | jax.tree.map(np.float32, tree.unflatten(params))

  @jax.jit
  def step(params, batch, key):
    ema = jax.tree.map(lambda x: 0.9 * x, params)
    context = Context(STEP, ema, objective.carried())
    weight = objective.ema_weight and objective.ema_weight(STEP)
    batch = objective.prepare(batch, key)
    return objective(params, batch, key, context), weight

  return step, params, batch, KEY
