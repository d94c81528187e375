"""AugReg's released weights: their file names, and which of them to take.

"How to train your ViT?" released its models as
gs://vit_models/augreg/NAME.npz, where NAME tells how each was trained:

  B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0
  ...--imagenet2012-steps_20k-lr_0.03-res_384      fine-tuned from the former

Labels of augmentation differ: the files' light0 and light1 are the paper's
light1 and light2 (medium and strong are the same in both).
"""

import csv
import dataclasses
import os
import re
from collections.abc import Iterable, Mapping

from vit_jax.weights.fetch import fetch

FOLDER = 'gs://vit_models/augreg'
MODELS = {  # in file names: ours
  'Ti_16': 'ViT-Ti/16',
  'S_32': 'ViT-S/32',
  'S_16': 'ViT-S/16',
  'B_32': 'ViT-B/32',
  'B_16': 'ViT-B/16',
  'B_8': 'ViT-B/8',
  'L_16': 'ViT-L/16',
  'R_Ti_16': 'R+ViT-Ti/16',
  'R26_S_32': 'R26+ViT-S/32',
  'R50_L_32': 'R50+ViT-L/32',
}
_NUMBER = r'[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?'
_NAME = re.compile(
  r'(?P<model>\w+)-(?P<dataset>i21k_30|i21k|i1k)-(?P<epochs>[0-9]+)ep'
  rf'-lr_(?P<lr>{_NUMBER})-aug_(?P<aug>\w+)-wd_(?P<wd>{_NUMBER})'
  rf'-do_(?P<dropout>{_NUMBER})-sd_(?P<stochastic_depth>{_NUMBER})'
  r'(?:--(?P<adapt_dataset>\w+)-steps_(?P<adapt_steps>[0-9]+k?)'
  rf'-lr_(?P<adapt_lr>{_NUMBER})-res_(?P<resolution>[0-9]+))?'
)


@dataclasses.dataclass(frozen=True)
class Name:
  """What a file name tells; the last four are None unless fine-tuned."""

  model: str  # our name, 'R50+ViT-L/32'
  dataset: str  # 'i1k', 'i21k' or, for 30 epochs, 'i21k_30'
  epochs: int
  lr: float
  aug: str  # the file's label
  wd: float
  dropout: float
  stochastic_depth: float
  adapt_dataset: str | None = None  # 'imagenet2012', 'cifar100', ...
  adapt_steps: int | None = None
  adapt_lr: float | None = None
  resolution: int | None = None  # pixels


# i21k, 300 epochs: the authors' choice, and ImageNet's top-1 when fine-tuned
# at 384 pixels.
RECOMMENDED = {
  name.model: (name, top1)
  for name, top1 in (
    (Name(model, 'i21k', 300, 1e-3, aug, wd, drop, drop), top1)
    for model, aug, wd, drop, top1 in (
      ('ViT-L/16', 'strong1', 0.1, 0.0, 85.59),
      ('ViT-B/16', 'medium1', 0.1, 0.0, 85.49),
      ('ViT-S/16', 'light1', 0.03, 0.0, 83.73),
      ('R50+ViT-L/32', 'medium1', 0.1, 0.1, 85.99),
      ('R26+ViT-S/32', 'light1', 0.1, 0.0, 83.85),
      ('ViT-Ti/16', 'none', 0.03, 0.0, 78.22),
      ('ViT-B/32', 'light1', 0.1, 0.0, 83.59),
      ('ViT-S/32', 'none', 0.1, 0.0, 79.58),
      ('R+ViT-Ti/16', 'none', 0.03, 0.0, 75.40),
    )
  )
}


def parse(name: str) -> Name:
  """What a file name tells; folders before it and .npz after it may be there.

  Raises:
    ValueError: it is not of that form.
  """
  stem = name.rsplit('/', 1)[-1].removesuffix('.npz')
  found = _NAME.fullmatch(stem)
  if not found or found['model'] not in MODELS:
    raise ValueError(
      f'{name!r} is no file name of AugReg. Expected MODEL-DATASET-EPOCHSep-'
      'lr_X-aug_LABEL-wd_X-do_X-sd_X[--DATASET-steps_Nk-lr_X-res_N], as in '
      f"'B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0'; MODEL is "
      f'one of {", ".join(MODELS)}.'
    )
  values = found.groupdict()
  steps = values.pop('adapt_steps')
  values['model'] = MODELS[values['model']]
  for field in ('epochs', 'resolution'):
    values[field] = values[field] and int(values[field])
  for field in ('lr', 'wd', 'dropout', 'stochastic_depth', 'adapt_lr'):
    values[field] = values[field] and float(values[field])
  if steps is not None:
    thousand = 1000 if steps.endswith('k') else 1
    steps = int(steps.removesuffix('k')) * thousand
  return Name(**values, adapt_steps=steps)


