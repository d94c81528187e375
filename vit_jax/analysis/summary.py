"""Table of a model's modules: shapes and parameters, and its FLOPs."""

import jax
import jax.numpy as jnp

from vit_jax.analysis import flops
from vit_jax.types import Model, Shape


def table(model: Model, image_shape: Shape) -> str:
  """Return the modules of a model as text.

  Nothing is computed. All layers of a model that can stack them share a row.

  Args:
    model: Flax module.
    image_shape: (H, W, C) of the image that it gets.
  """
  images = jnp.zeros((1, *image_shape))
  if hasattr(model, 'scan'):
    model = model.clone(scan=True)
  text = model.tabulate(
    jax.random.key(0),
    images,
    depth=2,
    console_kwargs={'width': 120, 'color_system': None},
  )
  products = flops.forward(model, jax.typeof(images)) / 1e9
  note = 'A multiply-add is two FLOPs; only products and convolutions count.'
  return f'{text.strip()}\n\n{products:,.3f} GFLOPs for one image. {note}'
