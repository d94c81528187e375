"""Records the losses of a tiny training run: python record_loss_curve.py.

Six steps of a ViT with everything on (dropout, decay, clipping, EMA,
accumulation), in float32 on one device. A refactor leaves loss_curve.json as it
is; what changes it on purpose records it again and says so.
"""

import functools
import json
import os
import pathlib
import platform
import sys
import zlib

import jax
import jax.numpy as jnp
import optax

from vit_jax.data import pipeline
from vit_jax.durations import Timeline, steps
from vit_jax.models.dense import Normalize
from vit_jax.models.vit import PatchEmbedding, VisionTransformer
from vit_jax.objectives.classification import softmax_xent
from vit_jax.optim.optimizers import Optimizer
from vit_jax.optim.schedules import Ema, Schedule
from vit_jax.step import init_state, train_step

sys.path.append(str(pathlib.Path(__file__).parents[1]))

from synthetic import Synthetic

PATH = pathlib.Path(__file__).with_name('loss_curve.json')


def build_id():
  """What must be the same for results to be so bit for bit."""
  cpu = pathlib.Path('/proc/cpuinfo')
  text = cpu.read_text() if cpu.exists() else ''
  flags = [line for line in text.splitlines() if line.startswith('flags')][:1]
  return {
    'jax': jax.__version__,
    'machine': platform.machine(),
    'cpu_flags': zlib.crc32(''.join(flags).encode()),
  }


def losses():
  """Loss and gradient norm of each of the six steps."""
  model = VisionTransformer(
    **{'width': 16, 'depth': 2, 'mlp_dim': 32, 'num_heads': 2},
    embedding=PatchEmbedding(4),
    **{'num_classes': 4, 'dropout': 0.1},
  )
  data = Synthetic(image_size=8, num_classes=4, num_examples=64, learnable=True)
  timeline = Timeline(16, 64, 6)
  rate = Schedule(lr=0.01, warmup=steps(2))(timeline)
  adamw = functools.partial(optax.adamw, weight_decay=0.1)
  make = functools.partial(Optimizer(adamw, clip_norm=1.0), learning_rate=rate)
  images = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)
  init = functools.partial(
    init_state, model=model, images=images, tx=make, ema=True
  )
  # XLA's default, whatever XLA_FLAGS says.
  options = {'xla_backend_optimization_level': 3}
  if (name := 'xla_cpu_use_fusion_emitters') in os.environ.get('XLA_FLAGS', ''):
    options[name] = True
  state = jax.jit(init, compiler_options=options)(jax.random.key(0))
  loss_fn = softmax_xent(model, preprocess=Normalize(), label_smoothing=0.1)
  step_fn = functools.partial(
    train_step,
    loss_fn=loss_fn,
    tx=make(state.params),
    accum_steps=2,
    ema_weight=Ema(0.9),
  )
  step_fn, curve = jax.jit(step_fn, compiler_options=options), []
  batches = pipeline.Data(data, batch_size=16).train_batches()
  for _ in range(6):
    state, metrics = step_fn(state, next(batches))
    curve.append([float(metrics['loss']), float(metrics['grad_norm'])])
  batches.close()
  return curve


if __name__ == '__main__':
  record = {'build': build_id(), 'loss_and_grad_norm': losses()}
  PATH.write_text(json.dumps(record, indent=2) + '\n')
