"""Train step or logits of a model of this project: images per second.

  python benchmarks/step_ours.py B/16 --batch_size=64 [--mode=infer]

The step is step.train_step with AdamW, clipping and softmax loss. It starts
from a batch of uint8 images that is on the device already.
"""

import jax
import jax.numpy as jnp
import jax_steps

from vit_jax.models.dense import Normalize
from vit_jax.models.pallas.choice import Chooser
from vit_jax.objectives.classification import softmax_xent
from vit_jax.step import TrainState, train_step
from vit_jax.zoo import names


def main():
  parser = jax_steps.parser(__doc__)
  for field in ('attention', 'remat'):
    parser.add_argument(f'--{field}', help='of the model')
  parser.add_argument('--scan', action='store_true', help='of the model')
  args = parser.parse_args()
  fields = {x: getattr(args, x) for x in ('attention', 'remat', 'scan')}
  model = names.create(
    args.model,
    num_classes=jax_steps.NUM_CLASSES,
    dtype=args.dtype,
    **{name: value for name, value in fields.items() if value},
  )
  shape = 1, args.image_size, args.image_size, 3
  if not args.topology:  # a run measures what attention='auto' is
    choose = Chooser(batch_size=args.batch_size, mesh=jax_steps.mesh())
    images = jax.ShapeDtypeStruct(shape, jnp.float32)
    model = choose(model, images, backward=args.mode == 'train')
  loss_fn = softmax_xent(model, preprocess=Normalize())

  def params():
    return model.init(jax.random.key(0), jnp.zeros(shape))['params']

  def state():
    made, step = params(), jnp.zeros((), jnp.int32)
    return TrainState(step, made, jax_steps.TX.init(made), jax.random.key(0))

  def train(state, images, labels):
    batch = {'image': images, 'label': labels}
    return train_step(state, batch, loss_fn=loss_fn, tx=jax_steps.TX)

  def logits(params, images):
    return model.apply({'params': params}, Normalize()(images))

  jax_steps.report(args, params, logits, state, train)


if __name__ == '__main__':
  main()
