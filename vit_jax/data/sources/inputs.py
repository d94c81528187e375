"""Images to predict: what a command line names, read and transformed."""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vit_jax.data import images, workers
from vit_jax.data.sources import image_files, named, tables
from vit_jax.data.subsets import Source, describe
from vit_jax.data.transforms import apply
from vit_jax.types import Decode, UserError


class Paths(tables.Labelled):
  """A source of image files, by path or URL, in this order; labels are 0."""

  def __init__(
    self, paths: Sequence[str], decode: Decode = images.Colours()
  ) -> None:
    super().__init__(np.zeros(len(paths), np.int32), None)
    self._paths = paths
    self.decode: Any = decode

  def __getitem__(self, index: int) -> dict[str, Any]:
    image = image_files.read(self.decode.paths(self._paths[index]))
    return {'image': image, 'label': 0}

  def held(self, keep: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Return the labels and the paths."""
    return super().held() | {'files': [[*map(os.fsencode, self._paths)]]}

  def describe(self, index: int) -> str:
    """Return the path of the file."""
    return self._paths[index]


def find(
  words: Sequence[str], *, decode: Decode, csv: str | None, **options: Any
) -> Source:
  """Return the source of the images that the words of a command name.

  It is `open_source` of the name of a data set, such as 'hf:beans:test', or of
  a table and its folder, with these options; else, `image_files.find`.
  """
  is_path = functools.partial(_is_path, decode=decode)
  if csv is None and (len(words) > 1 or any(map(is_path, words))):
    return Paths(image_files.find(words, decode), decode)
  if len(words) > 1:
    raise UserError(f'csv={csv!r}: expected one folder, not {words}.')
  with contextlib.redirect_stdout(sys.stderr):  # what is said of the data
    options = {'csv': csv, 'classes': False, 'decode': decode, **options}
    return named.open_source(*words, **options)


def _is_path(word, decode):
  """Return whether a word is neither a name nor a file of a data set."""
  is_image = image_files.is_image(word, decode)
  return is_image or named.kind_and_name(word) == ('folder', word)


def load(
  source: Source,
  transforms: Sequence[Any],
  max_image_bytes: int = images.MAX_IMAGE_BYTES,
  *,
  ahead: int = 16,
) -> Iterator[tuple[str, Any]]:
  """Yield (name, {'image': array [H, W, C]}) of each example, in order.

  By KeepAspect there is 'grid', too. If the image cannot be read, a ValueError
  replaces the dict. Threads read and transform `ahead` images in advance.
  """
  decode = images.decoder(source)

  def loaded(index):
    name = describe(source, index)
    try:
      image = source[index]['image']
      image = images.opened(decode, image, max_image_bytes=max_image_bytes)
      example = apply(transforms, {'image': image}, np.random.default_rng(0))
    except (OSError, ValueError) as error:
      return name, ValueError(f'{name}: {error}')
    if remark := getattr(image, 'remark', ''):
      images.warn_once(f'{name}: {remark}. The image is used.')
    return name, example

  yield from workers.read_ahead(loaded, range(len(source)), ahead)
