r"""Claims about Vision Transformers, tested in small on a CPU.

    python -m vit_jax.main --config=configs/studies/science.py:crossing \
        --workdir=DIR

No study needs a download; each takes 16 to 95 minutes on one core or two.
docs/science.md has the claims, the protocol, the pictures and the answers.

Arguments (separated by commas; the first of a list is the default):
  crossing   where a ViT overtakes a ResNet, by the structure of images
  positions  which position embeddings work on images of other sizes
  patches    whether smaller patches are better, at equal epochs and compute
  muon       Muon against AdamW, with weak and strong augmentation
  fractal    pre-training on perturbations of one fractal, by their strength
  warmup     a warm-up on sentences of formal grammars, before any image
  parts_glyphs, parts_photographs
             which recent parts help a plain ViT; docs/science.md has seeds=5
  rates      the best learning rate of Muon over widths, with and without muP
  seeds=3    seeds for each arm; one more chooses its learning rate
  tiny       one seed, few steps: minutes, to check that it runs
"""

import functools

from configs import arguments, common
from configs.studies import (
  crossing,
  fractal,
  muon,
  parts,
  patches,
  positions,
  rates,
  warmup,
)

STUDIES = {
  x.__name__.rpartition('.')[2]: x.study
  for x in (crossing, positions, patches, muon, fractal, warmup)
}
for data in parts.DATA:
  STUDIES[f'parts_{data}'] = functools.partial(parts.study, data=data)
STUDIES['rates'] = rates.study


def get_config(argument=''):
  args = arguments.parse(argument, ('tiny',), study=tuple(STUDIES), seeds=3)
  if args.tiny:
    args.seeds = 1
  runs, reports = STUDIES[args.study](args)
  return common.study(runs, reports, discard='.*_lr.*')
