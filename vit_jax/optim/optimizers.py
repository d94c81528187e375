"""Optimizers.

A rule is a function (learning_rate, *, mask, ...) -> optax transformation:
`optax.adamw`, `optax.lion`, `sgd`, `adafactor`, `lamb` and `muon` of this file,
or your own. `mask` is a tree of bools, True where weight decay applies.
`Optimizer` adds clipping, decay masks, frozen parameters and more. Scanned
layers are updated like unrolled ones.

The paper's Adam (section 4.1) is `optax.adamw`, whose weight decay is
multiplied by the learning rate. big_vision's `wd` is multiplied by the shape of
the schedule only: its 1e-4 at a peak rate of 1e-3 is weight_decay=0.1 here.
"""

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax import tree, types
from vit_jax.durations import Duration, Timeline, fraction
from vit_jax.kernels import Kernels, find
from vit_jax.optim.schedules import Schedule

KERNELS = ('.*/kernel',)

# ((path rule, factor),)
Multipliers = Sequence[tuple[types.PathRule, types.NonNegative]]

Rule = Annotated[
  Callable[..., optax.GradientTransformation],
  (('learning_rate', 'schedule.lr'), ('mask', 'optimizer.decay_mask')),
]


@dataclasses.dataclass(frozen=True)
class LayerDecay:
  """Layer-wise learning-rate decay: rate ** (distance to the head).

  Heads and the final norm have factor 1, the last block `rate`, the first of
  L blocks rate**L, and everything before it (patch, class and position
  embeddings) rate**(L+1), as BEiT and MAE fine-tune (from memory). timm differs
  in the final norm, which has the factor `rate` there.
  """

  rate: types.Share

  def factors(self, params: types.Params) -> types.PyTree:
    """Return a tree of floats and, for scanned leaves, [L, 1, ...] arrays."""
    flat = tree.flatten(params)
    blocks = {p: re.match(r'(?:.*/)?block_(\d+)/', p) for p in flat}
    index = {p: int(found[1]) for p, found in blocks.items() if found}
    lengths = [len(x) for p, x in flat.items() if tree.is_stacked([p])]
    depth = max([*lengths, *(i + 1 for i in index.values())], default=0)
    if not depth:
      raise types.UserError(
        'optimizer.layer_decay: the model has no parameters of block_0, '
        'block_1, ... Leave it out.'
      )

    def factor(path, leaf):
      if re.match('(norm|pre_logits|map_head|head|objective)/', path):
        return 1.0
      if tree.is_stacked([path]):
        powers = self.rate ** (depth - np.arange(depth, dtype=np.float32))
        return powers.reshape(depth, *(1 for _ in leaf.shape[1:]))
      return self.rate ** (depth - index.get(path, -1))

    return tree.map_with_path(factor, params)


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """Optimizer of a training run, which makes the optax transformation.

  Attributes:
    rule: see the module. In a config, the `target` and the keys that are not
      attributes here. It gets `mask` if it has this parameter.
    clip_norm: global norm that gradients are clipped to, frozen parameters not
      counted. The paper clips at 1.0 in ImageNet pre-training and fine-tuning.
    decay_mask: path rules of the parameters with weight decay; kernels only, as
      in big_vision (the paper does not say).
    decay_multipliers: ((path rule, factor), ...) on weight_decay; the first
      match counts. "Scaling ViT" has (('head/.*', 100.0),).
    final_weight_decay: weight decay at the end of the run, which it reaches on
      half a cosine (DINO: from 0.04 to 0.4); None: it stays as it is.
    corrected_weight_decay: whether weight decay is multiplied by the learning
      rate over its peak, so that a step decays in proportion to the square of
      the rate (arXiv 2512.08217). timm's option of this name also squares
      the factors of `lr_multipliers` and `layer_decay`, which here count once.
    freeze: path rules of parameters without training and optimizer state.
    thaw: time after which they are trained, too, so that new heads warm up
      first; None: never. Until then their updates are 0, but their gradients
      count in the norm, and in the state that they begin with.
    lr_multipliers: ((path rule, factor), ...); the first match counts. The
      factor scales the whole update, including decoupled weight decay.
  """

  rule: Rule = dataclasses.field(metadata={'rest': True})
  clip_norm: types.Positive | None = None
  decay_mask: Sequence[types.PathRule] = KERNELS
  decay_multipliers: Multipliers = ()
  final_weight_decay: types.NonNegative | None = None
  corrected_weight_decay: bool = False
  freeze: Sequence[types.PathRule] = ()
  thaw: Duration | None = None
  lr_multipliers: Multipliers = ()
  layer_decay: LayerDecay | None = None

  def __call__(
    self,
    params: types.Params,
    learning_rate: optax.ScalarOrSchedule,
    timeline: Timeline | None = None,
  ) -> optax.GradientTransformation:
    """Return the optax transformation for parameters, real or abstract.

    Only `final_weight_decay`, `corrected_weight_decay`, which also needs a rate
    that is a function of the step, and `thaw` need the timeline of the run.
    """
    lr_factors = _first_factors(self, 'lr_multipliers', params)
    tree.check_rules_match(self.freeze, params, what='optimizer.freeze')
    frozen = tree.mask(self.freeze, params)
    if all(jax.tree.leaves(frozen)):
      raise types.UserError(
        f'optimizer.freeze={tuple(self.freeze)} matches every parameter. Leave '
        "out those that are to be trained, as in '(?!head/).*'."
      )
    if self.thaw is not None and not self.freeze:
      raise types.UserError(
        f'optimizer.thaw={self.thaw} ends freeze, which is empty. Set '
        'optimizer.freeze to path rules, or leave thaw out.'
      )
    parts = [self._apply_rule(params, learning_rate, timeline)]
    if self.clip_norm is not None:
      parts.insert(0, optax.clip_by_global_norm(self.clip_norm))
    if self.layer_decay is not None:
      by_layer = self.layer_decay.factors(params)
      lr_factors = jax.tree.map(np.multiply, lr_factors, by_layer)
    if self.lr_multipliers or self.layer_decay is not None:
      parts.append(_scale_by(lr_factors))
    if self.thaw is not None:
      assert timeline is not None
      thaw = timeline.steps(self.thaw)
      late = optax.scale_by_schedule(lambda n: n >= thaw)
      parts.append(optax.masked(late, frozen))
    tx = optax.chain(*parts)
    if self.freeze and self.thaw is None:
      labels = jax.tree.map(lambda f: 'frozen' if f else 'trained', frozen)
      groups = {'trained': tx, 'frozen': optax.set_to_zero()}
      tx = optax.partition(groups, labels)
    return tx

  def _apply_rule(self, params, learning_rate, timeline):
    """Return the rule for each group of parameters with the same decay."""
    rule = getattr(self.rule, 'func', self.rule)  # of a partial
    arguments = {**getattr(self.rule, 'keywords', {})}
    parameters = inspect.signature(rule).parameters
    if 'mask' in parameters:
      what = 'optimizer.decay_mask'
      tree.check_rules_match(self.decay_mask, params, what=what)
      arguments['mask'] = tree.mask(self.decay_mask, params)
    elif arguments.get('weight_decay') or tuple(self.decay_mask) != KERNELS:
      raise types.UserError(
        f'{rule.__name__} has no parameter `mask`, so decay_mask and '
        'weight_decay cannot be used with it. Leave both unset.'
      )
    changed = self.corrected_weight_decay or self.decay_multipliers
    if not changed and self.final_weight_decay is None:
      return rule(learning_rate, **arguments)
    decay = arguments.get('weight_decay', parameters['weight_decay'].default)
    if self.final_weight_decay is not None:
      decay = Schedule(decay, end_lr=self.final_weight_decay)(timeline)
    if self.corrected_weight_decay:
      steps = jnp.arange(timeline.steps(fraction(1)))
      peak = jax.vmap(learning_rate)(steps).max()
      decay = _times(decay, _times(1 / peak, learning_rate))
    if not self.decay_multipliers:
      return rule(learning_rate, **arguments | {'weight_decay': decay})
    factors = _first_factors(self, 'decay_multipliers', params)
    groups = {
      f'decay_x{factor:g}': rule(
        learning_rate, **arguments | {'weight_decay': _times(factor, decay)}
      )
      for factor in sorted(set(jax.tree.leaves(factors)))
    }
    labels = jax.tree.map(lambda factor: f'decay_x{factor:g}', factors)
    return optax.partition(groups, labels)


