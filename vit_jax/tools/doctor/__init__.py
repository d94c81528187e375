"""Report on an installation, and checks of what its compiler computes.

__main__   command line: python -m vit_jax.tools.doctor
checks     what is computed on the devices
reference  the same layers and gradients in numpy and float64
"""
