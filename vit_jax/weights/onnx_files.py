"""ONNX files that PyTorch exported, with the names of the model's state dict.

Most arrays have these names. Others are found by their place in the graph:

  matrices   are transposed and named onnx::MatMul_12 or val_12. The node that
             multiplies by one names its module: in its own name (dynamo=False)
             or in its metadata (dynamo=True). If neither does, the bias that is
             added next has the name.
  positions  may be in two pieces, for the class token and for the patches.
  tokens     may be repeated for each image (dynamo=True with a fixed batch).
  equal ones may be stored once, under one of the names.

The name of the first convolution implies the names of positions and tokens.
Other constants without a name are left out. With dynamo=True and a fixed batch
the query of a MAP head is multiplied out: such a head cannot be restored.
"""

import pathlib
import re

import numpy as np

from vit_jax.types import UserError

_NAME = r'[a-zA-Z_]\w*(\.\w+)+|\w+_(embed|embedding|token)s?|proj'
_SCOPES = 'pkg.torch.onnx.name_scopes'  # of dynamo
_HF = 'embeddings.cls_token', 'embeddings.register_tokens'
_TABLE = 'embeddings.position_embedding'
_FOLDED = {  # first convolution: names of positions, class token, registers
  'patch_embed.proj': ('pos_embed', 'cls_token', 'reg_token'),
  'embeddings.patch_embeddings.projection': (f'{_TABLE}s', *_HF),
  'embeddings.patch_embeddings': ('', *_HF),
  'embeddings.patch_embedding': (
    *(f'{_TABLE}.weight', 'embeddings.class_embedding', ''),
  ),
}
_EXPECTED = (
  'Expected a float model of timm or transformers as torch.onnx.export writes '
  'it, not quantized'
)


def read(path: pathlib.Path, values: bool) -> dict[str, np.ndarray]:
  """Return {name: array}, as `array_files.read` does."""
  try:
    import onnx
  except ImportError:
    raise UserError("ONNX needs pip install -e '.[dinov2]'") from None
  graph = onnx.load(path, load_external_data=False).graph
  tensors = {x.name: x for x in graph.initializer}
  added: dict[str, str] = {}
  for node in graph.node:
    if re.search('Quant|QLinear|Integer|NBits', node.op_type):
      raise UserError(f'It is quantized ({node.op_type}). {_EXPECTED}')
    if node.op_type == 'Constant' and node.attribute[0].HasField('t'):
      tensors[node.output[0]] = node.attribute[0].t
    elif node.op_type == 'Identity' and node.input[0] in tensors:
      tensors[node.output[0]] = tensors[node.input[0]]
    elif node.op_type == 'Add':
      added |= dict(zip(node.input, reversed(node.input)))

  def array(name):
    if values:
      return onnx.numpy_helper.to_array(tensors[name], f'{path.parent}')
    return np.broadcast_to(np.float32(0), tuple(tensors[name].dims))

  arrays = {x: array(x) for x in tensors if re.fullmatch(_NAME, x)}
  named, parts, tokens, table = {*arrays}, {}, [], []
  reached: set[str] = set()  # depend on patches
  products: set[str] = set()
  for node in graph.node:
    kind, module = node.op_type, _module(node)
    is_data = kind != 'Shape' and not reached.isdisjoint(node.input)
    for i, name in enumerate(node.input):
      rank = len(tensors[name].dims) if name in tensors else 0
      if name in named:
        if rank == 1 and module and name.rpartition('.')[0] != module:
          part = 'weight' if kind == 'LayerNormalization' and i == 1 else 'bias'
          if kind == 'Mul':
            part = 'lambda1' if 'layer_scale' in module else 'gamma'
          if kind in ('LayerNormalization', 'Add', 'Mul'):
            arrays.setdefault(f'{module}.{part}', arrays[name])
      elif kind in ('MatMul', 'Gemm') and rank == 2:
        bias = added.get(node.output[0], '').removesuffix('.bias')
        is_kept = any(x.name == 'transB' and x.i for x in node.attribute)
        matrix = array(name) if is_kept else array(name).T
        parts.setdefault((module or bias, 'weight'), []).append(matrix)
        products.add(node.output[0])
      elif kind == 'Add' and rank == 1 and products & {*node.input}:
        parts.setdefault((module, 'bias'), []).append(array(name))
      elif kind in ('Concat', 'Reshape', 'Add') and rank == 3:
        is_token = kind == 'Concat' and is_data
        (tokens if is_token else table).append(array(name))
      elif kind == 'Resize' and rank == 4:  # [1, D, gh, gw]
        table.append(
          np.reshape(array(name), (1, tensors[name].dims[1], -1)).swapaxes(1, 2)
        )
    if is_data or kind == 'Conv':
      reached |= {*node.output}
  for (module, part), found in parts.items():
    if f'{module}.out_proj.weight' in arrays:  # MultiheadAttention
      name = f'{module}.in_proj_{part}'
      arrays.setdefault(name, np.concatenate(found))
    elif part == 'weight':
      arrays[f'{module}.weight'] = found[0]
  _add_folded(arrays, table, tokens)
  if '.weight' in arrays or not arrays:
    raise UserError(f'Its matrices have no names. {_EXPECTED}')
  return arrays


def _module(node):
  """Return the path of the module that a node computes, or ''."""
  for entry in node.metadata_props:
    if entry.key == _SCOPES:  # "['', 'blocks.0', 'blocks.0.fc1', 'linear']"
      return ['', *re.findall(r"'([^']*)'", entry.value)][-2]
  path = node.name.rpartition('/')[0].strip('/')  # /blocks/blocks.0/fc1/MatMul
  return re.sub(r'(?<![^/])([^/]+)/(?=\1\.)', '', path).replace('/', '.')


def _add_folded(arrays, table, tokens):
  """Add positions and tokens that lost their names, from constants."""
  for stem, names in _FOLDED.items():
    pattern = rf'(.*\.)?{re.escape(stem)}\.weight'
    for kernel in [x for x in arrays if re.fullmatch(pattern, x)]:
      width, prefix = len(arrays[kernel]), kernel.removesuffix(f'{stem}.weight')
      positions, cls, registers = (prefix + x for x in names)
      pieces = [x for x in table if x.shape[2] == width]
      if pieces := sorted(pieces, key=np.size):  # the class token comes first
        value = np.concatenate(pieces, axis=1)
        value = value[0] if positions.endswith('weight') else value
        arrays.setdefault(positions, value)
      for token in [x[:1] for x in tokens if x.shape[2] == width]:
        is_cls = token.shape[1] == 1 and cls not in arrays
        value = token[0, 0] if 'class_embedding' in cls else token
        arrays.setdefault(cls if is_cls else registers, value)
