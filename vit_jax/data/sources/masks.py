"""Images with masks: pictures of the classes of their pixels."""

import collections
import io
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from etils import epath

from vit_jax.data import images
from vit_jax.data.sources import named, tables
from vit_jax.data.subsets import Example, Source, View, describe
from vit_jax.types import MACHINE, Decode, PathLike, UserError

VOID = -1  # pixels of a mask that count nowhere
_UNKNOWN = -2
Value = int | Sequence[int]  # of a pixel: a number, or (red, green, blue)


def open_masked(
  path: Annotated[PathLike, MACHINE],
  *,
  split: str | None = None,
  csv: Annotated[PathLike | None, MACHINE] = None,
  image_key: str | None = None,
  mask_key: str = 'mask',
  class_names: Annotated[PathLike | Sequence[str] | None, MACHINE] = None,
  values: Sequence[Value] | None = None,
  void: Sequence[Value] | None = None,
  decode: Decode | None = None,
) -> 'Masked':
  """Return images and masks that are named like them, or in another column.

    PATH/SPLIT/images/a/b.jpg, PATH/SPLIT/masks/a/b.png, PATH/classes.txt
    a table `csv` with the columns image_key and mask_key
    hf:NAME:SPLIT with such columns

  Args:
    path, split, csv, image_key, decode: of `named.open_source`.
    class_names: names of the classes, or a file of them. Default: PATH/
      classes.txt, with a name in each line.
    values, void: of `Masked`.
  """

  def part(folder='', **options):
    where = split if csv or not is_folder else os.path.join(split or '', folder)
    options |= {'csv': csv, 'split': where, 'classes': False}
    return named.open_source(path, **options)

  is_folder = named.kind_and_name(os.fspath(path))[0] == 'folder'
  if csv or not is_folder:
    source = part(image_key=image_key, decode=decode)
    masks = part(image_key=mask_key)
  else:
    source, masks = part('images', decode=decode), part('masks')
    masks = _named_alike(source, masks)
  if class_names is None:
    class_names = epath.Path(path) / 'classes.txt'
  names = tables.class_names(class_names)
  return Masked(source, masks, names or (), values=values, void=void)


def _named_alike(source, masks):
  """Return the masks in the order of the images with their names."""

  def stems(files):
    names = map(files.file_name, range(len(files)))
    return [os.path.splitext(name)[0] for name in names]

  found, wanted = stems(masks), stems(source)
  rows = {stem: i for i, stem in enumerate(found)}
  if len(rows) < len(found):
    twice = [x for x, n in collections.Counter(found).items() if n > 1]
    raise UserError(f'{masks.where}: several masks of {tables.some(twice)}.')
  if missing := [x for x in wanted if x not in rows]:
    raise UserError(
      f'{masks.where} has no masks of the images {tables.some(missing)}. '
      f'Expected {missing[0]}.png, named as its image. If they are named '
      'otherwise, list both in the columns image and mask of a table (csv).'
    )
  if others := len(masks) - len({*wanted}):
    tables.say_once(f'{masks.where}: {others} masks without an image')
  return View(masks, [rows[x] for x in wanted])


class Masked(View):
  """A source whose examples have 'mask': class of each pixel, int16 [H, W].

  A pixel is a class, or VOID. `evals.patches.Patches` reads masks; no training
  does.

  Args:
    source: images.
    masks: a source of their masks, in the same order: PNGs (or another format
      without loss) of numbers, also with a palette, or of colours; or arrays.
    class_names: names of the classes.
    values: value of the pixels of each class, in the order of the names.
      Default: 0, 1, 2, ...
    void: values of pixels that count nowhere. Default: 255, as in Pascal VOC
      and Cityscapes; of colours none.

  Raises:
    UserError: by an example: the mask has another size than the image, other
      values, or is a JPEG, which changes values.
  """

  def __init__(
    self,
    source: Source,
    masks: Source,
    class_names: Sequence[str],
    *,
    values: Sequence[Value] | None = None,
    void: Sequence[Value] | None = None,
  ) -> None:
    super().__init__(source, range(len(source)))
    values = range(len(class_names)) if values is None else values
    if len(values) != len(class_names):
      raise UserError(
        f'There are {len(values)} values of {len(class_names)} classes '
        f'{tables.some(class_names)}. Expected one for each.'
      )
    self._masks, self.pixel_classes = masks, [*class_names]
    self._has_colours = any(map(np.ndim, values))
    if void is None:
      void = () if self._has_colours else (255,)
    bits = 24 if self._has_colours else 16
    self._table = np.full(2**bits, _UNKNOWN, np.int16)
    self._table[[*map(_number, void)]] = VOID
    self._table[[*map(_number, values)]] = range(len(values))

  def __getitem__(self, index: int) -> Mapping[str, Any]:
    example = super().__getitem__(index)

    def read(name):  # a mask is decoded only where it is used
      return self._mask(index, example) if name == 'mask' else example[name]

    return Example({}, [*example, 'mask'], read)

  def _mask(self, index, example):
    where = describe(self._masks, index)
    found = self._values(self._masks[index]['image'], where)
    size = images.opened(images.decoder(self.source), example['image']).shape
    if found.shape != size[:2]:
      raise UserError(f'{where} is {found.shape}, its image {size[:2]}.')
    classes = self._table[found]
    if (wrong := found[classes == _UNKNOWN]).size:
      known = np.flatnonzero(self._table != _UNKNOWN)
      given, known = map(self._texts, (np.unique(wrong), known))
      raise UserError(
        f'{where} has the values {given}. Expected {known}, of void and '
        f'{len(self.pixel_classes)} classes. Set class_names and values, one '
        'for each class, and void, values that count nowhere.'
      )
    return classes

  def _values(self, data, where):
    """Return the numbers of a mask, int [H, W]; see `_number`."""
    if isinstance(data, bytes):
      with images.pillow().open(io.BytesIO(data)) as picture:
        if picture.format in ('JPEG', 'MPO'):
          raise UserError(f'{where} is a JPEG, which changes values. Use PNG.')
        data = np.asarray(
          picture.convert('RGB') if self._has_colours else picture
        )
    found = data.astype(np.int32)
    if found.ndim == 3 and self._has_colours:
      return found[..., 0] << 16 | found[..., 1] << 8 | found[..., 2]
    if found.ndim == 3 and (found == found[..., :1]).all():  # grey
      return found[..., 0]
    if found.ndim != 2:
      raise UserError(
        f'{where} has colours. Set values to the (red, green, blue) of each '
        f'class: {", ".join(self.pixel_classes[:3])}, ...'
      )
    return found

  def _texts(self, numbers):
    form = '#{:06x}' if self._has_colours else '{}'
    more = ', ...' * (len(numbers) > 12)
    return ', '.join(map(form.format, numbers[:12])) + more


def _number(value):
  """Return a value as a number, a colour as its 24 bits."""
  red, green, blue = (0, 0, value) if np.ndim(value) == 0 else value
  return red << 16 | green << 8 | blue
