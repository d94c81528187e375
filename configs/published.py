"""Published numbers of the ViT paper (arXiv 2010.11929), to compare with.

All are in percent, as printed. Data sets have the names of transfer.py ('real'
is ImageNet-ReaL) and, in table 9, of the tasks in vit_jax/data/vtab.py.
Pre-training data are imagenet1k, imagenet21k and jft.

TABLE_2  {(pre-training, model): {data set: (mean, std of 3 runs)}}. ImageNet
         and ReaL are at 512 (L/16) or 518 pixels (H/14), with Polyak averaging.
         'vtab' is the mean of the 19 tasks.
TABLE_5  {(pre-training, model): {data set: value}}, at 384 pixels, without
         Polyak averaging.
TABLE_6  {(model, epochs on JFT): {data set: value, 'exaflops': value}}.
TABLE_7  {(model, optimizer of pre-training): {data set: value}}, 7 epochs on
         JFT. Adam's rows are table 6's.
TABLE_8  {positions: {where: value}}: 5-shot linear on ImageNet, B/16 on JFT.
TABLE_9  {(pre-training, model): {task: value}}.
AUGREG   {(pre-training, pixels, its epochs): {model: value}}: ImageNet, table 3
         of AugReg (arXiv 2106.10270).

For H/14 on JFT tables 5 and 6 differ by up to 0.5, and table 5 repeats table 2
for CIFAR-100, Pets and Flowers. The 859 exaFLOPs of R50+L/16 do not fit those
of its other row, 1668 / 2.
"""

from vit_jax.data import vtab

_DATA = ('imagenet', 'real', 'cifar10', 'cifar100', 'pets', 'flowers')


def _named(columns, rows):
  return {
    key: dict(zip(columns, row, strict=True)) for key, row in rows.items()
  }


def fraction(percent):
  """Return a value, or (value, std), divided by 100 for reports."""
  if isinstance(percent, tuple):
    return tuple(x / 100 for x in percent)
  return percent / 100


# fmt: off
TABLE_2 = _named((*_DATA, 'vtab'), {
  ('jft', 'H/14'): (
    (88.55, .04), (90.72, .05), (99.50, .06), (94.55, .04),
    (97.56, .03), (99.68, .02), (77.63, .23)),
  ('jft', 'L/16'): (
    (87.76, .03), (90.54, .03), (99.42, .03), (93.90, .05),
    (97.32, .11), (99.74, .00), (76.28, .46)),
  ('imagenet21k', 'L/16'): (
    (85.30, .02), (88.62, .05), (99.15, .03), (93.25, .05),
    (94.67, .15), (99.61, .02), (72.72, .21)),
})

TABLE_5 = _named(_DATA, {
  ('imagenet1k', 'B/16'): (77.91, 83.57, 98.13, 87.13, 93.81, 89.49),
  ('imagenet1k', 'B/32'): (73.38, 79.56, 97.77, 86.31, 92.04, 85.43),
  ('imagenet1k', 'L/16'): (76.53, 82.19, 97.86, 86.35, 93.64, 89.66),
  ('imagenet1k', 'L/32'): (71.16, 77.83, 97.94, 87.07, 91.35, 86.36),
  ('imagenet21k', 'B/16'): (83.97, 88.35, 98.95, 91.67, 94.43, 99.38),
  ('imagenet21k', 'B/32'): (81.28, 86.63, 98.79, 91.97, 93.02, 99.11),
  ('imagenet21k', 'L/16'): (85.15, 88.40, 99.16, 93.44, 94.73, 99.61),
  ('imagenet21k', 'L/32'): (80.99, 85.65, 99.13, 93.04, 93.09, 99.19),
  ('imagenet21k', 'H/14'): (85.13, 88.70, 99.27, 93.82, 94.82, 99.51),
  ('jft', 'B/16'): (84.15, 88.85, 99.00, 91.87, 95.80, 99.56),
  ('jft', 'B/32'): (80.73, 86.27, 98.61, 90.49, 93.40, 99.27),
  ('jft', 'L/16'): (87.12, 89.99, 99.38, 94.04, 97.11, 99.56),
  ('jft', 'L/32'): (84.37, 88.28, 99.19, 92.52, 95.83, 99.45),
  ('jft', 'H/14'): (88.04, 90.33, 99.50, 94.55, 97.56, 99.68),
})

