"""Record what lightly's DINO learns, for objectives/dino.py.

dino.npz holds of lightly's loss and heads, on random inputs, results and
gradients; and of ten steps of a tiny ViT of timm with lightly's head, loss and
schedules, AdamW and a teacher: the first gradients, the losses, the centre and
the last parameters of student and teacher. All is computed in float64. Inputs
and first parameters are those of `seeded`, named as in timm and lightly.

The prototypes of the first epoch have gradients of zero. In the paper's code
AdamW skips them instead, which changes these losses by up to 0.006.

To record again, in a virtual environment with torch, timm and lightly:

  python tests/golden/record_dino.py
"""

import numpy as np
import seeded

STEPS, BATCH, FROZEN = 10, 4, 2
WIDTH, HIDDEN, BOTTLENECK, OUTPUTS = 16, 24, 8, 40
MODEL = {
  **{'img_size': 16, 'patch_size': 4, 'embed_dim': WIDTH, 'depth': 2},
  **{'num_heads': 2, 'mlp_ratio': 2.0, 'num_classes': 0},
}
LR, DECAYS, MOMENTUM, TEMPERATURES = 2e-3, (0.04, 0.4), 0.9, (0.04, 0.07)


def crops(step):
  """Return uint8 images of two global and three local views, by name."""
  rng = np.random.default_rng(step)
  return {
    'image': rng.integers(0, 256, (BATCH, 2, 16, 16, 3), np.uint8),
    'local': rng.integers(0, 256, (BATCH, 3, 8, 8, 3), np.uint8),
  }


def outputs():
  """Return outputs of student [B, V, K] and teacher [B, 2, K], and a centre."""
  rng = np.random.default_rng(100)
  shapes = (BATCH, 5, OUTPUTS), (BATCH, 2, OUTPUTS), (1, 1, OUTPUTS)
  return [0.3 * rng.standard_normal(x, np.float32) for x in shapes]


def cosine(start, end, step):
  return end + 0.5 * (start - end) * (1 + np.cos(np.pi * step / STEPS))


def weights(shapes):
  """Return the first weights; lengths of prototypes are 1."""
  found = seeded.weights(shapes)
  is_length = lambda name: name.endswith('weight_g')  # noqa: E731
  return {k: x**0 if is_length(k) else x for k, x in found.items()}


def make(vit=None, **options):
  import torch
  from lightly.models.modules.heads import DINOProjectionHead

  head = DINOProjectionHead(WIDTH, HIDDEN, BOTTLENECK, OUTPUTS, **options)
  module = torch.nn.ModuleDict({'head': head} | ({'vit': vit} if vit else {}))
  seeded.fill(module.state_dict(), weights)
  return module.double()


def grads(module, prefix):
  found = {k: x.grad for k, x in module.named_parameters()}
  return {f'{prefix}{k}': x for k, x in found.items() if x is not None}


def record_parts(golden):
  import torch
  from lightly.loss import DINOLoss

  student, teacher, centre = (torch.from_numpy(x).double() for x in outputs())
  student.requires_grad_()
  loss = DINOLoss(OUTPUTS, teacher_temp=0.05)
  loss.center.data = centre
  value = loss(list(teacher.unbind(1)), list(student.unbind(1)))
  value.backward()
  golden['loss/value'], golden['loss/centre'] = value.item(), loss.center
  golden['loss/gradient'] = student.grad
  x = teacher.flatten(0, 1)
  for norm in (True, False):
    module = make(norm_last_layer=norm)
    out = module['head'](x[:, :WIDTH])
    torch.sum(out * x).backward()
    golden[f'head/{norm}/out'] = out.detach()
    golden |= grads(module, f'head/{norm}/')
  return golden


def record_steps(golden):
  import torch
  from lightly.loss import DINOLoss
  from timm.models.vision_transformer import VisionTransformer

  student, teacher = (
    make(VisionTransformer(**MODEL, dynamic_img_size=True)) for _ in range(2)
  )
  losses = []
  learned = {k: x for k, x in student.named_parameters() if x.requires_grad}
  groups = [
    {'params': [x for x in learned.values() if x.ndim > 1]},
    {'params': [x for x in learned.values() if x.ndim == 1], 'weight_decay': 0},
  ]
  optimizer, loss_fn = torch.optim.AdamW(groups, lr=LR), DINOLoss(OUTPUTS)
  loss_fn.center.data = loss_fn.center.data.double()
  for step in range(STEPS):
    views = [
      torch.from_numpy(x.transpose(1, 0, 4, 2, 3) / 127.5 - 1).unbind()
      for x in crops(step).values()
    ]
    run = lambda model, x: model['head'](model['vit'](x))  # noqa: E731
    with torch.no_grad():
      targets = [run(teacher, x) for x in views[0]]
    found = [run(student, x) for x in (*views[0], *views[1])]
    start, end = TEMPERATURES
    temperature = start + (end - start) * min(1, step / 5)
    loss = loss_fn(targets, found, teacher_temp=temperature)
    optimizer.zero_grad()
    loss.backward()
    if step < FROZEN:
      student['head'].last_layer.weight_v.grad.zero_()
    if step == 0:
      golden |= grads(student, 'grad/')
    groups = optimizer.param_groups
    groups[0]['weight_decay'] = cosine(*DECAYS, step)
    optimizer.step()
    momentum = cosine(MOMENTUM, 1, step)
    with torch.no_grad():
      for mine, theirs in zip(student.parameters(), teacher.parameters()):
        theirs.mul_(momentum).add_((1 - momentum) * mine)
    losses.append(loss.item())
  golden |= {'losses': losses, 'centre': loss_fn.center}
  for name, model in (('student', student), ('teacher', teacher)):
    golden |= {f'{name}/{k}': x for k, x in model.state_dict().items()}
  return golden


def record():
  seeded.import_torch('torch', 'timm')
  seeded.save('dino', record_steps(record_parts({})), np.float32)


if __name__ == '__main__':
  record()
