"""Worker that runs timm's model of the same name, in PyTorch.

torch.compile of normalization, model and loss; bfloat16 by autocast; timm's
default attention, which is PyTorch's scaled_dot_product_attention; fused AdamW;
clipping by global norm. Of this project it needs `serve` alone, so that any
interpreter with torch and timm can run it:

  PEER_PYTHON -m vit_jax.tools.benchmark.timm
"""

import importlib
import resource
import time
from typing import Any
from unittest import mock

from vit_jax.tools.benchmark import workers

CLIP_NORM, WEIGHT_DECAY, LEARNING_RATE = 1.0, 0.1, 1e-4


class Timm:
  """A compiled step of a timm model, with its batch.

  Args:
    settings: 'mode' ('train' or 'infer'), 'timm_name', 'batch_size',
      'image_size', 'num_classes', 'precision', 'warmup' (steps), 'compile' (a
      mode of torch.compile, or 'none' for eager).
  """

  def __init__(self, settings: Any) -> None:
    self._torch, timm = import_timm()
    torch = self._torch
    self._device = 'cuda' if torch.cuda.is_available() else 'cpu'
    # XLA's default on GPUs, too: TF32 for float32.
    torch.set_float32_matmul_precision('high')
    self._trains = settings['mode'] == 'train'
    self._bfloat16 = settings['precision'] == 'bfloat16'
    size, batch_size = settings['image_size'], settings['batch_size']
    num_classes = settings['num_classes']
    torch.manual_seed(0)
    model = timm.create_model(
      settings['timm_name'], num_classes=num_classes, img_size=size
    )
    self._model = model.to(self._device).train(self._trains)
    shape = (batch_size, 3, size, size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8)
    labels = torch.randint(0, num_classes, (batch_size,))
    self._images = images.to(self._device)
    self._labels = labels.to(self._device)
    self._optimizer = torch.optim.AdamW(
      self._model.parameters(),
      lr=LEARNING_RATE,
      weight_decay=WEIGHT_DECAY,
      fused=True,
    )
    compile_s, notes = self._compile(settings.get('compile', 'default'))
    self.round(settings.get('warmup', 0))
    self.started = {
      'compile_s': compile_s,
      'param_count': sum(p.numel() for p in self._model.parameters()),
      'hbm_peak': self._memory_gb(),
      'notes': notes,
      'versions': {'torch': torch.__version__, 'timm': timm.__version__},
    }

  def _compile(self, mode):
    """Compile, and return (seconds of the first step, notes)."""
    eager = self._loss if self._trains else self._logits
    self._forward, notes = eager, 'eager'
    if mode != 'none':
      self._forward = self._torch.compile(eager, mode=mode)
      notes = f'torch.compile {mode}'
    start = time.perf_counter()
    try:
      self.round(1)
    except Exception as error:
      if mode == 'none' or workers.kind_of(error) == workers.OUT_OF_MEMORY:
        raise
      self._forward = eager
      notes = f'EAGER, torch.compile failed: {workers.first_line(error)}'
      self.round(1)
    return time.perf_counter() - start, notes

  def _logits(self):
    images = self._images.float().sub(127.5).div(127.5)
    with self._torch.autocast(
      self._device, self._torch.bfloat16, enabled=self._bfloat16
    ):
      return self._model(images)

  def _loss(self):
    logits = self._logits().float()
    return self._torch.nn.functional.cross_entropy(logits, self._labels)

  def round(self, steps: int) -> float:
    """Return the seconds that some steps take."""
    self._synchronize()
    start = time.perf_counter()
    for _ in range(steps):
      if self._trains:
        self._update()
      else:
        with self._torch.inference_mode():
          self._forward()
    self._synchronize()
    return time.perf_counter() - start

  def _update(self):
    self._optimizer.zero_grad(set_to_none=True)
    self._forward().backward()
    self._torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP_NORM)
    self._optimizer.step()

  def _synchronize(self):
    if self._device == 'cuda':
      self._torch.cuda.synchronize()

  def _memory_gb(self):
    if self._device == 'cuda':
      return self._torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def import_timm() -> tuple[Any, Any]:
  """Return the modules torch and timm.

  timm imports torchvision, which cannot register its operators with a torch
  that it was not built for. Models need none of them.
  """
  import torch

  register = torch.library.register_fake

  def register_unless_torchvision(name, *args, **kwargs):
    if str(name).startswith('torchvision::'):
      return lambda function: function
    return register(name, *args, **kwargs)

  with mock.patch.object(
    torch.library, 'register_fake', register_unless_torchvision
  ):
    return torch, importlib.import_module('timm')


if __name__ == '__main__':
  workers.serve(Timm)
