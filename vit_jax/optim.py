"""Optimizers, and rules over parameter paths.

`make_optimizer` wraps any optimizer in what the config asks for:

    clip by global norm -> rule (Adam, SGD, ...) with decoupled decay
      -> learning-rate multipliers and layer decay;   frozen leaves apart

A rule is a function `(learning_rate, *, mask, ...) -> GradientTransformation`:
`adam` or `sgd` of this file, or any of optax by its dotted path.
"""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax import tree
from vit_jax.config import call, check_arguments

KERNELS = ('.*/kernel',)


def adam(
  learning_rate,
  *,
  b1=0.9,
  b2=0.999,
  eps=1e-8,
  weight_decay=0.0,
  mask=None,
  mu_dtype=None,
):
  """Adam with decoupled weight decay: p -= lr(t) * (adam(g) + decay * p).

  The decay means what AdamW's and the paper's do (Table 3): it is multiplied by
  the learning rate. big_vision's `wd` is not, but for the schedule's shape;
  its 1e-4 at a peak rate of 1e-3 is 0.1 here (wd = weight_decay * peak lr).

  Args:
    learning_rate: float or schedule.
    b1, b2: 0.9 and 0.999 in all pre-training of the paper (section 4.1).
    eps: added to the root of the second moment.
    weight_decay: decoupled; applied where mask is True.
    mask: tree of bools, see `make_optimizer`.
    mu_dtype: of the first moment; 'bfloat16' in "Better plain ViT baselines".
  """
  return optax.chain(
    optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=mu_dtype),
    optax.add_decayed_weights(weight_decay, mask=mask),
    optax.scale_by_learning_rate(learning_rate),
  )


