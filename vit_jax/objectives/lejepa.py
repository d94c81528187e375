"""LeJEPA (arXiv 2511.08544): views agree, and the images of a batch are normal.

A projector maps the representation of each view to z, [N, V, K], of N images in
the global batch and V views with the global ones first. There is no teacher.

    loss = weight * regularization + (1 - weight) * invariance

Invariance, the paper's prediction loss, is the mean of (z - centre)^2, where
the centre of an image is the mean z of its global views. Regularization
compares the z of each view, over the batch, with a standard normal
distribution. It looks at M projections, onto unit vectors that each step draws.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.objectives.colours import LEJEPA, Views
from vit_jax.objectives.views import OfViews
from vit_jax.step import Seen
from vit_jax.types import Count, Fraction, Outputs, Params


@dataclasses.dataclass(frozen=True)
class Projector:
  """A linear layer, then an MLP with batch norm and ReLU: D -> K, in float32.

  The norm is over all views of the global batch, large and small, as in
  stable-pretraining; layers before it need no bias. The widths are from
  MINIMAL.md; stable-pretraining has 512 outputs.
  """

  embedding: Count = 512
  hidden: tuple[Count, ...] = (2048, 2048)
  outputs: Count = 16

  def init(self, rng: jax.Array, width: int) -> Params:
    """Return parameters for D = width; kernels are PyTorch's initial ones."""
    make = jax.nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')
    widths = width, self.embedding, *self.hidden, self.outputs
    params: dict[str, Any] = {'bias': jnp.zeros(self.outputs)}
    for i, key in enumerate(jax.random.split(rng, len(widths) - 1)):
      params[f'layer_{i}'] = {'kernel': make(key, widths[i : i + 2])}
    for i, n in enumerate(self.hidden, 1):
      params[f'norm_{i}'] = {'scale': jnp.ones(n), 'bias': jnp.zeros(n)}
    return params

  def __call__(self, params: Params, x: jax.Array) -> jax.Array:
    """Return z of representations: [N, V, D] -> float32 [N, V, K]."""
    batch, x = x.shape[:2], x.astype(jnp.float32).reshape(-1, x.shape[-1])
    for i in range(len(self.hidden) + 2):
      x = x @ params[f'layer_{i}']['kernel']
      if norm := params.get(f'norm_{i}'):
        x = jax.nn.standardize(x, 0, variance=jnp.var(x, 0, keepdims=True))
        x = jax.nn.relu(x * norm['scale'][None] + norm['bias'][None])
    return (x + params['bias'][None]).reshape(*batch, -1)


@dataclasses.dataclass(frozen=True)
class Sigreg:
  """SIGReg: the test of Epps and Pulley, the mean over slices and views of

      T = N * integral of |mean of e^(itp) - e^(-t^2/2)|^2 * e^(-t^2/2) dt

  for N projections p, with t from -3 to 3 by the trapezoidal rule. For normal
  z, T is 1.05 on average for any N; if all z are equal, it is at least 0.4 N.
  So the best weight depends on the batch size: keep weight * N, which is 5 in
  MINIMAL.md, and 13 to 32 in the authors' runs on ImageNet. Other code means
  other weights: eb_jepa has no factor N; stable-pretraining has N * V, as it
  tests all views together, and weighs the invariance by 1.
  """

  weight: Fraction = 0.02  # MINIMAL.md, for batches of 256; 0.05 in lightly
  slices: Count = 256  # M; 1024 in lightly and stable-pretraining
  points: Count = 17  # number of t from 0 to 3

  def __call__(self, z: jax.Array, slices: jax.Array) -> jax.Array:
    """Return the mean T of z [N, V, K], for unit vectors [K, M]."""
    projected = jnp.matmul(z, slices, precision='highest')
    t = jnp.linspace(0, 3, self.points)
    first = jnp.exp(1j * t[1] * projected)
    waves = [first**j for j in range(self.points)]  # cheaper than sines
    # TPUs would gather complex means from all devices.
    real = jnp.stack([jnp.mean(x.real, axis=0) for x in waves])
    imaginary = jnp.stack([jnp.mean(x.imag, axis=0) for x in waves])
    normal = jnp.exp(-(t**2) / 2)
    error = (real - normal[:, None, None]) ** 2 + imaginary**2
    half = jnp.trapezoid(normal * jnp.mean(error, axis=(1, 2)), t)
    return 2 * len(z) * half


@dataclasses.dataclass(frozen=True)
class Visreg:
  """VISReg (arXiv 2606.02572): three terms, which do not grow with N.

  They are mean squares: of the mean of each output; of its standard deviation
  - 1; and of the sorted projections of standardised z - normal quantiles, with
  no gradient through that standard deviation.
  """

  weight: Fraction = 0.6  # the paper, for small data sets; 0.9 for large ones
  slices: Count = 1024  # M; 256 in the released code, 4096 in lightly

  def __call__(self, z: jax.Array, slices: jax.Array) -> jax.Array:
    """Return their sum for z [N, V, K], for unit vectors [K, M]."""
    mean = jnp.mean(z, axis=0, keepdims=True)
    std = jnp.sqrt(jnp.var(z, axis=0, keepdims=True) + 1e-12)
    standard = (z - mean) / jax.lax.stop_gradient(std)
    projected = jnp.matmul(standard, slices, precision='highest')
    places = jnp.arange(1, len(z) + 1).reshape(-1, 1, 1) / (len(z) + 1)
    shape = jnp.sort(projected, axis=0) - jax.scipy.special.ndtri(places)
    return jnp.mean(mean**2) + jnp.mean((std - 1) ** 2) + jnp.mean(shape**2)


@dataclasses.dataclass(frozen=True)
class LeJepa(OfViews):
  """The loss of a model without a head, see above, and its two terms."""

  _: dataclasses.KW_ONLY
  views: Views = LEJEPA
  projector: Projector = Projector()
  regularizer: Sigreg | Visreg = Sigreg()

  whole_batch = True

  def init(self, rng: jax.Array, images: jax.ShapeDtypeStruct) -> Params:
    x, _ = jax.eval_shape(self.model.init_with_output, rng, images)
    return self.projector.init(rng, x.shape[-1])

  def loss(self, seen: Seen) -> Outputs:
    *_, rng = jax.random.split(seen.rng, 3)  # the others are of the views
    x = [each['pre_logits'] for each in seen.features.values()]
    z = self.projector(seen.params['objective'], jnp.concatenate(x, axis=1))
    centre = jnp.mean(z[:, : x[0].shape[1]], axis=1, keepdims=True)
    invariance = jnp.mean((z - centre) ** 2)
    slices = draw(rng, z.shape[-1], self.regularizer.slices)
    found, weight = self.regularizer(z, slices), self.regularizer.weight
    loss = weight * found + (1 - weight) * invariance
    metrics = {'loss': loss, 'invariance': invariance, 'regularization': found}
    return loss, metrics


def draw(rng: jax.Array, width: int, count: int) -> jax.Array:
  """Return random unit vectors, [width, count]."""
  x = jax.random.normal(rng, (width, count))
  return x / jnp.linalg.norm(x, axis=0, keepdims=True)
