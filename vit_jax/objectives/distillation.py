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

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax import tree
from vit_jax.objectives.classification import (
  CrossEntropy,
  softmax_loss,
  softmax_xent,
)
from vit_jax.parallel.sharding import Rules, annotate, infer, rules_for
from vit_jax.step import Context, Labelled
from vit_jax.types import (
  MACHINE,
  RATE,
  Array,
  Batch,
  Fraction,
  Kinds,
  MakeObjective,
  Model,
  Outputs,
  Params,
  PathLike,
  Positive,
  Preprocess,
  PyTree,
  UserError,
)
from vit_jax.weights import formats


@dataclasses.dataclass  # not frozen: runs never share what an old file said
class Teacher:
  """A model and its parameters, from a weights file.

  The parameters are an argument of the train step, sharded by the rules of the
  model. No checkpoint contains them, and no optimizer sees them. The images are
  converted as the file says, and resized to its size on the device, with
  antialiasing. Dropout and stochastic depth are off.

  Attributes:
    path: a workdir, a checkpoint, or weights of any format of formats.py.
    options: more arguments of `formats.read`: step and ema of a workdir, trust,
      what a file does not say, and fields of the model ({'scan': True}).
    same_classes: whether teacher and data have the same classes in the same
      order, whatever their names. False: names that both have must be equal.
  """

  path: Annotated[PathLike, MACHINE]  # the parameters are compared
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  same_classes: bool = False

  def open(self, student: Any) -> None:
    """Read the model, and check that it fits a student.

    This sets `model`, whose attention `train` chooses, `images`, a
    ShapeDtypeStruct of its batches, and `class_names`, which must equal the
    names of the data, if both are known.
    """
    weights = formats.read(self.path, **self.options, values=False)
    model = weights.model
    if not model.num_classes or model.num_classes != student.num_classes:
      raise UserError(
        f'The teacher {self.path} has {model.num_classes or "no"} classes, the '
        f'student {student.num_classes}. Use a teacher that was fine-tuned on '
        'the data of the student.'
      )
    dtype = getattr(student, 'dtype', None)
    if dtype is not None and hasattr(model, 'dtype'):
      model = model.clone(dtype=dtype)
    self.model: Any = model
    self.images = jax.ShapeDtypeStruct((1, *weights.image_shape), np.float32)
    self.class_names = None if self.same_classes else weights.class_names
    self._preprocess = weights.preprocess

  def fingerprint(self) -> dict[str, Any]:
    """Return a hash of the parameters, which a resumed run compares."""
    params = formats.read(self.path, **self.options).params
    found = hashlib.sha256()
    for path, array in sorted(tree.flatten(params).items()):
      found.update(f'{path} {array.dtype} {array.shape}\n'.encode())
      found.update(np.ascontiguousarray(array).tobytes())
    return {'weights': found.hexdigest()[:16]}

  def abstract_params(self, mesh: Mesh, rules: Rules | None = None) -> PyTree:
    """Return ShapeDtypeStructs of the parameters, with shardings.

    `rules` are for paths that begin with 'teacher/'; None: `rules_for(mesh)`.
    """
    params = jax.eval_shape(self.model.init, jax.random.key(0), self.images)
    shapes = {'teacher': params['params']}
    rules = rules_for(mesh) if rules is None else rules
    return annotate(shapes, infer(shapes, rules, mesh))['teacher']

  def load(self, abstract_params: PyTree) -> Params:
    """Return the parameters, sharded like `abstract_params`."""
    params = formats.read(self.path, **self.options).params
    if getattr(self.model, 'scan', False):
      params = tree.stack_blocks(params)

    def place(array, like):
      return jax.make_array_from_callback(
        like.shape, like.sharding, lambda index: np.asarray(array)[index]
      )

    return jax.tree.map(place, tree.unflatten(params), abstract_params)

  def __call__(self, params: Params, images: Array) -> jax.Array:
    """Return float32 logits [B, K] of images [B, H, W, C] in 0..255."""
    x = self._preprocess(images)
    shape = (len(x), *self.images.shape[1:])
    if x.shape != shape:
      x = jax.image.resize(x, shape, 'bilinear')
    return jax.lax.stop_gradient(self.model.apply({'params': params}, x))


