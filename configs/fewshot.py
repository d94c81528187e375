"""Few-shot linear transfer to many data sets, in one pass over each.

    python -m vit_jax.main --config=configs/fewshot.py \
        --config.init_from.path=WEIGHTS --workdir=DIR

The paper's readout (section 4.1) of the features of any weights, by the
protocol of big_vision: 1, 5, 10 and 25 examples of each class (all, where there
are fewer), three draws of them, features whitened, strength 2**10. There is no
training; 'frozen/mean/fewshot/10shot' sums it up.

Arguments (between commas):
  caltech101, cars196, cifar100, dtd, pets, uc_merced, imagenet   any of them;
             all but imagenet, if none is given. ImageNet's examples are drawn
             from the first 65,000 of train, as there
  knn, logistic, probe   further readouts of the same features, which fit all
             training images, see evaluate.py; `logistic` is CLIP's
  sweep      few-shot's strength is chosen among 2**-10 ... 2**19 for each draw,
             on 5 further examples of each class (the strengths are scenic's,
             which takes one for all data sets)
  size=224   pixels; images are resized to 8/7 of it, aspect not kept, and cut

Splits are big_vision's: train and test; uc_merced has one only, of which the
first 1,000 images are for training. Those of the first five are from memory. If
a set is not prepared, the error shows how to do it.

Expected: the paper draws its few-shot numbers in figures only, but for those of
table 8: ImageNet 5-shot of a B/16 pre-trained on JFT, 64.2%.
"""

from ml_collections import config_dict

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
VARIANTS = ('', 'imagenet', 'pets,dtd,sweep', 'cifar100,knn,logistic,probe')


def get_config(argument=''):
  args = arguments.parse(
    argument,
    **{name: False for name in SETS},
    **{name: False for name in ('knn', 'logistic', 'probe', 'sweep')},
    size=224,
  )
  chosen = [name for name in SETS if getattr(args, name)]
  readouts = {
    name: settings
    for name, settings in evaluate.READOUTS.items()
    if name != 'fewshot' and getattr(args, name)
  }
  fewshot = {
    'target': 'vit_jax.evals.fewshot.FewShot',
    'shots': (1, 5, 10, 25),
    'seeds': (0, 1, 2),
    'l2': 2.0**10,
    'allow_fewer': True,  # cars196 has classes of 24
  }
  if args.sweep:
    fewshot['l2'] = tuple(2.0**power for power in range(-10, 20))
    fewshot['held_out_shots'] = 5
  config = common.evaluation(args.size)
  data_dir = config_dict.placeholder(str)  # one for all: any flag sets it
  config.evals = {
    'frozen': {
      'target': 'vit_jax.evals.frozen.Frozen',
      'features': 'pre_logits',
      'data': {
        name: splits(name, args.size, data_dir)
        for name in chosen or list(SETS)[:-1]
      },
      'readouts': {'fewshot': fewshot} | readouts,
    }
  }
  return config


def splits(name, size, data_dir):
  """{'train', 'test'}: arguments of the evaluation data."""
  tfds_name, *parts = SETS[name]
  transforms = common.resize(size * 8 // 7) + common.central_crop(size)
  return {
    split: {
      'source': common.tfds(tfds_name, part) | {'data_dir': data_dir},
      'transforms': transforms,
      'batch_size': 128,
      'num_workers': 0,
      'on_error': 'raise',
    }
    for split, part in zip(('train', 'test'), parts)
  }
