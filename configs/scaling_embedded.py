"""Transfer accuracy against the number of pre-training images, on a CPU.

    python -m vit_jax.main --config=configs/scaling_embedded.py --workdir=DIR

The question of the paper's figures 3 and 4, asked of data that needs no
download: a small ViT, a ResNet (BiT's form) and a hybrid are pre-trained on
N distinct images of glyphs, for N from 480 (one of each class) to one that is
never seen twice, and a linear readout of their frozen features is fitted to 10
handwritten digits per class. Whatever N is, a run has the same steps and the
same settings, as the paper's have; there is no early stopping.

`--study_member=i` does one run, `--study_report` none; see vit_jax/study.py.

Arguments (between commas; the first of a list is the default):
  glyphs, fractals   what is pre-trained on; fractals are drawn at the start,
             once, which takes some minutes
  seeds=3    runs of each model and N: other images, order and initialisation
  steps=1200 of 64 images
  lr=3e-3    learning rate of all models
  tiny       two values of N, one seed, a few steps: minutes

The models take about the same arithmetic per image (15 to 16 MFLOP forward at
24 px) and have the same optimizer; of the rates 1e-3 and 3e-3 the second was
better for the ViT and the ResNet, on held-out glyphs and on digits.

Result (60 min on 2 CPU cores that did other work too; mean and standard
deviation of 3 seeds; digits: 768 scans of other writers):

                             480        1920        7680       30720       76800
    digits, 10-shot
      ViT             67.0 ± 2.8  70.8 ± 1.9  84.5 ± 0.8  84.6 ± 3.3  88.0 ± 1.2
      ResNet          86.0 ± 0.7  88.6 ± 0.3  94.4 ± 0.8  95.8 ± 0.2  95.0 ± 0.2
      hybrid          69.1 ± 4.5  70.0 ± 2.8  91.3 ± 0.9  92.1 ± 0.3  91.7 ± 0.6
    held-out glyphs
      ViT              0.9 ± 0.1   3.2 ± 0.1  20.3 ± 0.8  23.0 ± 4.2  26.4 ± 1.2
      ResNet           3.2 ± 0.4   9.7 ± 0.3  43.9 ± 0.8  57.3 ± 0.5  58.7 ± 0.3
      hybrid           2.0 ± 0.1   6.2 ± 1.4  43.5 ± 0.7  52.7 ± 1.3  53.7 ± 0.7

As in the paper the ResNet is far ahead with few images, and the ViT gains more
from many (21 points on digits, the hybrid 23, the ResNet 9). Not as there, the
ResNet stays ahead: 1,200 steps are few for a ViT, we suppose, whose training
loss is still the highest with 76,800 images. The hybrid is no better than the
ViT with few images, and between the two with many.
"""

import ml_collections

from configs import arguments

VARIANTS = ('', 'fractals', 'seeds=2,steps=300', 'tiny', 'fractals,tiny')
CLASSES = 480
BATCH, IMAGE_PX = 64, 24
DIGITS = 'vit_jax.data.embedded.digits.Digits'
MODELS = {
  'ViT': {
    'target': 'vit_jax.models.vit.VisionTransformer',
    **{'width': 64, 'depth': 4, 'mlp_dim': 256, 'num_heads': 4},
    **{'patch_size': 4, 'posemb_init_std': 0.5},
  },
  'ResNet': {'target': 'vit_jax.models.resnet.ResNet', 'stages': (1, 1)},
  'hybrid': {
    'target': 'vit_jax.models.vit.VisionTransformer',
    **{'width': 64, 'depth': 2, 'mlp_dim': 256, 'num_heads': 4},
    **{'patch_size': 1, 'resnet_stages': (1,), 'posemb_init_std': 0.5},
  },
}


