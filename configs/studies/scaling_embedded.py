r"""Transfer accuracy against the number of pre-training images, on a CPU.

    python -m vit_jax.main --config=configs/studies/scaling_embedded.py \
        --workdir=DIR

The question of the paper's figures 3 and 4 without a download: a small ViT, a
ResNet (BiT's form) and a hybrid are pre-trained on N distinct images of glyphs,
from 480 (one per class) to a number at which no image is seen twice, all with
the same steps and settings. Result (60 minutes): the ViT gains most from many
images, but the ResNet stays ahead, see docs/results.md.

Arguments (separated by commas):
  seeds=3    runs of each model and N: other images, order and initialisation
  steps=1200   steps of 64 images
  lr=3e-3    learning rate of all models, which have 15 to 16 MFLOP forward
  tiny       two values of N, one seed, a few steps: minutes
"""

from configs import arguments, common, embedded
from vit_jax.zoo import names

CLASSES = 480
BATCH, IMAGE_PX = 64, 24
MODELS = {
  'ViT': embedded.vit(64),
  'ResNet': {'target': names.RESNET, 'stages': (1, 1)},
  'hybrid': embedded.vit(64, depth=2, patch_size=1, stages=(1,)),
}


def get_config(argument=''):
  args = arguments.parse(argument, ('tiny',), seeds=3, steps=1200, lr=3e-3)
  if args.tiny:
    args.seeds, args.steps = 1, 8
  sizes = [CLASSES * n for n in ((1, 4) if args.tiny else (1, 4, 16, 64))]
  if not args.tiny:
    sizes.append(BATCH * args.steps)  # no image is seen twice
  runs = {
    f'{model}_{size}_seed{seed}': run_config(args, model, size, seed)
    for size in sizes
    for seed in range(args.seeds)
    for model in MODELS
  }
  return common.study(runs, (report(sizes),))


def run_config(args, model, size, seed):
  """Return a pre-training on `size` images that also evaluates its features."""
  held_out = {'source': source(96 if args.tiny else 4 * CLASSES, -1)}
  evals = {
    'frozen': embedded.linear_on_digits(IMAGE_PX, tiny=args.tiny),
    'val': common.classification(held_out | {'batch_size': 128}),
  }
  batch_size = 16 if args.tiny else BATCH
  return embedded.run(
    MODELS[model] | {'num_classes': CLASSES},
    {'source': source(size, seed), 'batch_size': batch_size},
    evals,
    steps=args.steps,
    lr=args.lr,
    seed=seed,
    objective=common.xent('softmax', label_smoothing=0.1),
  )


def source(size, seed):
  return embedded.glyphs(IMAGE_PX, num_examples=size, seed=1 + seed)


def report(sizes):
  def panel(title, metric):
    lines = {}
    for model in MODELS:
      runs = {n: rf'{model}_{n}_seed\d+' for n in sizes}
      lines[model] = tuple(
        {'x': n, 'y': {'runs': runs[n], 'metric': metric}} for n in sizes
      )
    return common.panel(title, 'number of distinct pre-training glyphs', lines)

  panels = (
    panel('Digits, linear 10-shot', 'frozen/digits/fewshot/10shot'),
    panel('Held-out glyphs', 'val/accuracy'),
  )
  title = 'Transfer against the size of the pre-training set'
  return common.figure(*panels, title=title)
