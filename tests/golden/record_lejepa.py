"""Record what lightly and stable-pretraining compute, for objectives/lejepa.py.

lejepa.npz holds embeddings and unit vectors; of lightly's SIGReg and VISReg,
and of stable-pretraining's SIGReg, the value and its gradient; and of ten steps
of AdamW the losses, the first gradients and the last parameters. Those steps
train stable-pretraining's LeJEPA, a tiny ViT of timm with views of two sizes,
with lightly's loss, which has the terms and the weights of MINIMAL.md.
Parameters and crops are made of a seed. How the two differ:

  SIGReg      lightly: for each view; stable-pretraining: for all views as one
              set, so that a factor is the number of images times views
  loss        lightly: weight * SIGReg + (1 - weight) * invariance;
              stable-pretraining: weight * SIGReg + invariance
  VISReg      lightly adds 1e-4 to a standard deviation; here 1e-6, as in the
              released code and in later versions of stable-pretraining

To record again, in the environment of record_timm.py:

  pip install --no-deps lightly==1.6.0 stable-pretraining==0.1.8 transformers
  python tests/golden/record_lejepa.py
"""

import importlib.util
import pathlib
import sys
import types
from unittest import mock

import numpy as np
import seeded

STEPS, IMAGES, WEIGHT = 10, 6, 0.02
HIDDEN, OUTPUTS = (8, 12, 10), 4  # of the projector
ADAMW = {'lr': 3e-3, 'weight_decay': 0.05}


def crops():
  """Return uint8 crops of each step, large and small."""
  rng = np.random.default_rng(2)
  sizes = {'image': (2, 16, 16, 3), 'local': (3, 8, 8, 3)}
  return {
    name: rng.integers(0, 256, (STEPS, IMAGES, *size), np.uint8)
    for name, size in sizes.items()
  }


def unit_vectors(*shape):
  """Return normal numbers, of unit length along the last axis but one."""
  x = np.random.default_rng(3).normal(size=shape)
  return np.float32(x / np.linalg.norm(x, axis=-2, keepdims=True))


def import_stable_pretraining(torch):
  """Return its module of LeJEPA, without what importing the package needs."""
  folder = pathlib.Path(
    importlib.util.find_spec('stable_pretraining').submodule_search_locations[0]
  )

  def load(name, path):
    spec = importlib.util.spec_from_file_location(name, folder / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

  package = types.ModuleType('stable_pretraining')
  package.Module = torch.nn.Module
  parts = {
    'stable_pretraining': package,
    'stable_pretraining.backbone': load('mlp', 'backbone/mlp.py'),
  }
  with mock.patch.dict(sys.modules, parts):
    return load('lejepa', 'methods/lejepa.py')


def given(torch, array):
  """Replace the random directions."""
  return mock.patch.object(
    torch, 'randn', lambda *args, **kwargs: torch.tensor(array).double()
  )


def record():
  torch, vit, lightly, visreg = seeded.import_torch(
    *('torch', 'timm.models.vision_transformer'),
    *('lightly.loss.lejepa_loss', 'lightly.loss.visreg_loss'),
  )
  stable = import_stable_pretraining(torch)
  golden = {'z': np.random.default_rng(1).normal(0.3, 1.5, (5, 12, 6))}
  golden['z'] = np.float32(golden['z'])
  golden['slices'] = unit_vectors(6, 32)

  def sum_of_terms(z):
    shape = visreg.visreg_shape_loss(z, 32, eps=1e-6)
    return visreg.visreg_center_loss(z) + visreg.visreg_scale_loss(z) + shape

  sliced = stable.SlicedEppsPulley(32).double()
  for name, function in {
    'sigreg': lightly.SIGReg().double(),
    'sigreg_of_a_set': lambda z: sliced(z.reshape(-1, 6)),
    'visreg': sum_of_terms,
  }.items():
    z = torch.tensor(golden['z'], dtype=torch.float64, requires_grad=True)
    with given(torch, golden['slices']):
      value = function(z)
    value.backward()
    golden |= {name: value.item(), f'{name}_grad': z.grad.numpy()}
  golden |= steps(torch, vit, lightly, stable)
  seeded.save('lejepa', golden, np.float32)


def steps(torch, vit, lightly, stable):
  body = vit.VisionTransformer(
    **{'img_size': 16, 'patch_size': 4, 'embed_dim': 16, 'depth': 2},
    **{'num_heads': 2, 'mlp_ratio': 2, 'num_classes': 0},
    dynamic_img_size=True,
  )
  first, *hidden = HIDDEN
  mlp = stable.MLP(first, [*hidden, OUTPUTS], 'batch_norm')
  projector = torch.nn.Sequential(torch.nn.Linear(16, first), mlp)
  with mock.patch.object(stable.timm, 'create_model', lambda *_, **__: body):
    model = stable.LeJEPA(projector=projector).double().train()
  learned = dict(model.named_parameters())
  seeded.fill(learned)
  loss_fn = lightly.LeJEPALoss(WEIGHT).double()

  def compute_loss(z, num_global, *_):
    loss = loss_fn(local_proj=z[num_global:], global_proj=z[:num_global])
    invariance = lightly.lejepa_invariance_loss(
      all_proj=z, global_proj=z[:num_global]
    )
    return loss, invariance, (loss - (1 - WEIGHT) * invariance) / WEIGHT

  slices = unit_vectors(STEPS, OUTPUTS, 16)
  optimizer = torch.optim.AdamW(learned.values(), **ADAMW)
  golden = {'step_slices': slices, 'losses': []}
  for step in range(STEPS):
    views = [
      list(torch.tensor(x[step].transpose(1, 0, 4, 2, 3) / 127.5 - 1))
      for x in crops().values()
    ]
    optimizer.zero_grad()
    with (
      given(torch, slices[step]),
      mock.patch.object(model, '_compute_loss', compute_loss),
    ):
      out = model(*views)
    out.loss.backward()
    terms = out.loss, out.inv_loss, out.sigreg_loss
    golden['losses'].append([x.item() for x in terms])
    if step == 0:
      golden |= {f'grad/{k}': x.grad.numpy() for k, x in learned.items()}
    optimizer.step()
  return golden | {f'last/{k}': x.detach().numpy() for k, x in learned.items()}


if __name__ == '__main__':
  record()
