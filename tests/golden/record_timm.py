"""Records goldens from timm and torch, which the tests do not need.

They hold grids and patches that they resize, what timm trains with
(timm_training.npz), and how large the models are whose names we take.

To record again, in a virtual environment that has vit_jax:

  pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
  pip install --no-deps timm==1.0.31 torchvision==0.28.0
  pip install huggingface_hub pillow pyyaml safetensors
  python tests/golden/record_timm.py
"""

import functools
import json
import re
from unittest import mock

import numpy as np
import seeded
import torch

from vit_jax.weights import timm as ours

IMAGE, HEADS = seeded.TIMM['img_size'], seeded.TIMM['num_heads']

NAMES = (  # timm's models that are compared in size
  r'(vit|deit|deit3)_(tiny|small|medium|base|large|huge|giant|gigantic|so400m)'
  r'_patch\d+(_reg\d+)?(_siglip)?(_gap)?_\d+'
  r'|vit_[a-z]+_r(50|26|)_s\d+(_p8)?_\d+|resnetv2_\d+x\d+_bit|mixer_.\d+_224'
)
OTHERS = 'patch14_siglip.*_384'  # 384 px, of which timm ignores some

GRIDS = {  # old grid, new grid
  'up': ((5, 7), (8, 12)),
  'down': ((9, 8), (4, 5)),
  'mixed': ((6, 6), (9, 4)),
}
KERNELS = {  # old patch, new patch
  'grow': ((4, 4), (8, 6)),
  'shrink': ((8, 8), (4, 4)),
  'mixed': ((6, 4), (4, 7)),
}


def import_timm():
  """timm's module of Vision Transformers."""
  return seeded.import_torch('timm.models.vision_transformer')[0]


def record_grids():
  rng = np.random.default_rng(0)
  arrays = {}
  for name, (old, new) in GRIDS.items():
    table = rng.standard_normal((1, *old, 3)).astype(np.float32)
    arrays[f'{name}/table'] = table
    theirs = torch.from_numpy(table.transpose(0, 3, 1, 2)).double()
    offset = [(n + 0.1) / o for n, o in zip(new, old)]
    side = max(new)
    square = {'size': (side, side)} if old[0] == old[1] else {}
    bilinear, bicubic = (
      {'mode': mode, 'size': new} for mode in ('bilinear', 'bicubic')
    )
    for method, kwargs in {
      'bilinear': bilinear,
      'bilinear_antialias': bilinear | {'antialias': True},
      'bilinear_square': bilinear | square,
      'paper_square': bilinear | square | {'align_corners': True},
      'bicubic': bicubic,
      'bicubic_antialias': bicubic | {'antialias': True},
      'dinov2_offset': {'mode': 'bicubic', 'scale_factor': offset},
    }.items():
      out = torch.nn.functional.interpolate(
        theirs, **{'align_corners': False} | kwargs
      )
      out = out.numpy()[:, :, : new[0], : new[1]].transpose(0, 2, 3, 1)
      arrays[f'{name}/{method}'] = out
  seeded.save('torch_resize', arrays)


def record_kernels():
  """Patch kernels that timm resizes: [ph, pw, C, D], in float64."""
  import_timm()
  from timm.layers import resample_patch_embed

  rng = np.random.default_rng(0)
  arrays = {}
  for name, (old, new) in KERNELS.items():
    kernel = rng.standard_normal((*old, 3, 5))
    theirs = torch.from_numpy(kernel.transpose(3, 2, 0, 1))
    out = resample_patch_embed(theirs, list(new))  # bicubic, antialiased
    arrays[f'{name}/kernel'] = kernel
    arrays[f'{name}/resized'] = out.numpy().transpose(2, 3, 1, 0)
  seeded.save('timm_patch_resize', arrays)


def layer_factors():
  """{factor and decay: of learning rate and weights, path: our paths}."""
  from timm.optim._param_groups import param_groups_layer_decay

  model = import_timm().VisionTransformer(**seeded.TIMM)
  exempt = model.no_weight_decay()
  groups = param_groups_layer_decay(model, 0.05, exempt, layer_decay=0.75)
  found = {}
  for name, key in (('factor', 'lr_scale'), ('decay', 'weight_decay')):
    for group in groups:
      for parameter in group['params']:
        parameter.data.fill_(group[key])
    state = {k: x.float().numpy() for k, x in model.state_dict().items()}
    arrays = ours.read(state, num_heads=HEADS, image_size=IMAGE).params
    found[name] = [array.ravel()[0] for array in arrays.values()]
  return found | {'path': list(arrays)}


