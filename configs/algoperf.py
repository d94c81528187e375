"""AlgoPerf's ImageNet ViT workload: S/16 to 77.309% validation accuracy.

    python -m vit_jax.main --config=configs/algoperf.py --workdir=DIR

Arguments (separated by commas; the first of a list is the default):
  self_tuning, target_setting   the optimizer settings, see below
  faults      RandAugment with the two faults of the workload's JAX code: the
              wrong mean of Contrast, and a Solarize that overflows
  synthetic   noise instead of images, and no evaluation: to time the step
              without any data
  folder      instead of TFDS's imagenet2012, images in PATH/train/CLASS and
              PATH/val/CLASS: --config.data.source.path=PATH, or
              imagenet:PATH (its tar files), wds:FILES; see docs/data.md
  tiny        seconds on a CPU, on the same data

The workload fixes model, data and loss, so that published steps to the target
are those of an optimizer, whatever the code and the machine. The yardstick is
our seconds per step times published steps. This command prints img/s, and a
step takes 1024 / (img/s) seconds; use the second line, without compilation:

    python -m vit_jax.main --config=configs/algoperf.py:synthetic \
        --config.total_steps=300 --config.log_every_steps=150 --workdir=DIR

Hours are steps x seconds / 3600. Those of AlgoPerf's own code on its A100s, at
0.386 s a step in JAX and 0.321 s in PyTorch, are:

                               steps to the target     JAX   PyTorch
    NAdamW, best self-tuning run           152,461    16.3      13.6
    Muon                                   151,926    16.3      13.5
    schedule-free AdamW                    164,206    17.6      14.6
    step hint: budget of the baseline      186,666    20.0      16.6

How many A100s these are is from memory: four. With images, "data wait" must be
near 0 too. We have neither trained this to the target nor timed it on a GPU.

From the workload's code: S/16, mean over patches, fixed 2-D sine-cosine
positions, a head with a tanh layer, zero-initialised; softmax loss;
all 1,281,167 training images; random crops of 8 to 100% of the area, bicubic,
flip, RandAugment(2, 10), mixup(0.2) with one weight for each batch; mean and
deviation of ImageNet; test images: smaller side to 256 px, central 224,
bicubic. The target is on all 50,000 validation images. The second target,
65.19% on ImageNet-V2 (10,000 images), is tested by evaluate_imagenet.py:v2.

From its NAdamW baselines: batch 1024, cosine decay to 0 after a linear warm-up,
weight decay for all parameters, and

                       self_tuning   target_setting
    steps                  186,666          140,000
    learning rate          1.75e-3          1.997e-3
    warm-up                     2%   14,075 steps
    b1, b2            0.933, 0.9955    0.7132, 0.9982
    weight decay            0.0812           0.0266
    dropout                    0.1                0
    clipping                     -                1

target_setting is the run that set an earlier target, 77.171%; that the present
one has the same settings is not known. Its steps are 3/4 of the step hint.

Differences: bfloat16 matrices (AlgoPerf: float32, on A100s TF32); the bias
correction of optax's NAdamW, which differs in the first steps; after 100 failed
attempts a crop is the whole image (AlgoPerf: the central crop, after 10); the
cubic kernel of OpenCV instead of TensorFlow's.

Precision: products in bfloat16; parameters, the gradients of kernels and their
sums over devices in float32 (--config.grad_dtype=bfloat16 rounds gradients).
"""

from configs import arguments, common

NADAMW = {  # total steps, schedule, optimizer, dropout
  'self_tuning': (
    186_666,
    {'lr': 0.0017486387539278373, 'warmup_fraction': 0.02},
    {
      'b1': 1 - 0.06733926164,
      'b2': 0.9955159689799007,
      'weight_decay': 0.08121616522670176,
    },
    0.1,
  ),
  'target_setting': (
    140_000,
    {'lr': 0.001997, 'warmup_steps': 14_075},
    {'b1': 0.7132, 'b2': 0.9982, 'weight_decay': 0.026595, 'clip_norm': 1.0},
    0.0,
  ),
}


def get_config(argument=''):
  args = arguments.parse(
    argument,
    baseline=tuple(NADAMW),
    faults=False,
    synthetic=False,
    folder=False,
    tiny=False,
  )
  if args.synthetic and args.folder:
    raise ValueError("'synthetic' and 'folder' are both data. Keep one.")
  steps, schedule, optimizer, dropout = NADAMW[args.baseline]
  config = common.training()
  config.total_steps = steps
  config.model = common.model(
    'S/16',
    pooling=common.pooling('Mean'),
    posemb=common.posemb('SinCos2d'),
    dropout=dropout,
  )
  config.model.head = {'representation_size': config.model.width}
  config.preprocess = {
    'target': 'vit_jax.preprocess.Normalize',
    'mean': (123.675, 116.28, 103.53),
    'std': (58.395, 57.12, 57.375),
  }
  source, held_out = common.imagenet(args.folder, minival=False)
  augment = common.rand_augment(10, faults=args.faults)
  crop = common.inception_crop(224, area=(0.08, 1.0), interpolation='bicubic')
  train_images = [*crop, augment]
  if args.synthetic:
    source, held_out, train_images = noise(), {}, common.resize(224)
  config.data = common.data(source, train_images, batch_size=1024)
  config.objective = common.mixed(common.xent('softmax'), mixup=0.2)
  config.optimizer = {
    'target': 'optax.nadamw',
    'decay_mask': ('.*',),
    **optimizer,
  }
  config.schedule = {'decay': 'cosine', **schedule}
  test_images = common.resize_crop(256, 224)
  test_images[0]['interpolation'] = 'bicubic'
  config.evals = common.held_out_evals(
    config, held_out, test_images, every_steps=2000
  )
  return common.tiny(config) if args.tiny else config


def noise():
  """Return as many images of noise as ImageNet has, with labels."""
  return {
    'target': 'vit_jax.data.embedded.digits.Synthetic',
    'image_size': 224,
    'num_classes': 1000,
    'num_examples': 1_281_167,
  }
