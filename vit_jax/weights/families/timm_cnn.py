"""timm's BiT (ResNetV2) and MLP-Mixer, which are only read.

timm itself reads the .npz files of their authors.
"""

from vit_jax.models.dense import Gelu
from vit_jax.weights.family import Family
from vit_jax.weights.keymap import Key, KeyMap, conv, linear, norm


def backbone_keys(stem: str, prefix: str = '') -> list[Key]:
  """Return the rows of a ResNet."""
  unit = f'{prefix}stages.{{s}}.blocks.{{u}}'
  ours = 'resnet/stage{s+1}/unit{u+1}'
  return [
    *conv(f'{stem}conv', 'resnet/root/conv'),
    *norm(f'{stem}norm', 'resnet/root/norm'),
    *conv(f'{unit}.downsample.conv', f'{ours}/conv_proj'),
    *norm(f'{unit}.downsample.norm', f'{ours}/norm_proj'),
    *conv(f'{unit}.conv{{n}}', f'{ours}/conv{{n}}'),  # not of _proj
    *norm(f'{unit}.norm{{n}}', f'{ours}/norm{{n}}'),
  ]


FAMILIES = (
  Family(
    '(mixer_.*)?',
    r'blocks\.0\.mlp_tokens\.fc1\.weight',
    KeyMap(
      *conv('stem.proj', 'embedding'),
      *norm('blocks.{i}.norm{n}', 'block_{i}/norm{n}'),
      *linear('blocks.{i}.mlp_tokens.fc{n}', 'block_{i}/token_mixing/fc{n}'),
      *linear(
        'blocks.{i}.mlp_channels.fc{n}', 'block_{i}/channel_mixing/fc{n}'
      ),
      *norm('norm', 'norm'),
      *linear('head', 'head'),
    ),
    fields={'mlp': Gelu('exact')},
  ),
  Family(
    '(resnetv2_.*_bit)?',
    r'stages\.0\.blocks\.0\.conv1\.weight',
    KeyMap(
      *backbone_keys('stem.'), *norm('norm', 'norm'), *conv('head.fc', 'head')
    ),
  ),
)
