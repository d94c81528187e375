"""Pre-trains a small ViT on glyphs and transfers it to real digits, on a CPU.

    python -m vit_jax.main --config=configs/quickstart.py --workdir=/tmp/quick

One pre-training on letters and symbols that the program draws itself (no digit
among them), then transfer to handwritten digits with few examples per class,
each with 3 draws of those examples: a linear readout of frozen features, and
fine-tuning at a higher resolution with interpolated position embeddings (paper,
section 3.2); from scratch beside it. `quickstart.py:tiny` does all of it in
miniature, in seconds.

Result (2 CPU cores, 5 min 11 s; accuracy on 768 scans of other writers, mean
and standard deviation of the 3 draws):

                                     5 per class    10 per class
    linear on raw pixels             81.6 ± 0.3     83.4 ± 0.2
    linear on untrained features     62.8 ± 3.3     70.2 ± 1.0
    linear on frozen features        89.2 ± 2.1     91.2 ± 1.9
    from scratch, 32 px              77.4 ± 2.8     86.2 ± 1.7
    fine-tuned at 32 px              92.3 ± 0.8     95.2 ± 0.5

Not the paper's: posemb_init_std (0.02 there), b2 (0.999), label smoothing,
Adam for fine-tuning (SGD); chosen for the short time.
"""

import ml_collections

SEEDS = (0, 1, 2)
SHOTS = (5, 10)
VARIANTS = ('', 'tiny')
PATCH = 4
PRETRAIN_PX, FINETUNE_PX = 24, 32


def get_config(arg=''):
  if arg not in VARIANTS:
    raise ValueError(f"quickstart.py:{arg}: the only argument is 'tiny'.")
  tiny = arg == 'tiny'
  runs = {'pretrain': pretrain_config(tiny)}
  trained = {'path': '{workdir}/pretrain', 'ema': True}
  for name, features, init_from in (
    ('frozen', 'pooled', trained),
    ('untrained', 'pooled', None),
    ('pixels', 'pixels', None),
  ):
    runs[f'linear_{name}'] = linear_config(features, init_from, tiny)
  for shots in SHOTS[:1] if tiny else SHOTS:
    for seed in SEEDS[:1] if tiny else SEEDS:
      name = f'{shots}shot_seed{seed}'
      runs[f'scratch_{name}'] = digits_config(shots, seed, None, tiny)
      runs[f'finetune_{name}'] = digits_config(shots, seed, trained, tiny)
  config = ml_collections.ConfigDict()
  config.run = 'vit_jax.study.study'
  config.runs = runs
  config.order = tuple(runs)
  shown = SHOTS[:1] if tiny else SHOTS
  config.report = (
    {
      'target': 'vit_jax.reports.table.Table',
      'title': 'Accuracy on handwritten digits, 768 test scans',
      'cells': cells(shown),
    },
    {
      'target': 'vit_jax.reports.curves.Curves',
      'panels': panels(shown[-1]),
    },
  )
  return config


def model():
  return {
    'target': 'vit_jax.models.vit.VisionTransformer',
    'width': 96,
    'depth': 4,
    'mlp_dim': 384,
    'num_heads': 3,
    'patch_size': PATCH,
    'num_classes': ml_collections.config_dict.placeholder(int),  # the data's
    'pooling': 'token',
    # The paper's 0.02 is for long training; with this one, positions count
    # from the start, and so small a budget gets much further.
    'posemb_init_std': 0.5,
  }


def pretrain_config(tiny):
  glyphs = {
    'target': 'vit_jax.data.embedded.glyphs.Glyphs',
    'image_size': PRETRAIN_PX,
  }
  validation = {'seed': 1, 'num_examples': 96 if tiny else 1920}
  return {
    'run': 'vit_jax.train.train',
    'seed': 0,
    'total_steps': 4 if tiny else 1300,
    'log_every_steps': 2 if tiny else 100,
    'model': model(),
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
    'schedule': {'lr': 3e-3, 'decay': 'cosine', 'warmup_fraction': 0.1},
    'ema_decay': 0.99,
    'data': {'source': glyphs, 'batch_size': 16 if tiny else 128},
    'evals': {
      'val': {
        'target': 'vit_jax.evals.classification.Classification',
        'every_fraction': 0.25,
        'data': {
          'source': glyphs | validation,
          'batch_size': 16 if tiny else 128,
        },
      }
    },
  }


