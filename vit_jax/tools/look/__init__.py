"""Figures of what a model attends to and what its embeddings have learned.

__main__  command line: python -m vit_jax.tools.look
arrays    the numbers, of weights and of images
figures   a figure of each, with its numbers next to it
"""
