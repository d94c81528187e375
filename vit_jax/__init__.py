"""Vision Transformers in JAX.

The import appends to XLA_FLAGS what the installed jaxlib needs in order to
compute correctly, see environment.py. JAX reads XLA_FLAGS when it computes for
the first time, so import vit_jax before that.
"""

from vit_jax.io import environment

environment.avoid_wrong_results()
environment.drop_missing_backend()