TABLE_6 = _named((*_DATA, 'exaflops'), {
  ('B/32', 7): (80.73, 86.27, 98.61, 90.49, 93.40, 99.27, 55),
  ('B/16', 7): (84.15, 88.85, 99.00, 91.87, 95.80, 99.56, 224),
  ('L/32', 7): (84.37, 88.28, 99.19, 92.52, 95.83, 99.45, 196),
  ('L/16', 7): (86.30, 89.43, 99.38, 93.46, 96.81, 99.66, 783),
  ('L/16', 14): (87.12, 89.99, 99.38, 94.04, 97.11, 99.56, 1567),
  ('H/14', 14): (88.08, 90.36, 99.50, 94.71, 97.11, 99.71, 4262),
  ('R50x1', 7): (77.54, 84.56, 97.67, 86.07, 91.11, 94.26, 50),
  ('R50x2', 7): (82.12, 87.94, 98.29, 89.20, 93.43, 97.02, 199),
  ('R101x1', 7): (80.67, 87.07, 98.48, 89.17, 94.08, 95.95, 96),
  ('R152x1', 7): (81.88, 87.96, 98.82, 90.22, 94.17, 96.94, 141),
  ('R152x2', 7): (84.97, 89.69, 99.06, 92.05, 95.37, 98.62, 563),
  ('R152x2', 14): (85.56, 89.89, 99.24, 91.92, 95.75, 98.75, 1126),
  ('R200x3', 14): (87.22, 90.15, 99.34, 93.53, 96.32, 99.04, 3306),
  ('R50+B/32', 7): (84.90, 89.15, 99.01, 92.24, 95.75, 99.46, 106),
  ('R50+B/16', 7): (85.58, 89.65, 99.14, 92.63, 96.65, 99.40, 274),
  ('R50+L/32', 7): (85.68, 89.04, 99.24, 92.93, 96.97, 99.43, 246),
  ('R50+L/16', 7): (86.60, 89.72, 99.18, 93.64, 97.03, 99.40, 859),
  ('R50+L/16', 14): (87.12, 89.76, 99.31, 93.89, 97.36, 99.11, 1668),
})

_AUGREG = (  # models, columns of table 3
  'L/16', 'B/16', 'S/16', 'R50+L/32', 'R26+S/32', 'Ti/16', 'B/32', 'S/32',
  'R+Ti/16')
AUGREG = {
  key: dict(zip(_AUGREG, values, strict=True))
  for key, values in {
    ('imagenet1k', 224, 300): (
      74.01, 78.73, 77.51, 74.17, 78.20, 69.56, 71.38, 69.19, 67.30),
    ('imagenet21k', 224, 30): (
      82.05, 80.42, 76.04, 80.26, 77.42, 68.89, 72.24, 68.49, 65.65),
    ('imagenet21k', 224, 300): (
      83.98, 83.96, 80.46, 82.74, 80.81, 73.75, 79.13, 73.47, 69.69),
    ('imagenet1k', 384, 300): (
      77.21, 81.63, 80.70, 76.71, 81.55, 74.64, 76.60, 75.65, 73.48),
    ('imagenet21k', 384, 30): (
      84.48, 83.46, 80.22, 83.19, 81.11, 74.20, 78.65, 75.74, 71.97),
    ('imagenet21k', 384, 300): (
      85.59, 85.49, 83.73, 85.99, 83.85, 78.22, 83.59, 79.58, 75.40),
  }.items()
}

_FIVE = tuple(data for data in _DATA if data != 'real')
TABLE_7 = {
  (model, 'Adam'): {data: TABLE_6[model, 7][data] for data in _FIVE}
  for model in ('R50x1', 'R152x2')
} | _named(_FIVE, {
  ('R50x1', 'SGD'): (78.24, 97.46, 85.17, 91.00, 92.06),
  ('R152x2', 'SGD'): (84.37, 99.07, 91.06, 94.79, 99.32),
})

TABLE_8 = {
  'none': {'stem': 61.382},
  '1-D': {
    'stem': 64.206, 'every layer': 63.964, 'every layer, shared': 64.292},
  '2-D': {
    'stem': 64.001, 'every layer': 64.046, 'every layer, shared': 64.022},
  'relative': {'stem': 64.032},
}

TABLE_9 = _named(vtab.TASKS, {
  ('jft', 'H/14'): (
    95.3, 85.5, 75.2, 99.7, 97.2, 65.0, 88.9, 83.3, 96.7, 91.4, 76.6,
    91.7, 63.8, 53.1, 79.4, 63.3, 84.5, 33.2, 51.2),
  ('jft', 'L/16'): (
    95.4, 81.9, 74.3, 99.7, 96.7, 63.5, 87.4, 83.6, 96.5, 89.7, 77.1,
    86.4, 63.1, 49.7, 74.5, 60.5, 82.2, 36.2, 51.1),
  ('imagenet21k', 'L/16'): (
    90.8, 84.1, 74.1, 99.3, 92.7, 61.0, 80.9, 82.5, 95.6, 85.2, 75.3,
    70.3, 56.1, 41.9, 74.7, 64.9, 79.9, 30.5, 41.7),
})
# fmt: on
