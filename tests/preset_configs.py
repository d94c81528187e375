"""Configs of the folder configs/ for tests: their arguments, and helpers."""

import importlib
import pathlib
import sys

import tiny

from vit_jax.config import walk
from vit_jax.weights import formats
from vit_jax.zoo import names

ROOT = pathlib.Path(__file__).parents[1]


def load_module(name):
  # Users start in the root of the repository and import configs from there.
  if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
  is_study = (ROOT / 'configs' / 'studies' / f'{name}.py').exists()
  return importlib.import_module(f'configs{".studies" * is_study}.{name}')


def load_config(name, argument=''):
  return load_module(name).get_config(argument)


_ARGUMENTS = {  # with which the tests load each config; 'default' is none
  'ablations': """
    positions pooling head axial optimizer
    positions,name=my_set,classes=0,epochs=3
    positions,tiny pooling,tiny head,tiny axial,tiny optimizer,tiny
    positions,embedded,steps=300,seeds=3
  """,
  'aspect': 'default seeds=1 tiny',
  'deit': """
    deit,S/16 deit,Ti/16,soft deit,B/16,distilled,epochs=1000,folder
    deit3,S/16 deit3,M/16 deit3,H/14,imagenet21k,fsdp,tensor=2
    deit3_finetune,B/16 deit3_finetune,L/16,imagenet21k,folder
    deit3_finetune,B/16,size=384,epochs=10 deit,distilled,tiny deit3,tiny
    deit3,H/14,imagenet21k,fsdp,tiny deit3_finetune,H/14,tiny
    deit3_finetune,imagenet21k,tiny
  """,
  'dense': 'default seeds=1,steps=4 tiny',
  'distill_features': 'default B/32,size=192,batch=64,lr=1e-3 labels,tiny tiny',
  'distill_patient': 'default epochs=300 folder tiny',
  'evaluate': """
    folder tfds folder,fewshot tfds,fewshot,size=384
    tfds,accuracy,knn,logistic,flip folder,logistic,layers=1,flip
    folder,number=age tfds,labels=a+b
  """,
  'evaluate_imagenet': """
    default val,real,size=384,original v2,topimages a,r
    val,timm,flip sketch,big_vision val,original,size=384
  """,
  'fewshot': 'default imagenet pets,dtd,sweep cifar100,knn,logistic',
  'finetune': """
    imagenet,B/16 imagenet,L/16,polyak imagenet,H/14,polyak
    imagenet,B/16,dev,lr=.06
    cifar10,B/32 cifar100,L/32,resize pets,B/16,dev,resize
    flowers,S/16,size=224,resize folder,Ti/16,epochs=20
    folder,S/32,held_out=20,balanced folder,B/16,class_weights
    imagenet,R50+B/16,lr=.06 flowers,R26+S/32,size=224 cifar10,R+Ti/16
    imagenet,R152x2,bit,size=480 cifar100,R101x3,bit,dev
    folder,R50x2,bit,epochs=20 cifar10,Mixer-B/16 imagenet,B/16,tiny
    folder,from_weights,tiny cifar10,tiny imagenet,S/16,augreg,size=224
    imagenet,B/32,augreg,dev,v2 cifar100,L/16,augreg,steps=2500
    kitti,Ti/16,augreg resisc45,B/16,augreg,dev,steps=10000
    kitti,augreg,steps=2500,tiny folder,from_weights,labels=a+b
  """,
  'flexivit': """
    imagenet imagenet21k imagenet21k,distilled,epochs=300,fsdp imagenet,folder
    imagenet21k,tiny imagenet,tiny
  """,
  'guides': 'default seeds=1,steps=4 tiny',
  'masked_patches': """
    B/16 L/32 B/16,downsampled B/16,pixels,ratio=0.15
    B/16,name=my_set,steps=100000 B/16,imagenet B/16,imagenet,folder B/16,tiny
    B/16,imagenet,downsampled,tiny B/32,imagenet,pixels,tiny
  """,
  'masked_patches_embedded': 'default tiny',
  'photographs': 'default seeds=1 tiny',
  'photographs_labels': 'default seeds=1 tiny',
  'photographs_trained': 'default seeds=1 tiny',
  'pretrain_augreg': """
    imagenet,B/16 imagenet,Ti/16,light2 imagenet,S/16,folder
    imagenet,B/32,strong2,reg=0,faults imagenet,R+Ti/16,light2
    imagenet,R50+L/32,medium1 imagenet21k,L/16,strong1,reg=0.1
    imagenet21k,B/16,epochs=30,medium2 imagenet,B/16,tiny
    imagenet21k,R50+L/32,tiny
  """,
  'pretrain_better_plain': """
    S/16 S/16,epochs=150,faults S/16,folder B/16 B/16,tiny S/16,faults,tiny
  """,
  'pretrain_bit': """
    imagenet,R50x1 imagenet21k,R152x4
    imagenet,R50x1,folder,epochs=30 imagenet,R50x1,tiny imagenet21k,R152x2,tiny
  """,
  'pretrain_folder': """
    default dino,labels mae,B/16,size=192 visreg,B/16,epochs=9,batch=64
    simdino,lr=1e-3 lejepa,from_weights mae,imagenet,B/16 dino,imagenet,folder
    lejepa,imagenet,Ti/16,tiny mae,labels,tiny lejepa,H/14,local=98,tiny
    lejepa,stem,size=96,local=64 lejepa,stem,size=96,local=64,tiny
    dinov2,B/16 dinov2,from_weights,anchor,forget=site
    lejepa,from_weights,anchor,tiny
  """,
  'pretrain_paper': """
    B/16 imagenet,H/14 imagenet,B/16,folder,epochs=90 imagenet,B/16,tiny
    imagenet21k,L/16 imagenet21k,L/32,epochs=30 imagenet21k,L/16,fsdp,tensor=2
    imagenet21k,B/16,tiny jft,L/16 jft,R50+B/16 jft,R50x1 jft,R200x3,lr=5e-4
    jft,R152x2,sgd jft,B/16,name=my_set,classes=0 jft,H/14,fsdp
    jft,R50+L/32,tiny jft,R101x1,sgd,tiny
  """,
  'pretrain_scaling_vit': """
    G/14 g/14 So400m/14 Ti/16
    G/14,epochs=3,fsdp,tensor=2,name=my_set,classes=0 So400m/14,epochs=1
    G/14,fsdp,tensor=2,tiny So400m/14,tiny
  """,
  'pretrain_vit5': """
    S/16 B/16,fsdp,folder S/16,epochs=400,size=192 tiny
    finetune,S/16 finetune,B/16,tiny L/16
  """,
  'quickstart': 'default tiny',
  'race': 'default all,seeds=3 tiny all,tiny',
  'recipes_embedded': 'default seeds=1,steps=300 tiny',
  'scaling': """
    compute,R200x3,lr=5e-4,seeds=3 compute,B/32,R50x1,R50+B/32
    compute,name=my_set,classes=0,L/16,H/14 compute,B/32,R50x1,tiny
    data data,name=my_set,classes=0,images=5000000,sizes=500k+1M+all,B/32,R50x1
    data,fig3 data,fig3,B/16,H/14,R50x1,seeds=3 data,B/32,sizes=9M+all,tiny
    data,fig3,tiny shape shape,depth,lr=3e-4,epochs=14 shape,patch,all,tiny
  """,
  'scaling_embedded': 'default seeds=2,steps=300 tiny',
  'science': """
    default positions patches muon fractal,seeds=1 warmup parts_glyphs
    parts_photographs,seeds=3 rates
    tiny positions,tiny patches,tiny muon,tiny fractal,tiny warmup,tiny
    parts_glyphs,tiny parts_photographs,tiny rates,tiny
  """,
  'self_supervised_embedded': 'default seeds=1,steps=9 tiny',
  'teachers': 'default seeds=1 tiny',
  'train_folder': """
    default S/16,size=224,held_out=20,balanced B/16,class_weights,epochs=3
    R50x1,lr=3e-3 Mixer-B/16,size=224 tiny
    labels=a+b,class_weights number=age R50x1,order=1<2,balanced,tiny
  """,
  'transfer': """
    default imagenet,L/16,jft,polyak H/14,cifar10,pets,seeds=1
    R50x1,jft,flowers,bit R50+B/16,jft,imagenet,size=224,resize tiny
    R50x1,pets,bit,tiny B/16,augreg L/16,augreg,imagenet1k,size=224,seeds=1
    S/16,augreg,pets,kitti,tiny
  """,
  'vtab': """
    default L/16,kitti,dtd,sweep,seeds=1 H/14,natural,kitti
    R50x1,specialized,size=224 Mixer-B/16,structured tiny
    seeds=1,sweep,dtd,clevr_count,tiny
  """,
}
VARIANTS = {
  name: tuple(x.replace('default', '') for x in text.split())
  for name, text in _ARGUMENTS.items()
}
for _name in load_module('pretrain_folder').METHODS:
  VARIANTS['pretrain_folder'] += (f'{_name},tiny', f'{_name},imagenet')
