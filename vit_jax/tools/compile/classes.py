"""Numbers of classes of data that is not opened."""

from typing import Any

from vit_jax.config import Call
from vit_jax.data import imagenet, tfds
from vit_jax.data.sources import open_source


def declared(source: Any) -> int | None:
  """Return the number of classes that a source is known to have, or None.

  Args:
    source: Call of a source, as in `plan_run`. Known are the data sets of TFDS
      by their names, ImageNet and ImageNet-21k among them; sources and label
      functions with an attribute or argument `num_classes`; and what wraps such
      a source.
  """
  if not isinstance(source, Call):
    return None
  kwargs = source.kwargs
  label_key = kwargs.get('label_key') or 'label'
  if source.fn is tfds.Tfds:
    if kwargs.get('label_fn') is not None:
      return declared(kwargs['label_fn'])
    return tfds.registered_classes(kwargs['name'], label_key)
  if source.fn is open_source:
    kind, _, name = str(kwargs.get('path')).partition(':')
    if kind == 'imagenet':
      return imagenet.NUM_CLASSES
    if kind == 'tfds':
      return tfds.registered_classes(name.rpartition(':')[0], label_key)
    return None
  if 'num_classes' in kwargs:
    return kwargs['num_classes']
  if hasattr(source.fn, 'num_classes'):  # None of a source without classes
    return source.fn.num_classes
  return declared(kwargs.get('source'))
