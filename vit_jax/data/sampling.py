"""Orders of training by class, and by weights of the examples."""

import dataclasses
import difflib
import io
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from etils import epath

from vit_jax.config.domains import NonNegative, Range, checked
from vit_jax.data import fingerprints, order, pipeline


@checked
@dataclasses.dataclass(frozen=True)
class Balanced:
  """Each class equally often, or in other proportions: see order.BalancedOrder.

  Attributes:
    power: a class of n examples is visited in proportion to n ** power. 0: each
      class equally often; 0.5: by the square root; 1: as in the data.
    weights: of classes, one for each or {name: weight}, by which these
      proportions are multiplied. Classes without a name in it have weight 1.

  Raises:
    ValueError: (in `bind`) the source has other labels than one class per
      example; weights that do not fit its classes.
  """

  power: Annotated[float, Range(-10, 10)] = 0.0
  weights: Mapping[str, NonNegative] | Sequence[NonNegative] | None = None

  def bind(self, source: pipeline.Source, seed: int) -> order.Visits:
    weights = None
    if self.weights is not None:
      weights = _weights_of_classes(self.weights, source)
    labels = pipeline.labels(source)
    return order.BalancedOrder(labels, seed, power=self.power, weights=weights)


def _weights_of_classes(weights, source):
  """Return the weight of each class of a source: float64 [K]."""
  names = getattr(source, 'class_names', None)
  count = getattr(source, 'num_classes', None)
  if not isinstance(weights, Mapping):
    if count is not None and len(weights) != count:
      raise ValueError(
        f'Balanced: weights has {len(weights)} numbers, but the source has '
        f'{count} classes. Give one number for each class, or {{name: weight}}.'
      )
    return np.array(weights, np.float64)
  if names is None:
    raise ValueError(
      'Balanced: weights has names of classes, but the source has no '
      'class_names. Give one number for each class, in the order of the labels.'
    )
  for name in weights:
    if name not in names:
      near = difflib.get_close_matches(str(name), map(str, names), n=1)
      hint = f' Did you mean {near[0]!r}?' if near else ''
      raise ValueError(
        f'Balanced: weights has {name!r}, which is none of the {len(names)} '
        f'classes of the source.{hint}'
      )
  return np.array([weights.get(name, 1.0) for name in names], np.float64)


@checked
@dataclasses.dataclass(frozen=True)
class Weighted:
  """Independent draws of examples in proportion to weights, with replacement.

  Attributes:
    weights: one for each example, 0 or more: a .npy file, or numbers. An
      example of weight 0 is never drawn.

  Raises:
    ValueError: (in `bind`) a file that cannot be read; another number of
      weights than of examples; weights that are negative, not finite, or all 0.
  """

  weights: Any

  def bind(self, source: pipeline.Source, seed: int) -> order.Visits:
    weights = self._load()
    if len(weights) != len(source):
      raise ValueError(
        f'{self._name()} has {len(weights)} numbers, but the source has '
        f'{len(source)} examples. Expected one weight for each example.'
      )
    return order.WeightedOrder(weights, seed, what=self._name())

  def fingerprint(self) -> dict[str, Any]:
    """Return the number of the weights and their hash."""
    weights = self._load()
    digest = fingerprints.digest([weights.astype('<f8').tobytes()])
    kind = f'{type(self).__module__}.{type(self).__qualname__}'
    return {'kind': kind, 'num_examples': len(weights), 'weights': digest}

  def _name(self):
    name = 'Weighted: weights'
    is_path = isinstance(self.weights, str | os.PathLike)
    return f'{name}={self.weights!r}' if is_path else name

  def _load(self):
    """Return the weights: float64 [n]."""
    weights = self.weights
    try:
      if isinstance(weights, str | os.PathLike):
        content = io.BytesIO(epath.Path(weights).read_bytes())
        weights = np.load(content, allow_pickle=False)
      weights = np.asarray(weights, np.float64)
    except Exception as error:  # each file system raises its own types
      raise ValueError(
        f'{self._name()} cannot be read: {type(error).__name__}: {error}. '
        'Expected one number for each example, in a .npy file or a list.'
      ) from error
    if weights.ndim != 1:
      raise ValueError(
        f'{self._name()} has shape {weights.shape}. Expected [n], one weight '
        'for each of n examples.'
      )
    return weights
