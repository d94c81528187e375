"""Distillation: a student learns the predictions of a teacher.

`distillation` wraps an objective of logits and labels. Teacher and student see
the same pixels ("consistent" teaching in "Knowledge distillation: A good
teacher is patient and consistent", Beyer et al., 2021). This includes mixup, if
it is outside:

    mixed(objective=distillation(objective=softmax_xent))

A student with the pooling DistillationToken (DeiT) learns the labels with the
head of its class token, and the teacher with the head of its distillation
token. It predicts the mean of both.
"""

from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from vit_jax.objectives.classification import softmax_loss, softmax_xent
from vit_jax.objectives.teacher import Teacher
from vit_jax.types import (
  Array,
  Expect,
  Fraction,
  LossFn,
  Model,
  Objective,
  Preprocess,
  UserError,
)

Temperature = Annotated[
  float, Expect(lambda x: 1e-3 <= x <= 1e3, 'between 0.001 and 1000')
]


def distillation(
  model: Model,
  *,
  preprocess: Preprocess,
  teacher: Teacher,
  objective: Objective = softmax_xent,
  kind: Literal['soft', 'hard'] = 'soft',
  temperature: Temperature = 1.0,
  weight: Fraction = 1.0,
) -> LossFn:
  """Return (1 - weight) * loss of the labels + weight * loss of the teacher.

  The teacher is not trained. Its parameters are not in the checkpoints, and are
  sharded by the rules of the model.

  Published settings: "patient teacher": soft, temperature 1, weight 1. DeiT:
  hard, weight 0.5; or soft, temperature 3, weight 0.1 (from memory of the
  paper).

  Args:
    model: the student.
    preprocess: images in 0..255 -> float images, for the student.
    teacher: see Teacher.
    objective: the objective to wrap, `softmax_xent` or `sigmoid_xent`; it gives
      the loss of the labels. Its metrics are kept, except for 'loss'.
    kind: 'soft': KL(teacher || student) of softmax(logits / temperature),
      summed over classes, times temperature^2; 'hard': the softmax
      cross-entropy of the teacher's most probable class.
    temperature: of 'soft'.
    weight: of the loss of the teacher. At 1 the labels are not used, except for
      metrics.

  Returns:
    LossFn whose metrics are those of `objective`, 'loss', 'label_loss',
    'teacher_loss' and 'agreement': the fraction of examples for which teacher
    and student have the same most probable class.

  Raises:
    ValueError: the teacher cannot be read, or has other classes; or `objective`
      is not a function of logits and labels.
  """
  inner: Any = objective(model, preprocess=preprocess)
  compare = getattr(inner, 'compare', None)
  if compare is None:
    raise UserError(
      'distillation: the objective inside is not computed from the logits and '
      'labels alone. Use softmax_xent or sigmoid_xent, and wrap distillation '
      'in others: mixed(objective=distillation(objective=softmax_xent)).'
    )
  predictor = teacher.open(model)

  def loss_fn(params, batch, rng, teacher_params):
    logits, logits_for_teacher = student_logits(
      model, params, preprocess(batch['image']), rng
    )
    label_loss, metrics = compare(logits, jnp.asarray(batch['label']))
    targets = predictor(teacher_params, batch['image'])
    losses = teacher_loss(
      logits_for_teacher, targets, kind=kind, temperature=temperature
    )
    loss = jnp.mean(losses)
    same = jnp.argmax(logits_for_teacher, -1) == jnp.argmax(targets, -1)
    total = weight * loss
    if weight < 1:
      total += (1 - weight) * label_loss
    return total, metrics | {
      'loss': total,
      'label_loss': label_loss,
      'teacher_loss': loss,
      'agreement': jnp.mean(same),
    }

  activation = 'softmax' if weight == 1 else inner.activation
  loss_fn.activation = activation  # type: ignore[attr-defined]
  loss_fn.teacher = predictor  # type: ignore[attr-defined]
  return loss_fn


def teacher_loss(
  logits: Array, targets: Array, *, kind: str = 'soft', temperature: float = 1.0
) -> jax.Array:
  """Return the loss of each example: logits of student and teacher -> [B]."""
  if kind == 'hard':
    classes = jnp.argmax(targets, axis=-1)
    return softmax_loss(logits, jax.nn.one_hot(classes, targets.shape[-1]))
  student = jax.nn.log_softmax(logits / temperature)
  teacher = jax.nn.log_softmax(targets / temperature)
  return temperature**2 * jnp.sum(jnp.exp(teacher) * (teacher - student), -1)


def student_logits(
  model: Model, params: Any, images: jax.Array, rng: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Return the logits [B, K] for the labels, and those for the teacher.

  They are the same, unless the model has a distillation token.
  """
  variables = {'params': params}
  options = {'train': True, 'rngs': {'dropout': rng}}
  pooling = getattr(model, 'pooling', None)
  if not getattr(pooling, 'distillation_token', False):
    logits = model.apply(variables, images, **options)
    return logits, logits
  out = model.apply(
    variables, images, method='features', per_layer=False, **options
  )
  return out['class_logits'], out['distillation_logits']
