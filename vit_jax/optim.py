"""Optimizers and learning-rate schedules.

An optimizer rule is a function (learning_rate, *, mask, ...) -> optax
transformation: `optax.adamw`, `optax.lion`, `sgd` of this file, or your own.
`Optimizer` adds clipping, decay masks, frozen parameters and more. The paper's
Adam (section 4.1) is `optax.adamw`, whose weight decay is multiplied by the
learning rate. big_vision's `wd` is multiplied by the shape of the schedule
only: its 1e-4 at a peak rate of 1e-3 is weight_decay=0.1 here.
"""

import dataclasses
import inspect
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax import domains, tree
from vit_jax.durations import Duration, Timeline, fraction
from vit_jax.types import Params, PyTree

KERNELS = ('.*/kernel',)

LearningRate = float | Callable[[Any], Any]  # a number, or step -> number

# Weight decay, or anything else that a learning rate multiplies.
Strength = Annotated[float, domains.Range(0, 1e4)]
Small = Annotated[float, domains.Range(0, 1)]  # epsilon of a division
# A function that makes a transformation of optax, with the domains of the
# arguments that its rules have: optax annotates them as arrays of any kind.
Rule = Annotated[
  Callable[..., optax.GradientTransformation],
  *((name, domains.Rate) for name in ('b1', 'b2', 'b3', 'decay_rate')),
  *((name, domains.Rate | None) for name in ('momentum', 'decay')),
  *((name, Small) for name in ('eps', 'eps_root')),
  *(('weight_decay', Strength), ('nesterov', bool), ('mask', None)),
  *((f'{name}_dtype', domains.Dtype | None) for name in ('mu', 'accumulator')),
]


@domains.checked
def sgd(
  learning_rate: LearningRate,
  *,
  momentum: domains.Rate = 0.9,
  nesterov: bool = False,
  accumulator_dtype: domains.Dtype | None = None,
  weight_decay: Strength = 0.0,
  mask: PyTree = None,
) -> optax.GradientTransformation:
  """SGD with momentum, the paper's fine-tuning optimizer (section 4.1, B.1.1).

  Args:
    learning_rate: float or schedule.
    momentum: 0.9 in the paper.
    nesterov: False in the paper.
    accumulator_dtype: 'bfloat16' as in the paper's released code; None: that of
      the parameters. `optax.sgd` would also multiply in that dtype, and in
      bfloat16 a momentum of 0.9 is 0.898.
    weight_decay: coupled, i.e. added to the gradient (L2). BiT pre-trains with
      1e-4 and fine-tunes without.
    mask: tree of bools, True where weight decay applies.
  """
  trace = optax.trace(momentum, nesterov)
  if accumulator_dtype is not None:
    trace = _stored_as(accumulator_dtype, trace)
  return optax.chain(
    optax.add_decayed_weights(weight_decay, mask=mask),
    trace,
    optax.scale_by_learning_rate(learning_rate),
  )


def _stored_as(dtype, tx):
  """Keep the state of tx in a dtype between steps; compute in float32."""

  def init(params):
    return optax.tree.cast(tx.init(params), dtype)

  def update(updates, state, params=None):
    state = optax.tree.cast(state, jnp.float32)
    updates, state = tx.update(updates, state, params)
    return updates, optax.tree.cast(state, dtype)

  return optax.GradientTransformation(init, update)


@domains.checked
@dataclasses.dataclass(frozen=True)
class LayerDecay:
  """Layer-wise learning-rate decay: rate ** (distance to the head).

  The head and the final norm have factor 1, the last block `rate`, the first of
  L blocks rate**L, and everything before it (patch, class and position
  embeddings) rate**(L+1), as BEiT and MAE fine-tune (from memory).

  Attributes:
    rate: e.g. 0.75.
    head, block, stacked: path rules of the parameters with factor 1, of
      unrolled layers (the group is the index), and of scanned layers.
  """

  rate: domains.Share
  head: domains.PathRule = r'(norm|pre_logits|map_head|head)/.*'
  block: domains.PathRule = r'(?:.*/)?block_(\d+)/.*'
  stacked: domains.PathRule = r'(?:.*/)?blocks/.*'

  def factors(self, params: Params) -> PyTree:
    """Return a tree of floats and, for scanned leaves, [L, 1, ...] arrays.

    Raises:
      ValueError: no parameter belongs to a block.
    """
    depth = 0
    for path, leaf in tree.flatten(params).items():
      if found := re.fullmatch(self.block, path):
        depth = max(depth, int(found.group(1)) + 1)
      elif re.fullmatch(self.stacked, path):
        depth = max(depth, leaf.shape[0])
    if not depth:
      raise ValueError(
        f'layer_decay: no parameter path matches block={self.block!r} or '
        f'stacked={self.stacked!r}. Set them to the paths of your model.'
      )

    def factor(path, leaf):
      if re.fullmatch(self.head, path):
        return 1.0
      if found := re.fullmatch(self.block, path):
        return self.rate ** (depth - int(found.group(1)))
      if re.fullmatch(self.stacked, path):
        powers = self.rate ** (depth - np.arange(depth, dtype=np.float32))
        return powers.reshape((depth,) + (1,) * (leaf.ndim - 1))
      return self.rate ** (depth + 1)

    return tree.map_with_path(factor, params)


