"""The train step of a config, compiled for TPUs that need not be there.

__main__   command line: python -m vit_jax.tools.compile
step       a config's train step, lowered for the devices and compiled
hlo        cycles, collectives and kernels, read from the compiled program
report     a row of numbers from both, and how it is shown
"""
