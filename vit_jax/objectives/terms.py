"""Terms of a loss, `objective.terms.NAME` of a config: see step.Term."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from vit_jax.step import Seen
from vit_jax.types import UserError

Features = Mapping[str, jax.Array]


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


def patch_kernel(seen: Seen) -> jax.Array:
  """Return `kernel_difference` of the large views to those of the teacher.

  The patches of PaKA ("DINOv3.1" in lightly-train) are of crops in crops, after
  a head; here they are those of the same views.
  """
  if 'teacher' not in seen.features:
    raise UserError(
      'patch_kernel compares with an EMA teacher, and this objective has none. '
      'Use Dino or DinoV2, or the anchor, with difference=kernel_difference.'
    )
  return kernel_difference(seen.features['image'], seen.features['teacher'])


def kernel_difference(features: Features, others: Features) -> jax.Array:
  """Return 1 - the alignment of kernels of patches [..., n, D]: [...].

  K is the n x n matrix of the inner products of the patches, from which their
  mean was subtracted. The alignment is the sum of K * K', divided by the norms
  of both (PaKA, arXiv 2509.05606). Their squares are at least 1e-6.
  """
  one, two = map(_kernel, (features, others))
  sums = [jnp.sum(x * y, (-2, -1)) for x, y in ((one, one), (two, two))]
  norms = jnp.sqrt(jnp.maximum(sums[0], 1e-6) * jnp.maximum(sums[1], 1e-6))
  return 1 - jnp.sum(one * two, (-2, -1)) / norms


def _kernel(features):
  x = patches_of(features)
  x -= jnp.mean(x, axis=-2, keepdims=True)
  return jnp.einsum('...id,...jd->...ij', x, x, precision='highest')


def patches_of(features: Features) -> jax.Array:
  """Return the tokens of patches, float32 [..., n, D]."""
  count = features['patches'].shape[-2]
  return features['tokens'][..., -count:, :].astype(jnp.float32)


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
