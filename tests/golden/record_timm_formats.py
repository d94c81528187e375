"""Records what timm computes: of files it wrote, and of files we wrote.

formats_timm.json holds no weights: those are made of a seed (seeded.py), of
the names and shapes that are stored. To record again, in a virtual
environment that has vit_jax, and torch and timm as record_timm.py says:

  python tests/golden/record_timm_formats.py
"""

import functools
import json
import pathlib
import tempfile

import numpy as np
import safetensors.numpy
import seeded
from PIL import Image

timm, hub, vision_transformer, hybrid, resnetv2, mixer, layers, data = (
  seeded.import_torch(
    *('timm', 'timm.models._hub', 'timm.models.vision_transformer'),
    *('timm.models.vision_transformer_hybrid', 'timm.models.resnetv2'),
    *('timm.models.mlp_mixer', 'timm.layers', 'timm.data'),
  )
)
from written import OURS  # noqa: E402

from vit_jax.weights import timm as ours  # noqa: E402

SMALL = seeded.TIMM | {'depth': 1}
PLAIN, DEIT3 = 'vit_base_patch16_224', 'deit3_small_patch16_224'
THEIRS = {  # name: architecture, arguments
  'token': (PLAIN, {'depth': 2}),
  'avg': (PLAIN, {'global_pool': 'avg', 'class_token': False}),
  'avg_class_token': (PLAIN, {'global_pool': 'avg', 'fc_norm': False}),
  'token_fc_norm': (PLAIN, {'fc_norm': True}),
  'registers_avg': (
    PLAIN,
    {'reg_tokens': 2, 'global_pool': 'avg', 'qk_norm': True, 'depth': 2},
  ),
  'deit3': (DEIT3, {}),
  'no_positions': (PLAIN, {'pos_embed': 'none', 'num_classes': 0}),
  'channels': (PLAIN, {'in_chans': 1, 'act_layer': 'gelu_tanh'}),
}


def describe(model, names):
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'config.json'
    hub.save_config_for_hf(model, path, model_config={'label_names': names})
    return json.loads(path.read_text())


def record(model, image, config=None):
  """Give a model seeded weights; return what it computes in float64."""
  state = model.state_dict()
  shapes = {name: list(value.shape) for name, value in state.items()}
  seeded.fill(state)
  channels = config['pretrained_cfg']['input_size'][0] if config else 3
  return {
    'shapes': shapes,
    'config': config,
    'image': [*image, channels],
    'logits': run(model, [*image, channels]),
  }


def run(model, shape):
  model = model.double().eval()
  return seeded.compute(model, seeded.images(shape)).numpy().tolist()


def read_cases():
  cases = {}
  names = [f'class {i}' for i in range(5)]
  for name, (architecture, args) in THEIRS.items():
    model = timm.create_model(architecture, **SMALL | args)
    found = describe(model, names if model.num_classes else [])
    found['pretrained_cfg']['crop_pct'] = 0.9
    cases[name] = record(model, SMALL['img_size'], found)
  conv = functools.partial(layers.StdConv2d, eps=1e-8)
  resnet = resnetv2.ResNetV2(
    [1, 2], stem_type='fixed', conv_layer=conv, num_classes=5
  )
  cases['bit'] = record(resnet, (34, 48))
  embed = functools.partial(
    layers.HybridEmbed, backbone=hybrid._resnetv2((1, 1))
  )
  args = SMALL | {'img_size': (32, 32), 'patch_size': 1}
  model = vision_transformer.VisionTransformer(embed_layer=embed, **args)
  cases['hybrid'] = record(model, (32, 32))
  model = mixer.MlpMixer(
    img_size=16, patch_size=4, num_blocks=2, embed_dim=24, num_classes=5
  )
  cases['mixer'] = record(model, (16, 16))
  return cases


def write_cases():
  cases = {}
  for name, settings in OURS['timm'].items():
    weights = seeded.model_weights(settings)
    arrays, files = ours.write(weights)
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder)
      rows = {k: np.ascontiguousarray(v) for k, v in arrays.items()}
      safetensors.numpy.save_file(rows, path / 'model.safetensors')
      (path / 'config.json').write_text(json.dumps(files['config.json']))
      model = timm.create_model(f'local-dir:{folder}', pretrained=True)
    transform = data.create_transform(
      **data.resolve_model_data_config(model), is_training=False
    )
    picture = transform(Image.fromarray(seeded.picture()))
    cases[name] = {
      'digest': seeded.digest(arrays),
      'config': files['config.json'],
      'logits': run(model, weights.image_shape),
      'row': seeded.middle_row(picture),
    }
  return cases


if __name__ == '__main__':
  golden = {'read': read_cases(), 'written': write_cases()}
  seeded.write('formats_timm', golden)
