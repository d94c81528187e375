"""Optimizers and learning-rate schedules.

An optimizer rule is a function (learning_rate, *, mask, ...) -> optax
transformation: `optax.adamw`, `optax.nadamw`, `optax.lion`, `sgd` of this file,
`adafactor`, `lamb` and `schedule_free_adamw` of rules.py, `muon`, or your own.
`Optimizer` adds clipping, decay masks, frozen parameters and more. The paper's
Adam (section 4.1) is `optax.adamw`, whose weight decay is multiplied by the
learning rate. big_vision's `wd` is multiplied by the shape of the schedule
only: its 1e-4 at a peak rate of 1e-3 is weight_decay=0.1 here.
"""

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax import tree
from vit_jax.config import domains
from vit_jax.optim.averages import averages_itself
from vit_jax.optim.durations import Duration, Timeline, fraction
from vit_jax.optim.multipliers import LayerDecay as LayerDecay
from vit_jax.optim.multipliers import Multipliers, first_factors
from vit_jax.optim.muon import MATRICES
from vit_jax.optim.muon import muon as muon
from vit_jax.optim.rules import adafactor as adafactor
from vit_jax.optim.rules import lamb as lamb
from vit_jax.optim.rules import schedule_free_adamw as schedule_free_adamw
from vit_jax.optim.transformations import (
  LearningRate,
  Small,
  Strength,
  scale_by,
  stored_as,
)
from vit_jax.types import Params, PyTree

KERNELS = ('.*/kernel',)

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
  return optax.chain(
    optax.add_decayed_weights(weight_decay, mask=mask),
    stored_as(accumulator_dtype, trace),
    optax.scale_by_learning_rate(learning_rate),
  )


@domains.checked
@dataclasses.dataclass(frozen=True)
class Optimizer:
  """The optimizer of a training run.

  Attributes:
    rule: see the module. In a config, the `target` and the keys that are not
      attributes here. It gets `mask` if it has such a parameter. It also gets
      `factors` (those of lr_multipliers and layer_decay, or None) if it has
      such a parameter; the updates of other rules are multiplied by them.
    clip_norm: global norm that gradients are clipped to, frozen parameters not
      counted. The paper clips at 1.0 in ImageNet pre-training and fine-tuning.
    decay_mask: path rules of the parameters with weight decay; kernels only, as
      in big_vision (the paper does not say).
    decay_multipliers: ((path rule, factor), ...) on weight_decay; the first
      match counts. "Scaling ViT" has (('head/.*', 100.0),).
    freeze: path rules of parameters that are not trained and take no memory.
    lr_multipliers: ((path rule, factor), ...); the first match counts. The
      factor scales the whole update, including decoupled weight decay.
    layer_decay: layer-wise learning-rate decay, or None.
  """

  rule: Rule = dataclasses.field(metadata={'rest': True})
  clip_norm: domains.Positive | None = None
  decay_mask: Sequence[domains.PathRule] = KERNELS
  decay_multipliers: Multipliers = ()
  freeze: Sequence[domains.PathRule] = ()
  lr_multipliers: Multipliers = ()
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
    for name in ('lr_multipliers', 'decay_multipliers'):
      multiplied = [path_rule for path_rule, _ in getattr(self, name)]
      tree.check_rules_match(multiplied, params, what=f'optimizer.{name}')
    tree.check_rules_match(self.freeze, params, what='optimizer.freeze')
    if self.freeze and all(jax.tree.leaves(tree.mask(self.freeze, params))):
      raise ValueError(
        f'optimizer.freeze={tuple(self.freeze)} matches every parameter, so '
        'nothing would be trained. Leave out the parameters that are to be '
        "trained, as in '(?!head/).*'."
      )
    factors, arguments = self._factors(params), self._mask(params)
    takes_factors = self._has_parameter('factors')
    if takes_factors:
      arguments['factors'] = factors
    parts = [self._with_decay(params, learning_rate, arguments)]
    matrices = getattr(self.rule, 'keywords', {}).get('matrices', ())
    own = [each[0] for each in matrices if tuple(each) not in MATRICES]
    tree.check_rules_match(own, params, what='optimizer.matrices')
    if factors is not None and not takes_factors:
      if averages_itself(jax.eval_shape(parts[0].init, params)):
        raise ValueError(
          'lr_multipliers and layer_decay cannot be used with this '
          'schedule-free rule: they would scale the difference of averages. '
          'Use vit_jax.optim.optimizers.schedule_free_adamw.'
        )
      parts.append(scale_by(factors))
    if self.clip_norm is not None:
      parts.insert(0, optax.clip_by_global_norm(self.clip_norm))
    tx = optax.chain(*parts)
    if self.freeze:
      frozen = tree.mask(self.freeze, params)
      labels = jax.tree.map(lambda f: 'frozen' if f else 'trained', frozen)
      parts = {'trained': tx, 'frozen': optax.set_to_zero()}
      tx = optax.partition(parts, labels)
    return tx

  def _has_parameter(self, name):
    rule = getattr(self.rule, 'func', self.rule)  # of a partial
    return name in inspect.signature(rule).parameters

  def _with_decay(self, params, learning_rate, arguments):
    """Return the rule for each group of parameters with the same decay."""
    if not self.decay_multipliers:
      return self.rule(learning_rate, **arguments)
    rule = getattr(self.rule, 'func', self.rule)  # of a partial
    arguments = getattr(self.rule, 'keywords', {}) | arguments
    decay = arguments.get('weight_decay')
    if not decay or 'mask' not in arguments:
      raise ValueError(
        f'optimizer.decay_multipliers={tuple(self.decay_multipliers)} multiply '
        f'weight_decay={decay}. Set optimizer.weight_decay, or leave them out.'
      )
    factors = first_factors(self.decay_multipliers, params)
    groups = {
      f'decay_x{factor:g}': rule(
        learning_rate, **arguments | {'weight_decay': factor * decay}
      )
      for factor in sorted(set(jax.tree.leaves(factors)))
    }
    labels = jax.tree.map(lambda factor: f'decay_x{factor:g}', factors)
    return optax.partition(groups, labels)

  def _mask(self, params):
    rule = getattr(self.rule, 'func', self.rule)  # of a partial
    if self._has_parameter('mask'):
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
    factors = first_factors(self.lr_multipliers, params)
    if self.layer_decay is not None:
      by_layer = self.layer_decay.factors(params)
      factors = jax.tree.map(np.multiply, factors, by_layer)
    return factors


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
