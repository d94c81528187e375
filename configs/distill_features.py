r"""Distil the features of any model into a ViT, on your own images, no labels.

    python -m vit_jax.main --config=configs/distill_features.py:S/16 \
        --config.objective.teacher.path=WEIGHTS \
        --config.data.source.path=PATH --workdir=DIR

WEIGHTS are a workdir or weights in any format that vit_jax/weights reads, with
or without a head: the teacher, which keeps its own image size, resizing and
normalisation. A published one may be for large images, such as 518 px: with
--config.objective.teacher.image_size=112 it sees smaller ones. More for it,
such as {'step': 1000} of a workdir, is --config.objective.teacher.options. The
student takes all images below PATH (docs/data.md lists what else PATH can be),
and may have another width and patch size. Then DIR is the path of weights,
without the maps to the teacher's width.

DIR/report.html shows the mixed images, patches of student and teacher in
colours, the nearest neighbours of ten images, and curves:
`watch/shared_neighbours` is the fraction of the ten nearest images on which
student and teacher agree.

Arguments (separated by commas; the first of a list is the default):
  S/16, ...  the student, one of MODELS
  size=224   pixels of the student's images
  epochs=200 visits of each image
  batch=128  images
  lr=RATE    5e-4 * sqrt(batch / 1536)
  labels     PATH/CLASS/IMAGE: a tenth of each class is held out, and nearest
             neighbours and a linear classifier predict its classes
  patches    images with masks of their own judge the patches, as in evaluate.py
  tiny       seconds on a CPU, to try out the data

Loss, optimizer, crops and colours are those of "v3" in lightly-train, written
from its formulas (objectives/feature_distillation.py). The length of the queue
follows from the number of images, and may be twice or half that of v3 (16 for
fewer than 50 images); --config.objective.queue=N sets it. Epochs, warm-up,
cosine and kernels-only weight decay are our choice. What a student reaches on
your images is not known.
"""

import math

from configs import arguments, common, pretrain_folder

MODELS = ('S/16', 'Ti/16', 'S/32', 'B/16', 'B/32', 'L/16', 'L/14')


def get_config(argument=''):
  args = arguments.parse(
    argument,
    ('labels', 'patches', 'tiny'),
    model=MODELS,
    size=224,
    epochs=200.0,
    batch=128,
    lr=float,
  )
  config = common.training()
  config.total_epochs = args.epochs
  source, held_out = pretrain_folder.own(args)
  crop = common.torch_crop(args.size, (0.14, 1.0))
  config.data = common.data(source, (crop,), batch_size=args.batch)
  config.data.labels = False
  config.model = common.model(args.model, num_classes=0)
  config.objective = common.make(
    'objectives.feature_distillation.FeatureDistillation',
    teacher={'path': common.placeholder(str)},
  )
  lr = args.lr or 5e-4 * math.sqrt(args.batch / 1536)
  config.schedule = {'lr': lr, 'decay': 'cosine', 'warmup_fraction': 0.05}
  config.optimizer = common.adam(weight_decay=0.04, clip_norm=1.0)
  config.evals = pretrain_folder.evaluators(config, args, held_out)
  config.evals.watch.teacher = config.objective.get_oneway_ref('teacher')
  return common.finish(config, args)