def file_name(name: Name) -> str:
  """The inverse of parse, with .npz.

  Raises:
    ValueError: AugReg has no such model.
  """
  theirs = {ours: theirs for theirs, ours in MODELS.items()}
  if name.model not in theirs:
    raise ValueError(
      f'AugReg has no {name.model}; it has {", ".join(MODELS.values())}.'
    )
  text = (
    f'{theirs[name.model]}-{name.dataset}-{name.epochs}ep-lr_{name.lr}'
    f'-aug_{name.aug}-wd_{name.wd}-do_{name.dropout}'
    f'-sd_{name.stochastic_depth}'
  )
  if name.adapt_dataset is not None:
    steps = name.adapt_steps
    steps = f'{steps // 1000}k' if steps % 1000 == 0 else str(steps)
    text += (
      f'--{name.adapt_dataset}-steps_{steps}-lr_{name.adapt_lr}'
      f'-res_{name.resolution}'
    )
  return f'{text}.npz'


def read_index(
  path: str | os.PathLike = f'{FOLDER}/index.csv',
) -> list[dict[str, str]]:
  """Records of the table of all files, a dict of its columns each.

  Columns read here: filename, ds, final_val, and of what was fine-tuned
  adapt_filename, adapt_ds, adapt_resolution, adapt_final_val.

  Raises:
    ValueError: it cannot be read, or lacks those.
  """
  local = fetch(path)
  try:
    with local.open(encoding='utf-8', newline='') as f:
      records = list(csv.DictReader(f))
  except (ValueError, csv.Error) as e:  # ValueError: no UTF-8
    raise ValueError(f'{path} is no table (CSV): {e}') from e
  needed = {'filename', 'ds', 'final_val', 'adapt_filename', 'adapt_ds'}
  needed |= {'adapt_resolution', 'adapt_final_val'}
  have = records[0].keys() if records else ()
  if missing := sorted(needed.difference(have)):
    raise ValueError(
      f"{path} lacks the columns {', '.join(missing)} of AugReg's index."
    )
  return records


def best(
  records: Iterable[Mapping[str, str]],
  model: str,
  *,
  dataset: str = 'i21k',
  adapt_dataset: str | None = None,
  resolution: int | None = None,
  folder: str = FOLDER,
) -> str:
  """The path of a model's best file by accuracy on held-out data.

  Args:
    records: of read_index.
    model: our name, such as 'R50+ViT-L/32'; 'ViT-' may be left out.
    dataset: what it was pre-trained with.
    adapt_dataset, resolution: what it was fine-tuned with; with neither, the
      pre-trained model that was best before fine-tuning.
    folder: where the files are.

  Raises:
    ValueError: there is none; says what there is.
  """
  adapted = adapt_dataset is not None or resolution is not None
  wanted = {'dataset': dataset, 'model': model.replace('ViT-', '')}
  wanted |= {'adapt_dataset': adapt_dataset} if adapt_dataset else {}
  wanted |= {'resolution': resolution} if resolution else {}
  found, there = [], {field: set() for field in wanted}
  for record in records:
    values = _values(record)
    values = {field: values[field] for field in wanted}
    # What there is of the one, given all that stands before it.
    for field, value in values.items():
      there[field].add(value)
      if value != wanted[field]:
        break
    else:
      score = record['adapt_final_val' if adapted else 'final_val']
      name = record['adapt_filename' if adapted else 'filename']
      if score and name:
        found.append((float(score), name))
  if not found:
    shown = '; '.join(
      f'{field}: {", ".join(sorted(map(str, values)))}'
      for field, values in there.items()
      if values
    )
    raise ValueError(f'AugReg has no file with {wanted}. There is {shown}.')
  name = max(found, key=lambda pair: pair[0])[1]
  return f'{folder}/{name.removesuffix(".npz")}.npz'


def _values(record):
  model = record['filename'].split('-')[0]
  resolution = record['adapt_resolution']
  return {
    'dataset': record['ds'],
    'model': MODELS.get(model, model).replace('ViT-', ''),
    'adapt_dataset': record['adapt_ds'],
    'resolution': int(float(resolution)) if resolution else None,
  }
