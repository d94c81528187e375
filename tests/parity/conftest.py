"""Comparisons with PyTorch's implementations, of full size and live.

They need what the other tests do, and torch, timm, transformers:

  pip install -e '.[test,parity]'
  python -m pytest -m parity tests/parity -n 0 -s
"""
