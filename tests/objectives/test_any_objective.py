"""Each objective: the same on any mesh, and in a run that was interrupted."""

import contextlib
import functools
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import short_run
import tiny
from jax.experimental.compilation_cache import compilation_cache
from nightly import nightly
from synthetic import Synthetic

from vit_jax import tree
from vit_jax.config import Provenance
from vit_jax.data.pipeline import Data
from vit_jax.data.targets import Classes, Numbers
from vit_jax.data.transforms import KeepAspect, MultiCrop
from vit_jax.durations import Timeline, steps
from vit_jax.models.dense import Normalize
from vit_jax.models.flexi import FlexiPositions
from vit_jax.models.pooling import DistillationToken
from vit_jax.models.vit import PatchEmbedding
from vit_jax.objectives.anchor import Anchored, Start
from vit_jax.objectives.classification import softmax_xent
from vit_jax.objectives.colours import Colour, Views
from vit_jax.objectives.dino import Dino, DinoHead, SimDino
from vit_jax.objectives.dinov2 import DinoV2
from vit_jax.objectives.distillation import Distillation, Teacher
from vit_jax.objectives.feature_distillation import FeatureDistillation
from vit_jax.objectives.frozen_teacher import FrozenTeacher
from vit_jax.objectives.guides import Prototypes, Regression
from vit_jax.objectives.lejepa import LeJepa, Projector, Visreg
from vit_jax.objectives.mae import Decoder, Mae
from vit_jax.objectives.terms import Koleo, patch_kernel, z_loss
from vit_jax.optim.optimizers import Optimizer
from vit_jax.optim.schedules import Ema
from vit_jax.parallel import sharding
from vit_jax.parallel.sharding import MeshSizes
from vit_jax.runs.checkpoint import Checkpointer, Checkpoints
from vit_jax.runs.records import read_records
from vit_jax.runs.workdirs import ChangedRunError
from vit_jax.setup import make_step
from vit_jax.step import Term, as_objective, first_carried, of_examples
from vit_jax.weights import formats
from vit_jax.weights.surgery import InitFrom

FLIP = Colour(flip=0.5, jitter_probability=0, grey=0, blur=0)
make = functools.partial
VIEWS = Views((FLIP,), FLIP)
HEAD = DinoHead(16, 12, 6)
MOVES = {'momentum': 0.5, 'freeze_last_layer': None}
# Losses of nearly one-hot targets are so small that rounding shows.
MOVES |= {'teacher_temperature': 0.5, 'warmup_teacher_temperature': 0.5}
TERMS = {'koleo': Term(Koleo(), 0.1)}
LEJEPA = make(
  LeJepa, views=VIEWS, projector=Projector(8, (12, 10), 4), terms=TERMS
)
GUIDES = {
  'site': Term(Prototypes(key='site'), 0.5),
  'year': Term(Regression(key='year', hidden=4, adversarial=True), 0.5),
  'kernel': Term(patch_kernel, 0.5),
}
OBJECTIVES = {  # name: function of a file of weights -> objective
  'lejepa': lambda path: LEJEPA,
  'visreg': lambda path: make(LEJEPA, regularizer=Visreg(slices=64)),
  'dino': lambda path: make(Dino, **MOVES, views=VIEWS, head=HEAD),
  'simdino': lambda _: make(SimDino, views=VIEWS, head=DinoHead(None, 12, 6)),
  'dinov2': lambda path: make(
    DinoV2, **MOVES, views=VIEWS, head=HEAD, patch_head=HEAD, terms=GUIDES
  ),
  'aspect': lambda path: softmax_xent,
  'mae': lambda path: make(Mae, decoder=Decoder(8, 1, 2)),
  'anchored': lambda path: make(
    Anchored, objective=LEJEPA, start=Start(InitFrom(path))
  ),
  'features': lambda path: make(
    FeatureDistillation, views=VIEWS, teacher=FrozenTeacher(path)
  ),
  'distillation': lambda path: make(
    Distillation,
    objective=make(softmax_xent, terms={'z': Term(z_loss, 0.1)}),
    teacher=Teacher(path),
    kind='hard',
    weight=0.5,
  ),
}
WHOLE_BATCH = {*OBJECTIVES} - {'dino', 'mae', 'distillation', 'aspect'}
# DINOv2 does all that DINO does, and an anchored LeJEPA what LeJEPA does.
BY_DAY = 'dinov2', 'anchored', 'mae', 'features', 'aspect'
MODEL = tiny.vit(width=8, mlp_dim=16, num_classes=0)
FIELDS = {
  'dinov2': {'embedding': PatchEmbedding(4, mask_token=True)},
  'distillation': {'pooling': DistillationToken(), 'num_classes': 4},
  'aspect': {'posemb': FlexiPositions(stored=(2, 3)), 'num_classes': 4},
}