def distillation(
  model: Model,
  *,
  preprocess: Preprocess,
  teacher: Teacher,
  objective: MakeObjective = softmax_xent,
  kind: Literal['soft', 'hard'] = 'soft',
  temperature: Positive = 1.0,
  weight: Fraction = 1.0,
) -> 'Distillation':
  """Return (1 - weight) * loss of the labels + weight * loss of the teacher.

  Published settings: "patient teacher": soft, temperature 1, weight 1. DeiT:
  hard, weight 0.5; or soft, temperature 3, weight 0.1 (from memory of the
  paper). Its released code divides the soft loss by the number of classes, too.

  Args:
    model, preprocess: the student's model and preprocessing.
    teacher: see Teacher.
    objective: `softmax_xent` or `sigmoid_xent`, the loss of the labels.
    kind: 'soft': KL(teacher || student) of softmax(logits / temperature),
      summed over classes, times temperature^2; 'hard': the softmax
      cross-entropy of the teacher's most probable class.
    temperature: softmax temperature for kind='soft'.
    weight: weight of the teacher's loss; the label loss has 1 - weight.

  Returns:
    Objective with the metrics of `objective` and 'loss', 'label_loss',
    'teacher_loss' and 'agreement', the fraction of examples in which teacher
    and student have the same most probable class.
  """
  inner = objective(model, preprocess=preprocess)
  if not isinstance(inner, CrossEntropy):
    raise UserError(
      'distillation can only wrap softmax_xent or sigmoid_xent. Wrap it in '
      'others: mixed(objective=distillation(objective=softmax_xent)).'
    )
  if kind == 'hard' and temperature != 1:
    raise UserError(
      f"temperature={temperature} has no effect on kind='hard'. Leave it out."
    )
  pooling = getattr(model, 'pooling', None)
  two_heads = getattr(pooling, 'distillation_token', False)
  if weight == 1 and two_heads:
    raise UserError(
      'With DistillationToken, weight=1 does not train the head of the class '
      'token, half of the prediction. Use a smaller weight, such as 0.5.'
    )
  teacher.open(model)

  return Distillation(
    inner=inner,
    teacher=teacher,
    two_heads=two_heads,
    kind=kind,
    temperature=temperature,
    weight=weight,
  )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Distillation(Labelled):
  """See `distillation`; `two_heads`: of a student with DistillationToken."""

  inner: CrossEntropy
  teacher: Teacher = dataclasses.field()
  two_heads: bool
  kinds: ClassVar[Kinds] = {**Labelled.kinds, 'agreement': RATE}
  kind: str
  temperature: float
  weight: float

  @property
  def activation(self) -> str:  # type: ignore[override]
    return 'softmax' if self.weight == 1 else self.inner.activation

  def __call__(
    self, params: Params, batch: Batch, rng: Array, context: Context = Context()
  ) -> Outputs:
    images, options = self.inner.preprocess(batch['image']), {}
    if self.two_heads:
      options = {'method': 'features', 'per_layer': False}
    options |= {'train': True, 'rngs': {'dropout': rng}}
    out = self.inner.model.apply({'params': params}, images, **options)
    logits = out['class_logits'] if self.two_heads else out
    logits_for_teacher = out['distillation_logits'] if self.two_heads else out
    label_loss, metrics = self.inner.compare(
      logits, jnp.asarray(batch['label'])
    )
    targets = self.teacher(context.teacher, batch['image'])
    losses = teacher_loss(
      logits_for_teacher, targets, kind=self.kind, temperature=self.temperature
    )
    loss = jnp.mean(losses)
    same = jnp.argmax(logits_for_teacher, -1) == jnp.argmax(targets, -1)
    total = self.weight * loss
    if self.weight < 1:
      total += (1 - self.weight) * label_loss
    return total, metrics | {
      'loss': total,
      'label_loss': label_loss,
      'teacher_loss': loss,
      'agreement': jnp.mean(same),
    }


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