CLASSES = {  # of TFDS sets; 'folder' is a folder of the user's
  'imagenet2012': 1000,
  'imagenet21k': 21_843,
  'jft': 18_291,
  'jft_3b': 29_593,
  'my_set': 7,
  'cifar10': 10,
  'cifar100': 100,
  'oxford_iiit_pet': 37,
  'oxford_flowers102': 102,
  'resisc45': 45,
  'kitti': 4,
  'folder': 5,
}


KINDS = {}  # {config: what its `run` is}
for _name in VARIANTS:
  KINDS[_name] = load_config(_name, VARIANTS[_name][0]).run.rpartition('.')[2]
TRAINING, STUDIES, EVALUATIONS = (
  [name for name, kind in KINDS.items() if kind == wanted]
  for wanted in ('train', 'study', 'evaluate')
)


def variants(configs):
  return [(name, x) for name in configs for x in VARIANTS[name]]


def find_distillation(config):
  """Return the distillation in the objective, or None."""
  objective = config.objective
  while objective is not None and 'teacher' not in objective:
    objective = objective.get('objective')
  return objective


def flat(config):
  """Return {path: value}, with references resolved."""
  return dict(walk(config.to_dict()))


def difference(run, name, argument):
  """Return {path: value in the run} where it differs from another config."""
  defaults = {'accum_steps': 1, 'num_workers': None, 'remat': 'none', 'seed': 0}

  def changed(config):
    return {
      path: value
      for path, value in flat(config).items()
      if defaults.get(path.rpartition('.')[2], ...) != value
    }

  run, other = changed(run), changed(load_config(name, argument))
  paths = run.keys() | other.keys()
  return {p: run.get(p) for p in paths if run.get(p) != other.get(p)}


def write_weights(path, model, num_classes=3, size=28, **attributes):
  """Write weights of an untrained model by its name; return the path."""
  model = names.create(model, num_classes=num_classes)
  weights = tiny.weights(model, (size, size, 3), 0.1, **attributes)
  formats.write(weights, path, 'npz')
  return str(path)
