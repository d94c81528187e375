"""The study of table 6: published numbers, settings, and the grid."""

import pytest
from etils import epath
from test_configs import load_config
from test_scaling_configs import difference, run_name

from vit_jax import study

# Model, epochs; ImageNet, ReaL, CIFAR-10, -100, Pets, Flowers; exaFLOPs.
TABLE_6 = """
  B/32      7  80.73  86.27  98.61  90.49  93.40  99.27    55
  B/16      7  84.15  88.85  99.00  91.87  95.80  99.56   224
  L/32      7  84.37  88.28  99.19  92.52  95.83  99.45   196
  L/16      7  86.30  89.43  99.38  93.46  96.81  99.66   783
  L/16     14  87.12  89.99  99.38  94.04  97.11  99.56  1567
  H/14     14  88.08  90.36  99.50  94.71  97.11  99.71  4262
  R50x1     7  77.54  84.56  97.67  86.07  91.11  94.26    50
  R50x2     7  82.12  87.94  98.29  89.20  93.43  97.02   199
  R101x1    7  80.67  87.07  98.48  89.17  94.08  95.95    96
  R152x1    7  81.88  87.96  98.82  90.22  94.17  96.94   141
  R152x2    7  84.97  89.69  99.06  92.05  95.37  98.62   563
  R152x2   14  85.56  89.89  99.24  91.92  95.75  98.75  1126
  R200x3   14  87.22  90.15  99.34  93.53  96.32  99.04  3306
  R50+B/32  7  84.90  89.15  99.01  92.24  95.75  99.46   106
  R50+B/16  7  85.58  89.65  99.14  92.63  96.65  99.40   274
  R50+L/32  7  85.68  89.04  99.24  92.93  96.97  99.43   246
  R50+L/16  7  86.60  89.72  99.18  93.64  97.03  99.40   859
  R50+L/16 14  87.12  89.76  99.31  93.89  97.36  99.11  1668
"""
ROWS = [line.split() for line in TABLE_6.strip().splitlines()]


def test_table_6():
  """All rows, and the published numbers of the table and the figure."""
  assert len(ROWS) == 18
  config = load_config('scaling_compute', 'r200_lr=5e-4,real')
  pretrained = [n for n in config.order if n.startswith('pretrain')]
  assert pretrained == [f'pretrain_{run_name(m)}_{e}ep' for m, e, *_ in ROWS]
  assert len(config.order) == 18 * 6
  measured, published, table = config.report
  columns = ('ImageNet', 'ImageNet-ReaL', 'CIFAR-10', 'CIFAR-100')
  columns += ('Pets', 'Flowers')
  printed = {
    (cell['row'], cell['column']): cell['value']
    for cell in table['cells']
    if 'value' in cell
  }
  average, imagenet = published['panels']
  points = [
    {(kind, p['name']): p for kind, ps in panel['lines'].items() for p in ps}
    for panel in (average, imagenet)
  ]
  for model, epochs, *numbers, exaflops in ROWS:
    numbers = [float(x) for x in numbers]
    row = f'{model}, {epochs} paper'
    for column, number in zip(columns, numbers, strict=True):
      assert 100 * printed[row, column] == pytest.approx(number)
    top1, _, *others = numbers
    mean = (top1 + sum(others)) / 5
    assert 100 * printed[row, 'Average'] == pytest.approx(mean)
    kind = 'Transformer (ViT)' if '/' in model else 'ResNet (BiT)'
    key = ('Hybrid' if '+' in model else kind, f'{model}, {epochs}')
    for panel, value in zip(points, (mean, top1)):
      assert panel[key]['x'] == float(exaflops)
      assert 100 * panel[key]['y']['value'] == pytest.approx(value)
  assert len(printed) == 18 * 7 and [len(p) for p in points] == [18, 18]
  # Table 7 prints these means.
  for model, mean in (('R50x1', 89.33), ('R152x2', 94.01)):
    ours = printed[f'{model}, 7 paper', 'Average']
    assert round(100 * ours, 2) == mean
  lines = measured['panels'][0]['lines']
  drawn = [(kind, p['name']) for kind, ps in lines.items() for p in ps]
  assert sorted(drawn) == sorted(points[0])


def test_table_6_has_the_settings_of_the_other_configs():
  config = load_config('scaling_compute', 'r200_lr=5e-4,seeds=2')
  for model, epochs, *_ in ROWS:
    name = f'{run_name(model)}_{epochs}ep'
    argument = f'{model},epochs={epochs}'
    argument += ',lr=5e-4' if model == 'R200x3' else ''
    run = config.runs[f'pretrain_{name}']
    assert difference(run, 'pretrain_jft', argument) == {}
    for data in ('imagenet', 'cifar10', 'cifar100', 'pets', 'flowers'):
      run = config.runs[f'finetune_{name}_{data}_seed1']
      weights = f'{{workdir}}/pretrain_{name}'
      expected = {'init_from.path': weights, 'seed': 1}
      assert difference(run, 'finetune', f'{data},{model}') == expected


def test_the_rate_of_r200x3_is_not_known():
  assert not [x for x in load_config('scaling_compute').order if 'R200' in x]
  with pytest.raises(ValueError, match=r'R200x3\. Give one, r200_lr=RATE'):
    load_config('scaling_compute', 'R200x3')


@pytest.mark.parametrize(
  'data, rates',
  [
    ('imagenet', (0.003, 0.01, 0.03, 0.06)),
    ('pets', (0.001, 0.003, 0.01, 0.03)),
  ],
)
def test_grid(data, rates, tmp_path):
  config = load_config('scaling_compute', 'B/32,grid')
  workdir = epath.Path(tmp_path)
  runs = study.ordered(config.runs, config.order, workdir)
  final = f'finetune_B32_7ep_{data}_seed0'
  needed = study.needed_by(final, runs, workdir)
  weights, *tried = sorted(needed, key=lambda x: 'lr' in x)
  assert weights == 'pretrain_B32_7ep'
  assert tuple(runs[x].schedule.lr for x in tried) == rates
  for name, rate in zip(tried, rates):
    argument = f'{data},B/32,dev,lr={rate}'
    changed = difference(config.runs[name], 'finetune', argument)
    assert changed == {'init_from.path': '{workdir}/pretrain_B32_7ep'}
  assert runs[final].best_of.take == ('schedule.lr',)
  assert runs[final].best_of.metric == 'dev/accuracy'
