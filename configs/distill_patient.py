r"""A patient and consistent teacher on ImageNet: BiT-R152x2 teaches an R50x1.

"Knowledge distillation: A good teacher is patient and consistent" (Beyer et
al., 2021).

    python -m vit_jax.main --config=configs/distill_patient.py \
        --config.objective.objective.teacher.path=WEIGHTS --workdir=DIR

WEIGHTS have the 1000 classes of ImageNet; the paper's teacher is a BiT-M R152x2
fine-tuned at 224 px, in timm (the name is from memory)
hf://timm/resnetv2_152x2_bit.goog_teacher_in21k_ft_in1k.

Arguments (separated by commas):
  epochs=1200   the paper has 300 to 9600: the longer the better
  folder, tiny  see "Config options" in docs/training.md

Published: 82.8% top-1 (abstract; the longest training, 9600 epochs, is from
memory). What 1200 epochs reach is not known here.

Teacher and student see the same mixed images, because mixup is outside of the
distillation. The settings are those of big_vision's distill/bit_i1k. Its
decoupled decay of 3e-4, which is not multiplied by the rate, is 0.01 here.
"""

from configs import arguments, common


def get_config(argument=''):
  args = arguments.parse(argument, ('folder', 'tiny'), epochs=1200.0)
  source, held_out = common.splits(args, 'imagenet')
  source['split'] = 'train[:98%]'
  config = common.pretraining(source, held_out)
  config.total_epochs = args.epochs
  config.model = common.model('R50x1')
  config.objective = common.mixed(
    common.distillation(common.xent('softmax')), mixup=1.0
  )
  config.optimizer = common.clipped_adam(weight_decay=0.01)
  config.schedule = {'lr': 0.03, 'decay': 'cosine', 'warmup_steps': 5000}
  return common.finish(config, args)
