"""Worker that makes the batches of the input benchmark with timm.

Images are decoded by Pillow and transformed by what timm's `create_transform`
returns for a recipe, in a DataLoader of PyTorch. Images stay bytes; timm
normalizes them on the device. Random erasing, which comes after that, is
applied here to float images. Of this project it needs the images and `serve`:

  PEER_PYTHON -m vit_jax.tools.benchmark.timm_input
"""

import io
from collections.abc import Callable
from typing import Any

from vit_jax.tools.benchmark import workers
from vit_jax.tools.benchmark.input import (
  NUM_EXAMPLES,
  Jpegs,
  time_batches,
  use_cores,
)
from vit_jax.tools.benchmark.timm import import_timm

_RECIPES: dict[str, dict[str, Any]] = {  # arguments of create_transform
  'crop': {'scale': (0.05, 1.0), 'interpolation': 'bilinear'},
  'deit': {
    'auto_augment': 'rand-m9-mstd0.5-inc1',
    'interpolation': 'bicubic',
  },
  'deit3': {
    'auto_augment': '3a',
    'color_jitter': 0.3,
    'interpolation': 'bicubic',
  },
}


class _Examples:
  """Dataset of PyTorch: decoded, transformed images and their labels."""

  def __init__(self, source: Jpegs, transform: Callable[[Any], Any]) -> None:
    self._source, self._transform = source, transform

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> tuple[Any, int]:
    from PIL import Image

    example = self._source[index]
    image = Image.open(io.BytesIO(example['image'])).convert('RGB')
    return self._transform(image), example['label']


class TimmInput:
  """Batches of a DataLoader.

  Args:
    settings: as of `input.Input`. With several threads there are as many
      worker processes instead, as in PyTorch's examples.
  """

  def __init__(self, settings: Any) -> None:
    threads = settings.get('num_threads') or None
    use_cores(threads)
    torch, timm = import_timm()
    torch.set_num_threads(1)
    from timm.data import create_transform
    from timm.data.random_erasing import RandomErasing

    name, size = settings.get('augmentation', 'crop'), settings['image_size']
    transform = create_transform(
      size, is_training=True, use_prefetcher=True, **_RECIPES[name]
    )
    erase = RandomErasing(0.25, mode='pixel', device='cpu')

    def erased(image):
      image = torch.as_tensor(transform(image))
      return erase(image.float()) if name == 'deit' else image

    source = Jpegs(
      settings.get('images', 'imagenet'),
      settings.get('num_examples', NUM_EXAMPLES),
    )
    self._batches = torch.utils.data.DataLoader(
      _Examples(source, erased),
      settings['batch_size'],
      num_workers=threads if threads and threads > 1 else 0,
      drop_last=True,
      sampler=torch.utils.data.RandomSampler(source, replacement=True),
    )
    self.round(settings.get('warmup', 0))
    self.started = {
      'versions': {'torch': torch.__version__, 'timm': timm.__version__}
    }

  def round(self, steps: int) -> dict[str, float]:
    """Return the 'seconds' and 'cpu_seconds' that some batches take."""
    return time_batches(iter(self._batches), steps)


if __name__ == '__main__':
  workers.serve(TimmInput)
