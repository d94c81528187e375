"""Weights, images and pictures made of a seed: goldens need not store them."""

import hashlib
import importlib
import json
import pathlib

import numpy as np

FOLDER = pathlib.Path(__file__).parent

# Arguments of small ViTs: timm's, transformers' and ours.
TIMM = {
  **{'img_size': (12, 8), 'patch_size': (4, 2), 'num_classes': 5},
  **{'embed_dim': 24, 'depth': 2, 'num_heads': 3, 'mlp_ratio': 2.0},
}
HF = {
  **{'image_size': [12, 8], 'patch_size': [4, 2], 'hidden_size': 24},
  **{'num_hidden_layers': 2, 'num_attention_heads': 3},
  'intermediate_size': 50,
}
VIT = {'width': 24, 'depth': 1, 'mlp_dim': 50, 'num_heads': 3, 'num_classes': 5}


def weights(shapes, seed=0, *, scale=0.3):
  """{name: float32 array}, in the order of the names.

  Every parameter is random and matters; scales of norms are about 1.
  """
  rng = np.random.default_rng(seed)
  out = {}
  for name in sorted(shapes):
    value = scale * rng.standard_normal(shapes[name])
    if is_scale(name):
      value += 1
    out[name] = np.asarray(value, np.float32)
  return out


def is_scale(name):
  """Whether it is what a norm multiplies with, in anybody's names."""
  *_, layer, last = ['', *name.replace('/', '.').split('.')]
  return last == 'scale' or ('norm' in layer and last == 'weight')


def images(shape, seed=1):
  """float32 images [2, H, W, C] in [-1, 1]."""
  rng = np.random.default_rng(seed)
  return rng.uniform(-1, 1, (2, *shape)).astype(np.float32)


def picture(height=40, width=60):
  """uint8 [height, width, 3], smooth."""
  y, x = np.mgrid[:height, :width] / 9
  waves = [np.sin(x + y), np.cos(x - 2 * y), np.sin(3 * y) * np.cos(x)]
  return np.uint8(np.stack(waves, axis=-1) * 120 + 128)


def middle_row(picture):
  """Pixels of [C, H, W] across the middle: [C][W], rounded."""
  row = np.asarray(picture)[:, picture.shape[1] // 2]
  return [[round(float(v), 3) for v in channel] for channel in row]


def write(name, golden):
  """Write golden/NAME.json, with not too much in a line."""
  text = json.dumps(golden, separators=(',', ':'))
  text = text.replace('},"', '},\n"') + '\n'
  (FOLDER / f'{name}.json').write_text(text)


def save(name, golden, dtype=None):
  """Write golden/NAME.npz, with all arrays in one dtype if it is given."""
  golden = {k: np.asarray(x, dtype) for k, x in golden.items()}
  np.savez_compressed(FOLDER / f'{name}.npz', **golden)


def digest(arrays):
  """A number that changes with any of the arrays."""
  found = hashlib.sha256()
  for name in sorted(arrays):
    found.update(name.encode())
    found.update(np.ascontiguousarray(arrays[name]).tobytes())
  return found.hexdigest()[:16]


def error(ours, theirs):
  """(largest difference, spread of the logits, their quotient)."""
  theirs = np.asarray(theirs, np.float64)
  worst = np.abs(np.asarray(ours, np.float64) - theirs).max()
  spread = theirs.max() - theirs.min()
  return worst, spread, worst / spread


def import_torch(*modules):
  """Imports them, beside a torchvision whose operators do not load.

  torchvision built for another torch (CUDA, say) registers shapes of operators
  that do not exist then, and fails. We need none of them.
  """
  import torch

  register_fake = torch.library.register_fake

  def skip_torchvision(op, *args, **kwargs):
    if isinstance(op, str) and op.startswith('torchvision::'):
      return lambda function: function
    return register_fake(op, *args, **kwargs)

  torch.library.register_fake = skip_torchvision
  try:
    importlib.import_module('torchvision')  # others import it when they like
    return [importlib.import_module(name) for name in modules]
  finally:
    torch.library.register_fake = register_fake


def fill(tensors, make=weights):
  """Give torch tensors, by name, the values of `make`; return {name: array}."""
  import torch

  arrays = make({name: tuple(x.shape) for name, x in tensors.items()})
  with torch.no_grad():
    for name, value in arrays.items():
      tensors[name].copy_(torch.from_numpy(value))
  return arrays


def compute(forward, images):
  """Return what a torch model in float64 computes from images [B, H, W, C]."""
  import torch

  inputs = torch.from_numpy(images.transpose(0, 3, 1, 2)).double()
  with torch.no_grad():
    return forward(inputs)


def model_weights(fields, seed=0, **attributes):
  """Return Weights of a small ViT, with transforms that crop images.

  Args:
    fields: fields of the model, as in `bundle.from_fields`, in addition to VIT
      and patches of 4 x 2; and the image_shape, (12, 8, 3) if not given.
    seed: seed for the parameters.
    **attributes: attributes of Weights.
  """
  from vit_jax.data.transforms import CentralCrop, Resize
  from vit_jax.models.dense import Normalize
  from vit_jax.models.vit import PatchEmbedding, VisionTransformer
  from vit_jax.weights import bundle

  fields = VIT | {'embedding': PatchEmbedding((4, 2))} | fields
  image_shape = fields.pop('image_shape', (12, 8, 3))
  model = bundle.from_fields(VisionTransformer, **fields)
  shapes = bundle.shapes(model, image_shape).items()
  number = model.num_classes
  large = tuple(round(side * 1.5) for side in image_shape[:2])
  made = {
    'preprocess': Normalize((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
    'transforms': (
      Resize(large, interpolation='bicubic', antialias=True),
      CentralCrop(image_shape[:2]),
    ),
    'class_names': [f'class {i}' for i in range(number)] if number else None,
  }
  return bundle.Weights(
    model=model,
    params=weights({path: x.shape for path, x in shapes}, seed),
    image_shape=image_shape,
    **made | attributes,
  )