@domains.checked
@dataclasses.dataclass(frozen=True)
class Optimizer:
  """The optimizer of a training run.

  Attributes:
    rule: see the module. In a config, the `target` and the keys that are not
      attributes here. It gets `mask` if it has such a parameter.
    clip_norm: global norm that gradients are clipped to, frozen parameters not
      counted. The paper clips at 1.0 in ImageNet pre-training and fine-tuning.
    decay_mask: path rules of the parameters with weight decay; kernels only, as
      in big_vision (the paper does not say).
    freeze: path rules of parameters that are not trained and take no memory.
    lr_multipliers: ((path rule, factor), ...); the first match counts. The
      factor scales the whole update, including decoupled weight decay.
    layer_decay: layer-wise learning-rate decay, or None.
  """

  rule: Rule = dataclasses.field(metadata={'rest': True})
  clip_norm: domains.Positive | None = None
  decay_mask: Sequence[domains.PathRule] = KERNELS
  freeze: Sequence[domains.PathRule] = ()
  lr_multipliers: Sequence[tuple[domains.PathRule, domains.NonNegative]] = ()
  layer_decay: LayerDecay | None = None

  duck_typed = True

  def __call__(
    self, params: Params, learning_rate: LearningRate
  ) -> optax.GradientTransformation:
    """Return the optax transformation for parameters, real or abstract.

    Raises:
      ValueError: a path rule that matches no parameter, or weight decay with a
        rule that cannot be masked.
    """
    multiplied = [path_rule for path_rule, _ in self.lr_multipliers]
    tree.check_rules_match(multiplied, params, what='optimizer.lr_multipliers')
    tree.check_rules_match(self.freeze, params, what='optimizer.freeze')
    if self.freeze and all(jax.tree.leaves(tree.mask(self.freeze, params))):
      raise ValueError(
        f'optimizer.freeze={tuple(self.freeze)} matches every parameter, so '
        'nothing would be trained. Leave out the parameters that are to be '
        "trained, as in '(?!head/).*'."
      )
    parts = [self.rule(learning_rate, **self._mask(params))]
    if self.clip_norm is not None:
      parts.insert(0, optax.clip_by_global_norm(self.clip_norm))
    factors = self._factors(params)
    if factors is not None:
      parts.append(_scale_by(factors))
    tx = optax.chain(*parts)
    if self.freeze:
      frozen = tree.mask(self.freeze, params)
      labels = jax.tree.map(lambda f: 'frozen' if f else 'trained', frozen)
      parts = {'trained': tx, 'frozen': optax.set_to_zero()}
      tx = optax.partition(parts, labels)
    return tx

  def _mask(self, params):
    rule = getattr(self.rule, 'func', self.rule)  # of a partial
    if 'mask' in inspect.signature(rule).parameters:
      what = 'optimizer.decay_mask'
      tree.check_rules_match(self.decay_mask, params, what=what)
      return {'mask': tree.mask(self.decay_mask, params)}
    given = getattr(self.rule, 'keywords', {})
    if given.get('weight_decay') or tuple(self.decay_mask) != KERNELS:
      raise ValueError(
        f'{rule.__name__} has no parameter `mask`, so decay_mask and '
        'weight_decay cannot be used with it. Choose another optimizer, or '
        'leave both unset.'
      )
    return {}

  def _factors(self, params):
    """Tree of factors on the updates, or None if there are none."""
    if not self.lr_multipliers and self.layer_decay is None:
      return None
    rules = [path_rule for path_rule, _ in self.lr_multipliers]

    def named(path, _):
      i = tree.first_match(rules, path)
      return 1.0 if i is None else self.lr_multipliers[i][1]

    factors = tree.map_with_path(named, params)
    if self.layer_decay is not None:
      by_layer = self.layer_decay.factors(params)
      factors = jax.tree.map(np.multiply, factors, by_layer)
    return factors


def _scale_by(factors):
  """Multiply updates by a tree of constants; masked leaves pass unchanged."""
  flat = tree.flatten(factors)

  def scale(path, update):
    return update * jnp.asarray(flat[path], update.dtype)

  return optax.stateless(lambda updates, _: tree.map_with_path(scale, updates))


