"""Optimizers and learning-rate schedules.

An optimizer rule is a function (learning_rate, *, mask, ...) -> optax
transformation: `optax.adamw`, `optax.nadamw`, `optax.lion`, a rule of this file
(`sgd`, `adafactor`, `lamb`, `schedule_free_adamw`, `muon`), or your own.
`Optimizer` adds clipping, decay masks, frozen parameters and more. The paper's
Adam (section 4.1) is `optax.adamw`, whose weight decay is multiplied by the
learning rate. big_vision's `wd` is multiplied by the shape of the schedule
only: its 1e-4 at a peak rate of 1e-3 is weight_decay=0.1 here.

Rules treat scanned layers, whose parameters have a leading layer dimension,
like unrolled ones.
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
from vit_jax.averages import averages_itself
from vit_jax.durations import Duration, Timeline, fraction
from vit_jax.muon import muon as muon
from vit_jax.transformations import each_layer, scale_by, stored_as
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

# ((path rule, factor), ...)
Multipliers = Sequence[tuple[domains.PathRule, domains.NonNegative]]


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
def adafactor(
  learning_rate: LearningRate,
  *,
  b2: domains.Rate = 0.999,
  decay_rate: domains.Positive = 0.8,
  eps: Small = 1e-30,
  min_dim_size_to_factor: domains.Count = 32,
  momentum: domains.Rate | None = 0.9,
  accumulator_dtype: domains.Dtype | None = 'bfloat16',
  weight_decay: Strength = 0.0,
  mask: PyTree = None,
) -> optax.GradientTransformation:
  """Adafactor as "Scaling ViT" runs it: without scaling by parameter norms.

  Unlike `optax.adafactor`, the momentum accumulates updates before they are
  multiplied by the learning rate, and no update is clipped to an RMS of 1.

  Args:
    learning_rate: float or schedule.
    b2: upper bound of the decay of the second moment. In step t, counted from
      0, the decay is min(b2, 1 - (t + 1) ** -decay_rate).
    decay_rate: see b2.
    eps: added to squared gradients.
    min_dim_size_to_factor: a second moment is stored as row and column means
      over the two largest dimensions of one layer, if both have at least this
      size.
    momentum: decay of an EMA of the updates, not debiased; None: no momentum,
      and no memory for it.
    accumulator_dtype: of the momentum between steps; None: that of the
      parameters.
    weight_decay: decoupled, multiplied by the learning rate; 0.03 in "Scaling
      ViT", and 3.0 for the head (`Optimizer.decay_multipliers`).
    mask: tree of bools, True where weight decay applies.
  """
  second_moment = optax.scale_by_factored_rms(
    decay_rate=decay_rate,
    min_dim_size_to_factor=min_dim_size_to_factor,
    epsilon=eps,
    decay_rate_fn=lambda t, power: jnp.minimum(b2, 1 - (t + 1.0) ** -power),
  )
  parts = [each_layer(second_moment, optax.FactoredState)]
  if momentum is not None:
    ema = optax.ema(momentum, debias=False)
    parts.append(stored_as(accumulator_dtype, ema))
  return optax.chain(
    *parts,
    optax.add_decayed_weights(weight_decay, mask=mask),
    optax.scale_by_learning_rate(learning_rate),
  )


@domains.checked
def lamb(
  learning_rate: LearningRate,
  *,
  b1: domains.Rate = 0.9,
  b2: domains.Rate = 0.999,
  eps: Small = 1e-6,
  weight_decay: Strength = 0.0,
  mask: PyTree = None,
) -> optax.GradientTransformation:
  """LAMB, the optimizer of DeiT III: Adam with a trust ratio per parameter.

  The update of a parameter, weight decay included, is multiplied by the norm of
  the parameter over the norm of the update. As in the implementation that DeiT
  III used (from memory), this holds only for parameters with weight decay;
  `optax.lamb` does it for all, and so biases, which start at 0, hardly move.
  That implementation also clips gradients at a global norm of 1 (from memory):
  `Optimizer.clip_norm`. Its query, key and value are one parameter with one
  ratio; here each has its own.

  Args:
    learning_rate: float or schedule.
    b1, b2, eps: of Adam.
    weight_decay: decoupled; DeiT III has 0.05 on ImageNet and 0.02 on
      ImageNet-21k.
    mask: tree of bools, True where weight decay and the trust ratio apply;
      None: everywhere.
  """
  trust = each_layer(optax.scale_by_trust_ratio(), optax.EmptyState)
  return optax.chain(
    optax.scale_by_adam(b1, b2, eps),
    optax.add_decayed_weights(weight_decay, mask=mask),
    trust if mask is None else optax.masked(trust, mask),
    optax.scale_by_learning_rate(learning_rate),
  )


@domains.checked
def schedule_free_adamw(
  learning_rate: LearningRate,
  *,
  b1: domains.Between = 0.9,
  b2: domains.Rate = 0.999,
  eps: Small = 1e-8,
  weight_decay: Strength = 0.0,
  weight_lr_power: domains.NonNegative = 2.0,
  mask: PyTree = None,
  factors: PyTree = None,
) -> optax.GradientTransformation:
  """Schedule-free AdamW (Defazio et al., 2024; from memory).

  AdamW without momentum moves a sequence z. Its weighted average x is the
  result. Gradients are computed at y = b1 * x + (1 - b1) * z. `TrainState` has
  y as `params`, and x as `ema`, which evaluators see and weights files have.
  Use a `Schedule` with warm-up, decay 'constant', and no cooldown.

  Args:
    learning_rate: float or schedule.
    b1: interpolation between z and x. The average takes the place of momentum.
    b2, eps: of Adam.
    weight_decay: of y, decoupled, multiplied by the learning rate.
    weight_lr_power: the weight of each z in x is the largest learning rate so
      far to this power.
    mask: tree of bools, True where weight decay applies.
    factors: tree of factors on the updates of z, see `Optimizer`.
  """
  moves = [
    optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True),
    optax.add_decayed_weights(weight_decay, mask=mask),
    optax.scale_by_learning_rate(learning_rate),
  ]
  if factors is not None:
    moves.append(scale_by(factors))
  rate: Any = learning_rate
  if callable(learning_rate):
    # optax counts from 1 here, and from 0 in the other transformations.
    rate = lambda count: learning_rate(count - 1)  # noqa: E731
  return optax.contrib.schedule_free(
    optax.chain(*moves), rate, b1, weight_lr_power
  )


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
    if factors is not None and not takes_factors:
      if averages_itself(jax.eval_shape(parts[0].init, params)):
        raise ValueError(
          'lr_multipliers and layer_decay cannot be used with this '
          'schedule-free rule: they would scale the difference of averages. '
          'Use vit_jax.optim.schedule_free_adamw.'
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
    decay = getattr(self.rule, 'keywords', {}).get('weight_decay')
    if not decay or 'mask' not in arguments:
      raise ValueError(
        f'optimizer.decay_multipliers={tuple(self.decay_multipliers)} multiply '
        f'weight_decay={decay}. Set optimizer.weight_decay, or leave them out.'
      )
    factors = _first_factors(self.decay_multipliers, params)
    groups = {
      f'decay_x{factor:g}': self.rule(
        learning_rate, **arguments, weight_decay=factor * decay
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
    factors = _first_factors(self.lr_multipliers, params)
    if self.layer_decay is not None:
      by_layer = self.layer_decay.factors(params)
      factors = jax.tree.map(np.multiply, factors, by_layer)
    return factors


def _first_factors(multipliers, params):
  """Return a tree of the factors of the first rules that match, else 1."""
  rules = [path_rule for path_rule, _ in multipliers]

  def first(path, _):
    i = tree.first_match(rules, path)
    return 1.0 if i is None else multipliers[i][1]

  return tree.map_with_path(first, params)


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
