"""Distillation: a student learns the predictions of a teacher.

`Distillation` wraps an objective of logits and labels. Teacher and student see
the same pixels ("consistent" in "Knowledge distillation: A good teacher is
patient and consistent", Beyer et al., 2021), also mixed ones:

    Mixed(objective=Distillation(objective=softmax_xent))

A student with the pooling DistillationToken (DeiT) learns the labels with the
head of its class token, and the teacher with the head of its distillation
token. It predicts the mean of both.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from vit_jax import types
from vit_jax.data.targets import Classes
from vit_jax.durations import Timeline
from vit_jax.models.vit import grid_of
from vit_jax.objectives.classification import CrossEntropy, softmax_xent
from vit_jax.objectives.frozen_teacher import FrozenTeacher
from vit_jax.objectives.wrapper import Around
from vit_jax.step import Labelled, OfFeatures, Seen


@dataclasses.dataclass(eq=False)
class Teacher(FrozenTeacher):
  """A frozen teacher with the classes of the data.

  Attributes:
    same_classes: whether teacher and data have the same classes in the same
      order, whatever their names. False: names that both have must be equal.
  """

  same_classes: bool = False

  def open(self, student: Any, choose: Any = None) -> Any:
    """Return the teacher with its model, which must fit the student."""
    made = super().open(student, choose)
    classes, targets = made.model.num_classes, made.weights.targets
    if not isinstance(targets, Classes):
      raise types.UserError(
        f'The teacher {self.path} has learned {type(targets).__name__}, see '
        'vit_jax/data/targets.py. Distillation is for Classes and Grades.'
      )
    if not classes or classes != student.num_classes:
      raise types.UserError(
        f'The teacher {self.path} has {classes or "no"} classes, the student '
        f'{student.num_classes}. Use a teacher that was fine-tuned on the data '
        'of the student.'
      )
    names = None if self.same_classes else made.weights.class_names
    return made.opened(class_names=names)

  def __call__(self, params: types.Params, batch: types.Batch) -> jax.Array:
    """Return float32 logits [B, K] of a batch, whose images are in 0..255."""
    grid = grid_of(self.model, batch)
    images = self.convert(batch['image'], resize=not grid)
    logits = self.model.apply({'params': params}, images, **grid)
    return jax.lax.stop_gradient(logits)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Distillation(OfFeatures, Around, Labelled):
  """(1 - weight) * loss of the labels + weight * loss of the teacher.

  Published settings: "patient teacher": soft, temperature 1, weight 1. DeiT:
  hard, weight 0.5; or soft, temperature 3, weight 0.1 (from memory of the
  paper). Its released code divides the soft loss by the number of classes, too.

  The metrics are those of `objective` and 'label_loss', 'teacher_loss' and
  'agreement', the fraction of examples with the same most probable class.

  Attributes:
    objective: `softmax_xent` or `sigmoid_xent`, the loss of the labels.
    kind: 'soft': KL(teacher || student) of softmax(logits / temperature),
      summed over classes, times temperature^2; 'hard': the softmax
      cross-entropy of the teacher's most probable class.
  """

  teacher: Teacher
  objective: types.MakeObjective = softmax_xent
  kind: Literal['soft', 'hard'] = 'soft'
  temperature: types.Positive = 1.0
  weight: types.Fraction = 1.0

  for_grids = True
  kinds: ClassVar[types.Kinds] = {**Labelled.kinds, 'agreement': types.RATE}
  teachers = property(lambda self: {'teacher': self.teacher})  # type: ignore

  def __post_init__(self) -> None:
    super().__post_init__()
    if not isinstance(self.inner, CrossEntropy):
      raise types.UserError(
        'Distillation can only wrap softmax_xent or sigmoid_xent. Wrap it in '
        'others: Mixed(objective=Distillation(objective=softmax_xent)).'
      )
    if self.kind == 'hard' and self.temperature != 1:
      raise types.UserError(
        f"temperature={self.temperature} has no effect on kind='hard'. Leave "
        'it out.'
      )
    pooling = getattr(self.model, 'pooling', None)
    if self.weight == 1 and getattr(pooling, 'distillation_token', False):
      raise types.UserError(
        'With DistillationToken, weight=1 does not train the head of the class '
        'token, half of the prediction. Use a smaller weight, such as 0.5.'
      )

  @property
  def activation(self) -> str:  # type: ignore[override]
    return 'softmax' if self.weight == 1 else self.inner.activation

  def of_run(
    self, timeline: Timeline, images: jax.ShapeDtypeStruct, choose: Any = None
  ) -> 'Distillation':
    teacher = self.teacher.open(self.model, choose)
    return dataclasses.replace(self, teacher=teacher)

  def encode(self, seen: Seen) -> Seen:
    return self.inner.encode(seen, whole=True)

  def loss(self, seen: Seen) -> types.Outputs:
    found = seen.features['image']
    logits = found.get('class_logits', found['logits'])
    logits_for_teacher = found.get('distillation_logits', found['logits'])
    labels = jnp.asarray(seen.batch['label'])
    label_loss, metrics = self.inner.compare(logits, labels)
    targets = self.teacher(seen.context.teachers['teacher'], seen.batch)
    loss = jnp.mean(self.of_teacher(logits_for_teacher, targets))
    same = jnp.argmax(logits_for_teacher, -1) == jnp.argmax(targets, -1)
    total = self.weight * loss
    if self.weight < 1:
      total += (1 - self.weight) * label_loss
    metrics |= {'loss': total, 'label_loss': label_loss, 'teacher_loss': loss}
    return total, metrics | {'agreement': jnp.mean(same)}

  def of_teacher(self, logits: types.Array, targets: types.Array) -> jax.Array:
    """Return the loss of each example: logits of student and teacher -> [B]."""
    if self.kind == 'hard':
      hard = jax.nn.one_hot(jnp.argmax(targets, axis=-1), targets.shape[-1])
      return optax.softmax_cross_entropy(logits, hard)
    student = jax.nn.log_softmax(logits / self.temperature)
    teacher = jax.nn.log_softmax(targets / self.temperature)
    losses = jnp.sum(jnp.exp(teacher) * (teacher - student), -1)
    return self.temperature**2 * losses
