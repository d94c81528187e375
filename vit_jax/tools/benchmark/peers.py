"""Whom ours is timed against: their commands, and which models they have."""

import os
import sys

from vit_jax.models import names
from vit_jax.models.names import VIT
from vit_jax.tools.benchmark import workers

LINEN = workers.ROOT / 'benchmarks' / 'plain_linen_vit.py'


def timm_name(model):
  """timm's name of a model of ours, or None."""
  known = names.models()
  for ours in (model, f'ViT-{model}', f'BiT-{model}'):
    if known.get(ours):
      return known[ours][0]
  return model if any(model in theirs for theirs in known.values()) else None


def command(peer, python):
  """The command of a peer, None for none."""
  if peer == 'none':
    return None
  if peer == 'timm':
    return [python, '-m', 'vit_jax.tools.benchmark.timm']
  path = str(LINEN) if peer == 'linen' else peer
  if not os.path.exists(path):
    raise ValueError(
      f'--peer={peer}: there is no {path}. It can be timm, linen (in a clone '
      'of the repository), none, or the path of a script.'
    )
  return [python if peer != 'linen' else sys.executable, path]


def check(peer, case):
  """Raises ValueError if the peer has no model such as the case's."""
  if case['mode'] == 'input':
    return
  model, target = case['model'], case['fields']['target']
  if peer == 'timm' and case['timm_name'] is None:
    raise ValueError(f'timm has no {model}; leave it out, or use --peer=linen.')
  if peer == 'linen' and (target != VIT or 'resnet_stages' in case['fields']):
    raise ValueError(f'--peer=linen is a plain ViT, not {model}; leave it out.')
