"""Cases of a benchmark, and the implementations it compares with."""

import argparse
import itertools
import os
import sys
from collections.abc import Mapping
from typing import Any

from vit_jax.models import attention, common, names
from vit_jax.models.vit import VisionTransformer
from vit_jax.tools.benchmark import workers

NUM_CLASSES = 1000
LINEN = workers.ROOT / 'benchmarks' / 'plain_linen_vit.py'
INPUT = ('images', 'augmentation', 'num_examples', 'num_workers', 'num_threads')
INPUT_PEERS = {  # module of the worker, and the augmentations that it has
  'tf.data': ('tf_data', ('crop',)),
  'timm': ('timm_input', ('crop', 'deit', 'deit3')),
}
CHOICES = {  # the first is the default
  'precision': ('float32', 'bfloat16'),
  'attention': attention.IMPLEMENTATIONS,
  'remat': common.REMAT,
  'mode': ('train', 'infer', 'input'),
}


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
  """Return every combination of the command line's lists, as dicts."""
  shared = {'image_size': args.image_size}
  out = []
  if 'input' in args.mode:
    lists = {'batch_size': args.batch_sizes}
    lists |= {name: getattr(args, name) for name in INPUT}
    for values in itertools.product(*lists.values()):
      case = dict(zip(lists, values))
      out.append(shared | {'mode': 'input', 'model': ''} | case)
  lists = {'model': args.models, 'batch_size': args.batch_sizes}
  lists |= {name: getattr(args, name) for name in CHOICES}
  lists['mode'] = [mode for mode in args.mode if mode != 'input']
  for values in itertools.product(*lists.values()):
    case = shared | dict(zip(lists, values)) | {'scan': args.scan}
    case['fields'] = _fields(case)
    case['num_classes'] = NUM_CLASSES
    case['timm_name'] = timm_name(case['model'])
    names.create(case['model'], **case['fields'])  # refuses what does not exist
    out.append(case)
  return out


def _fields(case):
  """Return the fields of the model, for names.create; no defaults."""
  given = {'dtype': case['precision'], 'num_classes': NUM_CLASSES}
  defaults = {'attention': 'auto', 'remat': 'none', 'scan': False}
  return given | {k: case[k] for k, v in defaults.items() if case[k] != v}


def our_command() -> list[str]:
  """Return the command of our own worker."""
  return [sys.executable, '-m', 'vit_jax.tools.benchmark.ours']


def peer_command(
  peer: str, python: str, case: Mapping[str, Any]
) -> list[str] | None:
  """Return the command of a peer's worker, None if it does not have the case.

  Raises:
    ValueError: there is no such peer.
  """
  worker = 'vit_jax.tools.benchmark.'
  is_input = case['mode'] == 'input'
  if is_input and peer in INPUT_PEERS:
    module, augmentations = INPUT_PEERS[peer]
    has_case = case['augmentation'] in augmentations
    return [python, '-m', worker + module] if has_case else None
  if peer == 'timm':
    return [python, '-m', worker + 'timm']
  if peer in ('none', 'tf.data'):
    return None
  path = str(LINEN) if peer == 'linen' else peer
  if not os.path.exists(path):
    raise ValueError(
      f'--peer={peer}: {path} does not exist. Use timm, linen (in a clone of '
      'the repository), tf.data, none, or the path of a script.'
    )
  if is_input:
    return None
  return [python if peer != 'linen' else sys.executable, path]


def check_peer(peer: str, case: Mapping[str, Any]) -> None:
  """Raise ValueError if the peer does not have the model of the case."""
  name = case['model']
  if peer == 'timm' and name and case['timm_name'] is None:
    raise ValueError(f'timm has no {name}. Leave it out, or use --peer=linen.')
  if peer == 'linen' and name:
    model = names.create(name)
    if type(model) is not VisionTransformer or model.embedding.reduction > 1:
      raise ValueError(
        f'--peer=linen is a plain ViT, not {name}. Leave {name} out.'
      )


def timm_name(model: str) -> str | None:
  """Return timm's name of a model, or None."""
  known = names.models()
  for ours in (model, f'ViT-{model}', f'BiT-{model}'):
    if known.get(ours):
      return known[ours][0]
  return model if any(model in theirs for theirs in known.values()) else None
