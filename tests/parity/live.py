"""Full-size models of PyTorch with weights that resemble trained ones."""

from importlib.util import find_spec

import numpy as np
import pytest
import seeded


def needs(*packages):
  """Return the marks of a file whose tests need these packages."""
  found = all(map(find_spec, packages))
  return [
    pytest.mark.slow,
    pytest.mark.parity,
    pytest.mark.filterwarnings('ignore'),
    pytest.mark.skipif(not found, reason=f'needs {" and ".join(packages)}'),
  ]


def trained(model):
  """Gives it weights that keep activations near 1; every one matters."""
  import torch

  state = model.state_dict()
  is_resnet = any(name.startswith('stages.') for name in state)
  found = seeded.weights({k: v.shape for k, v in state.items()}, scale=1.0)
  for name, value in found.items():
    if seeded.is_scale(name):
      found[name] = 1 + 0.2 * (value - 1)
      if is_resnet and '.norm3.' in name:
        found[name] *= 0.5  # or the sum of the branches grows with depth
    elif value.ndim >= 2 and 'pos' not in name:
      found[name] = value / np.sqrt(max(value[0].size, 1))
    else:
      found[name] = 0.2 * value
  model.load_state_dict({k: torch.from_numpy(v) for k, v in found.items()})