def _times(x, y):
  """Return the product of two numbers or functions of the step."""
  if not callable(x) and not callable(y):
    return x * y
  return lambda n: math.prod(f(n) if callable(f) else f for f in (x, y))


def _first_factors(optimizer, name, params):
  """Return a tree of the factors of the first rules that match, else 1."""
  multipliers = getattr(optimizer, name)
  rules = [path_rule for path_rule, _ in multipliers]
  tree.check_rules_match(rules, params, what=f'optimizer.{name}')

  def first(path, _):
    i = tree.first_match(rules, path)
    return 1.0 if i is None else multipliers[i][1]

  return tree.map_with_path(first, params)


def _scale_by(factors):
  """Multiply updates by a tree of constants; masked leaves pass unchanged."""
  flat = tree.flatten(factors)

  def scale(path, update):
    return update * jnp.asarray(flat[path], update.dtype)

  return optax.stateless(lambda updates, _: tree.map_with_path(scale, updates))


def sgd(
  learning_rate: optax.ScalarOrSchedule,
  *,
  momentum: types.Rate = 0.9,
  accumulator_dtype: types.Dtype | None = None,
  weight_decay: types.NonNegative = 0.0,
  mask: types.PyTree = None,
) -> optax.GradientTransformation:
  """SGD with momentum, the paper's fine-tuning optimizer (section 4.1, B.1.1).

  Args:
    accumulator_dtype: 'bfloat16' as in the paper's released code; None: that of
      the parameters. `optax.sgd` would also multiply in that dtype, and in
      bfloat16 a momentum of 0.9 is 0.898.
    weight_decay: coupled, i.e. added to the gradient (L2). BiT pre-trains with
      1e-4 and fine-tunes without.
  """
  return optax.chain(
    optax.add_decayed_weights(weight_decay, mask=mask),
    _stored_as(accumulator_dtype, optax.trace(momentum)),
    optax.scale_by_learning_rate(learning_rate),
  )


