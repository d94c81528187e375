"""The classes of ImageNet and its reassessed labels, ReaL."""

import dataclasses
import functools
from typing import Any

import numpy as np


@functools.cache
def wnids() -> tuple[str, ...]:
  """Return the 1000 WordNet ids ('n01440764', ...) in the order of the classes.

  Pass them as `class_names` to a Folder with only some of ImageNet's classes.
  """
  import tensorflow_datasets as tfds

  return tuple(tfds.builder('imagenet2012').info.features['label'].names)


@dataclasses.dataclass(frozen=True)
class RealLabels:
  """Label function for the feature 'real_label' of TFDS's imagenet2012_real.

  It returns float32 [1000] with a 1 for each class of the image. Images without
  a class, which ReaL leaves out of the accuracy, have only zeros.
  """

  num_classes = 1000

  @property
  def class_names(self) -> list[str]:
    return list(wnids())

  def __call__(self, ids: Any) -> np.ndarray:
    label = np.zeros(self.num_classes, np.float32)
    label[np.asarray(ids, np.int64)] = 1
    return label
