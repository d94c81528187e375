"""Weights as ONNX: the model of timm that they fit, exported by PyTorch.

Needs torch, timm, onnx and onnxruntime (the extra 'onnx').
"""

import json
import os
import tempfile

import jax
import numpy as np

from vit_jax.types import PathLike, UserError
from vit_jax.weights import bundle, formats
from vit_jax.weights.bundle import Weights

_OPSET = 17
_BATCHES = 1, 3, 8  # of the comparison
_MOST = 1e-3  # largest error, relative to the spread of the outputs


def write(weights: Weights, path: PathLike) -> float:
  """Write NAME.onnx, and return the largest error relative to the spread.

  The graph takes 'images', float32 [B, C, H, W] after the preprocessing, any B,
  and returns 'outputs': logits, numbers, or features without a head. What is
  next to an npz, preprocessing and names, is JSON in its metadata 'vit_jax'.

  Raises:
    UserError: timm has no such model, or onnxruntime computes something else.
  """
  try:
    import onnx
    import onnxruntime
    import timm
    import torch
  except ImportError as error:
    raise UserError(
      f"ONNX needs {error.name}. Install it: pip install -e '.[onnx]'"
    ) from error
  weights = bundle.squeeze(weights)
  height, width, channels = weights.image_shape
  with tempfile.TemporaryDirectory() as folder:
    formats.write(weights, folder, 'timm')
    model = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
  torch.onnx.export(
    model,
    (torch.zeros(2, channels, height, width),),
    os.fspath(path),
    dynamo=False,
    opset_version=_OPSET,
    input_names=['images'],
    output_names=['outputs'],
    dynamic_axes={'images': {0: 'batch'}, 'outputs': {0: 'batch'}},
  )
  file = onnx.load(path)
  about = formats.describe_use(weights) | {'origin': weights.origin}
  onnx.helper.set_model_props(file, {'vit_jax': json.dumps(about)})
  onnx.save(file, path)
  session = onnxruntime.InferenceSession(os.fspath(path))
  ours, params = bundle.build(weights)
  apply = jax.jit(lambda x: ours.apply({'params': params}, x))
  rng, errors = np.random.default_rng(0), []
  for batch in _BATCHES:
    shape = batch, height, width, channels
    images = rng.normal(size=shape).astype(np.float32)
    (found,) = session.run(None, {'images': images.transpose(0, 3, 1, 2)})
    expected = np.asarray(apply(images))
    errors.append(np.abs(found - expected).max() / expected.std())
  if max(errors) > _MOST:
    raise UserError(
      f'onnxruntime differs by {max(errors):.1e} of the spread of the outputs, '
      f'expected at most {_MOST}. Use --format=stablehlo.'
    )
  return float(max(errors))