def adafactor(
  learning_rate: optax.ScalarOrSchedule,
  *,
  b1: types.Rate = 0.9,
  b2: types.Rate = 0.999,
  min_dim_size_to_factor: types.Count = 32,
  mu_dtype: types.Dtype | None = 'bfloat16',
  weight_decay: types.NonNegative = 0.0,
  mask: types.PyTree = None,
) -> optax.GradientTransformation:
  """Adafactor as "Scaling ViT" runs it: without scaling by parameter norms.

  Unlike `optax.adafactor`, the momentum accumulates updates before they are
  multiplied by the learning rate, and no update is clipped to an RMS of 1.

  Args:
    b1: decay of the momentum, an EMA of the updates that is not debiased.
    b2: upper bound of the decay of the second moment. In step t, counted from
      0, the decay is min(b2, 1 - (t + 1) ** -0.8).
    min_dim_size_to_factor: a second moment is stored as row and column means
      if the two largest dimensions of one layer have at least this size.
    mu_dtype: dtype of the momentum; None: the dtype of each parameter.
    weight_decay: decoupled, multiplied by the learning rate; 0.03 in "Scaling
      ViT", and 3.0 for the head (`Optimizer.decay_multipliers`).
  """
  second_moment = optax.scale_by_factored_rms(
    decay_rate=0.8,
    min_dim_size_to_factor=min_dim_size_to_factor,
    decay_rate_fn=lambda t, power: jnp.minimum(b2, 1 - (t + 1.0) ** -power),
  )
  return optax.chain(
    _each_layer(second_moment),
    _stored_as(mu_dtype, optax.ema(b1, debias=False)),
    optax.add_decayed_weights(weight_decay, mask=mask),
    optax.scale_by_learning_rate(learning_rate),
  )


def lamb(
  learning_rate: optax.ScalarOrSchedule,
  *,
  b1: types.Rate = 0.9,
  b2: types.Rate = 0.999,
  eps: types.Fraction = 1e-6,
  mu_dtype: types.Dtype | None = None,
  weight_decay: types.NonNegative = 0.0,
  mask: types.PyTree = None,
) -> optax.GradientTransformation:
  """LAMB, the optimizer of DeiT III: Adam with a trust ratio per parameter.

  The update of a parameter, weight decay included, is multiplied by the norm of
  the parameter over the norm of the update. As in timm, this holds only for
  parameters with weight decay; `optax.lamb` does it for all, and so biases,
  which start at 0, hardly move. In timm, query, key and value are one parameter
  with one ratio; here each has its own. timm also clips gradients at a global
  norm of 1: `Optimizer.clip_norm`.

  Args:
    b1, b2, eps, mu_dtype: as of `optax.adamw`.
    weight_decay: decoupled; 0.05 in DeiT III, and 0.02 on ImageNet-21k.
    mask: None: weight decay and the trust ratio apply everywhere.
  """
  trust = _each_layer(optax.scale_by_trust_ratio())
  return optax.chain(
    optax.scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype),
    optax.add_decayed_weights(weight_decay, mask=mask),
    trust if mask is None else optax.masked(trust, mask),
    optax.scale_by_learning_rate(learning_rate),
  )


