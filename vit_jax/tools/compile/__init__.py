"""The train step of a config, compiled for TPUs that need not be there.

__main__   command line: python -m vit_jax.tools.compile
step       a config's train step, lowered for the devices and compiled
attention  the choice of attention='auto' by estimates
costs      cycles, bytes and collectives, read from the compiled program
classes    numbers of classes of data that is not opened
peer       a train step of other code, compiled for comparison
report     rows of numbers from both, as a table, CSV, JSON or Markdown
search     the largest batch that fits, and the cheapest remat policy for it
table      docs/compile.md: the paper's models on TPU slices
"""
