"""Sources, a model and features for evaluators; meshes of 1 and 8 devices."""

import functools

import jax
import numpy as np
from listed import Listed

from vit_jax.data.sources.digits import Digits
from vit_jax.evals.frozen import Split
from vit_jax.parallel import sharding


@functools.cache
def digits(split):
  """Pixels of the digits in [-1, 1]: 1,029 or 768 of 64 features."""
  source = Digits(split=split)
  examples = [source[i] for i in range(len(source))]
  x = np.stack([e['image'].ravel() for e in examples]).astype(np.float32)
  return Split(x / 127.5 - 1, np.array([e['label'] for e in examples]))


class Source(Listed):
  """Images with given labels, some of which cannot be read."""

  def __init__(self, images, labels, num_classes, broken=()):
    super().__init__(images, labels)
    self.num_classes, self.broken, self.reads = num_classes, broken, 0

  def __getitem__(self, i):
    self.reads += 1
    if i in self.broken:
      raise ValueError('unreadable')
    return super().__getitem__(i)

  def describe(self, i):
    return f'image {i}'


class Linear:
  """A model whose parameters are its kernel."""

  def __init__(self, num_classes):
    self.num_classes = num_classes

  def apply(self, variables, images):
    return images.reshape(len(images), -1) @ variables['params']


def make(cls, data, kernel, num_devices=8, **options):
  """Return an evaluator of a linear model, and its parameters."""
  mesh = sharding.make_mesh(jax.devices()[:num_devices])
  evaluator = cls(
    model=Linear(kernel.shape[1]),
    preprocess=lambda images: images.astype('float32') / 255,
    mesh=mesh,
    data=data,
    **options,
  )
  return evaluator, jax.device_put(kernel, sharding.replicated(mesh))
