"""Pre-training without labels, by masked patch prediction (4.6, B.1.2).

    python -m vit_jax.main --config=configs/masked_patches.py:B/16,name=my_set \
        --workdir=DIR --config.data.source.data_dir=TFDS_DIR

JFT is not public; this is the config for a large TFDS set of your own, which
needs a split 'train' (its first 50,000 images are kept for validation; that
choice is ours) and an 'image'. Labels are not looked at. On ImageNet alone:

    python -m vit_jax.main --config=configs/masked_patches.py:B/16,imagenet \
        --workdir=DIR

Then fine-tune as from any other pre-training: the trunk and the class token are
taken over, head and mask vector are not.

    python -m vit_jax.main --config=configs/finetune.py:imagenet,B/16 \
        --config.init_from.path=DIR --workdir=DIR_imagenet

To see what is predicted:

    python -m vit_jax.tools.masked_patches --workdir=DIR --output=patches.png

Arguments (between commas; the first of a list is the default):
  B/16, B/32, S/16, S/32, L/16, L/32   the model; the paper has B/16 only
  mean_colour   what is predicted of a patch: its mean, with 3 bits a channel,
                512 classes
  downsampled   those of each pixel of the patch reduced to 4 x 4
  pixels        all of it, in squared error
  ratio=0.5     share of the patches that is corrupted
  name=jft      the TFDS data set
  imagenet      in place of it
  folder        ImageNet from PATH/train/CLASS and PATH/val/CLASS, not TFDS:
                --config.data.source.path=PATH
  steps=1000000
  tiny          seconds on a CPU, on the same data

Expected: 79.9% on ImageNet after fine-tuning, 2 points above training from
scratch and 4 below supervised pre-training (on JFT), by mean_colour, which the
paper chose; pixels did slightly worse, and so did ratio=0.15, BERT's. After
100k steps there is little gain, and pre-training on ImageNet gains about as
much; how many steps that was is not told.

Appendix B.1.2: of half of the patch embeddings 80% are replaced by a learned
vector, 10% by another patch's, 10% stay; each of them is predicted from its own
representation. Adam, batch 4096, rate 2e-4, 10k steps of warm-up, cosine decay,
1M steps (14 epochs of JFT).

Not in the paper:
- weight decay, here none; dropout, none; clipping, none.
- inception crop and flip; test images (smaller side to 256 px, central 224):
  as in this folder's other pre-trainings.
- whether there is a class token. There is, for fine-tuning reads it; no loss
  does, so that it learns only as what patches attend to.
- that exactly half of each image is corrupted, the other patch is of the same
  image, and the mask vector starts from a normal distribution of std 0.02.

Where memory is short: --config.accum_steps=8 --config.model.remat=full
--config.model.scan=True. masked_patches_embedded.py needs no data and minutes.
"""

from ml_collections import config_dict

from configs import arguments, common

MODELS = ('B/16', 'B/32', 'S/16', 'S/32', 'L/16', 'L/32')
OBJECTIVE = 'vit_jax.objectives.masked_patches.masked_patches'
EVALUATOR = 'vit_jax.evals.masked_patches.MaskedPatches'
PREDICT = ('mean_colour', 'downsampled', 'pixels')
VARIANTS = (
  *MODELS,
  'B/16,downsampled',
  'B/16,pixels,ratio=0.15',
  'B/16,name=my_set,steps=100000',
  'B/16,imagenet',
  'B/16,imagenet,folder',
  'B/16,tiny',
  'B/16,imagenet,downsampled,tiny',
  'B/32,imagenet,pixels,tiny',
)


def get_config(argument=''):
  args = arguments.parse(
    argument,
    model=MODELS,
    predict=PREDICT,
    ratio=0.5,
    name='jft',
    imagenet=False,
    folder=False,
    steps=1_000_000,
    tiny=False,
  )
  source, held_out = data(args)
  config = common.training()
  config.total_steps = args.steps
  config.model = common.model(
    args.model, pooling='none', class_token=True, mask_token=True
  )
  config.data = common.data(source, common.inception_crop(224), batch_size=4096)
  config.data.labels = False
  config.objective = {
    'target': OBJECTIVE,
    'predict': args.predict,
    'downsampled_to': 2 if args.tiny else 4,
    'ratio': args.ratio,
    'mask_share': 0.8,
    'swap_share': 0.1,
  }
  config.optimizer = {
    'target': 'vit_jax.optim.adam',
    'b1': 0.9,
    'b2': 0.999,
    'weight_decay': 0.0,
    'clip_norm': config_dict.placeholder(float),
  }
  config.schedule = {'lr': 2e-4, 'decay': 'cosine', 'warmup_steps': 10_000}
  config.evals = {
    name: evaluator(
      config.objective,
      common.held_out(config, split, common.resize_crop(256, 224)),
      every_steps=5000,
    )
    for name, split in held_out.items()
  }
  if args.tiny:
    common.tiny(config)
  set_outputs(config)
  return config


def data(args):
  """(source, {evaluator: split})."""
  if args.imagenet:
    splits = common.imagenet_held_out(args.folder)
    return common.imagenet(args.folder), splits
  if args.folder:
    raise ValueError("'folder' is for 'imagenet'; add that word.")
  held_out = 16 if args.tiny else 50_000
  source = common.tfds(args.name, f'train[{held_out}:]')
  return source, {'val': f'train[:{held_out}]'}


def evaluator(objective, data, **every):
  """Of the same task as the objective, on other data."""
  task = {key: objective[key] for key in objective if key != 'target'}
  return {'target': EVALUATOR, 'data': data, **task, **every}


def set_outputs(config, channels=3):
  """Gives the model as many outputs as its task needs, in place."""
  task, patch = config.objective, config.model.patch_size
  ph, pw = (patch, patch) if isinstance(patch, int) else patch
  config.model.num_classes = {
    'mean_colour': 8**channels,
    'downsampled': 8**channels * task.downsampled_to**2,
    'pixels': ph * pw * channels,
  }[task.predict]
