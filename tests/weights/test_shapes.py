"""The shapes told without a model are those that the models have."""

import jax
import numpy as np
import pytest
from vit_jax.models.variants import MIXER, RESNET, VIT

from vit_jax import tree
from vit_jax.config import instantiate
from vit_jax.weights import bundle, shapes

SMALL = {
  'target': VIT,
  **{'width': 16, 'depth': 2, 'mlp_dim': 24, 'num_heads': 4},
  **{'patch_size': (4, 2), 'num_classes': 5},
}
RES = {'target': RESNET, 'num_classes': 5}
MIX = {
  'target': MIXER,
  **{'width': 16, 'depth': 2, 'tokens_mlp_dim': 6, 'channels_mlp_dim': 24},
  **{'patch_size': (4, 4), 'num_classes': 5},
}


@pytest.mark.parametrize(
  'settings',
  [
    SMALL,
    SMALL | {'pooling': 'gap', 'posemb': 'sincos2d', 'num_classes': None},
    SMALL | {'pooling': 'map', 'num_registers': 2, 'qk_norm': True},
    SMALL | {'representation_size': 12, 'layerscale_init': 1e-5},
    SMALL | {'resnet_stages': (), 'patch_size': (2, 1)},
    SMALL | {'resnet_stages': (2, 1), 'patch_size': (1, 1)},
    RES | {'stages': (2, 1), 'form': 'preact'},
    RES | {'stages': (1, 2), 'form': 'postact', 'width_factor': 2},
    MIX,
  ],
)
@pytest.mark.parametrize('channels', [1, 3])
def test_expected_is_what_the_model_initialises(settings, channels):
  images = jax.ShapeDtypeStruct((1, 16, 32, channels), np.float32)
  made = jax.eval_shape(instantiate(settings).init, jax.random.key(0), images)
  made = tree.flatten(made['params'])
  found = shapes.expected(bundle.infer(made), made)
  assert {k: v.shape for k, v in found.items()} == {
    k: v.shape for k, v in made.items()
  }
