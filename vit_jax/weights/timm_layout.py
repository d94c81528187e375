"""What timm calls the arrays of each kind of model, and of what shape they are.

Lists of `torch_layout.Part`. Paths 'cls', 'registers' and 'pos_embedding' are
not ours yet: timm has them for what precedes the patches in another form.
"""

from vit_jax.weights.torch_layout import conv, linear, mlp, norm, same


def vit_parts(
  *,
  width,
  depth,
  mlp_dim,
  num_heads,
  patch_size,
  channels,
  num_classes=None,
  resnet_stages=None,
  class_token=True,
  registers=0,
  positions=None,
  layerscale=False,
  qk_norm=False,
  map_head=False,
  norm_name='norm',
  representation_size=None,
):
  """A VisionTransformer.

  Args:
    class_token: whether there is one; registers: how many.
    positions: rows of the position table, of 'pos_embedding' [1, rows, D].
    norm_name: of the last norm.
    channels: of the images, or of what a hybrid's patches are cut out of.
    Others: as the fields of our model; layerscale, map_head: whether.
  """
  parts, heads = [], (num_heads, width // num_heads)
  if resnet_stages is not None:
    stem = 'patch_embed.backbone.'
    parts += backbone_parts(
      stem, units=resnet_stages, width=64, channels=channels, form='postact'
    )
    channels = 64 * 2 ** (len(resnet_stages) + 1) if resnet_stages else 64
  parts += conv(
    'patch_embed.proj', 'embedding', patch_size, channels, width, bias=True
  )
  for there, theirs, ours, rows in (
    (class_token, 'cls_token', 'cls', 1),
    (registers, 'reg_token', 'registers', registers),
    (positions, 'pos_embed', 'pos_embedding', positions),
  ):
    if there:
      parts += same(theirs, ours, 1, rows, width)
  for i in range(depth):
    parts += _block(
      f'blocks.{i}', f'block_{i}', width, mlp_dim, heads, layerscale, qk_norm
    )
  parts += norm(norm_name, 'norm', width)
  if map_head:
    parts += _map_head(width, mlp_dim, heads)
  if representation_size:
    size = (representation_size,)
    parts += linear('pre_logits.fc', 'pre_logits', (width,), size)
  if num_classes:
    inputs = (representation_size or width,)
    parts += linear('head', 'head', inputs, (num_classes,))
  return parts


def _block(theirs, ours, width, mlp_dim, heads, layerscale, qk_norm):
  parts = norm(f'{theirs}.norm1', f'{ours}/norm1', width)
  parts += _attention(
    theirs + '.attn', ours + '/attn', width, heads, {'qkv': 'query key value'}
  )
  for name in ('q', 'k') if qk_norm else ():
    path = {'q': 'query', 'k': 'key'}[name]
    parts += norm(
      f'{theirs}.attn.{name}_norm', f'{ours}/attn/{path}_norm', heads[1]
    )
  parts += norm(f'{theirs}.norm2', f'{ours}/norm2', width)
  parts += mlp(f'{theirs}.mlp', f'{ours}/mlp', width, mlp_dim)
  for name in ('ls1', 'ls2') if layerscale else ():
    parts += same(f'{theirs}.{name}.gamma', f'{ours}/{name}', width)
  return parts


def _attention(theirs, ours, width, heads, fused):
  parts = []
  for name, paths in fused.items():
    paths = paths.split()
    for slot, path in enumerate(paths):
      parts += linear(
        f'{theirs}.{name}',
        f'{ours}/{path}',
        (width,),
        heads,
        slot=(slot, len(paths)),
      )
  return parts + linear(f'{theirs}.proj', f'{ours}/out', heads, (width,))


def _map_head(width, mlp_dim, heads):
  return [
    *same('attn_pool.latent', 'map_head/probe', 1, 1, width),
    *_attention(
      'attn_pool',
      'map_head/attn',
      width,
      heads,
      {'q': 'query', 'kv': 'key value'},
    ),
    *norm('attn_pool.norm', 'map_head/norm', width),
    *mlp('attn_pool.mlp', 'map_head/mlp', width, mlp_dim),
  ]


def mixer_parts(
  *,
  width,
  depth,
  tokens,
  tokens_mlp_dim,
  channels_mlp_dim,
  patch_size,
  channels,
  num_classes=None,
):
  """An MlpMixer with so many tokens."""
  parts = conv('stem.proj', 'embedding', patch_size, channels, width, bias=True)
  for i in range(depth):
    ours, theirs = f'block_{i}', f'blocks.{i}'
    for norm_name in ('norm1', 'norm2'):
      parts += norm(f'{theirs}.{norm_name}', f'{ours}/{norm_name}', width)
    for theirs_mlp, ours_mlp, size, hidden in (
      ('mlp_tokens', 'token_mixing', tokens, tokens_mlp_dim),
      ('mlp_channels', 'channel_mixing', width, channels_mlp_dim),
    ):
      parts += mlp(f'{theirs}.{theirs_mlp}', f'{ours}/{ours_mlp}', size, hidden)
  parts += norm('norm', 'norm', width)
  if num_classes:
    parts += linear('head', 'head', (width,), (num_classes,))
  return parts


def resnet_parts(*, units, width, channels, form, num_classes=None):
  """A ResNet; width: of its root; units: in each stage."""
  parts = backbone_parts(
    '', units=units, width=width, channels=channels, form=form
  )
  features = width * 2 ** (len(units) + 1)
  if form == 'preact':
    parts += norm('norm', 'norm', features)
  if num_classes:  # a convolution of 1x1
    weight, bias = linear('head.fc', 'head', (features,), (num_classes,))
    parts += _as_conv(weight), bias
  return parts


def _as_conv(part):
  kernel = part.shape[::-1]
  return type(part)(
    part.theirs, part.ours, (*part.shape, 1, 1), (1, 0, 2, 3), kernel
  )


def backbone_parts(prefix, *, units, width, channels, form):
  """Root and stages of a ResNet; the root alone has other names."""
  stem = f'{prefix}stem.' if units else prefix
  parts = conv(f'{stem}conv', 'resnet/root/conv', (7, 7), channels, width)
  if form == 'postact':
    parts += norm(f'{stem}norm', 'resnet/root/norm', width)
  inputs = width
  for stage, blocks in enumerate(units):
    inner = width * 2**stage
    for block in range(blocks):
      theirs = f'{prefix}stages.{stage}.blocks.{block}'
      ours = f'resnet/stage{stage + 1}/unit{block + 1}'
      parts += _unit(theirs, ours, inputs, inner, form, block == 0)
      inputs = 4 * inner
  return parts


def _unit(theirs, ours, inputs, inner, form, projects):
  outside = 4 * inner
  parts = []
  for i, (size, before, after) in enumerate(
    ((1, inputs, inner), (3, inner, inner), (1, inner, outside)), 1
  ):
    parts += conv(
      f'{theirs}.conv{i}', f'{ours}/conv{i}', (size, size), before, after
    )
    features = before if form == 'preact' else after
    parts += norm(f'{theirs}.norm{i}', f'{ours}/norm{i}', features)
  if projects:
    project = f'{theirs}.downsample'
    parts += conv(
      f'{project}.conv', f'{ours}/conv_proj', (1, 1), inputs, outside
    )
    if form == 'postact':
      parts += norm(f'{project}.norm', f'{ours}/norm_proj', outside)
  return parts
