"""timm's models of full size, written as it does, run by ours, and back."""

import fnmatch
import json

import jax
import numpy as np
import pytest
import seeded
from live import needs, trained

from vit_jax import tree
from vit_jax.types import UserError
from vit_jax.weights import formats
from vit_jax.weights import timm as our_timm
from vit_jax.zoo import published

pytestmark = needs('timm')

MODELS = {  # what is compared: architecture, arguments; families are smaller
  'S/16': ('vit_small_patch16_224', {}),
  'B/16': ('vit_base_patch16_224', {}),
  'B/32 at 384': ('vit_base_patch32_384', {}),
  'R+Ti/16': ('vit_tiny_r_s16_p8_224', {}),
  'R26+S/32': ('vit_small_r26_s32_224', {}),
  'R50+B/16': ('vit_base_r50_s16_224', {'num_classes': 1000}),
  'BiT-R50x1': ('resnetv2_50x1_bit', {}),
  'BiT-R101x1': ('resnetv2_101x1_bit', {}),
  'Mixer-B/16': ('mixer_b16_224', {}),
}


@pytest.mark.parametrize('what', MODELS)
def test_logits_are_those_of_timm(what, tmp_path):
  torch, timm, hub = seeded.import_torch('torch', 'timm', 'timm.models._hub')
  name, args = MODELS[what]
  model = timm.create_model(name, **args).eval()
  trained(model)
  hub.save_for_hf(model, tmp_path / 'theirs', safe_serialization=True)
  weights = formats.read(tmp_path / 'theirs')
  images = seeded.images(weights.image_shape)
  inputs = torch.from_numpy(images.transpose(0, 3, 1, 2))
  with torch.no_grad():
    theirs = model(inputs).numpy()
  params = {'params': tree.unflatten(weights.params)}
  ours = jax.jit(weights.model.apply)(params, images)
  worst, spread, quotient = seeded.error(ours, theirs)
  print(f'\n| timm {what} | {worst:.1e} | {spread:.2f} | {quotient:.1e} |')
  assert quotient < 1e-4

  if 'patch' not in name:  # these are not written
    return
  formats.write(weights, tmp_path / 'ours', 'timm')
  again = timm.create_model(f'local-dir:{tmp_path}/ours', pretrained=True)
  with torch.no_grad():
    back = again.eval()(inputs).numpy()
  np.testing.assert_allclose(back, theirs, atol=1e-5 * spread)


def test_each_vit_of_timm_is_read_or_listed_as_refused(tmp_path):
  timm, hub = seeded.import_torch('timm', 'timm.models._hub')
  import torch

  modules = 'vision_transformer*', 'eva', 'beit', 'deit', 'naflexvit'
  listed = ' '.join(published.REFUSED).split()
  for name in timm.list_models(module='', exclude_filters='*.*'):
    module = timm.models._registry._model_to_module[name]
    if not any(fnmatch.fnmatch(module, x) for x in modules):
      continue
    with torch.device('meta'):
      model = timm.create_model(name)
    hub.save_config_for_hf(model, tmp_path / 'config.json')
    config = json.loads((tmp_path / 'config.json').read_text())
    shapes = {k: tuple(x.shape) for k, x in model.state_dict().items()}
    blanks = {k: np.broadcast_to(np.float32(0), x) for k, x in shapes.items()}
    is_listed = any(fnmatch.fnmatch(name, x) for x in listed)
    try:
      our_timm.read(blanks, config)
    except UserError as e:
      assert is_listed, (name, e)
    else:
      assert not is_listed, name
