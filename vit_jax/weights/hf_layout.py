"""What transformers calls the arrays of its ViT, and of what shape they are."""

from vit_jax.weights.torch_layout import conv, linear, norm, same

PATCHES = 'embeddings.patch_embeddings.projection.weight'
# Beginnings of the names in a layer, and the rest of them: of the files that
# every version writes, and those of version 5 in memory.
FILES = (
  'encoder.layer.{i}.',
  {
    'query': 'attention.attention.query',
    'key': 'attention.attention.key',
    'value': 'attention.attention.value',
    'out': 'attention.output.dense',
    'fc1': 'intermediate.dense',
    'fc2': 'output.dense',
  },
)
MEMORY = (
  'layers.{i}.',
  {
    'query': 'attention.q_proj',
    'key': 'attention.k_proj',
    'value': 'attention.v_proj',
    'out': 'attention.o_proj',
    'fc1': 'mlp.fc1',
    'fc2': 'mlp.fc2',
  },
)


def parts(
  layers,
  *,
  width,
  depth,
  mlp_dim,
  num_heads,
  patch_size,
  channels,
  positions,
  num_classes=None,
  representation_size=None,
):
  """Of a ViTModel, with a classifier where there are classes.

  Args:
    layers: FILES or MEMORY.
    positions: rows of the position table, of 'pos_embedding' [1, rows, D].
    Others: as the fields of our model.
  """
  heads = num_heads, width // num_heads
  patches = PATCHES.removesuffix('.weight')
  out = [
    *same('embeddings.cls_token', 'cls', 1, 1, width),
    *same(
      'embeddings.position_embeddings', 'pos_embedding', 1, positions, width
    ),
    *conv(patches, 'embedding', patch_size, channels, width, bias=True),
    *norm('layernorm', 'norm', width),
  ]
  start, names = layers
  for i in range(depth):
    theirs, ours = start.format(i=i), f'block_{i}'
    out += norm(f'{theirs}layernorm_before', f'{ours}/norm1', width)
    out += norm(f'{theirs}layernorm_after', f'{ours}/norm2', width)
    for path in ('query', 'key', 'value'):
      out += linear(
        theirs + names[path], f'{ours}/attn/{path}', (width,), heads
      )
    last = theirs + names['out']
    out += linear(last, f'{ours}/attn/out', heads, (width,))
    sizes = (width,), (mlp_dim,)
    out += linear(theirs + names['fc1'], f'{ours}/mlp/fc1', *sizes)
    out += linear(theirs + names['fc2'], f'{ours}/mlp/fc2', *sizes[::-1])
  if representation_size:
    size = (representation_size,)
    out += linear('pooler.dense', 'pre_logits', (width,), size)
  if num_classes:
    out += linear('classifier', 'head', (width,), (num_classes,))
  return out