def cut(image, rng):
  return image[: rng.integers(1, 13)]


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  """Three files of weights: a teacher, a copy, and another teacher."""
  folder, found = tmp_path_factory.mktemp('teacher'), []
  for i, seed in enumerate((1, 1, 2)):
    weights = tiny.weights(
      tiny.vit(num_classes=4, width=8, mlp_dim=16), (12, 12, 3), seed=seed
    )
    formats.write(weights, folder / f'{i}.npz', 'vit_jax')
    found.append(str(folder / f'{i}.npz'))
  return found


def data_of(name):
  """Batches of 8: images with labels, or views of two sizes."""
  source = Synthetic(image_size=12, num_classes=4, num_examples=32)
  if name in ('mae', 'features', 'distillation'):
    return Data(source, 8, labels=name == 'distillation')
  if name == 'aspect':
    return Data(source, 8, transforms=(cut, KeepAspect(4, 12, (0.5, 1.0))))
  crop = MultiCrop(8, local_size=4, local_count=2)
  if name != 'dinov2':
    return Data(source, 8, transforms=(crop,), labels=False)
  source = Visited(image_size=12, num_classes=4, num_examples=32)
  keep = {'site': Classes(), 'year': Numbers()}
  return Data(source, 8, transforms=(crop,), labels=False, keep=keep)


class Visited(Synthetic):
  """Images with a site and a year, some of which are missing."""

  def __getitem__(self, index):
    site, year = 'NE S'[index % 4], ('', '1999.5', '2001.0')[index % 3]
    return {**super().__getitem__(index), 'site': site.strip(), 'year': year}


def model_of(name):
  return MODEL.clone(**FIELDS.get(name, {}))


def start(name, path, axes, **options):
  """Return (state, its shapes, function (state, batch) -> (state, metrics))."""
  model = model_of(name)
  images = data_of(name).first_example()['image']
  images = jax.ShapeDtypeStruct((1, *images.shape[-3:]), jnp.float32)
  made = as_objective(OBJECTIVES[name](path)(model, preprocess=Normalize()))
  timeline = Timeline(8, 32, total_steps=4)
  made = made.of_run(timeline, images)
  made = of_examples(made, data_of(name).first_example(), timeline)
  mesh = sharding.make_mesh(jax.devices()[: math.prod(axes.values())], **axes)
  tx = optax.sgd(0.1)
  given = {'images': images, 'loss_fn': made, 'make_tx': lambda params: tx}
  _, shapes, step_fn = make_step(model, mesh=mesh, **given, **options)
  rules = options.get('rules')
  frozen = {name: x.load(mesh, rules) for name, x in made.teachers.items()}

  def step(state, batch):
    with jax.set_mesh(mesh):
      return step_fn(state, sharding.put_batch(batch, mesh), teachers=frozen)

  # Not of `init`, which compiles slowly.
  rng = np.random.default_rng(0)
  params = tree.map_with_path(
    lambda k, x: np.float32(rng.normal(k.endswith('scale'), 0.2, x.shape)),
    shapes.params,
  )
  ema = None if shapes.ema is None else params
  carried = first_carried(made, model.width)
  state = tiny.first_state(params, tx, ema=ema, carried=carried)
  placed = jax.device_put(state, jax.tree.map(lambda x: x.sharding, shapes))
  return placed, shapes, step


def losses_of(step, state, batches):
  """Return (the state after a step for each batch, losses)."""
  losses = []
  for batch in batches:
    state, metrics = step(state, batch)
    losses.append(float(metrics['loss']))
  return state, losses


def arrays(state):
  return {'params': state.params, 'ema': state.ema, 'carried': state.carried}


