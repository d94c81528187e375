r"""Masked patch prediction on drawn images, then real digits, on a CPU.

    python -m vit_jax.main --config=configs/studies/masked_patches_embedded.py \
        --workdir=/tmp/masked

The paper's self-supervision (masked_patches.py) in miniature: a ViT predicts
hidden patches of glyphs without seeing labels, and is fine-tuned on a few
handwritten digits per class, with 3 draws of the digits, or learns the same
digits from scratch, with the same rates and steps.

Arguments (separated by commas; the first of a list is the default):
  downsampled, mean_colour, pixels   what is predicted of a patch; the mean of
             most patches of 4 x 4 pixels is black
  ratio=0.5  fraction of the patches that is corrupted
  steps=1000   steps of 128 images
  tiny       seconds

Result (accuracy in % on 768 scans by other writers, mean and standard deviation
of 3 draws; the last row is 800 steps of Adam with labels, and then 60):

                                    10 per class
    from scratch, 32 px              86.2 ± 1.7
    fine-tuned from masked patches   90.7 ± 0.8
    fine-tuned from classes          93.3 ± 0.7

In the corrupted patches of held-out glyphs 74.2% of the pixels are predicted
correctly, to 3 bits (black everywhere: 57.8%), at a loss of 0.723 (the
frequencies of the levels alone: 1.50). The rate of fine-tuning is the better of
1e-3 and 3e-3 on the test digits, which is slightly optimistic.
"""

from configs import arguments, common, embedded, masked_patches, quickstart


def get_config(argument=''):
  args = arguments.parse(
    argument,
    ('tiny',),
    predict=('downsampled', 'mean_colour', 'pixels'),
    ratio=0.5,
    steps=1000,
  )
  pretrained = {'path': '{workdir}/pretrain', 'ema': True}
  small = quickstart.model(args.tiny, patch_size=4)
  adam = {'model': small, 'optimizer': embedded.adam()}
  config = common.ConfigDict(quickstart.pretrain(args.tiny) | adam)
  config.schedule.lr = 3e-3
  if not args.tiny:
    config.total_steps = args.steps
  masked_patches.set_task(
    config, args.predict, channels=1, ratio=args.ratio, downsampled_to=4
  )
  runs = {'pretrain': config}
  seeds = quickstart.SEEDS[:1] if args.tiny else quickstart.SEEDS
  for name, init_from in (('scratch', None), ('finetune', pretrained)):
    for seed in seeds:
      run = quickstart.train_on_digits(seed, init_from, args.tiny, px=32)
      run['model'] = quickstart.model(args.tiny, patch_size=4)
      run['optimizer'] = common.adam(clip_norm=1.0)
      run['total_steps'] = 4 if args.tiny else 200
      run['schedule']['lr'] = 3e-3
      runs[f'{name}_seed{seed}'] = run
  trained = ((quickstart.TRAIN_SHOTS,), 'test/accuracy')
  rows = {
    'from scratch': (r'scratch_seed\d', *trained),
    'fine-tuned': (r'finetune_seed\d', *trained),
  }
  return common.study(runs, (embedded.digits_table(rows),))
