"""Write weights of any known format as ONNX, and compare outputs.

    python docs/export_onnx.py WEIGHTS FILE.onnx

The model takes float images [B, H, W, C] after preprocessing and returns logits
[B, K], or features if it has no head. Needs jax2onnx and onnxruntime.
"""

import sys

import jax
import jax2onnx
import numpy as np
import onnxruntime

from vit_jax import pretrained
from vit_jax.weights import formats


def main(path, file):
  model, params = pretrained.load(path)
  if hasattr(model, 'attention'):  # ONNX has no fused kernel
    model = model.clone(attention='einsum')
  shape = formats.read(path, values=False).image_shape

  def forward(images):
    return model.apply({'params': params}, images)

  inputs = [('batch', *shape)]
  jax2onnx.to_onnx(forward, inputs, return_mode='file', output_path=file)
  images = np.random.default_rng(0).normal(size=(3, *shape)).astype('float32')
  expected = np.asarray(jax.jit(forward)(images))
  session = onnxruntime.InferenceSession(file)
  (found,) = session.run(None, {session.get_inputs()[0].name: images})
  error = np.abs(found - expected).max() / expected.std()
  print(f'wrote {file}; the largest error is {error:.1e} of the spread')


if __name__ == '__main__':
  main(*sys.argv[1:])
