r"""Photographs of any aspect ratio: kept, squeezed to a square, or cropped?

    pip install -e '.[elpv,dinov2]'
    python -m vit_jax.main --config=configs/studies/aspect.py --workdir=DIR

A third each of the photographs of solar cells is cut to 1:2, to 2:1, and left
square (see Strips). All models get at most 64 patches of an image, which keeps
its aspect ratio, or is resized to a square, or has its middle square cut out.
Logistic regression learns defects from frozen features of a trained DINOv2-S,
and a small ViT learns from scratch. docs/photographs.md has the result.

Arguments (separated by commas):
  seeds=5    divisions into training and test images
  tiny       one seed, few steps, to check that it runs
"""

import dataclasses
from typing import Any

from configs import arguments, common, finetune, train_folder
from configs.studies import photographs, photographs_trained

SIDE = 8  # patches
IMAGES = {'native': 'native', 'squeezed': 'squeezed', 'centre': 'centre crop'}
MODELS = {
  'frozen': ('DINOv2-S, frozen', 'frozen/cells/linear/{}'),
  'scratch': ('from scratch', 'test/{}'),
}


@dataclasses.dataclass
class Strips:
  """Images of `source`, by turns the middle half in height, in width, or whole.

  The label remains that of the whole image.
  """

  source: Any

  def __post_init__(self):
    self.num_classes = self.source.num_classes
    self.class_names = self.source.class_names
    self.labels, self.describe = self.source.labels, self.source.describe

  def __len__(self):
    return len(self.source)

  def __getitem__(self, index):
    example = dict(self.source[index])
    image = example['image']
    height, width = (slice(n // 4, n // 4 + n // 2) for n in image.shape[:2])
    cut = (height,), (slice(None), width), ()
    return example | {'image': image[cut[index % 3]]}


def get_config(argument=''):
  args = arguments.parse(argument, ('tiny',), seeds=5)
  shared = common.ConfigDict({'weights': photographs_trained.WEIGHTS})
  runs = {}
  for seed in range(1 if args.tiny else args.seeds):
    for images in IMAGES:
      run = runs[f'frozen_{images}_seed{seed}'] = frozen(args, images, seed)
      run.init_from.path = shared.get_oneway_ref('weights')
      runs[f'scratch_{images}_seed{seed}'] = scratch(args, images, seed)
  cells = [
    {'row': f'{title}, {IMAGES[images]}', 'column': column}
    | {'runs': rf'{name}_{images}_seed\d+', 'metric': path.format(metric)}
    for name, (title, path) in MODELS.items()
    for images in IMAGES
    for metric, column in photographs.METRICS.items()
  ]
  title = '656 test photographs of three shapes'
  return common.study(
    runs, [common.table(cells, title=title, name='aspect')], shared=shared
  )


def strips(args, split, seed, channels=1):
  """Return the source of a split, with `tiny` of a few images."""
  source = photographs.photographs(
    split, seed, 8 if args.tiny else None, channels
  )
  return {'target': 'configs.studies.aspect.Strips', 'source': source}


def transforms(images, patch_size):
  """Return the transforms of one kind of images."""
  px = patch_size * SIDE
  if images == 'native':
    fields = {'patch_size': patch_size, 'max_patches': SIDE**2}
    return [common.make('data.transforms.KeepAspect', **fields)]
  fields = {'interpolation': 'bilinear', 'antialias': True}
  if images == 'squeezed':
    return common.resize(px, **fields)
  small = common.make('data.transforms.ResizeSmall', size=px, **fields)
  return [small, common.make('data.transforms.CentralCrop', size=px)]


def frozen(args, images, seed):
  """Return an evaluation of logistic regression on frozen features."""
  config = common.evaluation(14 * SIDE)
  config.model = finetune.follow(config, 'from_weights')
  config.model.update(dtype='float32', keep_aspect=images == 'native')
  parts = {
    split: common.data(
      strips(args, split, seed, channels=3),
      transforms(images, 14),
      batch_size=64,
    )
    for split in ('train', 'test')
  }
  linear = common.make('evals.logistic.Logistic', C=(0.1,), standardize=True)
  config.evals = {'frozen': common.frozen({'cells': parts}, {'linear': linear})}
  return config


def scratch(args, images, seed):
  """Return a training of train_folder.py, 8 epochs of a small plain ViT."""
  config = train_folder.get_config('epochs=8')
  patches = common.make('models.vit.PatchEmbedding', patch_size=16)
  config.model = train_folder.model('stem') | {
    'embedding': patches,
    'depth': 1 if args.tiny else 4,
  }
  config.data.source = strips(args, 'train', seed)
  flip = common.make('data.transforms.FlipLR')
  config.data.transforms = [flip, *transforms(images, 16)]
  test = config.evals.test.data
  test.source = strips(args, 'test', seed)
  test.transforms = transforms(images, 16)
  del config.evals.test.every_fraction
  config.schedule.lr = 1e-3
  config.seed = seed
  if args.tiny:
    del config.total_epochs
    config.total_steps = 2
  return config
