"""Train step or logits of timm's model of the same name: images per second.

  python benchmarks/step_timm.py B/16 --batch_size=64 [--mode=infer]

torch.compile of normalization, model and loss; bfloat16 by autocast; fused
AdamW; clipping by global norm. Of the backends of PyTorch's
scaled_dot_product_attention the fastest is taken, as `attention='auto'` does
here; stderr has the images per second of each. It needs torch and timm, and
nothing of this project.
"""

import sys

import timing
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = 'FLASH_ATTENTION', 'CUDNN_ATTENTION', 'EFFICIENT_ATTENTION', 'MATH'
SIZES = {'Ti': 'tiny', 'S': 'small', 'B': 'base', 'L': 'large', 'H': 'huge'}


def main():
  parser = timing.step_parser(__doc__)
  parser.add_argument('--eager', action='store_true', help='do not compile')
  args = parser.parse_args()
  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  # XLA's default on GPUs, too: TF32 for float32.
  torch.set_float32_matmul_precision('high')
  size, patch = args.model.split('/')
  model = timm.create_model(
    f'vit_{SIZES[size]}_patch{patch}_224',
    num_classes=1000,
    img_size=args.image_size,
  )
  model = model.to(device).train(args.mode == 'train')
  shape = (args.batch_size, 3, args.image_size, args.image_size)
  images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
  labels = torch.randint(0, 1000, shape[:1], device=device)
  optimizer = torch.optim.AdamW(
    model.parameters(), lr=1e-4, weight_decay=0.1, fused=True
  )

  def logits():
    with torch.autocast(
      device, torch.bfloat16, enabled=args.dtype == 'bfloat16'
    ):
      return model(images.float().sub(127.5).div(127.5))

  def loss():
    return torch.nn.functional.cross_entropy(logits().float(), labels)

  eager = loss if args.mode == 'train' else logits
  forward = eager

  def step():
    if args.mode == 'infer':
      with torch.inference_mode():
        forward()
      return
    optimizer.zero_grad(set_to_none=True)
    forward().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

  def wait():
    if device == 'cuda':
      torch.cuda.synchronize()

  found = {}
  for name in BACKENDS:
    torch.compiler.reset()
    forward = eager if args.eager else torch.compile(eager)
    try:
      with sdpa_kernel(getattr(SDPBackend, name)):
        found[name] = args.steps / timing.seconds(step, args.steps, wait)
    except RuntimeError:  # not on this device, or not in this dtype
      continue
    print(name, found[name] * args.batch_size, file=sys.stderr)
  print(max(found.values()) * args.batch_size)


if __name__ == '__main__':
  main()
