"""Record ONNX files of tiny models that PyTorch exports.

onnx.npz has the files; weights in them are made of a seed (seeded.py), of the
names and shapes that are stored. To record again, in an environment that has
torch==2.14.1, timm==1.0.31, transformers==5.24.0, onnx and onnxscript:

  python tests/golden/record_onnx.py
"""

import json
import re
import tempfile

import numpy as np
import seeded

TIMM = {'img_size': 8, 'patch_size': 4, 'embed_dim': 8, 'depth': 1}
TIMM |= {'num_heads': 2, 'mlp_ratio': 2.0, 'num_classes': 5}
HF = {'image_size': 8, 'patch_size': 4, 'hidden_size': 8, 'mlp_ratio': 2}
HF |= {'num_hidden_layers': 1, 'num_attention_heads': 2}
HF |= {'intermediate_size': 16}
SIZES = {0: 'batch', 2: 'height', 3: 'width'}
PLAIN, RESIZED = 'vit_tiny_patch16_224', {'dynamic_img_size': True}
CASES = {  # name: (model, its arguments, arguments of torch.onnx.export)
  'timm': (PLAIN, {}, {}),
  'timm_half': (PLAIN, {'qkv_bias': False}, {}),
  'timm_dynamo': ('vit_small_patch14_reg4_dinov2', {}, {}),
  'timm_equal_dynamo': ('deit3_small_patch16_224', {}, {}),
  'timm_resized_dynamo': (PLAIN, RESIZED, {'dynamic_shapes': (SIZES,)}),
  'dinov2': ('Dinov2Model', {}, {}),
  'dinov2_sizes': ('Dinov2Model', {}, {'dynamic_axes': {'x': SIZES}}),
  'clip_dynamo': ('CLIPVisionModel', {}, {}),
  'siglip': ('SiglipVisionModel', {}, {}),
}


def record(case, name, args, options):
  """Return (the bytes of a file, {name: shape} of its arrays)."""
  timm, transformers = seeded.import_torch('timm', 'transformers')
  import onnx
  import torch

  if name.endswith('Model'):
    config = getattr(transformers, re.sub('Model', 'Config', name))(**HF)
    model = getattr(transformers, name)(config).eval()
  else:
    model = timm.create_model(name, **TIMM | args).eval()
  params = dict(model.named_parameters())
  random = {
    k: x for k, x in params.items() if 'equal' not in case or x.ndim > 1
  }
  for k in params.keys() - random:  # equal vectors, which are stored once
    params[k].data = torch.arange(float(len(params[k])))
  seeded.fill(random)
  images = torch.zeros(1, 3, 8, 8)
  if 'half' in case:
    model, images = model.half(), images.half()
  is_dynamo = 'dynamo' in case
  options |= {'external_data': False} if is_dynamo else {'input_names': ['x']}
  with tempfile.NamedTemporaryFile() as file:
    torch.onnx.export(model, (images,), file.name, dynamo=is_dynamo, **options)
    found = onnx.load(file.name)
  del found.graph.value_info[:]
  for node in found.graph.node:  # stack traces are long
    kept = [x for x in node.metadata_props if x.key.endswith('name_scopes')]
    del node.metadata_props[:]
    node.metadata_props.extend(kept)
  shapes = {k: list(x.shape) for k, x in params.items()}
  return np.frombuffer(found.SerializeToString(), np.uint8), shapes


if __name__ == '__main__':
  files = {case: record(case, *row) for case, row in CASES.items()}
  about = json.dumps({k: shapes for k, (_, shapes) in files.items()})
  arrays = {k: x for k, (x, _) in files.items()}
  seeded.save('onnx', arrays | {'about': about})
