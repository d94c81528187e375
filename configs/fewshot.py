r"""Few-shot linear transfer to many data sets, in one pass over each.

    python -m vit_jax.main --config=configs/fewshot.py \
        --config.init_from.path=WEIGHTS --workdir=DIR

The paper's readout (section 4.1) of the features of any weights, with
big_vision's protocol and splits (common_fewshot.py): 1, 5, 10 and 25 examples
of each class (all, if there are fewer), three draws, whitened features, ridge
strength 2**10. 'frozen/mean/fewshot/10shot' is the summary.

Arguments (separated by commas):
  caltech101, cars196, cifar100, dtd, pets, uc_merced, imagenet   any of them;
             all except imagenet if none is given
  knn, logistic   more readouts of the same features, see evaluate.py
  sweep      choose the ridge strength among 2**-10 ... 2**19 (scenic's) for
             each draw, on 5 more examples of each class
  size=224   pixels; images are resized to 8/7 of it, without keeping the aspect
             ratio, and the centre is cropped

Expected: the paper draws its few-shot results in figures only, except for table
8: ImageNet 5-shot of a B/16 pre-trained on JFT, 64.2%.
"""

from configs import arguments, common, evaluate

SETS = {  # TFDS name, train, test
  'caltech101': ('caltech101', 'train', 'test'),
  'cars196': ('cars196', 'train', 'test'),
  'cifar100': ('cifar100', 'train', 'test'),
  'dtd': ('dtd', 'train', 'test'),
  'pets': ('oxford_iiit_pet', 'train', 'test'),
  'uc_merced': ('uc_merced', 'train[:1000]', 'train[1000:]'),
  'imagenet': ('imagenet2012', 'train[:65000]', 'validation'),
}


def get_config(argument=''):
  args = arguments.parse(
    argument, (*SETS, 'knn', 'logistic', 'sweep'), size=224
  )
  few_shot = common.few_shot((1, 5, 10, 25), l2=(2.0**10,))
  few_shot['allow_fewer'] = True  # cars196 has classes of 24
  if args.sweep:
    few_shot['l2'] = tuple(2.0**power for power in range(-10, 20))
    few_shot['held_out_shots'] = 5
  more = [x for x in ('knn', 'logistic') if getattr(args, x)]
  readouts = {'fewshot': few_shot} | {x: evaluate.READOUTS[x] for x in more}
  chosen = [x for x in SETS if getattr(args, x)] or list(SETS)[:-1]
  config = common.evaluation(args.size)
  data_dir = common.placeholder(str)  # shared: a flag for one sets all
  how = {'data_dir': data_dir, 'batch_size': 128}
  data = {x: common.few_shot_data(*SETS[x], args.size, **how) for x in chosen}
  config.evals = {'frozen': common.frozen(data, readouts)}
  return config
