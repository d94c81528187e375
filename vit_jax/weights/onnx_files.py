"""ONNX files that PyTorch exported, with the names of the model's state dict.

Most arrays keep these names. Nodes show the others: their name (dynamo=False)
or metadata (dynamo=True) is the path of a module. These are matrices, which are
transposed; of equal vectors all but one; positions in two pieces, for the class
token and the patches; tokens repeated for each image. Other constants are left
out. With dynamo=True the query of a MAP head is multiplied out. Biases that are
put together in the forward pass, of timm's BEiT and EVA, are not restored.
"""

import pathlib
import re

import numpy as np

from vit_jax.types import UserError

_NAME = r'[a-zA-Z_]\w*(\.\w+)+|\w+_(embed|embedding|token)s?|proj'
_STEM = r'(.*?(?:embeddings\.)?)(patch_embed(?:dings?)?)(\.proj\w*)?\.weight'
_FOLDED = {  # first convolution: names of positions, class token, registers
  'patch_embed': ('pos_embed', 'cls_token', 'reg_token'),
  'patch_embeddings': ('position_embeddings', 'cls_token', 'register_tokens'),
  'patch_embedding': ('position_embedding.weight', 'class_embedding', ''),
}


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Return {name: array}, as `array_files.read` does."""
  try:
    import onnx
  except ImportError:
    raise UserError("ONNX needs pip install -e '.[dinov2]'") from None
  graph, array = onnx.load(path).graph, onnx.numpy_helper.to_array
  tensors = {x.name: array(x) for x in graph.initializer}
  for node in graph.node:
    if node.op_type == 'Constant' and node.attribute[0].HasField('t'):
      tensors[node.output[0]] = array(node.attribute[0].t)
    elif node.op_type == 'Identity' and node.input[0] in tensors:
      tensors[node.output[0]] = tensors[node.input[0]]
  arrays = _named(graph.node, tensors)
  kinds = {x.op_type for x in graph.node}
  kinds = [x for x in kinds if re.search('^Q[A-Z]|[Qq]uant|Integer|NBits', x)]
  if kinds or '.weight' in arrays or not arrays:
    problem = f'quantized ({min(kinds)})' if kinds else 'without names'
    raise UserError(
      f'Its matrices are {problem}. Expected a float model of timm or '
      'transformers as torch.onnx.export writes it'
    )
  heads = [x for x in arrays if re.search(r'attn_pool|head\.attention', x)]
  if heads and not any(re.search('latent|probe', x) for x in arrays):
    raise UserError('Its MAP head has no query. Export it with dynamo=False')
  return arrays


def _named(nodes, tensors):
  """Return {name: array} of what has a name or is used by a known node."""
  used = {k: x for k, x in tensors.items() if x.size}
  arrays = {k: x for k, x in used.items() if re.fullmatch(_NAME, k)}
  parts, tokens, table = {}, [], []
  named, products, patches = {*arrays}, set(), set()
  for node in nodes:
    kind, module = node.op_type, _module(node)
    is_data = kind != 'Shape' and not patches.isdisjoint(node.input)
    for i, name in enumerate(node.input):
      rank = np.ndim(array := tensors.get(name, 0))
      known = name in named
      if kind in ('MatMul', 'Gemm') and rank == 2 and not known:
        is_kept = any(x.name == 'transB' and x.i for x in node.attribute)
        matrix = array if is_kept else array.T
        parts.setdefault(f'{module}.weight', []).append(matrix)
        products.add(node.output[0])
      elif rank == 1 and (known or not products.isdisjoint(node.input)):
        scale = 'lambda1' if 'layer_scale' in module else 'gamma'
        norm = 'weight' if i == 1 else 'bias'
        part = {'Add': 'bias', 'Mul': scale, 'LayerNormalization': norm}
        if kind in part and name.rpartition('.')[0] != module:
          parts.setdefault(f'{module}.{part[kind]}', []).append(array)
      elif kind in ('Concat', 'Reshape', 'Add') and rank == 3 and not known:
        (tokens if kind == 'Concat' and is_data else table).append(array)
      elif kind == 'Resize' and rank == 4:  # [1, D, gh, gw]
        rows = np.moveaxis(array, 1, -1)
        table.append(rows.reshape(1, -1, rows.shape[-1]))
    if is_data or kind == 'Conv':
      patches |= {*node.output}
  for name, found in parts.items():
    module, _, part = name.rpartition('.')
    if f'{module}.out_proj.weight' in arrays:  # MultiheadAttention
      name, found = f'{module}.in_proj_{part}', [np.concatenate(found)]
    arrays.setdefault(name, found[0])
  return arrays | _folded(arrays, table, tokens)


def _module(node):
  """Return the path of the module that a node computes, or ''."""
  for entry in node.metadata_props:
    if entry.key.endswith('.name_scopes'):  # "['', 'blocks.0.fc1', 'linear']"
      return ['', *re.findall(r"'([^']*)'", entry.value)][-2]
  path = node.name.rpartition('/')[0].strip('/')  # /blocks/blocks.0/fc1/MatMul
  return re.sub(r'(?<![^/])([^/]+)/(?=\1\.)', '', path).replace('/', '.')


def _folded(arrays, table, tokens):
  """Return positions and tokens that lost their names, made of constants."""
  out = {}
  for found in filter(None, (re.fullmatch(_STEM, x) for x in arrays)):
    kernel = arrays[found[0]]
    positions, cls, registers = (found[1] + x for x in _FOLDED[found[2]])
    pieces = [x for x in table if x.shape[2] == len(kernel)]
    if pieces and positions not in arrays:
      out[positions] = np.concatenate(sorted(pieces, key=np.size), axis=1)
    for token in [x[:1] for x in tokens if x.shape[2] == len(kernel)]:
      is_cls = token.shape[1] == 1 and not {cls} & {*arrays, *out}
      out[cls if is_cls else registers] = token
    if found[2] == 'patch_embedding':  # [rows, D] and [D]
      out = {k: np.squeeze(x) for k, x in out.items()}
  return out
