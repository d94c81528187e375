r"""Pre-training without labels, by masked patch prediction (4.6, B.1.2).

    python -m vit_jax.main --config=configs/masked_patches.py:B/16,name=my_set \
        --workdir=DIR --config.data.source.data_dir=TFDS_DIR

JFT is not public; this is for a large TFDS set with a split 'train' (its first
50,000 images are kept for validation) and an 'image'. Then fine-tune with
finetune.py:imagenet,B/16 as from any other pre-training: the head and the mask
vector are dropped. docs/draw_masked_patches.py draws what is predicted.

Arguments (separated by commas; the first of a list is the default):
  B/16, B/32, S/16, S/32, L/16, L/32   the model; the paper has B/16 only
  mean_colour, downsampled, pixels   what is predicted of a patch, see Task in
                vit_jax/objectives/masked_patches.py
  ratio=0.5     fraction of the patches that is corrupted
  name=jft      the TFDS data set
  imagenet      ImageNet instead
  steps=1000000
  folder, tiny  see "Config options" in docs/training.md

Expected: 79.9% on ImageNet after fine-tuning, 2 points above training from
scratch and 4 below supervised pre-training (on JFT), with mean_colour, which
the paper chose. pixels gave slightly less, and so did ratio=0.15, BERT's. After
100k steps there is little gain. Pre-training on ImageNet gains about as much;
the paper does not state its number of steps.

Not in the paper: weight decay, dropout and clipping (here none); crops, flip
and test images (as in pretrain_paper.py); whether there is a class token. Here
there is, because fine-tuning reads it; no loss does.
"""

from configs import arguments, common

MODELS = ('B/16', 'B/32', 'S/16', 'S/32', 'L/16', 'L/32')
PREDICT = ('mean_colour', 'downsampled', 'pixels')


def get_config(argument=''):
  args = arguments.parse(
    argument,
    ('imagenet', 'folder', 'tiny'),
    model=MODELS,
    predict=PREDICT,
    ratio=0.5,
    name='jft',
    steps=1_000_000,
  )
  data = 'imagenet' if args.imagenet else args.name
  config = common.pretraining(*common.splits(args, data))
  config.total_steps = args.steps
  config.model = common.model(args.model)
  config.optimizer = common.adam()
  config.schedule = {'lr': 2e-4, 'decay': 'cosine', 'warmup_steps': 10_000}
  common.finish(config, args)
  size = 2 if args.tiny else 4
  set_task(config, args.predict, ratio=args.ratio, downsampled_to=size)
  return config


def set_task(config, predict, *, channels=3, **fields):
  """Make a run and its evaluators predict masked patches."""
  task = {'predict': predict, **fields}
  config.objective = common.make(
    'objectives.masked_patches.MaskedPatches', task=task
  )
  for evaluator in config.evals.values():
    evaluator.update(common.make('evals.masked_patches.MaskedPatches'))
    evaluator.task = task
  config.data.labels = False
  config.model.pooling = common.make('models.pooling.NoPooling')
  config.model.pooling.class_token = True
  config.model.embedding.mask_token = True
  patch = config.model.embedding.patch_size
  height, width = (patch, patch) if isinstance(patch, int) else patch
  config.model.num_classes = {
    'mean_colour': 8**channels,
    'downsampled': 8**channels * fields['downsampled_to'] ** 2,
    'pixels': height * width * channels,
  }[predict]
