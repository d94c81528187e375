"""Pre-train a small ViT on drawn glyphs and transfer it to digits, on a CPU.

    python -m vit_jax.main --config=configs/quickstart.py --workdir=/tmp/quick

The first run pre-trains on letters and symbols that the program draws; none of
them is a digit. The others transfer to handwritten digits with few examples per
class, in 3 random draws: a linear classifier on frozen features, and
fine-tuning at a higher resolution with interpolated position embeddings (paper,
section 3.2), compared with training from scratch. `quickstart.py:tiny` does all
of it in miniature, in seconds.

Result (2 CPU cores, 5 min 11 s; accuracy in % on 768 scans by other writers,
mean and standard deviation of the 3 draws):

                                     5 per class    10 per class
    linear on raw pixels             81.6 ± 0.3     83.4 ± 0.2
    linear on untrained features     62.8 ± 3.3     70.2 ± 1.0
    linear on frozen features        89.2 ± 2.1     91.2 ± 1.9
    from scratch, 32 px              77.4 ± 2.8     86.2 ± 1.7
    fine-tuned at 32 px              92.3 ± 0.8     95.2 ± 0.5

Different from the paper, because the training is short: the std of the initial
position embeddings, b2, label smoothing, and Adam for fine-tuning (SGD).
"""

from configs import arguments, common, embedded

SHOTS, SEEDS = (5, 10), (0, 1, 2)
PRETRAIN_PX, FINETUNE_PX = 24, 32


def get_config(argument=''):
  tiny = arguments.parse(argument, ('tiny',)).tiny
  shots, seeds = (SHOTS[:1], SEEDS[:1]) if tiny else (SHOTS, SEEDS)
  pretrained = {'path': '{workdir}/pretrain', 'ema': True}
  runs = {
    'pretrain': pretrain(tiny),
    'linear_frozen': linear('pooled', pretrained, tiny),
    'linear_untrained': linear('pooled', None, tiny),
    'linear_pixels': linear('pixels', None, tiny),
  }
  for n in shots:
    for name, init_from in (('scratch', None), ('finetune', pretrained)):
      for seed in seeds:  # next to each other they share compiled programs
        run = train_on_digits(n, seed, init_from, tiny)
        runs[f'{name}_{n}shot_seed{seed}'] = run
  return common.study(runs, reports(shots))


def model(tiny):
  depth = 1 if tiny else 4
  return embedded.vit(
    width=96, depth=depth, mlp_dim=384, num_heads=3, patch_size=4
  )


def pretrain(tiny):
  batch_size = 16 if tiny else 128
  glyphs = embedded.glyphs(PRETRAIN_PX)
  val = glyphs | {'seed': 1, 'num_examples': 96 if tiny else 1920}
  val = {'source': val, 'batch_size': batch_size}
  return embedded.run(
    model(tiny),
    {'source': glyphs, 'batch_size': batch_size},
    {'val': common.classification(val, every_fraction=0.25)},
    steps=4 if tiny else 1300,
    lr=3e-3,
    objective=common.xent('softmax', label_smoothing=0.1),
    ema={'decay': 0.99},
    logging={'every_steps': 2 if tiny else 100},
  )


def linear(features, init_from, tiny):
  digits = embedded.linear_on_digits(
    PRETRAIN_PX, shots=SHOTS, seeds=SEEDS, features=features
  )
  return {
    'run': 'vit_jax.evaluate.evaluate',
    'model': model(tiny),
    'image_shape': (PRETRAIN_PX, PRETRAIN_PX, 1),
    'init_from': init_from,
    'evals': {'linear': digits},
  }


def train_on_digits(shots, seed, init_from, tiny):
  """Training from scratch needs more steps and a higher learning rate."""
  few = {'examples_per_class': shots, 'seed': seed}
  few['batch_size'] = 16 if tiny else 50
  train = embedded.digits('train', FINETUNE_PX + 4, crop=FINETUNE_PX, **few)
  test = embedded.digits('test', FINETUNE_PX)
  return embedded.run(
    model(tiny),
    train,
    {'test': common.classification(test, every_fraction=1 / 3)},
    steps=4 if tiny else 60 if init_from else 200,
    lr=1e-3 if init_from else 3e-3,
    seed=seed,
    init_from=init_from,
    optimizer=common.adam(clip_norm=1.0),
    logging={'every_steps': 2 if tiny else 30},
  )


def reports(shots):
  linear = r'linear/digits/fewshot/SHOTSshot_seed\d'
  rows = {
    'linear on raw pixels': ('linear_pixels', linear),
    'linear on untrained features': ('linear_untrained', linear),
    'linear on frozen features': ('linear_frozen', linear),
    'from scratch, 32 px': (r'scratch_SHOTSshot_seed\d', 'test/accuracy'),
    'fine-tuned at 32 px': (r'finetune_SHOTSshot_seed\d', 'test/accuracy'),
  }
  pretraining = {
    'train (labels smoothed)': ('pretrain', 'train/loss'),
    'validation (EMA)': ('pretrain', 'val/loss'),
  }
  transfer = {
    'fine-tuned': (rf'finetune_{shots[-1]}shot_.*', 'test/accuracy'),
    'from scratch': (rf'scratch_{shots[-1]}shot_.*', 'test/accuracy'),
  }
  frozen, metric = rows['linear on frozen features']
  metric = metric.replace('SHOTS', str(shots[-1]))
  draws = ' (mean ± std of 3 draws)' if len(shots) > 1 else ''
  title = f'Digits, {shots[-1]} per class{draws}'
  loss = {'title': 'Pre-training on glyphs', 'ylabel': 'loss'}
  accuracy = {'title': title, 'ylabel': 'test accuracy (%)'}
  accuracy['levels'] = {'linear, frozen': (frozen, metric)}
  curves = common.curves(
    (loss | {'lines': pretraining}, accuracy | {'lines': transfer})
  )
  return embedded.digits_table(rows, shots), curves