@pytest.mark.parametrize('name', nightly(OBJECTIVES, but=BY_DAY))
def test_a_mesh_and_a_checkpoint_change_nothing(name, files, tmp_path):
  """Nor do micro-batches, where an objective allows them."""
  with contextlib.closing(data_of(name).train_batches()) as batches:
    *first, last = (next(batches) for _ in range(3))
  state, _, step = start(name, files[0], {'data': 1})
  expected, losses = losses_of(step, state, [*first, last])
  assert len(set(losses)) == 3
  assert all(jnp.any(x != 0) for x in jax.tree.leaves(expected.carried))
  state, shapes, step = start(
    name,
    files[0],
    {'data': 2, 'fsdp': 2},
    rules=sharding.fsdp(min_elements=64),
    accum_steps=1 if name in WHOLE_BATCH else 2,
  )
  state, same = losses_of(step, state, first)
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(2, state, {})
  checkpointer.close()
  found, end = losses_of(step, state, [last])
  # Measured: at most 2e-6.
  np.testing.assert_allclose(same + end, losses, rtol=1e-5)
  found, expected = arrays(found), arrays(expected)
  tiny.assert_trees_close(found, expected, rtol=1e-4, atol=1e-5)
  split = {
    path
    for path, x in tree.flatten(found).items()
    if not x.sharding.is_fully_replicated
  }
  assert 'params/embedding/kernel' in split
  assert name != 'features' or 'carried' in split  # the queue
  state, _ = Checkpointer(tmp_path).restore(shapes)
  resumed, same_end = losses_of(step, state, [last])
  assert same_end == end
  tiny.assert_trees_close(arrays(resumed), found)


@pytest.fixture
def compiled_once(tmp_path):
  """Let a second run read the programs of the first, as vit_jax.main does."""
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  jax.config.update('jax_compilation_cache_dir', str(tmp_path / 'programs'))
  compilation_cache.reset_cache()
  yield
  compilation_cache.reset_cache()


def run(workdir, name, path, **options):
  """Train a model of 8 devices, for four steps."""
  rule = Optimizer(optax.adam)
  if name == 'anchored':  # as it is used: from the start, with a new head
    options = {'init_from': InitFrom(path)} | options
    rule = Optimizer(optax.adamw, freeze=('(?!objective/).*',), thaw=steps(1))
  return short_run.run(
    workdir,
    model=model_of(name),
    data=data_of(name),
    objective=OBJECTIVES[name](path),
    optimizer=rule,
    schedule=lambda timeline: lambda step: 1e-2,
    total=steps(4),
    checkpoints=Checkpoints(every=steps(2), keep_last=2),
    mesh=MeshSizes(data=2, fsdp=2, model=2),
    **options,
  )


@pytest.mark.slow
@pytest.mark.usefixtures('compiled_once')
@pytest.mark.parametrize(
  'name', ['dino', 'dinov2', 'anchored', 'features', 'distillation', 'aspect']
)
def test_a_run_resumes_bit_by_bit(name, files, tmp_path):
  """A teacher may move, but is not saved, and no other takes its place."""
  path, moved, other = files
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  expected = run(whole, name, path)
  shutil.copytree(whole, parts)
  shutil.rmtree(parts / 'checkpoints' / '4')
  resumed = run(parts, name, path if name == 'anchored' else moved)
  for field in ('params', 'ema', 'opt_state', 'carried'):
    found = (getattr(x, field) for x in (resumed, expected))
    jax.tree.map(np.testing.assert_array_equal, *found)
  losses, same = (
    [x['train/loss'] for x in read_records(path) if 'train/loss' in x]
    for path in (whole, parts)
  )
  assert losses == same and len(losses) == 4
  written = formats.read(whole).params
  kept = {k: x for k, x in expected.eval_params.items() if k != 'objective'}
  jax.tree.map(np.testing.assert_array_equal, tree.unflatten(written), kept)
  saved = {x.name for x in (whole / 'checkpoints').rglob('*')}
  assert not any('teacher' in name or 'frozen' in name for name in saved)
  if 'dino' not in name and name != 'aspect':  # which have no file of a teacher
    shutil.rmtree(parts / 'checkpoints' / '4')
    changes = ('init_from', 'objective.start.init_from') * (name == 'anchored')
    with pytest.raises(ChangedRunError, match=r'objective\.\w+\.weights'):
      run(parts, name, other, provenance=Provenance(allow_changes=changes))


@pytest.mark.parametrize('name', sorted(WHOLE_BATCH))
def test_micro_batches_are_refused(name, files, tmp_path):
  what = r"the (term '(koleo|site)'|loss) of this objective"
  with pytest.raises(ValueError, match=f'accum_steps=2, but {what}'):
    run(tmp_path, name, files[0], accum_steps=2)


def test_an_ema_of_the_run_is_refused_next_to_that_of_a_teacher(tmp_path):
  with pytest.raises(ValueError, match='Leave ema out'):
    run(tmp_path, 'dino', None, ema=Ema(0.5))