def digits(split, image_px, batch_size, transforms=(), **kwargs):
  """Digits at image_px; further transforms come after the resize."""
  resize = {'target': 'vit_jax.data.transforms.Resize', 'size': image_px}
  return {
    'source': {
      'target': 'vit_jax.data.embedded.digits.Digits',
      'split': split,
      **kwargs,
    },
    'transforms': (resize, *transforms),
    'batch_size': batch_size,
  }


def linear_config(features, init_from, tiny):
  config = {
    'run': 'vit_jax.evaluate.evaluate',
    'model': model(),
    'image_shape': (PRETRAIN_PX, PRETRAIN_PX, 1),
    'evals': {
      'linear': {
        'target': 'vit_jax.evals.frozen.Frozen',
        'features': features,
        'data': {
          'digits': {
            'train': digits('train', PRETRAIN_PX, 128),
            'test': digits('test', PRETRAIN_PX, 128),
          }
        },
        'readouts': {
          'fewshot': {
            'target': 'vit_jax.evals.fewshot.FewShot',
            'shots': SHOTS,
            'seeds': SEEDS,
          }
        },
      }
    },
  }
  return config | ({'init_from': init_from} if init_from else {})


def digits_config(shots, seed, init_from, tiny):
  """Training at 32 px on a few digits, from scratch or from pre-training.

  From scratch it takes more steps and a higher rate, for its sake.
  """
  crop = {'target': 'vit_jax.data.transforms.RandomCrop', 'size': FINETUNE_PX}
  train = digits(
    'train',
    FINETUNE_PX + 4,
    16 if tiny else 50,
    (crop,),
    examples_per_class=shots,
    seed=seed,
  )
  config = {
    'run': 'vit_jax.train.train',
    'seed': seed,
    'total_steps': 4 if tiny else 60 if init_from else 200,
    'log_every_steps': 2 if tiny else 30,
    'model': model(),
    'objective': {
      'target': 'vit_jax.objectives.classification.softmax_xent',
    },
    'optimizer': {'target': 'vit_jax.optim.adam', 'clip_norm': 1.0},
    'schedule': {
      'lr': 1e-3 if init_from else 3e-3,
      'decay': 'cosine',
      'warmup_fraction': 0.1,
    },
    'data': train,
    'evals': {
      'test': {
        'target': 'vit_jax.evals.classification.Classification',
        'every_fraction': 0.25,
        'data': digits('test', FINETUNE_PX, 128),
      }
    },
  }
  return config | ({'init_from': init_from} if init_from else {})


def cells(all_shots):
  found = []
  for shots in all_shots:
    column = f'{shots} per class'
    for row, run in (
      ('linear on raw pixels', 'pixels'),
      ('linear on untrained features', 'untrained'),
      ('linear on frozen features', 'frozen'),
    ):
      metric = rf'linear/digits/fewshot/{shots}shot_seed\d'
      found.append((row, column, f'linear_{run}', metric))
    for row, run in (
      (f'from scratch, {FINETUNE_PX} px', 'scratch'),
      (f'fine-tuned at {FINETUNE_PX} px', 'finetune'),
    ):
      runs = rf'{run}_{shots}shot_seed\d'
      found.append((row, column, runs, 'test/accuracy'))
  keys = ('row', 'column', 'runs', 'metric')
  return tuple(dict(zip(keys, cell)) for cell in found)


def panels(shots):
  return (
    {
      'title': 'Pre-training on glyphs',
      'ylabel': 'loss',
      'lines': {
        'train (labels smoothed)': ('pretrain', 'train/loss'),
        'validation (EMA)': ('pretrain', 'val/loss'),
      },
    },
    {
      'title': f'Digits, {shots} per class (mean ± std of 3 draws)',
      'ylabel': 'test accuracy',
      'lines': {
        'fine-tuned': (rf'finetune_{shots}shot_.*', 'test/accuracy'),
        'from scratch': (rf'scratch_{shots}shot_.*', 'test/accuracy'),
      },
    },
  )
