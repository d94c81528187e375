"""Benchmark of training, inference and input, optionally against a peer.

  __main__  command line: python -m vit_jax.tools.benchmark
  cases     what is measured, and the implementations to compare with
  rounds    one case: worker processes that take turns on the device
  report    rows for the terminal, CSV with timm's columns, and JSON
  workers   a worker process, and the protocol it speaks (standard library only)
  ours      worker: this project's train step and logits
  timm      worker: timm's model of the same name, in PyTorch
  input     worker: the data pipeline

Another worker, a plain Linen ViT, is benchmarks/plain_linen_vit.py.
"""
