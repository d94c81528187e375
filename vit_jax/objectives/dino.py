"""DINO: a student predicts what its EMA, the teacher, says of other views.

"Emerging Properties in Self-Supervised Vision Transformers" (arXiv 2104.14294).
The teacher sees the global views of an image; the student also sees the local
views. A head follows both. `Dino` compares their distributions over prototypes,
`SimDino` ("Simplifying DINO via Coding Rate Regularization", arXiv 2502.10385)
their features. Defaults are those of the released code.

B images, V views, the first G of them global, widths D before the head, K after
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from vit_jax import tree
from vit_jax.durations import Duration, epochs
from vit_jax.models.dense import GELU, matmul
from vit_jax.objectives.ema_teacher import EmaTeacher
from vit_jax.objectives.encode import encode
from vit_jax.objectives.views import OfViews
from vit_jax.step import Seen
from vit_jax.types import Array, Count, Outputs, Params, Positive, Rate


@dataclasses.dataclass(frozen=True)
class DinoHead:
  """An MLP of three layers, and cosines with K prototypes.

  Attributes:
    outputs: K; None: no prototypes, the bottleneck is the output.
    hidden, bottleneck: widths of the layers; the last is scaled to length 1.
    last_layer: 'unit': prototypes keep length 1; 'lengths': they have learned
      lengths (published ViT-S, DINOv2); 'linear': a plain layer (DINOv3).
  """

  outputs: Count | None = 65_536
  hidden: Count = 2048
  bottleneck: Count = 256
  last_layer: Literal['unit', 'lengths', 'linear'] = 'unit'

  def init(self, rng: jax.Array, width: int) -> Params:
    *keys, last = jax.random.split(rng, 4)
    widths = width, self.hidden, self.hidden, self.bottleneck
    params: dict[str, Any] = {}
    for i, key in enumerate(keys, start=1):
      kernel = jax.nn.initializers.normal(0.02)(key, widths[i - 1 : i + 1])
      params[f'fc{i}'] = {'kernel': kernel, 'bias': jnp.zeros(widths[i])}
    if self.outputs:
      make = jax.nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')
      if self.last_layer == 'linear':
        make = jax.nn.initializers.normal(0.02)
      params['last'] = {'kernel': make(last, (self.bottleneck, self.outputs))}
      if self.last_layer == 'lengths':
        params['last']['length'] = jnp.ones((1, 1, self.outputs))
    return params

  def __call__(self, params: Params, x: jax.Array) -> jax.Array:
    """Return outputs, float32 [B, V, K], of representations [B, V, D]."""
    for i in (1, 2, 3):
      layer = params[f'fc{i}']
      x = matmul(x, layer['kernel']) + layer['bias'].astype(x.dtype)[None, None]
      x = GELU['exact'](x) if i < 3 else x
    x = x.astype(jnp.float32)
    x /= jnp.linalg.norm(x, axis=-1, keepdims=True)
    if not self.outputs:
      return x
    last = params['last']
    if self.last_layer == 'linear':
      return x @ last['kernel']
    lengths = jnp.linalg.norm(last['kernel'], axis=0, keepdims=True)
    return x @ (last['kernel'] / lengths) * last.get('length', 1.0)


@dataclasses.dataclass(frozen=True)
class Centre:
  """Targets of DINO: an EMA of teacher outputs is subtracted before softmax."""

  momentum: Rate = 0.9  # decay of this EMA, the centre

  whole_batch = False

  def carried(self, outputs: int) -> jax.Array:
    """Return the first centre, [1, 1, K]."""
    return jnp.zeros((1, 1, outputs))

  def __call__(
    self, teacher: jax.Array, temperature: Array, centre: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Return the targets of teacher outputs, [B, G, K], and the next centre."""
    keep, mean = self.momentum, jnp.mean(teacher, (0, 1), keepdims=True)
    targets = jax.nn.softmax((teacher - centre) / temperature)
    return targets, keep * centre + (1 - keep) * mean


@dataclasses.dataclass(frozen=True)
class SinkhornKnopp:
  """Targets of SwAV and DINOv2: all prototypes are used equally often.

  exp(outputs / temperature) is scaled to equal sums of prototypes, then of
  views, in turn. All views of the global batch count. It needs no centre.
  """

  iterations: Count = 3

  whole_batch = True

  def carried(self, outputs: int) -> None:
    return None

  def __call__(
    self, teacher: jax.Array, temperature: Array, centre: None = None
  ) -> tuple[jax.Array, None]:
    logs, sums = teacher / temperature, jax.scipy.special.logsumexp
    for _ in range(self.iterations):  # logarithms cannot overflow
      logs -= sums(logs, axis=(0, 1), keepdims=True)
      logs -= sums(logs, axis=2, keepdims=True)
    return jnp.exp(logs), None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfDistillation(EmaTeacher, OfViews):
  """Student, teacher and head; a subclass has the loss."""

  head: DinoHead = DinoHead()

  def init(self, rng: jax.Array, images: jax.ShapeDtypeStruct) -> Params:
    out, _ = jax.eval_shape(self.model.init_with_output, rng, images)
    return self.head.init(rng, out.shape[-1])

  def encode(self, seen: Seen) -> Seen:
    """Return the features of the views, and 'teacher': of its large views."""
    seen = super().encode(seen)
    images = self.preprocess(seen.batch['image'])
    teacher = encode(self.model, seen.context.ema, images)
    return seen._replace(features={**seen.features, 'teacher': teacher})

  def outputs(self, seen: Seen) -> tuple[jax.Array, jax.Array]:
    """Return the outputs of student, [B, V, K], and teacher, [B, G, K]."""
    *views, teacher = (x['pre_logits'] for x in seen.features.values())
    views = jnp.concatenate(views, axis=1)
    student = self.head(seen.params['objective'], views)
    return student, self.head(seen.context.ema['objective'], teacher)


