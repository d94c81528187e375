r"""DeiT and DeiT III on ImageNet: pre-training, distillation, fine-tuning.

"Training data-efficient image transformers & distillation through attention"
and "DeiT III: Revenge of the ViT" (Touvron et al., 2021 and 2022).

    python -m vit_jax.main --config=configs/deit.py:deit,S/16 --workdir=DIR
    python -m vit_jax.main --config=configs/deit.py:deit,S/16,distilled \
        --config.objective.objective.teacher.path=WEIGHTS --workdir=DIR
    python -m vit_jax.main --config=configs/deit.py:deit3_finetune,B/16 \
        --config.init_from.path=PRETRAINING_WORKDIR --workdir=DIR

The teacher has the 1000 classes of ImageNet. The last command also takes
published weights, such as hf://timm/deit3_base_patch16_224.fb_in1k.

Arguments (separated by commas; the first of a list is the default):
  deit, deit3, deit3_finetune   the recipe
  S/16, Ti/16, B/16, M/16, L/16, H/14   the model: deit has the first three,
              deit3 all but Ti/16
  imagenet, imagenet21k   the data of deit3 (see pretrain_paper.py); of
              deit3_finetune, the data of pre-training
  distilled, soft   deit: with a distillation token, which learns the teacher's
              most probable class, or its probabilities
  epochs=EPOCHS   deit 300; deit3 800, on imagenet21k 240 and for H/14 90;
              deit3_finetune 20, after imagenet21k 50
  size=PX     deit3_finetune: 224; for imagenet,S/16, trained at 224 px, 384.
              After imagenet21k, fine-tune the result again with imagenet
  folder, fsdp, tensor=1, tiny   see "Config options" in docs/training.md

Published: top-1 in % on the validation set of ImageNet. deit at 224 px, the
distilled models with hard distillation by a RegNetY-16GF (82.9, from memory);
deit3 after fine-tuning:

                              Ti/16    S/16    M/16    B/16    L/16    H/14
    deit                       72.2    79.9       -    81.8       -       -
      distilled                74.5    81.2       -    83.4       -       -
    deit3, 224 px                 -    81.4    83.0    83.8    84.9    85.2
      384 px                      -    83.4       -    85.0    85.8       -
    deit3, imagenet21k, 224       -    83.1    84.5    85.7    87.0    87.2
      384 px                      -    84.8       -    86.7    87.7       -

The numbers are those of the papers' scripts. From memory: deit's crops,
stochastic depth, GELU, decay of kernels only, and the settings of its
distillation. From deit3-jax on GitHub: LAMB's epsilon and its clipping; test
images; 154 and 126 px of H/14, 160 and 128 in the README. From mmpretrain: the
stochastic depth of B/16 and L/16 at 384 px. Not known: the settings of M/16,
where stochastic depth, 224 px and 3e-3 are our choice.

Different here: the warm-up starts at 0 instead of 1e-6, and rates change with
each step instead of each epoch; the loss of `soft` is summed over classes (the
released code divides by their number); class and distillation token start at 0,
like the bias of the patch embedding (uniform there, and so is its kernel); in
timm, LayerScale starts at 1e-6; query, key and value are one parameter of LAMB
there; the noise of random erasing is clipped to [0, 255]; evaluators use the
EMA; deit3 has no EMA; position embeddings are interpolated by a cubic kernel
with a = -0.5 (PyTorch: -0.75, from memory); 51,200 images of ImageNet-21k are
held out.
"""

from configs import arguments, common

MODELS = {
  'deit': ('S/16', 'Ti/16', 'B/16'),
  'deit3': ('S/16', 'B/16', 'M/16', 'L/16', 'H/14'),
}
MODELS['deit3_finetune'] = MODELS['deit3']
RECIPES = {  # epochs, learning rate, batch size, weight decay
  ('deit', 'imagenet'): (300.0, 1e-3, 1024, 0.05),
  ('deit3', 'imagenet'): (800.0, 3e-3, 2048, 0.05),
  ('deit3', 'imagenet', 'S/16'): (800.0, 4e-3, 2048, 0.05),
  ('deit3', 'imagenet21k'): (240.0, 1e-3, 2048, 0.02),
  ('deit3', 'imagenet21k', 'H/14'): (90.0, 1e-3, 2048, 0.02),
  ('deit3_finetune', 'imagenet'): (20.0, 1e-5, 512, 0.1),
  ('deit3_finetune', 'imagenet21k'): (50.0, 3e-4, 2048, 0.02),
}
SIZES = {  # pixels; else 224
  ('deit3', 'imagenet'): {'B/16': 192, 'L/16': 192, 'H/14': 154},
  ('deit3', 'imagenet21k'): {'H/14': 126},
  ('deit3_finetune', 'imagenet'): {'S/16': 384},
}
STOCHASTIC_DEPTH = {  # on imagenet, imagenet21k; fine-tuning after each
  'S/16': (0.05, 0.05, 0.0, 0.05),
  'M/16': (0.1, 0.05, 0.1, 0.1),
  'B/16': (0.2, 0.1, 0.2, 0.15),
  'L/16': (0.45, 0.3, 0.45, 0.4),
  'H/14': (0.6, 0.5, 0.55, 0.45),
}
AT_384_PX = {'B/16': 0.15, 'L/16': 0.4}  # fine-tuning on imagenet