def sgd(
  learning_rate,
  *,
  momentum=0.9,
  nesterov=False,
  accumulator_dtype=None,
  weight_decay=0.0,
  mask=None,
):
  """SGD with momentum, the paper's fine-tuning optimizer (section 4.1, B.1.1).

  Args:
    learning_rate: float or schedule.
    momentum: 0.9 in the paper.
    nesterov: off in the paper.
    accumulator_dtype: 'bfloat16' as in the paper's released code, or None for
      the parameters' own.
    weight_decay: coupled, i.e. added to the gradient (L2); BiT's upstream SGD
      uses 1e-4, fine-tuning none.
    mask: tree of bools, see `make_optimizer`.
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
  """tx whose state is kept in dtype between steps, computed in float32."""
  # optax.trace can keep it so, but multiplies in that dtype, too, and in
  # bfloat16 a momentum of 0.9 is 0.898.

  def init(params):
    return optax.tree.cast(tx.init(params), dtype)

  def update(updates, state, params=None):
    state = optax.tree.cast(state, jnp.float32)
    updates, state = tx.update(updates, state, params)
    return updates, optax.tree.cast(state, dtype)

  return optax.GradientTransformation(init, update)


def make_optimizer(
  rule,
  params,
  learning_rate,
  *,
  clip_norm=None,
  decay_mask=KERNELS,
  freeze=(),
  lr_multipliers=(),
  layer_decay=None,
  **rule_kwargs,
):
  """The whole optimizer of a training run.

  Args:
    rule: function(learning_rate, **rule_kwargs); gets `mask` if it takes one.
    params: parameters, real or abstract.
    learning_rate: schedule.
    clip_norm: global norm that gradients are clipped to; the paper's 1.0 is
      for ImageNet pre-training and all fine-tuning. Frozen leaves don't count.
    decay_mask: path rules of what decays; kernels only, as big_vision (the
      paper does not say).
    freeze: path rules of what is not trained; takes no optimizer memory.
    lr_multipliers: ((path rule, factor), ...); the first match counts. The
      factor scales the whole update, decoupled decay with it.
    layer_decay: dict of arguments of `layer_multipliers`, or None.
    **rule_kwargs: passed to rule.

  Returns:
    optax.GradientTransformation. Raises ValueError where a path rule matches
    no parameter.
  """
  multiplied = [path_rule for path_rule, _ in lr_multipliers]
  tree.check_rules_match(multiplied, params, what='optimizer.lr_multipliers')
  tree.check_rules_match(freeze, params, what='optimizer.freeze')
  if 'mask' in inspect.signature(rule).parameters:
    tree.check_rules_match(decay_mask, params, what='optimizer.decay_mask')
    rule_kwargs['mask'] = tree.mask(decay_mask, params)
  elif rule_kwargs.get('weight_decay') or tuple(decay_mask) != KERNELS:
    raise ValueError(
      f'{rule.__name__} takes no `mask`: decay_mask and weight_decay cannot be '
      'honoured together; choose another optimizer, or leave both unset.'
    )
  ours = ('clip_norm', 'decay_mask', 'freeze', 'lr_multipliers', 'layer_decay')
  check_arguments(rule, rule_kwargs, num_args=1, also=ours)
  parts = [rule(learning_rate, **rule_kwargs)]
  if clip_norm is not None:
    parts.insert(0, optax.clip_by_global_norm(clip_norm))
  factors = _multipliers(params, lr_multipliers, layer_decay)
  if factors is not None:
    parts.append(_scale_by(factors))
  tx = optax.chain(*parts)
  if freeze:
    frozen = tree.mask(freeze, params)
    labels = jax.tree.map(lambda f: 'frozen' if f else 'trained', frozen)
    tx = optax.partition({'trained': tx, 'frozen': optax.set_to_zero()}, labels)
  return tx


def layer_multipliers(
  params,
  *,
  rate,
  head=r'(norm|pre_logits|map_head|head)/.*',
  block=r'(?:.*/)?block_(\d+)/.*',
  stacked=r'(?:.*/)?blocks/.*',
):
  """Layer-wise learning-rate decay: rate ** (distance to the head).

  The head and final norm have factor 1, the last block `rate`, the first of L
  blocks rate**L, and all that comes before it (patch, class and position
  embeddings) rate**(L+1), as BEiT and MAE fine-tune (from memory). Scanned
  layers get a vector over their leading dimension, to the same effect.

  Args:
    params: parameters, real or abstract.
    rate: e.g. 0.75.
    head: path rule of what keeps the full rate.
    block: path rule whose group is the layer's index, unrolled layout.
    stacked: path rule of scanned layers.

  Returns:
    Tree of floats and, for scanned leaves, [L, 1, ...] arrays.
  """
  flat = tree.flatten(params)
  depth = 0
  for path, leaf in flat.items():
    if found := re.fullmatch(block, path):
      depth = max(depth, int(found.group(1)) + 1)
    elif re.fullmatch(stacked, path):
      depth = max(depth, leaf.shape[0])
  if not depth:
    raise ValueError(
      f'layer_decay: no path matches block={block!r} or stacked={stacked!r}.'
    )

  def factor(path, leaf):
    if re.fullmatch(head, path):
      return 1.0
    if found := re.fullmatch(block, path):
      return rate ** (depth - int(found.group(1)))
    if re.fullmatch(stacked, path):
      powers = rate ** (depth - np.arange(depth, dtype=np.float32))
      return powers.reshape((depth,) + (1,) * (leaf.ndim - 1))
    return rate ** (depth + 1)

  return tree.map_with_path(factor, params)


def _multipliers(params, lr_multipliers, layer_decay):
  """Tree of factors on the updates, or None where all are one."""
  if not lr_multipliers and layer_decay is None:
    return None
  rules = [path_rule for path_rule, _ in lr_multipliers]

  def named(path, _):
    i = tree.first_match(rules, path)
    return 1.0 if i is None else lr_multipliers[i][1]

  factors = tree.map_with_path(named, params)
  if layer_decay is not None:
    by_layer = call(layer_multipliers, layer_decay, params)
    factors = jax.tree.map(np.multiply, factors, by_layer)
  return factors


def _scale_by(factors):
  """Multiplies updates by a tree of constants; leaves masked out pass by."""
  flat = tree.flatten(factors)

  def scale(path, update):
    return update * jnp.asarray(flat[path], update.dtype)

  return optax.stateless(lambda updates, _: tree.map_with_path(scale, updates))