def compare(teacher: jax.Array, student: jax.Array) -> jax.Array:
  """Return the mean of teacher · student over pairs of two different views."""
  pairs = jnp.einsum('bgk,bvk->bgv', teacher, student, precision='highest')
  differ = 1 - jnp.eye(pairs.shape[1], pairs.shape[2])
  return jnp.sum(jnp.mean(pairs, axis=0) * differ) / jnp.sum(differ)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dino(SelfDistillation):
  """Cross-entropy of the student with the teacher, centred and sharpened.

  The teacher has collapsed where 'teacher_entropy', the mean over views, equals
  'batch_entropy', that of the mean distribution (of a micro-batch).

  Attributes:
    teacher_temperature: it rises to this from warmup_teacher_temperature in
      each step (the paper's code: epoch) of teacher_warmup. Published ViT-S:
      from 0.04 to 0.07 in 30 epochs.
    centre: converts teacher outputs to targets; or SinkhornKnopp.
    freeze_last_layer: how long prototypes have no gradient. Adam counts these
      steps, and weight decay acts in them, unlike in PyTorch.
  """

  student_temperature: Positive = 0.1
  teacher_temperature: Positive = 0.04
  warmup_teacher_temperature: Positive = 0.04
  teacher_warmup: Duration | None = None
  centre: Centre | SinkhornKnopp = Centre()
  freeze_last_layer: Duration | None = epochs(1)

  whole_batch = property(lambda self: self.centre.whole_batch)  # type: ignore

  def carried(self) -> jax.Array | None:
    return self.centre.carried(self.head.outputs or 0)

  def temperature(self, step: Array) -> jax.Array:
    """Return the temperature of the teacher."""
    warmup = max(1, self.timeline.steps(self.teacher_warmup))
    start, end = self.warmup_teacher_temperature, self.teacher_temperature
    return start + (end - start) * jnp.minimum(1, step / warmup)

  def encode(self, seen: Seen) -> Seen:
    frozen = seen.context.step < self.timeline.steps(self.freeze_last_layer)

    def stop(path, x):
      is_last = 'last' in path.split('/')
      return jnp.where(frozen, jax.lax.stop_gradient(x), x) if is_last else x

    heads = tree.map_with_path(stop, seen.params['objective'])
    params = {**seen.params, 'objective': heads}
    return super().encode(seen._replace(params=params))

  def loss(self, seen: Seen) -> Outputs:
    student, teacher = self.outputs(seen)
    temperature = self.temperature(seen.context.step)
    targets, centre = self.centre(teacher, temperature, seen.context.carried)
    logs = jax.nn.log_softmax(student / self.student_temperature)
    loss, entropy = -compare(targets, logs), jax.scipy.special.entr
    metrics = {
      'loss': loss,
      'teacher_entropy': jnp.mean(jnp.sum(entropy(targets), axis=-1)),
      'batch_entropy': jnp.sum(entropy(jnp.mean(targets, (0, 1)))),
    }
    return loss, metrics, centre


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimDino(SelfDistillation):
  """Cosines of student and teacher, and the coding rate of global views.

  The loss is -coefficient * cosine - rate. With the means z of both in a view,
  [B, K], rate = log det(I + K / (B eps) zᵀ z) / 2 * (K + B) / (K B). In the
  released code zᵀ z is that of one device. Published runs have this eps.
  """

  head: DinoHead = DinoHead(outputs=None)
  eps: Positive = 0.05
  coefficient: Positive = 1.0
  whole_batch = True

  def loss(self, seen: Seen) -> Outputs:
    student, teacher = self.outputs(seen)
    b, g, k = teacher.shape
    z = (student[:, :g] + teacher) / 2
    products = jnp.einsum('bgi,bgj->gij', z, z, precision='highest')
    gram = jnp.eye(k)[None] + k / (b * self.eps) * products
    rate = jnp.mean(jnp.linalg.slogdet(gram)[1]) / 2 * (k + b) / (k * b)
    cosine = compare(teacher, student)
    loss = -self.coefficient * cosine - rate
    return loss, {'loss': loss, 'cosine': cosine, 'coding_rate': rate}