DECAYS = ('constant', 'cosine', 'linear', 'rsqrt', 'step')


@domains.checked
@dataclasses.dataclass(frozen=True)
class Schedule:
  """Learning rate over steps: a decay times linear warm-up and cooldown ramps.

  The decay runs from the end of warm-up to the end of training; warm-up
  multiplies it by min(1, step / warm-up steps), as in the paper's released code
  and big_vision.

  Attributes:
    lr: peak learning rate.
    decay: 'linear' or 'cosine' (to end_lr), 'constant', 'rsqrt':
      lr / sqrt(1 + (step - warm-up steps) / timescale) ("Scaling ViT"), or
      'step': times step_factor at each milestone, as in BiT.
    warmup: 10,000 steps in every pre-training of the paper (Table 3).
    cooldown: linear ramp to zero at the end; 50,000 steps in "Scaling ViT".
    end_lr: final rate of 'linear' and 'cosine'. The paper's released code ends
      'linear' at 1e-5, big_vision at 0.
    timescale: of 'rsqrt', in steps.
    milestones: of 'step': increasing fractions of the whole training, warm-up
      included; (1/3, 2/3, 8/9) is epochs 30, 60 and 80 of 90.
    step_factor: of 'step'.

  Raises:
    ValueError: values that make no sense, alone or together.
  """

  lr: domains.LearningRate
  decay: Annotated[str, domains.OneOf(*DECAYS)] = 'cosine'
  warmup: Duration | None = None
  cooldown: Duration | None = None
  end_lr: domains.LearningRate = 0.0
  timescale: domains.Count = 10_000
  milestones: Sequence[float] = ()
  step_factor: domains.Between = 0.1

  duck_typed = True  # a schedule of yours is a function of a Timeline

  def __post_init__(self) -> None:
    if self.end_lr and self.decay not in ('linear', 'cosine'):
      raise ValueError(
        f'end_lr={self.end_lr} has no meaning for decay={self.decay!r}. Leave '
        'it out, or use linear or cosine decay.'
      )
    milestones = tuple(self.milestones)
    if self.decay != 'step':
      if milestones or self.step_factor != 0.1:
        raise ValueError(
          f'milestones={milestones} and step_factor={self.step_factor} have no '
          f"meaning for decay={self.decay!r}. Leave them out, or use 'step'."
        )
    elif not milestones or any(
      low >= high for low, high in itertools.pairwise((0, *milestones, 1))
    ):
      raise ValueError(
        f"milestones={milestones} for decay='step'. Expected increasing "
        'fractions of the whole training between 0 and 1, e.g. (0.3, 0.6, 0.9).'
      )

  def __call__(self, timeline: Timeline) -> Callable[[Any], jax.Array]:
    """Return the traceable function step -> float32 learning rate.

    Raises:
      ValueError: warm-up and cooldown are longer than the Timeline of the run.
    """
    total_steps = timeline.steps(fraction(1))
    warmup_steps = timeline.steps(self.warmup) or 0
    cooldown_steps = timeline.steps(self.cooldown) or 0
    if warmup_steps + cooldown_steps > total_steps:
      raise ValueError(
        f'Warm-up ({warmup_steps} steps) and cooldown ({cooldown_steps}) are '
        f'longer than the run ({total_steps} steps). Shorten them, or train '
        'longer.'
      )
    # Rounded first: 0.29 * 100 is 28.999999999999996.
    milestones = [round(x * total_steps, 6) for x in self.milestones]
    milestones = np.ceil(milestones).astype(np.float32)
    lr, end_lr = self.lr, self.end_lr

    def at(step):
      step = jnp.asarray(step, jnp.float32)
      since = jnp.maximum(0.0, step - warmup_steps)
      done = jnp.minimum(1.0, since / max(1, total_steps - warmup_steps))
      if self.decay == 'constant':
        rate = jnp.float32(lr)
      elif self.decay == 'linear':
        rate = end_lr + (lr - end_lr) * (1 - done)
      elif self.decay == 'cosine':
        rate = end_lr + (lr - end_lr) * 0.5 * (1 + jnp.cos(math.pi * done))
      elif self.decay == 'rsqrt':
        rate = lr / jnp.sqrt(1 + since / self.timescale)
      else:
        rate = lr * self.step_factor ** (step >= milestones).sum()
      if warmup_steps:
        rate *= jnp.minimum(1.0, step / warmup_steps)
      if cooldown_steps:
        rate *= jnp.clip((total_steps - step) / cooldown_steps, 0.0, 1.0)
      return rate

    return at
