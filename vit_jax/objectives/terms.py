"""Terms of a loss, `objective.terms.NAME` of a config: see step.Term."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from vit_jax.step import Seen
from vit_jax.types import UserError


def find(seen: Seen, name: str) -> jax.Array:
  """Return a feature of the images, or of their large views."""
  found = seen.features['image']
  if name not in found:
    raise UserError(
      f'A term needs {name!r}, and this objective has {", ".join(found)}.'
    )
  return found[name].astype(jnp.float32)


def z_loss(seen: Seen) -> jax.Array:
  """Return log(sum of exp(logits))^2, which keeps logits near 0."""
  return jax.nn.logsumexp(find(seen, 'logits'), axis=-1) ** 2


@dataclasses.dataclass(frozen=True)
class Koleo:
  """KoLeo of representations, which moves those of different images apart."""

  whole_batch = True

  def __call__(self, seen: Seen) -> jax.Array:
    x = find(seen, 'pre_logits')
    if len(x) == 1:
      raise UserError(
        'KoLeo compares the images of a batch, and batch_size=1. Use a larger '
        'batch, or leave the term out.'
      )
    return koleo(x.reshape(len(x), -1, x.shape[-1]))


@dataclasses.dataclass(frozen=True)
class Decorrelation:
  """Mean squared correlation of two entries of the representation."""

  whole_batch = True

  def __call__(self, seen: Seen) -> jax.Array:
    x = find(seen, 'pre_logits')
    x = x.reshape(-1, x.shape[-1])
    x = jax.nn.standardize(x, 0, variance=jnp.var(x, 0, keepdims=True))
    found = jnp.matmul(x.T, x, precision='highest') / len(x)
    return jnp.mean(found**2, where=~jnp.eye(len(found), dtype=bool))


def koleo(x: jax.Array) -> jax.Array:
  """Return the sum over views of the KoLeo loss of x [B, G, D].

  It is the mean of -log(distance to the nearest other image), of vectors
  divided by their lengths, or by 1e-8 as in DINOv2's code if that is larger.
  The nearest has the largest inner product.
  """
  x = x.astype(jnp.float32)
  x /= optax.safe_norm(x, 1e-8, axis=-1, keepdims=True)
  products = jnp.einsum('igd,jgd->gij', x, x, precision='highest')
  itself = jnp.eye(len(x), dtype=bool)[None]
  nearest = jnp.argmax(jnp.where(itself, -jnp.inf, products), axis=-1)
  other = jnp.take_along_axis(x, nearest.T[..., None], axis=0)
  # Equal images have no gradient instead of NaN.
  distances = optax.safe_norm(x - other, 1e-12, axis=-1)
  return -jnp.sum(jnp.mean(jnp.log(distances + 1e-8), axis=0))
