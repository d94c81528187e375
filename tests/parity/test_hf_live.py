"""transformers' ViT-B/16 of full size, written as it does, run by ours."""

import jax
import numpy as np
import pytest
import seeded
from live import needs, trained

from vit_jax import tree
from vit_jax.weights import formats

pytestmark = needs('transformers')

MODELS = {
  'B/16': {},  # exact GELU, an epsilon of 1e-12
  'B/32 at 384, tanh': {
    'image_size': 384,
    'patch_size': 32,
    'hidden_act': 'gelu_pytorch_tanh',
  },
}


@pytest.mark.parametrize('what', MODELS)
def test_logits_are_those_of_transformers(what, tmp_path):
  torch, transformers = seeded.import_torch('torch', 'transformers')
  kind = transformers.ViTForImageClassification
  config = transformers.ViTConfig(num_labels=1000, **MODELS[what])
  model = kind(config).eval()
  trained(model)
  model.save_pretrained(tmp_path / 'theirs')
  weights = formats.read(tmp_path / 'theirs')
  images = seeded.images(weights.image_shape)
  inputs = torch.from_numpy(images.transpose(0, 3, 1, 2))
  with torch.no_grad():
    theirs = model(inputs).logits.numpy()
  params = {'params': tree.unflatten(weights.params)}
  ours = jax.jit(weights.model.apply)(params, images)
  worst, spread, quotient = seeded.error(ours, theirs)
  print(f'\n| HF {what} | {worst:.1e} | {spread:.2f} | {quotient:.1e} |')
  assert quotient < 1e-4

  formats.write(weights, tmp_path / 'ours', 'hf')
  again, loading = kind.from_pretrained(
    tmp_path / 'ours', output_loading_info=True
  )
  assert not any(loading.values())
  with torch.no_grad():
    back = again.eval()(inputs).logits.numpy()
  np.testing.assert_array_equal(back, theirs)
