"""Write a data set once, as sharded ArrayRecord files that are read by name.

  python -m vit_jax.tools.prepare [SPLIT=]SOURCE [...] DEST [options]

A folder of images, shrunk to a short side of 256 pixels:

  python -m vit_jax.tools.prepare /data/flowers /data/sets/flowers \\
      --short_side=256

SOURCE is a folder of images, a name such as 'tfds:NAME:SPLIT' or
'hf:NAME:SPLIT', see docs/data.md, a tar file 'tar:FILE', or 'imagenet:FOLDER:
SPLIT' for the tar files of image-net.org. SPLIT is 'train' by default, or the
split that the name ends with. DEST is a new folder. Until it is complete, it is
called DEST.part. Unreadable images and copies are left out, and listed in
DEST/left_out.csv. Columns of numbers and texts are kept.
"""

import argparse
import contextlib
import functools
import io
import numbers
import pathlib
import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.data import images, subsets, workers
from vit_jax.data.rasters import Raster
from vit_jax.data.sources import tars
from vit_jax.data.sources.named import open_source, split_and_name
from vit_jax.data.transforms import resize
from vit_jax.io import terminal
from vit_jax.io.files import write_csv
from vit_jax.tools import parsers
from vit_jax.types import PathLike, UserError

_SOURCE_OPTIONS = {
  'csv': 'table of path,label',
  'image_key': 'field with the image',
  'label_key': 'field with the label',
  'class_names': 'file with the names, one per line, or a JSON list',
}
_COPY_BITS = 6  # Hashes of copies differ in at most so many of 64 bits.


@terminal.one_message()
def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_args(argv)
  options = {key: getattr(args, key) for key in _SOURCE_OPTIONS}
  decode = Raster(args.channels) if args.channels else None
  word = f':channels={args.channels}' if decode else ''
  sources = {
    split_and_name(x)[0]: _open(x, decode, **options) for x in args.sources
  }
  if len(sources) < len(args.sources):
    raise UserError(f'{args.sources} name a split twice. Use SPLIT=SOURCE.')
  folder = write(
    args.dest,
    sources,
    short_side=args.short_side,
    shuffle=args.shuffle,
    leave_out={x: _open(x, decode) for x in args.leave_out},
    max_image_bytes=args.max_image_bytes,
  )
  source = shlex.quote(f'tfds:{folder}:{next(iter(sources))}')
  terminal.say(
    'Train a small model on it, or set the source of any config:\n'
    f'  python -m vit_jax.main --config=configs/train_folder.py{word}'
    f' --config.data.source.path={source} --workdir=DIR'
  )


def parser() -> argparse.ArgumentParser:
  made = parsers.parser(__doc__, 'tools.prepare SOURCE [...] DEST [options]')
  add = made.add_argument
  add('sources', metavar='[SPLIT=]SOURCE', nargs='+')
  add('dest', metavar='DEST')
  add('--shuffle', action='store_true', help='write in a shuffled order')
  help = 'leave out copies of images of this source; may be repeated'
  add('--leave_out', metavar='SOURCE', action='append', default=[], help=help)
  shrink = 'shrink images with a larger short side (bytes are copied)'
  keep = 'images are rasters of N channels of any depth, and keep their bits'
  most = 'most height * width * channels of an image file'
  parsers.add_counts(
    made,
    short_side=(None, shrink),
    channels=(None, keep),
    max_image_bytes=(images.MAX_IMAGE_BYTES, most),
  )
  for name, text in _SOURCE_OPTIONS.items():
    add(f'--{name}', help=f'{text} of the sources')
  return made


def _open(text, decode=None, **options):
  """Return the source of '[SPLIT=]SOURCE'."""
  _, name = split_and_name(text)
  kind, _, rest = name.partition(':')
  if kind == 'tar':
    return tars.Tar(rest, decode=decode or images.Colours())
  if kind == 'imagenet':
    return tars.imagenet(*rest.rsplit(':', 1))
  return open_source(name, decode=decode, **options)


