"""Feature distillation: a student learns the similarities that a teacher sees.

No labels, and no head of the teacher, are needed. The teacher says how similar
an image is to others, which are in a queue, and how similar the patches of an
image are; the student predicts both ("v3" of lightly-train, written from the
formulas; the comparison with a queue is that of SEED, arXiv 2101.04731). Widths
and grids may differ: two linear maps give the student's features the width of
the teacher's, and its patches are resized to the teacher's grid.

B images, Q features in the queue, T the teacher's width, [gh, gw] its grid
"""

import dataclasses
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from vit_jax import types
from vit_jax.durations import Timeline
from vit_jax.models import resample
from vit_jax.objectives.colours import Colour, Views
from vit_jax.objectives.encode import encode, summarize
from vit_jax.objectives.frozen_teacher import FrozenTeacher
from vit_jax.objectives.views import OfViews
from vit_jax.step import OfFeatures, Seen

# One feature is always the most similar one: its loss is 0.
Length = Annotated[int, types.Expect(lambda n: n >= 2, 'at least 2')]
Features = tuple[jax.Array, jax.Array]  # [B, D] of images, [B, ., ., D] patches


@dataclasses.dataclass(frozen=True)
class FeatureDistillation(OfViews):
  """KL divergences of similarities; the loss is global + weight * local.

  With features of length 1, g of an image and p of its patches:

    global  KL(softmax(g · queue / t) || the student's), mean over images
    local   KL(softmax over n (p_m · p_n / t) || the student's), mean over m too

  The queue has the teacher's g of the global batch, then those of batches
  before, newest first; it starts with zeros. Both models see the same images:
  the whole batch is mixed with a permutation of it, by one weight from U(0, 1).

  Attributes:
    views: colours of the one view of an image; by default those of v3, whose
      blur of at most 0.1 pixels changes nothing.
    temperature, queue: t and Q above; None: see `queue_length`.
  """

  _: dataclasses.KW_ONLY
  teacher: FrozenTeacher
  views: Views = Views((Colour(blur=0.0),))
  temperature: types.Positive = 0.07
  weight: types.NonNegative = 1.0
  queue: Length | None = None

  whole_batch = True
  kinds: ClassVar[types.Kinds] = dict.fromkeys(
    ('loss', 'global_loss', 'local_loss'), types.LOSS
  )

  teachers = property(lambda self: {'teacher': self.teacher})  # type: ignore
  # Guides would read the columns of one of the two images that are mixed.
  with_terms = OfFeatures.with_terms  # type: ignore[assignment]

  def of_run(
    self, timeline: Timeline, images: jax.ShapeDtypeStruct, choose: Any = None
  ) -> 'FeatureDistillation':
    queue = self.queue or queue_length(timeline.num_examples)
    teacher = self.teacher.open(self.model, choose)
    return dataclasses.replace(self, queue=queue, teacher=teacher)

  def init(self, rng: jax.Array, images: jax.ShapeDtypeStruct) -> types.Params:
    """Return the maps of images and of patches to the teacher's width."""
    make = jax.nn.initializers.truncated_normal(0.02)
    params: dict[str, Any] = {}
    widths = zip(_widths(self.model, images), self._teacher_widths())
    keys = jax.random.split(rng)
    for name, key, shape in zip(('image', 'patches'), keys, widths):
      params[name] = {'kernel': make(key, shape), 'bias': jnp.zeros(shape[1])}
    return params

  def carried(self) -> jax.Array:
    """Return the queue of the first step, [Q, T]."""
    return jnp.zeros((self.queue, self._teacher_widths()[0]))

  def _teacher_widths(self):
    return _widths(self.teacher.model, self.teacher.images)

  def prepare(self, batch: types.Batch, rng: jax.Array) -> dict[str, Any]:
    """Change the colours of the images, then mix the whole batch."""
    of_views, of_order, of_weight = jax.random.split(rng, 3)
    batch = super().prepare(batch, of_views)
    images, weight = batch['image'], jax.random.uniform(of_weight)
    others = images[jax.random.permutation(of_order, len(images))]
    return batch | {'image': weight * images + (1 - weight) * others}

  def encode(self, seen: Seen) -> Seen:
    images = self.preprocess(seen.batch['image'])
    found = encode(self.model, seen.params, images, seen.rng)
    return seen._replace(features={'image': found})

  def features(self, seen: Seen) -> tuple[Features, Features]:
    """Return the features of student and teacher, each as it has them."""
    images, teacher = seen.batch['image'], self.teacher
    found = seen.features['image']
    student = summarize(self.model, seen.params, images, found)
    images = teacher.convert(images)
    params = seen.context.teachers['teacher']
    targets = summarize(teacher.model, params, images)
    return student, jax.lax.stop_gradient(targets)

  def loss(self, seen: Seen) -> types.Outputs:
    student, teacher = self.features(seen)
    maps = seen.params['objective']
    image, patches = map(_project, student, (maps['image'], maps['patches']))
    _, height, width, _ = teacher[1].shape
    patches = resample.resize(patches, (height, width), 'bilinear')
    image, patches = _unit(image), _tokens(patches)
    true_image, true_patches = _unit(teacher[0]), _tokens(teacher[1])
    queue = jnp.concatenate([true_image, seen.context.carried])[: self.queue]
    metrics = {
      'global_loss': self._compare((true_image, queue), (image, queue)),
      'local_loss': self._compare((true_patches,) * 2, (patches,) * 2),
    }
    loss = metrics['global_loss'] + self.weight * metrics['local_loss']
    return loss, {'loss': loss, **metrics}, queue

  def _compare(self, teacher, student):
    """Return the mean KL divergence of similarities of x with keys, (x, keys).

    They are [..., m, T] and [..., n, T].
    """

    def log_probabilities(x, keys):
      cosines = jnp.einsum('...mt,...nt->...mn', x, keys, precision='highest')
      return jax.nn.log_softmax(cosines / self.temperature)

    logs = log_probabilities(*student), log_probabilities(*teacher)
    return jnp.mean(optax.losses.kl_divergence_with_log_targets(*logs))


def queue_length(num_images: int) -> int:
  """Return a power of two, a quarter to a half of the images: 2 to 8,192."""
  return min(8192, 2 ** (max(2, num_images // 2).bit_length() - 1))


def _widths(model, images):
  """Return the widths of the features of an image and of a patch."""

  def features(rng, images):
    return summarize(model, model.init(rng, images)['params'], images)

  found = jax.eval_shape(features, jax.random.key(0), images)
  return [x.shape[-1] for x in found]


def _project(x, linear):
  bias = linear['bias'].reshape((1,) * (x.ndim - 1) + (-1,))
  return jnp.matmul(x, linear['kernel'], precision='highest') + bias


def _unit(x):
  return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def _tokens(patches):
  """Return patches [B, gh, gw, T] as rows of length 1, [B, gh * gw, T]."""
  return _unit(patches.reshape(len(patches), -1, patches.shape[-1]))
