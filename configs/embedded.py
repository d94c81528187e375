"""Parts that the studies on embedded data share; nothing is downloaded."""

from configs import common
from vit_jax.models import names

_EMBEDDED = 'vit_jax.data.embedded'


def vit(*, patch_size, stages=None, **fields):
  """Return a small ViT; with `stages` of a ResNet a hybrid.

  The paper initialises position embeddings with a std of 0.02, which suits long
  training. With 0.5 positions matter from the first step, and a small budget
  gives a much better model.
  """
  if stages is None:
    embedding = {'target': names.PATCHES, 'patch_size': patch_size}
  else:
    embedding = {'target': names.HYBRID, 'stages': stages}
    embedding['patch_size'] = patch_size
  return {
    'target': names.VIT,
    'embedding': embedding,
    'posemb': common.posemb('Learned', init_std=0.5),
    **fields,
  }


def glyphs(size, **fields):
  """Return drawn letters and symbols in 480 classes; none is a digit."""
  target = f'{_EMBEDDED}.glyphs.Glyphs'
  return {'target': target, 'image_size': size, **fields}


def fractals(size, **fields):
  """Return fractals; they are drawn when the source is opened."""
  target = f'{_EMBEDDED}.fractals.Fractals'
  return {'target': target, 'image_size': size, **fields}


def digits(split, size, *, batch_size=128, crop=None, **fields):
  """Return handwritten digits: 'train', or 'test' by other writers.

  Args:
    split: 'train' or 'test'.
    size: pixels that the scans are resized to.
    batch_size: global.
    crop: pixels of a random crop after the resize.
    **fields: more arguments of the source.
  """
  source = {'target': f'{_EMBEDDED}.digits.Digits', 'split': split, **fields}
  transforms = common.resize(size)
  if crop:
    transforms.append(common.transform('RandomCrop', size=crop))
  return {'source': source, 'transforms': transforms, 'batch_size': batch_size}


def linear_on_digits(size, *, shots, seeds, features='pre_logits', tiny=False):
  """Return the evaluator that fits a linear classifier to a few digits."""
  few = {'examples_per_class': 2 * max(shots)} if tiny else {}
  data = {split: digits(split, size, **few) for split in ('train', 'test')}
  readouts = {'fewshot': common.few_shot(shots, seeds)}
  return common.frozen({'digits': data}, readouts, features=features)


def adam():
  """Return the optimizer of the pre-trainings, for few steps."""
  return common.adam(b2=0.95, weight_decay=0.05, clip_norm=1.0)


def cosine(lr):
  """Return a cosine schedule with a warm-up of a tenth of the steps."""
  return {'lr': lr, 'decay': 'cosine', 'warmup_fraction': 0.1}


def digits_table(rows, all_shots):
  """Return a table with a column for each number of examples per class.

  Args:
    rows: {title: (runs, metric)}, regular expressions in which SHOTS stands for
      the number of examples per class.
    all_shots: the numbers of examples per class.
  """
  cells = []
  for shots in all_shots:
    for row, patterns in rows.items():
      runs, metric = (x.replace('SHOTS', str(shots)) for x in patterns)
      column = f'{shots} per class'
      cells.append(
        {'row': row, 'column': column, 'runs': runs, 'metric': metric}
      )
  title = 'Accuracy on handwritten digits, 768 test scans'
  return common.table(cells, title=title)


def curves(shots):
  """Return the learning curves of quickstart.py's runs."""
  pretraining = {
    'train (labels smoothed)': ('pretrain', 'train/loss'),
    'validation (EMA)': ('pretrain', 'val/loss'),
  }
  transfer = {
    'fine-tuned': (rf'finetune_{shots}shot_.*', 'test/accuracy'),
    'from scratch': (rf'scratch_{shots}shot_.*', 'test/accuracy'),
  }
  title = f'Digits, {shots} per class (mean ± std of 3 draws)'
  return common.curves(
    (
      {
        'title': 'Pre-training on glyphs',
        'ylabel': 'loss',
        'lines': pretraining,
      },
      {'title': title, 'ylabel': 'test accuracy', 'lines': transfer},
    )
  )