def get_config(argument=''):
  args = arguments.parse(
    argument,
    data=('glyphs', 'fractals'),
    seeds=3,
    steps=1200,
    lr=3e-3,
    tiny=False,
  )
  if args.tiny:
    args.seeds, args.steps = 1, 8
  sizes = [CLASSES * n for n in ((1, 4) if args.tiny else (1, 4, 16, 64))]
  if not args.tiny:
    sizes.append(BATCH * args.steps)  # none is seen twice
  runs = {
    f'{model}_{size}_seed{seed}': run_config(args, model, size, seed)
    for size in sizes
    for seed in range(args.seeds)
    for model in MODELS
  }
  config = ml_collections.ConfigDict()
  config.run = 'vit_jax.study.study'
  config.runs = runs
  config.order = tuple(runs)
  config.report = (report(args, sizes),)
  return config


def run_config(args, model, size, seed):
  """Pre-training on `size` images, and what its features are worth."""
  batch = 16 if args.tiny else BATCH
  evals = {'frozen': frozen()}
  if args.data == 'glyphs':
    held_out = source(args, 96 if args.tiny else 4 * CLASSES, -1)
    evals['val'] = {
      'target': 'vit_jax.evals.classification.Classification',
      'data': {'source': held_out, 'batch_size': 128},
    }
  return {
    'run': 'vit_jax.train.train',
    'seed': seed,
    'total_steps': args.steps,
    'log_every_fraction': 0.25,
    'model': {**MODELS[model], 'num_classes': CLASSES},
    'objective': {
      'target': 'vit_jax.objectives.classification.softmax_xent',
      'label_smoothing': 0.1,
    },
    'optimizer': {
      'target': 'vit_jax.optim.adam',
      'b2': 0.95,
      'weight_decay': 0.05,
      'clip_norm': 1.0,
    },
    'schedule': {
      'lr': args.lr,
      'decay': 'cosine',
      'warmup_fraction': 0.1,
    },
    'data': {'source': source(args, size, seed), 'batch_size': batch},
    'evals': evals,
  }


def frozen():
  """10 digits per class for a linear readout, five times."""
  return {
    'target': 'vit_jax.evals.frozen.Frozen',
    'features': 'pre_logits',
    'data': {'digits': {split: digits(split) for split in ('train', 'test')}},
    'readouts': {
      'fewshot': {
        'target': 'vit_jax.evals.fewshot.FewShot',
        'shots': (10,),
        'seeds': (0, 1, 2, 3, 4),
      }
    },
  }


def source(args, size, seed):
  if args.data == 'glyphs':
    return {
      'target': 'vit_jax.data.embedded.glyphs.Glyphs',
      **{'image_size': IMAGE_PX, 'num_examples': size, 'seed': 1 + seed},
    }
  return {
    'target': 'vit_jax.data.embedded.fractals.Fractals',
    **{'image_size': IMAGE_PX, 'num_classes': CLASSES, 'seed': seed},
    'images_per_class': size // CLASSES,
  }


def digits(split):
  resize = {'target': 'vit_jax.data.transforms.Resize', 'size': IMAGE_PX}
  return {
    'source': {'target': DIGITS, 'split': split},
    'transforms': (resize,),
    'batch_size': 128,
  }


def report(args, sizes):
  def lines(metric):
    return {
      model: tuple(
        {
          'x': size,
          'y': {'runs': rf'{model}_{size}_seed\d+', 'metric': metric},
        }
        for size in sizes
      )
      for model in MODELS
    }

  axes = {
    'xlabel': f'number of distinct pre-training {args.data}',
    'ylabel': 'accuracy (%)',
  }
  transfer = lines('frozen/digits/fewshot/10shot')
  panels = (
    {'title': 'Digits, linear 10-shot', 'lines': transfer, **axes},
    {'title': 'Held-out glyphs', 'lines': lines('val/accuracy'), **axes},
  )
  return {
    'target': 'vit_jax.reports.scaling.Scaling',
    'title': 'Transfer against the size of the pre-training set',
    'panels': panels if args.data == 'glyphs' else panels[:1],
  }