def get_config(argument=''):
  args = arguments.parse(
    argument,
    ('distilled', 'soft', 'folder', 'fsdp', 'tiny'),
    recipe=tuple(MODELS),
    model=tuple(dict.fromkeys(MODELS['deit'] + MODELS['deit3'])),
    data=('imagenet', 'imagenet21k'),
    epochs=float,
    size=int,
    tensor=1,
  )
  return common.finish(unfinished(args), args)


def unfinished(args):
  """Return the run for `args`, which `common.finish` completes."""
  recipe = args.recipe, args.data
  if recipe not in RECIPES or args.model not in MODELS[args.recipe]:
    raise ValueError(
      f'{args.recipe} has no {args.model} on {args.data}. Use one of '
      f'{", ".join(MODELS[args.recipe])} on imagenet.'
    )
  epochs, lr, batch_size, weight_decay = (
    RECIPES.get((*recipe, args.model)) or RECIPES[recipe]
  )
  size = args.size or SIZES.get(recipe, {}).get(args.model, 224)
  is_deit, finetuning = args.recipe == 'deit', args.recipe == 'deit3_finetune'
  on_21k = args.data == 'imagenet21k'
  config = common.training()
  config.preprocess = common.imagenet_colours()
  config.model = transformer(args)
  config.objective = objective(args)
  crop = common.torch_crop(size, (0.08, 1.0))
  if on_21k:  # DeiT III's simple crop
    crop = common.make('data.transforms.SimpleRandomCrop', size=size)
  images = [crop, common.make('data.transforms.FlipLR')]
  if recipe in (('deit', 'imagenet'), ('deit3_finetune', 'imagenet')):
    config.optimizer = common.adam(weight_decay=weight_decay)
    rand_augment = common.make(
      'data.augment.rand_augment',
      policy='rand-m9-mstd0.5-inc1',
      interpolation='bicubic',
      fill=(124, 116, 104),  # ImageNet's mean
    )
    images.append(rand_augment)
  else:
    config.optimizer = common.make(
      'optim.optimizers.lamb',
      eps=1e-8,
      weight_decay=weight_decay,
      clip_norm=1.0,
    )
    images.append(common.make('data.augment.ThreeAugment'))
    images.append(common.make('data.augment.ColorJitter'))
  if is_deit:
    config.ema = {'decay': 0.99996}
    images.append(common.make('data.augment.RandomErasing', probability=0.25))
  fields = {'every_steps': 5000}
  if args.recipe == 'deit3':
    fields['loss'] = 'softmax' if on_21k else 'sigmoid'
  if finetuning:
    fields = {'every_fraction': 0.1}
    config.init_from = {
      'path': common.placeholder(str),
      'head': 'reset' if on_21k else 'keep',
      'posemb_resize': 'bicubic_antialias',
    }
  data = 'imagenet' if finetuning else args.data
  source, held_out = common.splits(args, data, minival=False)
  config.data = common.data(source, images, batch_size=batch_size)
  if not (on_21k or finetuning):
    config.data.order = common.make('data.order.Repeated', times=3)
  margin = 0.875 if is_deit else 1.0
  test_images = common.evaluation_images('timm', size, crop=margin)
  config.evals = common.held_out_evals(config, held_out, test_images, **fields)
  config.total_epochs = args.epochs or epochs
  config.schedule = {'lr': lr, 'decay': 'timm_cosine', 'end_lr': 1e-5}
  config.schedule.warmup_epochs = 5.0
  return config


def transformer(args):
  """Return a model with DeiT's GELU and initialisation."""
  fields = {'block': {'mlp': {'form': 'exact'}, 'init_std': 0.02}}
  if args.recipe == 'deit':
    fields['stochastic_depth'] = 0.1
    if args.distilled or args.soft:
      fields['pooling'] = common.make('models.pooling.DistillationToken')
  else:
    stage = 2 * (args.recipe == 'deit3_finetune') + (args.data != 'imagenet')
    depth = STOCHASTIC_DEPTH[args.model][stage]
    if stage == 2 and args.size == 384:
      depth = AT_384_PX.get(args.model, depth)
    fields['stochastic_depth'] = (depth, depth)
    fields['block']['layerscale_init'] = 1e-4
    fields['posemb'] = common.make('models.posemb.Learned', prefix=False)
  model = common.model(args.model, head={'init_std': 0.02}, **fields)
  model['embedding']['init_std'] = 0.02
  if (args.recipe, args.data) == ('deit3', 'imagenet21k'):
    model['num_classes'] = 21_843
  return model


def objective(args):
  """Return the loss of mixed images, which teacher and student both see."""
  smoothed = common.xent('softmax', label_smoothing=0.1)
  if args.data == 'imagenet21k':
    return common.mixed(smoothed, cutmix=1.0)
  inner = common.bce() if args.recipe == 'deit3' else smoothed
  if args.recipe == 'deit' and args.soft:
    soft = {'kind': 'soft', 'weight': 0.1, 'temperature': 3.0}
    inner = common.distillation(smoothed, **soft)
  elif args.recipe == 'deit' and args.distilled:
    inner = common.distillation(smoothed, kind='hard', weight=0.5)
  return common.mixed(inner, mixup=0.8, cutmix=1.0)
