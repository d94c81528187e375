"""The steps of golden/record_dinov2.py, taken by this package."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import record_dinov2 as recorder
import tiny

from vit_jax import tree
from vit_jax.durations import Timeline, steps
from vit_jax.models.dense import Normalize
from vit_jax.models.vit import PatchEmbedding, VisionTransformer
from vit_jax.objectives.anchor import Anchored
from vit_jax.objectives.colours import Colour, Views
from vit_jax.objectives.dino import DinoHead
from vit_jax.objectives.dinov2 import DinoV2

HEAD = DinoHead(
  recorder.OUTPUTS, recorder.HIDDEN, recorder.BOTTLENECK, 'lengths'
)
MODEL = VisionTransformer(
  width=recorder.WIDTH,
  depth=recorder.DEPTH,
  mlp_dim=2 * recorder.WIDTH,
  num_heads=recorder.HEADS,
  embedding=PatchEmbedding(recorder.PATCH, mask_token=True),
  num_classes=0,
)
PLAIN = Colour(flip=0, jitter_probability=0, grey=0, blur=0)
low, high = recorder.TEMPERATURES
FIELDS = {
  'preprocess': Normalize(),
  'views': Views((PLAIN,), PLAIN),
  'head': HEAD,
  'patch_head': HEAD,
  'timeline': Timeline(recorder.BATCH, 2 * recorder.BATCH, recorder.STEPS),
  'momentum': recorder.MOMENTUM,
  'student_temperature': recorder.STUDENT,
  'warmup_teacher_temperature': low,
  'teacher_temperature': high,
  'teacher_warmup': steps(recorder.WARMUP),
  'freeze_last_layer': None,
  'patch_weight': recorder.PATCH_WEIGHT,
  'koleo_weight': recorder.KOLEO,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given(DinoV2):
  """DinoV2 that hides the patches that the batch says."""

  def prepare(self, batch, rng):
    return batch | {x: jnp.float32(batch[x]) for x in ('image', 'local')}


def parameters(seed=0):
  return tree.unflatten(recorder.weights(seed))


def compare(name):
  """Check losses, terms, first gradients and last parameters of a recording.

  Returns the largest relative errors of the first loss and gradient, and of
  all losses.
  """
  golden, loss_fn, frozen = tiny.golden(name), Given(MODEL, **FIELDS), {}
  if name == 'anchor':
    loss_fn = Anchored(
      MODEL,
      preprocess=FIELDS['preprocess'],
      objective=lambda *_, **__: Given(MODEL, **FIELDS),
      start=None,
      weight=recorder.ANCHOR,
    )
    frozen = {'start': parameters(1)}
  tx = optax.adamw(recorder.LR, eps=recorder.EPS, weight_decay=recorder.DECAY)
  params = parameters()
  ema = jax.tree.map(lambda x: np.float32(0.9) * x, params)
  state, found = tiny.first_state(params, tx, ema=ema), []
  step = tiny.compiled_step(loss_fn, tx, ema_weight=loss_fn.ema_weight)
  for i in range(recorder.STEPS):
    state, metrics = step(state, recorder.crops(i), teachers=frozen)
    terms = sorted(
      metrics.keys() & {'class_loss', 'patch_loss', 'koleo', 'anchor'}
    )
    found.append([metrics[x] for x in ('loss', *terms)])
    if i == 0:  # AdamW's first moment is a tenth of the gradient
      grads = tree.flatten(state.opt_state[0].mu)
      largest = max(abs(x).max() for k, x in golden.items() if 'grad/' in k)
      errors = {
        path: abs(10 * np.float64(x) - golden[f'grad/{path}']).max() / largest
        for path, x in grads.items()
      }
  errors = max(errors.values())
  losses = abs(np.array(found, np.float64) / golden['losses'] - 1)
  expected = tree.unflatten(tiny.under(golden, 'last/'))
  options = {'rtol': 1e-4, 'atol': 1e-5, 'without': '.*key/bias'}
  tiny.assert_trees_close(state.params, expected, **options)
  return losses[0].max(), errors, losses.max()
