"""What attention looks at: maps, rollout and distances, of recorded q and k.

    _, found = model.apply(variables, images, mutable=['intermediates'])
    layers = attention.recorded(found['intermediates'])
    distances = attention.cell_distances(grid=(14, 14), cell_px=(16, 16))
    attention.per_layer(  # [B, L, h], in pixels
      lambda *layer: attention.mean_distance(*layer, distances=distances),
      *layers,
    )

Shapes: B examples, L layers, h heads of width d, Q queries, N tokens, of which
the last P = gh * gw are patches row by row; the prefix before them are class
token and registers. All softmaxes are float32. Under jit no more than the
[B, h, N, N] of one layer is in memory at a time: the compiler would see layers
as independent, and have all of them at once, were they not in a loop.
"""

import jax
import jax.numpy as jnp
import numpy as np

HEADS = {'mean': jnp.mean, 'max': jnp.max, 'min': jnp.min}
RESIDUALS = ('half', 'none')
PREFIXES = ('left_out', 'zero')


def recorded(intermediates):
  """Of the encoder's layers, first to last, what makes up their attention.

  Args:
    intermediates: the collection, as apply with mutable=['intermediates']
      returns it; of layers one after the other, or looped over (scan=True).

  Returns:
    (q, k, added): [L, B, N, h, d] each of queries and keys; and what relative
    positions add to q kᵀ, [L, B, h, N, N], or None.

  Raises:
    ValueError: there are none: a model without attention (Mixer, ResNet), or
      nothing was recorded.
  """
  if 'blocks' in intermediates:
    return _of_layer(intermediates['blocks'])
  names = [name for name in intermediates if name.startswith('block_')]
  names.sort(key=lambda name: int(name.removeprefix('block_')))
  layers = [_of_layer(intermediates[name]) for name in names]
  layers = layers or [_of_layer({})]
  return jax.tree.map(lambda *of_all: jnp.stack(of_all), *layers)


def _of_layer(layer):
  found = layer.get('attn', {})
  if 'q' not in found or 'k' not in found:
    raise ValueError(
      'No queries and keys were recorded. Either the model has no attention '
      '(Mixers and ResNets have none: there are no attention maps of them), or '
      "it was applied without mutable=['intermediates']."
    )
  # Each call of a module appends its own.
  return found['q'][0], found['k'][0], found.get('position_logits', (None,))[0]


def weights(q, k, added=None):
  """softmax((q kᵀ + added) / √d), as the model attends: [B, h, Q, N].

  Args:
    q: [B, Q, h, d].
    k: [B, N, h, d].
    added: None, or [B, h, Q, N].
  """
  scores = jnp.einsum(
    'bqhd,bnhd->bhqn', q, k, preferred_element_type=jnp.float32
  )
  if added is not None:
    scores = scores + added
  return jax.nn.softmax(scores * q.shape[-1] ** -0.5, axis=-1)


def per_layer(fn, q, k, added=None):
  """fn(q, k, added) of each layer, one after the other: [B, L, ...].

  Args:
    fn: ([B, N, h, d], [B, N, h, d], None or [B, h, N, N]) -> [B, ...].
    q, k, added: of `recorded`.
  """
  found = jax.lax.map(lambda layer: fn(*layer), (q, k, added))
  return jnp.swapaxes(found, 0, 1)


def maps(q, k, added=None, *, start):
  """Each head's attention from some tokens: [B, h, R, N], of one layer.

  Args:
    q, k, added: of `weights`, with as many queries as keys.
    start: [B or 1, R, N], such as `representation`: R mixtures of queries,
      weights that sum to one. The identity gives `weights`.
  """
  start = jnp.broadcast_to(start, (q.shape[0], *start.shape[1:]))
  return jnp.einsum('brq,bhqn->bhrn', start, weights(q, k, added))


def rollout(q, k, added=None, *, start=None, heads='mean', residual='half'):
  """How much each token of the input makes up tokens of the output.

  The product A_L ... A_2 A_1 of all layers' attention (paper, Figs. 6 and 14).
  What the paper leaves open is as proposed in "Quantifying attention flow in
  transformers", which it cites, from memory of it: the skip connection counts
  as much as attention, A = (A + I) / 2.

  Args:
    q, k, added: of `recorded`.
    start: [B or 1, R, N], which tokens (or mixtures) of the output; by default
      all of them, R = N.
    heads: how heads become one: 'mean' (paper), 'max', 'min'. Rows are scaled
      to sum to one again after the latter two; where heads agree on nothing
      at all ('min'), a token keeps to itself.
    residual: 'half', as above, or 'none': the plain product.

  Returns:
    float32 [B, R, N]; rows sum to as much as those of start.
  """
  _check('heads', heads, HEADS)
  _check('residual', residual, RESIDUALS)
  batch, tokens = q.shape[1:3]
  if start is None:
    start = jnp.eye(tokens)[None]
  start = jnp.broadcast_to(start, (batch, *start.shape[1:]))
  alone = jnp.eye(tokens)[None]

  def layer_before(out, layer):
    mixed = HEADS[heads](weights(*layer), axis=1)
    total = mixed.sum(axis=-1, keepdims=True)
    mixed = jnp.where(total > 0, mixed / jnp.where(total > 0, total, 1), alone)
    step = jnp.einsum('brq,bqn->brn', out, mixed)
    return ((step + out) / 2 if residual == 'half' else step), None

  # From the last layer back: a few rows times a matrix are less than matrices.
  return jax.lax.scan(layer_before, start, (q, k, added), reverse=True)[0]


def cell_distances(grid, cell_px):
  """Distances in pixels between the centres of patches: float32 [P, P].

  Args:
    grid: (gh, gw).
    cell_px: (height, width) of what a token stands for in the picture; of a
      hybrid a cell of its feature map, in pixels of the picture.
  """
  at = np.mgrid[: grid[0], : grid[1]].reshape(2, -1)
  at = at * np.asarray(cell_px, np.float64).reshape(2, 1)
  return np.hypot(*(at[:, :, None] - at[:, None, :])).astype(np.float32)


def mean_distance(q, k, added=None, *, distances, prefix='left_out'):
  """Mean attention distance of each head (paper, Figs. 7 and 11): [B, h].

  Of each patch's query: the distance to all patches, weighted by attention;
  then the mean over queries, in the units of `distances`. The paper does not
  say what becomes of the class token, which is nowhere in the picture.

  Args:
    q, k, added: of `weights`, of one layer.
    distances: [P, P], P <= N.
    prefix: attention to the class token and registers: 'left_out', what goes
      to the patches counts as the whole; 'zero', a distance of 0, so that a
      head that looks at the class token comes out as near. As queries they do
      not count either way.
  """
  _check('prefix', prefix, PREFIXES)
  patches = len(distances)
  if q.shape != k.shape or q.shape[1] < patches:
    raise ValueError(
      f'q is {q.shape} and k {k.shape}, with distances of {patches} patches; '
      'expected [B, N, h, d] of at least as many tokens. Give cell_distances '
      'the grid of these images.'
    )
  first = q.shape[1] - patches
  # The softmax over patches alone is what is left out of the whole, scaled to
  # sum to one, with no division by zero.
  keys = first if prefix == 'left_out' else 0
  if added is not None:
    added = added[:, :, first:, keys:]
  to_patches = weights(q[:, first:], k[:, keys:], added)[..., first - keys :]
  return jnp.einsum('bhqk,qk->bh', to_patches, distances) / patches


def _check(what, value, choices):
  if value not in choices:
    raise ValueError(f'{what}={value!r}; it can be {", ".join(choices)}.')
