"""Figure 8: which dimension of a ViT is worth its compute.

    python -m vit_jax.main --config=configs/scaling_shape.py:name=my_set \
        --workdir=DIR --config.shared.data_dir=TFDS_DIR

The base is a ViT with 8 layers, width 1024, an MLP of 2048 and patches of 32
pixels. ViTs that differ from it in one dimension, or in all of them, are
pre-trained by pretrain_jft.py. The figure shows the accuracy of a 5-shot linear
readout of ImageNet, with the spread of 3 draws, against compute relative to the
base.

Arguments (separated by commas):
  depth, width, mlp, patch, all   any of the families below; all five if none is
                  given (`all` is one of them: it scales all dimensions)
  name=jft, classes=18291   the data set of pre-training, see scaling.py
  lr=6e-4         of all runs
  epochs=7        of all runs
  tiny            all of it in miniature, on the same data: widths a 32nd,
                  depths an 8th

scaling.py says how to set values for all runs, and how to do single runs.

                     layers          width           MLP             patch
    depth    2 4 8 16 32 64          1024            2048               32
    width                 8     256 ... 2048         2048               32
    mlp                   8          1024      512 ... 8192             32
    patch                 8          1024            2048     56 32 16 8
    all              4 8 16     512 1024 2048  1024 2048 4096     56 32 16

Expected: the paper has no numbers. It says that depth helps most, visibly up to
64 layers, but less and less after 16; that width changes least; that smaller
patches help surprisingly much, although they add no parameters; and that
scaling all dimensions together is the safest.

The base and the metric are the paper's. It does not state the following, which
are our choice:
- the values: from memory, powers of 2 around the base; only the 64 layers are
  certain. 64 pixels do not divide 224; 56 are the nearest that do.
- heads: of 64 dimensions each, as in B and L (16 heads at the base).
- data and duration: pretrain_jft.py's, 7 epochs. Rate: table 3's for L/32,
  which has the base's width and patch. Runs that diverge are not drawn; `lr`
  changes the rate of all.
- compute is counted as in table 6, see scaling_compute.py.
"""

from configs import common, scaling

BASE = {'depth': 8, 'width': 1024, 'mlp_dim': 2048, 'patch': 32}
FAMILIES = {  # changes of the base
  'depth': [{'depth': d} for d in (2, 4, 16, 32, 64)],
  'width': [{'width': w} for w in (256, 512, 2048)],
  'mlp': [{'mlp_dim': m} for m in (512, 1024, 4096, 8192)],
  'patch': [{'patch': p} for p in (56, 16, 8)],
  'all': [
    {'depth': 4, 'width': 512, 'mlp_dim': 1024, 'patch': 56},
    {'depth': 16, 'width': 2048, 'mlp_dim': 4096, 'patch': 16},
  ],
}
LABELS = {
  'depth': 'Depth',
  'width': 'Width',
  'mlp': 'Width MLP',
  'patch': 'Patch size',
  'all': 'All',
}


def get_config(argument=''):
  args = scaling.parse(argument, tuple(FAMILIES), lr=6e-4, epochs=7.0)
  values = scaling.shared()
  runs = {'pretrain_base': _pretraining({}, args, values)}
  lines = {}
  for family in args.models:
    points = [_point('base', args)]
    for change in FAMILIES[family]:
      name = f'{family}_{next(iter(change.values()))}'
      runs[f'pretrain_{name}'] = _pretraining(change, args, values)
      points.append(_point(name, args))
    lines[LABELS[family]] = points
  panel = {
    'title': 'Shape of a ViT',
    'xlabel': 'relative compute',
    'ylabel': 'ImageNet 5-shot accuracy (%)',
    'relative_to': scaling.exaflops('base'),
    'lines': lines,
  }
  title = 'Accuracy against compute, by dimension'
  report = common.figure((panel,), title=title, name='figure_8')
  return common.study(runs, (report,), shared=values)


def _point(name, args):
  few_shot = scaling.few_shot(f'pretrain_{name}', args.tiny)
  return {'x': scaling.exaflops(name), 'y': few_shot, 'name': name}


def _pretraining(change, args, values):
  """Return the pre-training of L/32 with another shape."""
  shape = BASE | change
  config = scaling.jft('L/32', args, values, epochs=args.epochs, lr=args.lr)
  # Images and patches of `tiny` are 8 times smaller.
  thinner, lower = (32, 8) if args.tiny else (1, 1)
  width, patch = shape['width'] // thinner, shape['patch'] // lower
  config.model.update(
    width=width,
    depth=max(1, shape['depth'] // lower),
    mlp_dim=shape['mlp_dim'] // thinner,
    num_heads=max(1, shape['width'] // 64 // lower),
    head={'representation_size': width},
    embedding={'patch_size': (patch, patch)},
  )
  scaling.add_few_shot(config, values, args.tiny)
  return config
