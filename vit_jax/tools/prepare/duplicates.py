"""Copies of evaluation examples in a source, found by a perceptual hash.

Each image becomes a grey thumbnail of 64 x 64 pixels. Each of 19 views of it
(the whole, and parts of it) becomes the lowest 8 x 8 coefficients of its DCT. A
view has

  a hash      64 bits: which coefficients are larger than their median
  a vector    the coefficients, weighted by their frequency, of length 1

Two images are compared by the whole of one and all views of the other, so that
a copy may be cropped by up to 10% (central) or 5% (at a corner). They are

  exact   copies if their thumbnails are equal
  near    copies if two views have a Hamming distance of at most `max_distance`
          and vectors with a cosine of at least `_SIMILAR`

The hash finds candidates fast. It is compared with all views of all evaluation
examples, without an index: 50,000 of them take 2.5 ms of one core per image,
and the views of the image 0.6 ms (one measurement, with random hashes). This is
12 core-hours for 14 million images, more than decoding small photographs. The
cosine separates copies from images that only look alike at this size, such as
two scans of the same digit. Mirrored and rotated copies are not found.
"""

import csv
import dataclasses
import functools
import hashlib
import io
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data import fingerprints, images, pipeline
from vit_jax.data.pipeline import Source
from vit_jax.runs.files import PathLike, replacing, write_atomically

MAX_DISTANCE = 10  # default of max_distance, of 64 bits
# Chosen on a few sets, see docs/data.md. Of all pairs of 768 scans of digits,
# three reach it, all of the digit 1; of 1,000 glyphs, none.
_SIMILAR = 0.985
_BLOCK = 2**15  # evaluation examples that are compared at a time
_SIDE, _SMALL, _LOW = 64, 32, 8
# Top, bottom, left and right of the views, as fractions of the sides.
_VIEWS = (
  (0, 1, 0, 1),
  *((x, 1 - x, x, 1 - x) for x in (0.0125, 0.025, 0.0375, 0.05)),
  *((y, y + 0.95, x, x + 0.95) for y in (0, 0.05) for x in (0, 0.05)),
  *((y, y + 0.975, x, x + 0.975) for y in (0, 0.025) for x in (0, 0.025)),
  *((y, y + 0.96, 0, 1) for y in (0, 0.04)),
  *((0, 1, x, x + 0.96) for x in (0, 0.04)),
  *((0, 1, 0.04, 0.96), (0.04, 0.96, 0, 1)),
)


class Match(NamedTuple):
  """An evaluation example that an image is a copy of.

  Attributes:
    source: number of the evaluation set.
    place: index of the example in it.
    description: of the example.
    kind: 'exact' or 'near'.
    distance: Hamming distance of the hashes, 0 to 64.
    similarity: cosine of the vectors.
  """

  source: int
  place: int
  description: str
  kind: str
  distance: int
  similarity: float


@functools.cache
def _dct():
  """Return the lowest rows of the matrix of a DCT: float32 [8, 32]."""
  rows, places = np.arange(_LOW)[:, None], np.arange(_SMALL)[None]
  return np.cos(np.pi * rows * (places + 0.5) / _SMALL).astype(np.float32)


@functools.cache
def _weights():
  """Return the weights of the coefficients, float32 [64]: i + j."""
  return np.add.outer(np.arange(_LOW), np.arange(_LOW)).astype('f4').ravel()


class Views(NamedTuple):
  """An image as it is compared.

  Attributes:
    digest: of the thumbnail, uint64.
    hashes: uint64 [19].
    vectors: float16 [19, 64]; 0 for images of one colour.
  """

  digest: np.uint64
  hashes: np.ndarray
  vectors: np.ndarray


def views(image: np.ndarray) -> Views:
  """Return the views of an image, uint8 [H, W, 1 or 3]."""
  cv2 = images.opencv()
  if image.shape[2] == 3:
    image = cv2.cvtColor(np.ascontiguousarray(image), cv2.COLOR_RGB2GRAY)
  shrinks = min(image.shape[:2]) >= _SIDE
  how = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
  thumbnail = cv2.resize(image, (_SIDE, _SIDE), interpolation=how)
  digest = hashlib.blake2b(thumbnail.tobytes(), digest_size=8).digest()
  floats = thumbnail.astype(np.float32)
  found = np.stack([_cut(cv2, floats, *view) for view in _VIEWS])
  low = (_dct() @ found @ _dct().T).reshape(len(_VIEWS), -1)
  middle = np.partition(low[:, 1:], 31, axis=1)[:, 31:32]
  bits = low > middle
  bits[:, 0] = False  # the brightness
  hashes = np.packbits(bits, axis=1).view('>u8')[:, 0].astype(np.uint64)
  vectors = low * _weights()
  norms = np.linalg.norm(vectors, axis=1, keepdims=True)
  # Rounding of the thumbnail alone gives about 100.
  vectors = np.where(norms > 1000, vectors / np.maximum(norms, 1e-9), 0)
  return Views(
    np.frombuffer(digest, '<u8')[0], hashes, vectors.astype(np.float16)
  )


def _cut(cv2, thumbnail, top, bottom, left, right):
  """Return a part of the thumbnail, at fractions of pixels: [32, 32]."""
  height, width = (x * _SIDE / _SMALL for x in (bottom - top, right - left))
  matrix = np.array(
    [
      [width, 0, left * _SIDE + (width - 1) / 2],
      [0, height, top * _SIDE + (height - 1) / 2],
    ]
  )
  return cv2.warpAffine(
    thumbnail,
    matrix,
    (_SMALL, _SMALL),
    flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
    borderMode=cv2.BORDER_REPLICATE,
  )


