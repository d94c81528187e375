"""Attention maps, rollout and distances, computed from recorded q and k.

    _, found = model.apply(variables, images, mutable=['intermediates'])
    layers = attention.recorded(found.get('intermediates', {}))
    distances = attention.cell_distances(grid=(14, 14), cell_px=(16, 16))
    distance = functools.partial(attention.mean_distance, distances=distances)
    attention.per_layer(distance, *layers)  # [B, L, h], in pixels

Shapes: B examples, L layers, h heads of dimension d, Q queries, N tokens, of
which the last P = gh * gw are patches row by row; the prefix before them is the
class token and registers. All softmaxes are float32. Under jit only the
[B, h, N, N] of one layer is in memory at a time, because layers are in a loop.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.types import Array, Params, UserError


def recorded(intermediates: Params) -> tuple[Array, Array, Array | None]:
  """Return what the encoder layers recorded about attention, first to last.

  `intermediates` is the collection that apply with mutable=['intermediates']
  returns, {} if there is none. The result is (q, k, added): queries and keys,
  each [L, B, N, h, d]; and what relative positions add to q kᵀ,
  [L, B, h, N, N], or None.
  """
  names = [name for name in intermediates if name.startswith('block')]
  names.sort(key=lambda name: (len(name), name))  # block_10 after block_9
  found = [intermediates[name].get('attn', {}) for name in names]
  # Each call of a module appends its own.
  layers = [
    (x['q'][0], x['k'][0], x.get('position_logits', (None,))[0])
    for x in found
    if 'q' in x
  ]
  if not layers:
    raise UserError(
      'No queries and keys were recorded. Either the model has no attention '
      '(as Mixers and ResNets), or its layers are kernels (leave model.layers '
      "out), or it was applied without mutable=['intermediates']."
    )
  if names == ['blocks']:
    return layers[0]
  return jax.tree.map(lambda *of_all: jnp.stack(of_all), *layers)


def weights(q: Array, k: Array, added: Array | None = None) -> jax.Array:
  """Return the attention weights softmax((q kᵀ + added) / √d), [B, h, Q, N].

  q is [B, Q, h, d], k [B, N, h, d], and added [B, h, Q, N] or None.
  """
  scores = jnp.einsum('bqhd,bnhd->bhqn', q, k, preferred_element_type='float32')
  if added is not None:
    scores = scores + added
  return jax.nn.softmax(scores * q.shape[-1] ** -0.5, axis=-1)


def per_layer(
  fn: Callable[..., jax.Array], q: Array, k: Array, added: Array | None = None
) -> jax.Array:
  """Compute fn(q, k, added) -> [B, ...] of each layer: [B, L, ...]."""
  found = jax.lax.map(lambda layer: fn(*layer), (q, k, added))
  return jnp.swapaxes(found, 0, 1)


def rollout(
  q: Array, k: Array, added: Array | None = None, *, start: Array | None = None
) -> jax.Array:
  """Return the contribution of each input token to output tokens (rollout).

  It is the product A_L ... A_2 A_1 of the attention of all layers, averaged
  over heads (Figs. 6 and 14). The paper leaves the rest open; it follows
  "Quantifying attention flow in transformers", which the paper cites, from
  memory: the skip connection counts as much as attention, A = (A + I) / 2. The
  rows of the result, float32 [B, R, N], have the same sums as those of start.

  Args:
    q, k, added: arrays that `recorded` returns.
    start: [B or 1, R, N], output tokens or mixtures of them, such as
      Pooling.token_weights; None: all, R = N.
  """

  def layer_before(out, layer):
    attended = jnp.einsum('brq,bqn->brn', out, weights(*layer).mean(axis=1))
    return (attended + out) / 2, None

  start = jnp.eye(q.shape[2])[None] if start is None else start
  start = jnp.broadcast_to(start, (q.shape[1], *start.shape[1:]))
  # From the last layer back: a few rows times a matrix cost less.
  return jax.lax.scan(layer_before, start, (q, k, added), reverse=True)[0]


def rollout_of_heads(
  q: Array, k: Array, added: Array | None = None, *, start: Array
) -> jax.Array:
  """Return rollouts from one head of one layer: float32 [B, L, h, R, N].

  The head of layer l attends to the tokens of its layer; the layers before it
  are rolled out with the mean over heads. So the mean over the heads of a layer
  is the `rollout` of the layers up to it. Arguments as of `rollout`.
  """
  batch, tokens = q.shape[1:3]
  identity = jnp.broadcast_to(jnp.eye(tokens), (batch, tokens, tokens))

  def next_layer(before, layer):
    of_heads = (weights(*layer) + identity[:, None]) / 2
    found = jnp.einsum('brq,bhqn,bnm->bhrm', start, of_heads, before)
    return jnp.einsum('bqn,bnm->bqm', of_heads.mean(axis=1), before), found

  _, found = jax.lax.scan(next_layer, identity, (q, k, added))
  return jnp.swapaxes(found, 0, 1)


def cell_distances(grid: Sequence[int], cell_px: Sequence[int]) -> np.ndarray:
  """Return distances between the centres of patches: float32 [P, P].

  The grid is (gh, gw), and cell_px the (height, width) of a patch in pixels.
  """
  at = np.mgrid[: grid[0], : grid[1]].reshape(2, -1)
  at = at * np.asarray(cell_px, np.float64).reshape(2, 1)
  return np.hypot(*(at[:, :, None] - at[:, None, :])).astype(np.float32)


def mean_distance(
  q: Array, k: Array, added: Array | None = None, *, distances: Array
) -> jax.Array:
  """Return the mean attention distance of each head (Figs. 7 and 11): [B, h].

  For the query of each patch, distances to all patches are weighted by
  attention; then the mean over queries is taken. Class token and registers,
  about which the paper does not say anything, have no place in the image and
  are left out: the weights of patches sum to one.

  Args:
    q, k, added: see `weights`, of one layer.
    distances: [P, P], P <= N.
  """
  patches = len(distances)
  first = q.shape[1] - patches
  # A softmax over patches only: their weights sum to one, without a division.
  if added is not None:
    added = added[:, :, first:, first:]
  to_patches = weights(q[:, first:], k[:, first:], added)
  return jnp.einsum('bhqk,qk->bh', to_patches, distances) / patches