def write(
  folder: PathLike,
  sources: Mapping[str, Any],
  *,
  short_side: int | None = None,
  shuffle: bool = False,
  leave_out: Mapping[str, Any] | None = None,
  max_image_bytes: int = images.MAX_IMAGE_BYTES,
) -> pathlib.Path:
  """Write a TFDS data set, and return its folder.

  Args:
    folder: new folder for the data set.
    sources: {split: source}. A source has len() and [i], or is an iterable of
      (name, example). An example is {'image': bytes or array, 'label': int or
      float [K]} and columns. Named entries of a label [K] become columns, too.
    short_side, shuffle, max_image_bytes: see the command.
    leave_out: {name: source} of images whose copies are left out.
  """
  import tensorflow_datasets as tfds

  folder = pathlib.Path(folder).expanduser().absolute()
  if folder.exists():
    raise UserError(f'{folder} exists. Use a new folder, or remove it.')
  partial = folder.with_name(f'{folder.name}.part')
  shutil.rmtree(partial, ignore_errors=True)
  first, *others = sources.values()
  is_raster = images.decoder(first).dtype != 'uint8'
  if is_raster and short_side:
    raise UserError('short_side is for images of 8 bits. Leave it out.')
  names = getattr(first, 'class_names', None)
  if any(getattr(other, 'class_names', None) != names for other in others):
    raise UserError('the splits have different classes. Add --class_names=FILE')
  count = getattr(first, 'num_classes', None)
  known = {'names': names} if names else {'num_classes': count}
  label = tfds.features.ClassLabel(**known) if names or count else np.int64
  text, example = tfds.features.Text(), _first(first)
  image = text if is_raster else tfds.features.Image(shape=(None, None, 3))
  if shape := np.shape(example.get('label', 0)):
    label = tfds.features.Tensor(shape=shape, dtype=np.float32)
  named = (shape and names) or ()
  known = {'image': image, 'label': label, 'file_name': text}
  cells = {name: x for name, x in example.items() if name not in known}
  floats = [k for k, x in cells.items() if isinstance(x, numbers.Number)]
  texts = [k for k, x in cells.items() if isinstance(x, str | None)]
  kinds = dict.fromkeys([*named, *floats], np.float64)
  kinds |= dict.fromkeys(texts, text)
  if others := sorted(cells.keys() - kinds):
    terminal.say(f'Left out columns of neither numbers nor texts: {others}')
  features = tfds.features.FeaturesDict(kinds | known)
  copies = Copies(leave_out, max_image_bytes) if leave_out else None
  left_out: list[tuple[str, str, str]] = []

  class Prepared(  # type: ignore[call-arg]
    tfds.core.GeneratorBasedBuilder, skip_registration=True
  ):
    VERSION = tfds.core.Version('1.0.0')
    # TFDS would look for files next to the code of the class.
    pkg_dir_path, code_path = partial, None

    def _info(self):
      return tfds.core.DatasetInfo(
        builder=self, features=features, disable_shuffling=not shuffle
      )

    def _split_generators(self, dl_manager):
      return {split: self._generate_examples(split) for split in sources}

    def _generate_examples(self, split):
      def record(source, name, read):
        try:
          example = read()
          # Decoded even if the bytes are copied, to find unreadable images.
          data = example['image']
          pixels = _decoded(source, data, max_image_bytes)
          if is_raster and not isinstance(data, bytes):
            data = _npy(data)
          found, why = _record(data, *pixels, short_side, copies)
          cells = dict(zip(named, np.ravel(example['label'])))
          cells |= {k: example.get(k) for k in floats}  # None becomes NaN
          values = ((k, example.get(k)) for k in texts)
          cells |= {k: '' if x is None else str(x) for k, x in values}
          found = found and cells | {'image': found, 'label': example['label']}
          return name, found, why
        except (OSError, ValueError) as error:
          return name, None, f'unreadable: {error}'

      found = _process(sources[split], record)
      for index, (name, example, reason) in enumerate(found):
        if example is None:
          left_out.append((split, name, reason))
        else:
          yield index, {**example, 'file_name': terminal.printable(name)}

  builder = Prepared(data_dir=partial, file_format='array_record')
  builder.download_and_prepare()
  made = pathlib.Path(builder.data_path)
  for split, info in builder.info.splits.items():
    terminal.say(f'{folder}: {info.num_examples:,} examples of {split}.')
  if left_out:
    rows = [('split', 'file_name', 'reason'), *left_out]
    write_csv(made / 'left_out.csv', rows)
    terminal.say(f'Left out {len(left_out):,}, see {folder}/left_out.csv.')
  made.rename(folder)
  shutil.rmtree(partial)
  return folder


