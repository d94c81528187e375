"""Train step or logits of a ViT of big_vision: images per second.

  PYTHONPATH=~/big_vision python benchmarks/step_big_vision.py B/16

~/big_vision is a clone of github.com/google-research/big_vision. Only its model
is used, so TensorFlow need not be installed. As in its configs/vit_i1k.py: a
class token, and a head with a tanh layer. Optimizer, loss and batch are those
of step_ours.py.
"""

import importlib
import sys
import types

import jax_steps
import step_plain_linen


def main():
  args = jax_steps.parser(__doc__).parse_args()
  # big_vision's utilities import TensorFlow, and the model does not use them.
  sys.modules['big_vision.utils'] = types.ModuleType('big_vision.utils')
  vit = importlib.import_module('big_vision.models.vit')
  model = vit.Model(
    jax_steps.NUM_CLASSES,
    variant=args.model,
    rep_size=True,
    pool_type='tok',
    dtype_mm=args.dtype,
  )
  step_plain_linen.report(args, model)


if __name__ == '__main__':
  main()
