"""Record a run of the code before the redesign: python record_old_run.py.

old_run/ holds the workdir of a run that stopped after 3 of 6 steps, written by
the commit below, and losses.json: the loss and gradient norm of the 3 steps
that follow. Today's code must read its model.json and parameters, and resume
it. Run this script with PYTHONPATH set to a checkout of that commit, on one
device (JAX_NUM_CPU_DEVICES=1).
"""

import json
import pathlib
import shutil
import tempfile

import ml_collections
from record_loss_curve import build_id

from vit_jax.train import train

COMMIT = '55e2e6d'
HERE = pathlib.Path(__file__).parent
RESIZE = {'target': 'vit_jax.data.transforms.Resize', 'size': 8}


def get_config():
  def digits(split):
    return {
      'source': {'target': 'vit_jax.data.builtin.Digits', 'split': split},
      'transforms': (RESIZE,),
      'batch_size': 16,
    }

  return ml_collections.ConfigDict(
    {
      'run': 'vit_jax.train.train',
      'seed': 0,
      'total_steps': 6,
      'log_every_steps': 1,
      'model': {
        'target': 'vit_jax.models.vit.VisionTransformer',
        'width': 32,
        'depth': 1,
        'mlp_dim': 128,
        'num_heads': 2,
        'patch_size': 4,
        'pooling': 'token',
        'posemb': 'learned',
        'posemb_init_std': 0.5,
        'dropout': 0.1,
      },
      'objective': {
        'target': 'vit_jax.objectives.classification.softmax_xent',
        'label_smoothing': 0.1,
      },
      'optimizer': {
        'target': 'vit_jax.optim.optimizers.adam',
        'weight_decay': 0.1,
        'clip_norm': 1.0,
      },
      'schedule': {'lr': 3e-3, 'decay': 'cosine', 'warmup_steps': 2},
      'ema_decay': 0.9,
      'checkpoint': {'every_steps': 3, 'keep_every_steps': 3},
      'data': digits('train'),
      'evals': {
        'test': {
          'target': 'vit_jax.evals.classification.Classification',
          'data': digits('test'),
        }
      },
    }
  )


def main():
  out = HERE / 'old_run'
  shutil.rmtree(out, ignore_errors=True)
  with tempfile.TemporaryDirectory() as folder:
    workdir = pathlib.Path(folder)
    train(get_config(), workdir)
    lines = (workdir / 'metrics.jsonl').read_text().splitlines()
    steps = {}
    for record in map(json.loads, lines):
      steps.setdefault(record['step'], {}).update(record)
    out.mkdir()
    for name in ('config.json', 'model.json'):
      shutil.copy(workdir / name, out / name)
    kept = workdir / 'checkpoints' / '3'
    shutil.copytree(kept, out / 'checkpoints' / '3')
  found = [
    [steps[i][f'train/{k}'] for k in ('loss', 'grad_norm')] for i in (4, 5, 6)
  ]
  record = {'build': build_id(), 'commit': COMMIT, 'loss_and_grad_norm': found}
  (out / 'losses.json').write_text(json.dumps(record, indent=2) + '\n')


if __name__ == '__main__':
  main()
