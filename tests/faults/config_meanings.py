"""Ranges of meaningful values of arguments, by the name of the argument.

The ranges are independent of the domains that the signatures declare.
"""

import re

import numpy as np

from .config_mutations import Mutation, is_number, read

_ANY = (-1e6, 1e6)
_UNIT = r'.*_(steps|epochs|examples|fraction)'
MEANINGS: dict[str, tuple[float, float]] = {
  r'seed|seeds': (0, 2**64 - 1),
  r'b1|b2|momentum|ema_decay|dropout|stochastic_depth|attention_dropout': (
    *(0, 1 - 1e-9),
  ),
  r'label_smoothing|held_out|above': (0, 1 - 1e-9),
  r'alpha': (1e-3, 1e3),
  r'(train|schedule)\.lr|lr|end_lr': (0, 1e4),
  r'weight_decay|weight_decay_mask': (0, 1e4),
  r'eps|eps_root|norm_eps': (0, 1),
  r'clip_norm|clip': (1e-30, 1e12),
  r'num_workers': (0, 512),
  r'num_registers': (0, 4096),
  r'num_classes|representation_size': (1, 2**31),
  r'calibration_bins': (0, 1e6),
  r'(data|fsdp|model)': (-1, 1),  # -1: all devices that are left
  r'keep_last|keep_best|batch_size|accum_steps|depth|width|num_heads': (
    *(1, 2**31 - 1),
  ),
  r'mlp_dim|tokens_mlp_dim|channels_mlp_dim|width_factor': (1, 2**31 - 1),
  r'patch_size|stride|size|image_size|stages|k': (1, 2**15),
  r'num_examples|images_per_class|examples_per_class|shots': (1, 2**32),
  r'timescale': (1, 2**31),
  r'probability|probabilities|low_resolution|step_factor|rate': (0, 1),
  r'area': (1e-30, 1),
  r'ratio|mask_share|swap_share|threshold': (0, 1e6),
  r'std': (1e-30, 1e6),
  r'log_every_steps|every_steps|total_steps|.*_every_steps': (1, 2**31 - 1),
  r'every_fraction|total_epochs': (1e-30, 1e9),
  _UNIT: (0, 2**31 - 1),
  r'digits': (0, 100),
  r'max_iter|epochs': (1, 2**31),
}
# Arguments that take any text.
FREE_TEXT = r'.*(name|title|project|entity|group|experiment|tracking_uri|mode)'
FREE_TEXT += r'|discard|.*_rule|head|block|stacked|cache_dir|path|data_dir'


def has_meaning(mutation: Mutation) -> bool:
  """Return whether a user may want a run with the mutated value."""
  if mutation.kind == 'missing':
    return True  # if it is accepted, the argument has a default
  if mutation.kind not in ('out of range', 'wrong type'):
    return mutation.kind == 'wrong target' and mutation.value == 'None'
  value, text = read(mutation.value), mutation.annotation
  key = re.sub(r'.*\.', '', mutation.path)
  if value is None:
    may_be_none = re.search('None|Optional|Any', text)
    return bool(may_be_none or re.fullmatch(_UNIT, key))
  if isinstance(value, bool):
    return 'bool' in text or text.endswith('Any')
  if isinstance(value, str):
    return bool(re.fullmatch(FREE_TEXT, key)) and 'str' in text
  if isinstance(value, dict):
    return 'Mapping' in text and not mutation.argument.endswith('evals')
  if isinstance(value, list | tuple):
    listed = re.search('Sequence|tuple|list|Any', text)
    if not listed or (value and not all(_is_number_in(x, key) for x in value)):
      return False
    return bool(value) or not re.search(r'seeds|shots|lr|\bk\b', key)
  if not is_number(text) and text != 'typing.Any':
    return False
  if isinstance(value, float) and not re.search('float|Duration|Any', text):
    return False
  return _is_number_in(value, key)


def _is_number_in(value, key):
  if not isinstance(value, int | float):
    return False
  low, high = next(
    (x for name, x in MEANINGS.items() if re.fullmatch(name, key)), _ANY
  )
  if key.endswith('_steps') and value != int(value if value < 1e300 else 0):
    return False
  tiny = 0 < abs(value) < float(np.finfo(np.float32).tiny)
  return low <= value <= high and not tiny
