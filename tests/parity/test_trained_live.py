"""A model trained here goes out, and timm says the same of every test digit."""

import jax
import numpy as np
import seeded
from live import needs
from ml_collections import ConfigDict
from PIL import Image

from vit_jax import config, pretrained
from vit_jax.data.sources.digits import Digits
from vit_jax.tools import convert
from vit_jax.weights import formats

pytestmark = needs('torch', 'timm')


def data(split):
  resize = {'target': 'vit_jax.data.transforms.Resize', 'size': 16}
  return {
    'source': {'target': 'vit_jax.data.sources.digits.Digits', 'split': split},
    'transforms': (resize,),
    'batch_size': 64,
  }


def get_config():
  return ConfigDict(
    {
      'run': 'vit_jax.train.train',
      'total_steps': 150,
      'data': data('train'),
      'model': {
        'target': 'vit_jax.models.vit.VisionTransformer',
        **{'width': 48, 'depth': 2, 'mlp_dim': 96, 'num_heads': 3},
        **{'embedding': {'patch_size': 4}, 'scan': True},
      },
      'objective': {'target': 'vit_jax.objectives.classification.softmax_xent'},
      'optimizer': {'target': 'optax.adamw', 'weight_decay': 0.0},
      'schedule': {'lr': 3e-3, 'warmup_steps': 20},
      'ema': {'decay': 0.9},
      'evals': {
        'test': {
          'target': 'vit_jax.evals.classification.Classification',
          'data': data('test'),
        }
      },
    }
  )


def test_timm_says_the_same_of_every_test_digit(tmp_path):
  torch, timm, timm_data = seeded.import_torch('torch', 'timm', 'timm.data')
  config.run(get_config(), str(tmp_path / 'run'))
  convert.main([str(tmp_path / 'run'), str(tmp_path / 'out'), '--format=timm'])

  weights = formats.read(tmp_path / 'run')
  model, params = pretrained.build(weights)
  source, pictures = Digits(split='test'), []
  for i in range(len(source)):
    picture = source[i]['image']
    for transform in weights.transforms:
      picture = transform(picture, None)
    pictures.append(picture)
  labels = np.array([source[i]['label'] for i in range(len(source))])
  images = np.asarray(weights.preprocess(np.stack(pictures)))
  ours = np.asarray(jax.jit(model.apply)({'params': params}, images))
  assert (ours.argmax(-1) == labels).mean() > 0.8  # it has learned something

  net = timm.create_model(f'local-dir:{tmp_path}/out', pretrained=True).eval()
  with torch.no_grad():
    same_images = net(torch.tensor(images.transpose(0, 3, 1, 2))).numpy()
    prepare = timm_data.create_transform(
      **timm_data.resolve_model_data_config(net), is_training=False
    )
    scans = [source[i]['image'][..., 0] for i in range(len(source))]
    same_scans = net(
      torch.stack([prepare(Image.fromarray(s)) for s in scans])
    ).numpy()
  assert seeded.error(ours, same_images)[2] < 1e-5
  np.testing.assert_array_equal(ours.argmax(-1), same_images.argmax(-1))
  # timm resizes the scans itself, as what was written tells it.
  np.testing.assert_array_equal(ours.argmax(-1), same_scans.argmax(-1))