def muon(
  learning_rate: optax.ScalarOrSchedule,
  *,
  momentum: types.Rate = 0.95,
  ns_steps: types.Count = 5,
  consistent_rms: types.Positive | None = 0.2,
  b1: types.Rate = 0.9,
  b2: types.Rate = 0.999,
  eps: types.Fraction = 1e-8,
  mu_dtype: types.Dtype | None = None,
  weight_decay: types.NonNegative = 0.0,
  mask: types.PyTree = None,
  kernels: Kernels = (),
) -> optax.GradientTransformation:
  """Muon for kernels, AdamW for all other parameters and the head.

  A kernel of any number of dimensions is a matrix [inputs, outputs], and a
  kernel of scanned layers is one matrix per layer. The rest of
  `optax.contrib.muon` is Adam with Nesterov momentum; here it is AdamW.

  Args:
    momentum: Nesterov momentum for matrices. optax corrects its bias, so about
      the first 100 steps differ from Muon as first published.
    ns_steps: Newton-Schulz iterations; 5: singular values of about 0.7 to 1.2.
    consistent_rms: each update of a matrix has about this RMS, so that learning
      rates and weight decays of AdamW fit. None: as first published, it has
      singular values of about sqrt(max(1, outputs / inputs)).
    eps: added to AdamW's denominator, and to the norm that divides a matrix.
    mu_dtype, weight_decay: dtype of first moments and decoupled decay, of both.
    kernels: rows for kernels that kernels.py does not have.
  """
  shared = {'eps': eps, 'weight_decay': weight_decay, 'mu_dtype': mu_dtype}
  axes_of = functools.partial(_matrix_axes, kernels=kernels)
  axes = functools.partial(tree.map_with_path, axes_of)
  matrices = optax.contrib.muon(
    learning_rate,
    ns_steps=ns_steps,
    beta=momentum,
    weight_decay_mask=mask,
    consistent_rms=consistent_rms,
    muon_weight_dimension_numbers=axes,
    **shared,
  )
  rest = optax.adamw(learning_rate, b1=b1, b2=b2, mask=mask, **shared)

  def label(path, x):
    return 'muon' if axes_of(path, x) else 'adamw'

  labels = functools.partial(tree.map_with_path, label)
  return optax.partition({'muon': matrices, 'adamw': rest}, labels)


def _matrix_axes(path, x, kernels=()):
  """Return which axes of a kernel are inputs and outputs; else None."""
  if not re.fullmatch(r'(?!head[^/]*/).*/kernel', path):
    return None
  _, inputs, outputs = find(path, kernels)
  axes = tuple(range(int(tree.is_stacked([path])), x.ndim))
  if inputs and len(axes) != len(inputs) + len(outputs):
    raise types.UserError(
      f'muon: {path} has {len(axes)} axes. By its name, {[*inputs, *outputs]} '
      'are expected. Add a row with the names of its axes: optimizer.kernels='
      f'(({path.removesuffix("/kernel")!r}, INPUTS, OUTPUTS),)'
    )
  split = len(axes) - len(outputs)
  return optax.contrib.MuonDimensionNumbers(axes[:split], axes[split:])


def _stored_as(dtype, tx):
  """Keep the state in a dtype between steps, and compute in float32."""
  if dtype is None:
    return tx

  def cast(state, dtype):
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, state)

  def update(updates, state, params=None):
    updates, state = tx.update(updates, cast(state, jnp.float32), params)
    return updates, cast(state, dtype)

  return optax.GradientTransformation(
    lambda params: cast(tx.init(params), dtype), update
  )


def _each_layer(tx):
  """Apply tx to each scanned layer by itself."""

  def vectorized(fn):
    def call(leaves, *rest):
      # `vmap` refuses trees without leaves, which a mask may leave over.
      return (jax.vmap(fn) if jax.tree.leaves(leaves) else fn)(leaves, *rest)

    return call

  def label(path, _):
    return 'scanned' if tree.is_stacked([path]) else 'other'

  layers = optax.GradientTransformation(*map(vectorized, tx))
  labels = functools.partial(tree.map_with_path, label)
  return optax.partition({'scanned': layers, 'other': tx}, labels)