@dataclasses.dataclass(frozen=True)
class Index:
  """The views of all examples of some evaluation sets, in files.

  Each process maps the files into its memory, so they are there only once.

  Attributes:
    folder: of the files, see `build`.
    sources: the evaluation sets.
    max_distance: largest Hamming distance of near copies.
  """

  folder: str
  sources: Sequence[Source]
  max_distance: int = MAX_DISTANCE

  def find(self, image: np.ndarray) -> list[Match]:
    """Return the evaluation examples that the image is a copy of."""
    own, known = views(image), self._files
    exact = set(self._by_digest.get(int(own.digest), ()))
    places = set(exact)
    for start in range(0, len(known.digest), _BLOCK):
      block = self._by_view[:, start : start + _BLOCK]
      least = np.full(block.shape[1], 64, np.uint8)
      pairs = [(view, own.hashes[0]) for view in block]
      pairs += [(block[0], view) for view in own.hashes[1:]]
      differing = np.empty(block.shape[1], np.uint64)
      for view, other in pairs:
        np.bitwise_xor(view, other, out=differing)
        np.minimum(least, np.bitwise_count(differing), out=least)
      near = np.flatnonzero(least <= self.max_distance)
      places.update((start + near).tolist())
    found = []
    for place in sorted(places):
      distance, similarity = self._compare(own, place)
      if place in exact or similarity >= _SIMILAR:
        kind = 'exact' if place in exact else 'near'
        number, index = self._example(place)
        text = pipeline.describe(self.sources[number], index)
        found.append(Match(number, index, text, kind, distance, similarity))
    return found

  def _compare(self, own, place):
    """Return (distance, similarity) of the most similar pair of views."""
    hashes = self._files.hashes[place]
    vectors = self._files.vectors[place].astype(np.float32)
    mine = own.vectors.astype(np.float32)
    distances = np.concatenate([hashes ^ own.hashes[0], own.hashes ^ hashes[0]])
    distances = np.bitwise_count(distances)
    similar = np.concatenate([vectors @ mine[0], mine @ vectors[0]])
    best = np.argmax(np.where(distances <= self.max_distance, similar, -2))
    return int(distances[best]), round(float(similar[best]), 4)

  def _example(self, place):
    for number, source in enumerate(self.sources):
      if place < len(source):
        return number, place
      place -= len(source)
    raise IndexError(place)

  @functools.cached_property
  def _files(self):
    return Views(
      *(
        np.load(os.path.join(self.folder, f'{name}.npy'), mmap_mode='r')
        for name in Views._fields
      )
    )

  @functools.cached_property
  def _by_view(self):
    return np.ascontiguousarray(self._files.hashes.T)

  @functools.cached_property
  def _by_digest(self):
    found: dict[int, list[int]] = {}
    for place, digest in enumerate(self._files.digest.tolist()):
      found.setdefault(digest, []).append(place)
    return found

  def __getstate__(self) -> dict[str, Any]:
    fields = [field.name for field in dataclasses.fields(self)]
    return {name: self.__dict__[name] for name in fields}


def build(
  folder: PathLike,
  sources: Sequence[Source],
  max_distance: int,
  each: Callable[[Callable[[int], Any], int], Iterable[Any]],
) -> Index:
  """Return the index of some evaluation sets; complete files are used again.

  Args:
    folder: for the files.
    sources: evaluation sets.
    max_distance: of `Index`.
    each: returns f(i) for i in range(n), in order, such as `map`.

  Raises:
    ValueError: an evaluation example that cannot be read.
  """
  known = fingerprints.digest(
    [repr((1, [fingerprints.fingerprint(source) for source in sources]))]
  )
  folder = os.path.join(folder, f'index-{known}')
  index = Index(folder, sources, max_distance)
  done = os.path.join(folder, 'done')
  if os.path.exists(done):
    return index
  os.makedirs(folder, exist_ok=True)
  found: list[Views] = []
  for source in sources:
    found += each(functools.partial(_views_of, source), len(source))
  for name in Views._fields:
    path = os.path.join(folder, f'{name}.npy')
    with replacing(path) as partial, open(partial, 'wb') as file:
      np.save(file, np.stack([getattr(x, name) for x in found]))
  write_atomically(done, '')
  return index


def _views_of(source, index):
  try:
    example = source[index]
    image = example['image']
    if isinstance(image, bytes):
      exif = example.get('exif', getattr(source, 'exif', True))
      image = images.decode(image, getattr(source, 'channels', 3), exif=exif)
    return views(image)
  except (OSError, ValueError) as error:
    where = pipeline.describe(source, index)
    raise ValueError(
      f'cannot read the evaluation example {index} ({where}): {error}'
    ) from error


COLUMNS = (
  *('index', 'description', 'evaluation_set', 'evaluation_index'),
  *('evaluation_description', 'kind', 'distance', 'similarity', 'left_out'),
)


def write_csv(
  path: PathLike, columns: Sequence[str], rows: Iterable[Sequence[Any]]
) -> None:
  """Write a table."""
  file = io.StringIO()
  writer = csv.writer(file, lineterminator='\n')
  writer.writerow(columns)
  writer.writerows(rows)
  write_atomically(path, file.getvalue())