def updated(make, given, num_steps):
  """Our {path: array} after steps; only the last three have a rate, 0.1.

  `given` has the parameters and three gradients, which take turns. Kernels are
  [outputs, inputs] in torch, so dimensions are reversed.
  """
  given = {k: torch.from_numpy(x.T.copy()) for k, x in given.items()}
  params = {k: x[..., 0].clone().requires_grad_() for k, x in given.items()}
  decayed = {path: 0.1 * path.endswith('kernel') for path in params}
  optimizer = make(
    [{'params': [x], 'weight_decay': decayed[k]} for k, x in params.items()]
  )
  for step in range(num_steps):
    for path, x in params.items():
      x.grad = given[path][..., 1 + step % 3].clone()
    for group in optimizer.param_groups:
      group['lr'] = 0.1 * (step >= num_steps - 3)
    optimizer.step()
  return {k: x.detach().numpy().T for k, x in params.items()}


def record_training():
  """Rates, losses, factors, repeats, and parameters after updates."""
  import_timm()
  from timm import loss, optim
  from timm.data.distributed_sampler import RepeatAugSampler
  from timm.optim import muon
  from timm.scheduler import CosineLRScheduler

  rng = np.random.default_rng(0)
  idle = torch.optim.SGD([torch.zeros(1)], lr=3e-4)
  schedule = CosineLRScheduler(idle, 200, 1e-5, warmup_t=20)
  samplers = [RepeatAugSampler(range(264), 2, i, shuffle=False) for i in (0, 1)]
  logits = rng.normal(size=(6, 5)).astype('f')
  soft = rng.dirichlet(np.ones(5), 6).astype('f').round(1)
  both = torch.from_numpy(logits), torch.from_numpy(soft)
  shapes = {'embedding/kernel': (2, 2, 3, 8), 'block_0/mlp/fc1/bias': (16,)}
  shapes |= {'mlp/fc1/kernel': (8, 16), 'block_0/mlp/fc2/kernel': (16, 8)}
  given = {k: rng.normal(size=(4, *x)).astype('f') for k, x in shapes.items()}
  arrays = {
    'rates': [schedule._get_lr(t)[0] for t in range(200)],
    'repeats': np.stack([list(x) for x in samplers], axis=1).ravel(),
    **{'logits': logits, 'soft': soft},
    'loss/softmax': loss.SoftTargetCrossEntropy()(*both),
    'loss/bce': loss.BinaryCrossEntropy(0, target_threshold=0.0)(*both),
    **layer_factors(),
    **{f'given/{path}': array for path, array in given.items()},
  }
  fields = {'nesterov': True, 'ns_coefficients': 'original'}
  fields |= {'betas': (0.9, 0.999), 'adjust_lr_fn': 'match_rms_adamw'}
  make_muon = functools.partial(optim.Muon, **fields)
  exact = functools.partial(  # timm iterates in bfloat16
    muon.zeropower_via_newtonschulz, dtype=torch.float32
  )
  with mock.patch.object(muon, 'zeropower_via_newtonschulz', exact):
    for name, make, num_steps in (
      ('lamb', functools.partial(optim.Lamb, betas=(0.8, 0.95), eps=1e-3), 3),
      ('muon', make_muon, 300),
      (
        'muon_original',
        functools.partial(make_muon, adjust_lr_fn='original'),
        300,
      ),
    ):
      found = updated(make, given, num_steps)
      arrays |= {f'{name}/{path}': array for path, array in found.items()}
  seeded.save('timm_training', arrays)


def record_sizes():
  """{name: [image side, parameters, heads or None]} of timm's models."""
  import timm

  sizes = {}
  for name in timm.list_models():
    if not re.fullmatch(NAMES, name) or re.search(OTHERS, name):
      continue
    # R-Ti's feature map must be computed, which abstract tensors cannot be.
    with torch.device('cpu' if '_r' in name else 'meta'):
      model = timm.create_model(name, num_classes=1000)
    heads = [m.num_heads for m in model.modules() if hasattr(m, 'qkv')]
    side = model.pretrained_cfg['input_size'][-1]
    if name.startswith('resnet'):
      side = 224
    count = sum(p.numel() for p in model.parameters())
    sizes[name] = [side, count, heads[0] if heads else None]
  lines = ',\n'.join(f'  "{k}": {json.dumps(v)}' for k, v in sizes.items())
  (seeded.FOLDER / 'timm_sizes.json').write_text(f'{{\n{lines}\n}}\n')


if __name__ == '__main__':
  record_training()
  record_sizes()
  record_grids()
  record_kernels()
