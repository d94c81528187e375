"""Images without their labels, for objectives that need none."""

import numpy as np


class Unlabelled:
  """A source whose examples all have label 0, whatever `source` says of them.

  It knows no classes, so that what a model predicts is never taken for them.

  Args:
    source: as in pipeline.py; its examples need no 'label'.
  """

  num_classes = None
  class_names = None

  def __init__(self, source):
    self.source = source
    self.channels = getattr(source, 'channels', 3)

  def __len__(self):
    return len(self.source)

  def __getitem__(self, index):
    return {'image': self.source[index]['image'], 'label': 0}

  def describe(self, index):
    return self.source.describe(index)

  def labels(self):
    return np.zeros(len(self), np.int32)
