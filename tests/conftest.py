"""Strict JAX settings for every test: 8 fake devices, no rank promotion."""

import jax

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