def _first(source):
  """Return the first example that can be read, or {}."""
  for index in range(len(source) if hasattr(source, '__getitem__') else 0):
    with contextlib.suppress(OSError, ValueError):
      return source[index]
  return {}


def _process(source, function):
  """Yield function(source, file name, read) of each example, by threads."""

  def reads():
    if not hasattr(source, '__getitem__'):
      for name, example in source:
        yield name, functools.partial(dict, example)
      return
    file_name = getattr(source, 'file_name', lambda index: None)
    for index in range(len(source)):
      name = file_name(index) or subsets.describe(source, index)
      yield name, functools.partial(source.__getitem__, index)

  return workers.read_ahead(
    lambda named: function(source, *named), reads(), 2 * workers.cores()
  )


def _decoded(source, image, limit):
  """Return an image, uint8 [H, W, C], and whether EXIF turned it."""
  decode = images.decoder(source)
  image = images.opened(decode, image, max_image_bytes=limit)
  if isinstance(image, images.Encoded):
    return image.pixels(), image.is_turned
  return image if decode.dtype == 'uint8' else decode.show(image), False


def _record(data, image, is_turned, short_side, copies):
  """Return (bytes, ''), or (None, why the image is left out)."""
  if copies and (copy := copies.find(image)):
    return None, f'copy of {copy}'
  factor = short_side / min(image.shape[:2]) if short_side else 1
  if factor < 1:
    size = tuple(max(1, round(x * factor)) for x in image.shape[:2])
    image = resize(image, size, 'area')
  if factor < 1 or is_turned:  # TensorFlow ignores the EXIF orientation
    data = _encoded('.jpg', image)  # of quality 95
  elif not isinstance(data, bytes):
    data = _encoded('.png', image)
  return data, ''


def _encoded(kind, image):
  image = np.ascontiguousarray(image[..., ::-1])  # OpenCV has BGR
  return images.opencv().imencode(kind, image)[1].tobytes()


def _npy(array):
  file = io.BytesIO()
  np.save(file, array)
  return file.getvalue()


class Copies:
  """The images of sources {name: source}, which copies are compared with."""

  def __init__(self, sources: Mapping[str, Any], max_image_bytes: int) -> None:
    def named_hash(source, name, read):
      image, _ = _decoded(source, read()['image'], max_image_bytes)
      return name, perceptual_hash(image)

    found = [
      (f'{name}: {file}', value)
      for name, source in sources.items()
      for file, value in _process(source, named_hash)
    ]
    self._names, hashes = zip(*found)
    self._hashes = np.array(hashes, np.uint64)
    terminal.say(f'Comparing with {len(found):,} evaluation images.')

  def find(self, image: np.ndarray) -> str | None:
    """Return the image that this, uint8 [H, W, C], is a copy of, or None."""
    distances = np.bitwise_count(self._hashes ^ perceptual_hash(image))
    nearest = distances.argmin()
    if distances[nearest] > _COPY_BITS:
      return None
    return f'{self._names[nearest]} (distance {distances[nearest]})'


def perceptual_hash(image: np.ndarray) -> np.uint64:
  """Return `imagehash.phash` of an image, uint8 [H, W, C].

  Resizing, compression and changes of contrast keep nearly all of its 64 bits;
  cropping, mirroring and rotating do not.
  """
  import imagehash  # of the extra 'prepare'

  picture = image[..., 0] if image.shape[2] == 1 else image
  bits = imagehash.phash(images.pillow().fromarray(picture)).hash
  return np.packbits(bits).view('>u8')[0].astype(np.uint64)


if __name__ == '__main__':
  main()
