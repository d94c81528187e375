"""Settings of our models that the recorders and tests write in each format."""

from vit_jax.models.dense import Gelu
from vit_jax.models.pooling import DistillationToken, Head, Map, Mean
from vit_jax.models.posemb import SinCos2d

OURS = {
  'timm': {
    'token': {'depth': 2},
    'exact': {'block.mlp': Gelu('exact'), 'posemb': SinCos2d()},
    'token_registers': {
      **{'pooling.num_registers': 2, 'block.layerscale_init': 0.1}
    },
    'gap': {'pooling': Mean(), 'posemb': SinCos2d(), 'block.qk_norm': True},
    'fc_norm': {'pooling': Mean(norm='after')},
    'map': {'pooling': Map(num_registers=1), 'posemb': None},
    'distilled': {'pooling': DistillationToken(), 'depth': 2},
    'distilled_features': {
      **{'pooling': DistillationToken(), 'posemb': SinCos2d()},
      'num_classes': None,
    },
    'features': {'num_classes': None},
  },
  'hf': {
    'token': {'depth': 2},
    'exact': {
      **{'block.mlp': Gelu('exact'), 'block.norm_eps': 0.1},
      'posemb': SinCos2d(),
    },
    'features': {'num_classes': None},
    'representation': {'num_classes': None, 'head': Head(20)},
  },
}
