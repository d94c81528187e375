"""The worker that runs timm's model of the same name, in PyTorch.

torch.compile around the normalisation of uint8 images, the model and the loss;
bfloat16 by autocast; timm's attention is PyTorch's scaled_dot_product_attention
by default; fused AdamW and clipping by global norm. Nothing of ours is needed
but `serve`, so any interpreter that has torch and timm can run it:

  PEER_PYTHON -m vit_jax.tools.benchmark.timm
"""

import contextlib
import importlib
import time

from vit_jax.tools.benchmark import workers

CLIP_NORM, WEIGHT_DECAY, LEARNING_RATE = 1.0, 0.1, 1e-4


class Timm:
  """A compiled step of a model of timm's, with its batch.

  Args:
    settings: 'mode' ('train' or 'infer'), 'timm_name', 'batch_size',
      'image_size', 'num_classes', 'precision', 'warmup' (steps), 'compile': a
      mode of torch.compile, or 'none' for eager.
  """

  def __init__(self, settings):
    torch, timm = import_timm()
    self._torch = torch
    cuda = torch.cuda.is_available()
    self._device = torch.device('cuda' if cuda else 'cpu')
    # What XLA does on GPUs unless told otherwise, too: TF32 for float32.
    torch.set_float32_matmul_precision('high')
    self._train = settings['mode'] == 'train'
    self._bf16 = settings['precision'] == 'bfloat16'
    size, batch_size = settings['image_size'], settings['batch_size']
    torch.manual_seed(0)
    model = timm.create_model(
      settings['timm_name'],
      num_classes=settings['num_classes'],
      img_size=size,
    )
    self._model = model.to(self._device).train(self._train)
    shape = (batch_size, 3, size, size)
    self._images = torch.randint(0, 256, shape, dtype=torch.uint8)
    self._images = self._images.to(self._device)
    labels = torch.randint(0, settings['num_classes'], (batch_size,))
    self._labels = labels.to(self._device)
    if self._train:
      self._optimizer = torch.optim.AdamW(
        self._model.parameters(),
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        fused=True,
      )
    compile_s = self._compile(settings.get('compile', 'default'))
    self.round(settings.get('warmup', 0))
    self.started = {
      'compile_s': compile_s,
      'param_count': sum(p.numel() for p in self._model.parameters()),
      'hbm_peak': self._memory_gb(),
      'notes': self._notes,
      'versions': {'torch': torch.__version__, 'timm': timm.__version__},
    }

  def _compile(self, mode):
    """Seconds of the first step; eager, with a note, if it cannot compile."""
    self._forward = self._loss if self._train else self._logits
    self._notes = 'eager' if mode == 'none' else f'torch.compile {mode}'
    eager = self._forward
    start = time.perf_counter()
    if mode == 'none':
      self.round(1)
    else:
      self._forward = self._torch.compile(
        eager, mode=None if mode == 'default' else mode
      )
      try:
        self.round(1)
      except Exception as error:
        if workers.kind_of(error) == 'oom':
          raise
        self._forward = eager
        reason = workers.first_line(error)
        self._notes = f'EAGER, torch.compile failed: {reason}'
        self.round(1)
    return time.perf_counter() - start

  def _logits(self):
    images = self._images.float().sub(127.5).div(127.5)
    with self._autocast():
      return self._model(images)

  def _loss(self):
    logits = self._logits().float()
    return self._torch.nn.functional.cross_entropy(logits, self._labels)

  def _autocast(self):
    if not self._bf16:
      return contextlib.nullcontext()
    return self._torch.autocast(self._device.type, self._torch.bfloat16)

  def round(self, steps):
    """Seconds that so many steps take."""
    self._synchronise()
    start = time.perf_counter()
    for _ in range(steps):
      if self._train:
        self._update()
      else:
        with self._torch.inference_mode():
          self._forward()
    self._synchronise()
    return time.perf_counter() - start

  def _update(self):
    self._optimizer.zero_grad(set_to_none=True)
    self._forward().backward()
    self._torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP_NORM)
    self._optimizer.step()

  def _synchronise(self):
    if self._device.type == 'cuda':
      self._torch.cuda.synchronize()

  def _memory_gb(self):
    if self._device.type == 'cuda':
      return self._torch.cuda.max_memory_allocated() / 1e9
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def import_timm():
  """torch and timm, beside a torchvision that may not fit this torch.

  timm imports torchvision, which on import tells torch the shapes of its own
  operators, and fails if these did not load, as when one of the two packages
  was built for CUDA and the other was not. Models need none of them.
  """
  import torch

  tell = torch.library.register_fake

  def tell_of_others(name, *args, **kwargs):
    if str(name).startswith('torchvision::'):
      return lambda function: function
    return tell(name, *args, **kwargs)

  torch.library.register_fake = tell_of_others
  try:
    return torch, importlib.import_module('timm')
  finally:
    torch.library.register_fake = tell


if __name__ == '__main__':
  workers.serve(Timm)
