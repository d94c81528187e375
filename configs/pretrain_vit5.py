r"""ViT-5 on ImageNet: a plain ViT with newer parts, and DeiT III's recipe.

"ViT-5: Vision Transformers for the Mid-2020s" (arXiv 2602.08071).

    python -m vit_jax.main --config=configs/pretrain_vit5.py:S/16 --workdir=DIR
    python -m vit_jax.main --config=configs/pretrain_vit5.py:finetune,S/16 \
        --config.init_from.path=DIR --workdir=FINE_TUNED

The model has RMSNorm, queries and keys normalised by RMSNorm, rotary position
embeddings and a learned table, four registers that are rotated as a grid of
2x2, LayerScale, exact GELU, and no bias in q, k and v.

Arguments (separated by commas; the first of a list is the default):
  S/16, B/16, L/16   the model; B/16 and L/16 are trained at 192 px
  finetune   20 epochs at 224 px after it
  epochs=800 (L/16: 400), size=PX, folder, fsdp, tensor=1, tiny   see deit.py

Published, top-1 in % on the validation set of ImageNet at 224 px: S/16 82.2
(reproduced by another group), B/16 84.2, L/16 84.9.

From the released script: LAMB, 4e-3 (B/16 and L/16: 3e-3), weight decay 0.05,
batches of 2,048, 5 epochs of warm-up, mixup 0.8 or CutMix 1.0 in each batch,
3-Augment, colour jitter, three repeats of an image, binary cross-entropy, the
same stochastic depth in all layers (DEPTHS), EMA 0.99996. So all but the model,
its stochastic depth, the epochs of L/16 and the EMA is deit3 of
configs/deit.py, and differs as it says there. The settings of XL/16 are not
known; its model has a name, ViT-5-XL/16.
Class token and registers start at 0 and with a normal distribution (there: a
truncated one for both).
"""

from configs import arguments, common, deit

# Stochastic depth of pre-training and of fine-tuning.
DEPTHS = {'S/16': (0.05, 0.05), 'B/16': (0.2, 0.25), 'L/16': (0.35, 0.5)}


def get_config(argument=''):
  args = arguments.parse(
    argument,
    ('finetune', 'folder', 'fsdp', 'tiny'),
    model=tuple(DEPTHS),
    epochs=float,
    size=int,
    tensor=1,
  )
  args.recipe, args.data = 'deit3', 'imagenet'
  if args.finetune:  # DeiT III's S/16 would have 384 px
    args.recipe, args.size = 'deit3_finetune', args.size or 224
  elif args.model == 'L/16':
    args.epochs = args.epochs or 400.0
  config = deit.unfinished(args)
  depth = (DEPTHS[args.model][args.finetune],) * 2
  config.model = common.model(f'ViT-5-{args.model}', stochastic_depth=depth)
  config.ema = {'decay': 0.99996}
  return common.finish(config, args)
