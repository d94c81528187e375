"""Single examples: ordered, read, decoded, checked, augmented."""

import functools

import numpy as np

from vit_jax.data import images

_TRIES = 100  # consecutive unreadable examples until we give up skipping


class Unreadable(ValueError):
  """An example whose bytes cannot be had or decoded: on_error decides."""


class Examples:
  """Reads, decodes and transforms single examples, and checks them."""

  def __init__(self, source, transforms, seed, on_error, num_classes):
    if not 0 < len(source) <= 2**32:
      raise ValueError(
        f'the source {_name(source)} has {len(source)} examples; from 1 to'
        ' 2**32 can be read.'
      )
    if on_error not in ('raise', 'skip'):
      raise ValueError(
        f"on_error is {on_error!r}; it can be 'raise' or 'skip'."
      )
    if not 0 <= seed < 2**64:
      raise ValueError(f'seed is {seed}; it lies in [0, 2**64).')
    self.source, self.seed, self.on_error = source, seed, on_error
    self.transforms = tuple(transforms)
    if num_classes is None:
      num_classes = getattr(source, 'num_classes', None)
    self.num_classes = num_classes
    self.channels = getattr(source, 'channels', 3)

  def at(self, position):
    """(epoch, index) of a global position of training."""
    from grain.experimental import index_shuffle

    count = len(self.source)
    epoch, place = divmod(position, count)
    key = _shuffle_seed(self.seed, epoch)
    index = index_shuffle(place, max_index=count - 1, seed=key, rounds=4)
    return epoch, index

  def load(self, epoch, index, *, replace):
    """(image, label, how many unreadable ones came before it).

    With `replace` and on_error='skip', the next readable example by index
    stands in for an unreadable one; it is augmented in the one's place.
    """
    replace = replace and self.on_error == 'skip'
    count, first_error = len(self.source), None
    for skipped in range(min(_TRIES, count) if replace else 1):
      try:
        image, label = self._read((index + skipped) % count)
        break
      except Unreadable as error:
        first_error = first_error or error
    else:
      if not replace:
        raise first_error
      raise ValueError(
        f'gave up after {min(_TRIES, count)} unreadable examples in a row; the'
        f' first: {first_error}'
      )
    place = (index + skipped) % count
    return self._transform(image, epoch, index, place), label, skipped

  def _read(self, index):
    try:
      example = self.source[index]
      image = example['image']
      if isinstance(image, bytes):
        image = images.decode(image, self.channels)
    except (OSError, ValueError) as error:
      raise Unreadable(
        f'cannot read {self._where(index)}: {error} (Repair or remove it, or'
        " set on_error='skip'.)"
      ) from error
    if getattr(image, 'dtype', None) != np.uint8 or image.ndim != 3:
      kind = f'{getattr(image, "dtype", type(image))}, {np.shape(image)}'
      raise ValueError(
        f'the image of {self._where(index)} is {kind}; expected uint8 [H, W, C]'
        ' or encoded bytes.'
      )
    return image, self._checked_label(example['label'], index)

  def _checked_label(self, label, index):
    if isinstance(label, (int, np.integer)):
      limit = self.num_classes
      if label < 0 or (limit is not None and label >= limit):
        raise ValueError(
          f'the label of {self._where(index)} is {label}, not in'
          f' [0, {"..." if limit is None else limit}). Check num_classes'
          f' ({limit}), and whether this split has labels at all (-1 often'
          ' stands for none).'
        )
      return label
    label = np.asarray(label)
    if label.ndim != 1 or label.dtype.kind not in 'fiub':
      raise ValueError(
        f'the label of {self._where(index)} is {label!r}; expected an int, or a'
        ' vector with one weight for each class.'
      )
    if self.num_classes is not None and len(label) != self.num_classes:
      raise ValueError(
        f'the label of {self._where(index)} has {len(label)} entries;'
        f' num_classes is {self.num_classes}.'
      )
    return label.astype(np.float32)

  def _transform(self, image, epoch, index, place):
    if not self.transforms:
      return image
    # A counter-based generator: (seed, epoch) is its key and `index` a word of
    # its counter, so no two examples ever share a stream.
    key = np.array([self.seed, epoch], np.uint64)
    counter = np.array([0, 0, index, 0], np.uint64)
    rng = np.random.Generator(np.random.Philox(key=key, counter=counter))
    for transform in self.transforms:
      try:
        image = transform(image, rng)
      except Exception as error:
        error.add_note(f'In {transform} on {self._where(place)}.')
        if type(error) is not ValueError:
          raise
        raise ValueError(f'{error} ({self._where(place)})') from error
    return image

  def _where(self, index):
    try:
      what = self.source.describe(index)
    except Exception as error:  # its record may be what is broken
      what = f'no description: {error}'
    return f'example {index} of {_name(self.source)} ({what})'


@functools.lru_cache(maxsize=16)
def _shuffle_seed(seed, epoch):
  return int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])


def _name(source):
  return type(source).__name__
