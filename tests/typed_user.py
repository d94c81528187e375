"""A user's typed code against the public API: mypy must accept all of it.

Lines with `type: ignore` are mistakes, each of which mypy must find: with
warn_unused_ignores it reports those that it does not. Nothing here is run.
"""

import functools
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax
from own_parts import Crop, Largest, Rows, Scaled, Squares

from vit_jax import evaluate, pretrained, step, train
from vit_jax.analysis import attention
from vit_jax.data import transforms
from vit_jax.data.pipeline import Data
from vit_jax.durations import Duration, epochs, examples, steps
from vit_jax.evals.classification import Classification
from vit_jax.models.dense import Normalize
from vit_jax.models.posemb import SinCos2d
from vit_jax.models.vit import PatchEmbedding, VisionTransformer
from vit_jax.objectives import classification
from vit_jax.optim import optimizers as optim
from vit_jax.optim.schedules import Schedule
from vit_jax.parallel import sharding
from vit_jax.runs.checkpoint import Checkpoints
from vit_jax.types import LossFn, Model, Params
from vit_jax.weights import formats
from vit_jax.weights.bundle import Weights
from vit_jax.weights.surgery import InitFrom
from vit_jax.zoo import names


class Text:
  """Neither a source nor an evaluator."""


def train_a_model(workdir: str) -> Params:
  data = Data(
    Squares(),
    batch_size=8,
    transforms=[transforms.Resize(16), transforms.FlipLR(), Crop(8)],
  )
  model = VisionTransformer(
    width=32,
    depth=2,
    mlp_dim=64,
    num_heads=2,
    embedding=PatchEmbedding(patch_size=(8, 4)),
    posemb=Rows(),
  )
  state = train.train(
    workdir,
    train.Training(
      model=model,
      data=data,
      objective=functools.partial(
        Scaled, objective=classification.softmax_xent, factor=2.0
      ),
      optimizer=optim.Optimizer(optax.adamw, clip_norm=1.0),
      schedule=Schedule(lr=1e-3, warmup=steps(10)),
      total=epochs(2.5),
      evals={
        'test': train.Evaluation(
          functools.partial(Classification, data=data), every=examples(1000)
        ),
        'largest': train.Evaluation(functools.partial(Largest, data=data)),
      },
      checkpoints=Checkpoints(every=steps(100)),
      init_from=InitFrom('vit.npz'),
      mesh=sharding.MeshSizes(fsdp=2),
    ),
  )
  assert_type(state.eval_params, Params | Any)
  results = evaluate.evaluate(
    workdir, evals={'largest': Largest}, init_from=InitFrom(workdir)
  )
  assert_type(results, dict[str, float])
  return dict(state.params)


def look_inside(path: str) -> np.ndarray:
  model, params = pretrained.load(path, image_size=(384, 512), num_classes=10)
  assert_type(params, Params)
  images = Normalize()(np.zeros((1, 384, 512, 3), np.uint8))
  assert_type(images, jax.Array)
  _, recorded = model.apply({'params': params}, images, mutable=['all'])
  q, k, added = attention.recorded(recorded)
  found = attention.rollout(q, k, added)
  assert_type(found, jax.Array)
  weights = formats.read(path)
  assert_type(weights, Weights)
  formats.write(weights, 'there.npz', 'vit_jax')
  return np.asarray(found)


def step_by_hand(loss_fn: LossFn) -> None:
  model = names.create('ViT-B/16', num_classes=10)
  tx = optax.sgd(0.1)
  state = step.init_state(
    jax.random.key(0),
    model=model,
    images=jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32),
    tx=lambda params: tx,
  )
  mesh = sharding.make_mesh(data=-1)
  batches = Data(Squares(), batch_size=8).train_batches(seed=1)
  for batch in batches:
    on_device = sharding.put_batch(batch, mesh)
    state, metrics = step.train_step(state, on_device, loss_fn=loss_fn, tx=tx)
    print(float(metrics['loss']), batches.position)


def mistakes(model: Model, data: Data, weights: Weights) -> None:
  Data(Text(), batch_size=8)  # type: ignore[arg-type]
  Data(Squares(), batch_size='8')  # type: ignore[arg-type]
  Data(Squares(), 8, [str.upper])  # type: ignore[list-item]
  Duration('10', 'steps')  # type: ignore[arg-type]
  sharding.MeshSizes(pipeline=2)  # type: ignore[call-arg]
  SinCos2d(init_std=0.1)  # type: ignore[call-arg]
  VisionTransformer(width='wide')  # type: ignore[call-arg, arg-type]
  train.Training(model=model, data=data)  # type: ignore[call-arg]
  train.Evaluation(Text)  # type: ignore[arg-type]
  evaluate.evaluate('/tmp/run', evals={'text': Text})  # type: ignore[dict-item]
  classification.softmax_xent(model)  # type: ignore[call-arg]
  pretrained.load('vit.npz', image_size='384')  # type: ignore[arg-type]
  formats.write('vit.npz', weights, 'timm')  # type: ignore[arg-type]
  print(weights.activations)  # type: ignore[attr-defined]
  step.train_step(None, {}, loss_fn=None, tx=None)  # type: ignore[arg-type]
