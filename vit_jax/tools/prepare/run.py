"""A whole preparation: planned, written, resumed, verified."""

import contextlib
import dataclasses
import datetime
import fcntl
import importlib.metadata
import itertools
import json
import pathlib
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import rich.filesize

from vit_jax.config.domains import Count, Natural, OneOf, Range, Seed, checked
from vit_jax.data import fingerprints, images, sources, workers
from vit_jax.runs import terminal
from vit_jax.runs.files import PathLike, read_json, write_atomically
from vit_jax.tools.prepare import duplicates, releases, shards, tfds_folder
from vit_jax.tools.prepare.examples import (
  Features,
  Made,
  Maker,
  Reencode,
  read_features,
)
from vit_jax.tools.prepare.inputs import Input, is_url, output_split

_WORK = '.prepare'  # folder in the data set while it is prepared
_FEW = 1000  # examples that are prepared before worker processes pay off
_PACKAGES = ('vit_jax', 'array_record', 'numpy', 'opencv-python-headless')
_FORMAT = 1


@checked
@dataclasses.dataclass(frozen=True)
class Options:
  """All that the result depends on, apart from the source.

  Attributes:
    short_side: re-encode larger images to this short side; None copies bytes.
    quality: of the JPEG files if images are re-encoded.
    shards: number of shards; None: by the number of bytes.
    shuffle_seed: of the order of the examples; None: that of the source.
    on_error: 'raise' to stop at an unreadable example, 'skip' to list it.
    leave_out: names of evaluation sets whose copies are left out.
    compare_with: names of evaluation sets whose copies are listed only.
    max_distance: of near copies, see duplicates.py.
    max_image_bytes: of `images.decode`.
  """

  short_side: Annotated[int, Range(1, 2**15)] | None = None
  quality: Annotated[int, Range(1, 100)] = 95
  shards: Annotated[int, Range(1, 99_999)] | None = None
  shuffle_seed: Seed | None = None
  on_error: Annotated[str, OneOf('raise', 'skip')] = 'raise'
  leave_out: Sequence[str] = ()
  compare_with: Sequence[str] = ()
  max_distance: Annotated[int, Range(0, 64)] = duplicates.MAX_DISTANCE
  max_image_bytes: Count = images.MAX_IMAGE_BYTES


def prepare(
  source: str,
  folder: PathLike,
  options: Options,
  *,
  split: str | None = None,
  source_split: str | None = None,
  source_options: Mapping[str, Any] | None = None,
  num_workers: Natural | None = None,
) -> dict[str, Any]:
  """Write a split of a TFDS data set; continue where an earlier call ended.

  Args:
    source: its name, see `sources.open_source`.
    folder: of the data set: NAME or NAME/VERSION.
    options: see `Options`.
    split: name of the prepared split, and of the source's split if it has
      several; default: the split that the source names, else 'train'.
    source_split: split or slice of the source, if it differs.
    source_options: more arguments of `open_source`.
    num_workers: number of processes; 0 uses threads; None chooses.

  Returns:
    The record of the preparation, as in prepare-SPLIT.json.

  Raises:
    ValueError: the folder has a preparation with other options or of other
      data; an unreadable example; a damaged shard; and those of the source.
  """
  if is_url(folder):
    raise ValueError(
      f'{folder}: shards are written to a local folder. Copy it there later.'
    )
  folder = pathlib.Path(folder).expanduser().absolute()
  _check_target(folder, source)
  work = folder / _WORK
  with _locked(folder):
    given = Input(source, source_split, source_options or {}, work / 'unpacked')
    run = _Run(folder, given, options, split, num_workers)
    done = run.run()
    shutil.rmtree(work, ignore_errors=True)
    return done


class _Run:
  """The steps of `prepare`."""

  def __init__(
    self,
    folder: pathlib.Path,
    given: Input,
    options: Options,
    split: str | None,
    num_workers: int | None,
  ) -> None:
    self.folder, self.given, self.options = folder, given, options
    self.num_workers = num_workers
    self.source = None if given.is_compressed else given.open(split)
    self.split = output_split(split, given, self.source)
    self.path = folder / f'prepare-{self.split}.json'
    self.log = shards.Log(folder / f'prepare-{self.split}.jsonl')

  def run(self):
    evaluation = self._evaluation_sets()
    asked = {
      'source': self.given.text,
      'fingerprint': self.given.fingerprint(self.source),
      'options': json.loads(json.dumps(dataclasses.asdict(self.options))),
      'evaluation_sets': [
        {'name': name, 'fingerprint': fingerprints.fingerprint(source)}
        for name, source in evaluation
      ],
    }
    record = self._earlier(asked)
    is_done = record is not None and record['state'] == 'verified'
    if is_done and not self._missing(record['shards']):
      say(
        f'{self.folder} has the split {self.split!r} already, by this command.'
      )
      return record
    if self.source is None:
      self.source = self.given.open(None)
    if record is None:
      features = Features.of(self.source)
      self._check_features(features)
    else:
      features = read_features(record['features'])
    maker = self._maker(features, [source for _, source in evaluation])
    if record is None:
      record = self._planned(asked, maker)
    say(
      f'{record["num_examples"]:,} examples of {self.given.text} ->'
      f' {record["shards"]} shards in {self.folder}'
    )
    if text := releases.report(features.class_names):
      say(f'The classes are {text}.')
    self._write(record, maker)
    return self._finish(record, features)

  def _evaluation_sets(self):
    names = [*self.options.leave_out, *self.options.compare_with]
    return [(name, sources.open_source(name)) for name in names]

  def _earlier(self, asked):
    """Return the record of an earlier call; ValueError if it differs."""
    if not self.path.exists():
      if self.split in tfds_folder.splits(self.folder):
        raise ValueError(
          f'{self.folder} has the split {self.split!r}, which was not made by'
          ' this command. Use another folder, or another --split.'
        )
      return None
    record = read_json(self.path)
    lines = []
    before = {**record['options'], 'source': record['source']}
    now = {**asked['options'], 'source': asked['source']}
    same_data = record['fingerprint'] == asked['fingerprint']
    for key in dict.fromkeys([*before, *now]):
      if key == 'source' and same_data:
        continue  # it was moved
      if before.get(key) != now.get(key):
        lines += [f'- {key}={before.get(key)}', f'+ {key}={now.get(key)}']
    if not same_data:
      found = fingerprints.differences(
        record['fingerprint'], asked['fingerprint']
      )
      lines += [f'  the source has changed: {line}' for line in found]
    for old, new in zip(record['evaluation_sets'], asked['evaluation_sets']):
      if old['name'] == new['name'] and old != new:
        found = fingerprints.differences(old['fingerprint'], new['fingerprint'])
        lines += [f'  {old["name"]} has changed: {line}' for line in found]
    if lines:
      raise ValueError(
        f'{self.folder} has the split {self.split!r} of another preparation'
        f' ({record["state"]}):\n' + '\n'.join(lines) + '\nRun the earlier'
        ' command to continue it, or use another folder or --split. To start'
        f' again, remove {self.path.name} and the shards of the split.'
      )
    return record

  def _check_features(self, features):
    """Raise ValueError unless the other splits have the same classes."""
    others = _records(self.folder)
    if not others and tfds_folder.splits(self.folder):
      raise ValueError(
        f'{self.folder} is a data set that this command did not make. Use'
        ' another folder.'
      )
    for other in others:
      before = read_features(other['features'])
      lines = []
      for field in dataclasses.fields(Features):
        old, new = (getattr(x, field.name) for x in (before, features))
        if field.name == 'class_names' and old and new and old != new:
          lines += fingerprints.differences({'classes': old}, {'classes': new})
        elif old != new:
          lines += [f'- {field.name}={old}', f'+ {field.name}={new}']
      if lines:
        raise ValueError(
          f'the split {self.split!r} differs from {other["split"]!r} in'
          f' {self.folder}:\n' + '\n'.join(lines) + '\nAll splits of a data set'
          ' have the same features. Give the classes with --class_names=FILE,'
          ' or use another folder.'
        )

  def _maker(self, features, evaluation):
    options, index = self.options, None
    if evaluation:
      count = sum(len(source) for source in evaluation)
      say(f'Hashing {count:,} evaluation examples ...')
      index = duplicates.build(
        self.folder / _WORK, evaluation, options.max_distance, _each
      )
    reencode = None
    if options.short_side is not None:
      reencode = Reencode(options.short_side, options.quality)
    leaves_out = frozenset(range(len(options.leave_out)))
    return Maker(
      self.source,
      features,
      reencode,
      index,
      leaves_out,
      options.max_image_bytes,
    )

  def _planned(self, asked, maker):
    """Return a new record, and write it."""
    name, version = tfds_folder.identity(self.folder)
    count = len(self.source)
    number = self.options.shards or shards.shards_for(maker)
    if number > count:
      raise ValueError(
        f'--shards={number}, but the source has {count} examples. Use fewer.'
      )
    record = {
      'format': _FORMAT,
      'state': 'incomplete',
      'name': name,
      'version': version,
      'split': self.split,
      **asked,
      'num_examples': count,
      'shards': number,
      'features': dataclasses.asdict(maker.features),
      'started': _now(),
      'versions': _versions(),
    }
    self._write_record(record)
    return record

  def _write_record(self, record):
    write_atomically(self.path, json.dumps(record, indent=2) + '\n')

  def _write(self, record, maker):
    """Write the shards that are missing."""
    name, number = record['name'], record['shards']
    missing = self._missing(number)
    if not missing:
      return
    if len(missing) < number:
      done = number - len(missing)
      say(f'{done} of {number} shards are complete. Continuing.')
    self.log.mend()
    seed = self.options.shuffle_seed
    plan = shards.Plan(record['num_examples'], number, seed)
    bounds = [plan.bounds(shard) for shard in missing]
    count = sum(last - first for first, last in bounds)
    progress = _Progress(count, len(missing))
    processes = self.num_workers
    if processes is None:
      processes = workers.cores() if count > _FEW else 0
    with shards.made(maker, plan, missing, processes) as chunks:
      for place, shard in enumerate(missing):
        file = tfds_folder.shard_name(name, self.split, shard, number)
        mine = itertools.islice(chunks, plan.chunks)
        self._write_shard(shard, file, mine, progress, place)
    progress.close()

  def _write_shard(self, shard, file, chunks, progress, place):
    skips = self.options.on_error == 'skip'
    writer, entry = shards.Writer(self.folder / file), _Entry()
    try:
      for made in itertools.chain.from_iterable(chunks):
        if made.error is not None and not skips:
          raise ValueError(_unreadable(made))
        entry.add(made)
        if made.record is not None:
          writer.write(made.record)
        progress.advance(len(made.record or b''), place)
      done = writer.finish()
    except BaseException:
      writer.abandon()
      raise
    self.log.append({'shard': shard, **done, **vars(entry)})

  def _missing(self, number):
    """Return the numbers of the shards that are not complete."""
    known, found = self.log.read(), []
    for shard in range(number):
      entry = known.get(shard)
      path = entry and self.folder / entry['file']
      if entry and path.exists() and path.stat().st_size == entry['bytes']:
        continue
      found.append(shard)
      if entry:
        say(f'{path.name} is missing or damaged. It is written again.')
    return found

  def _finish(self, record, features):
    entries = _in_order(self.log)
    names = [x['name'] for x in record['evaluation_sets']]
    kept = sum(x['examples'] for x in entries)
    copies = [row for x in entries for row in x['copies']]
    bad = [row for x in entries for row in x['unreadable']]
    tables = {
      'copies': (
        duplicates.COLUMNS if names else None,
        [[*row[:2], names[row[2]], *row[3:]] for row in copies],
      ),
      'unreadable': (('index', 'description', 'error') if bad else None, bad),
    }
    for what, (columns, rows) in tables.items():
      if columns:
        path = self.folder / f'{what}-{self.split}.csv'
        duplicates.write_csv(path, columns, rows)
    if not kept:
      raise ValueError(
        f'no example of {self.given.text} is left: {len(bad)} are unreadable,'
        f' the others are copies of evaluation examples. {self.folder} has'
        ' lists of them.'
      )
    _verify(self.folder, self.split, entries, features)
    lengths = [x['examples'] for x in entries]
    size = sum(x['bytes'] for x in entries)
    tfds_folder.write(
      self.folder,
      features,
      record['name'],
      record['version'],
      {self.split: (lengths, size)},
    )
    record |= {
      'state': 'verified',
      'finished': _now(),
      'examples': kept,
      'bytes': size,
      'reencoded': sum(x['reencoded'] for x in entries),
      'turned': sum(x['turned'] for x in entries),
      'unreadable': len(bad),
      'copies': len({row[0] for row in copies}),
      'left_out': len({row[0] for row in copies if row[-1]}),
      'files': [
        {
          key: entry[key]
          for key in ('file', 'examples', 'bytes', 'sha256', 'crc32_of_records')
        }
        for entry in entries
      ],
    }
    self._write_record(record)
    return record


class _Entry:
  """Counts and lists of a shard, for the log."""

  def __init__(self) -> None:
    self.unreadable: list[list[Any]] = []
    self.copies: list[list[Any]] = []
    self.reencoded = self.turned = 0

  def add(self, made: Made) -> None:
    if made.error is not None:
      self.unreadable.append([made.source_index, made.description, made.error])
    for match in made.matches:
      left_out = made.record is None
      self.copies.append(
        [made.source_index, made.description, *match, left_out]
      )
    self.reencoded += made.is_reencoded
    self.turned += made.is_turned and not made.is_reencoded


def _unreadable(made):
  return (
    f'cannot read example {made.source_index} ({made.description}):'
    f' {made.error} (Repair or remove it, or use --on_error=skip.)'
  )


def verify(folder: PathLike) -> int:
  """Read all shards of a prepared folder back; return the number of examples.

  Raises:
    ValueError: nothing is prepared there; a preparation is incomplete; names
      every damaged shard.
  """
  folder = pathlib.Path(folder).expanduser().absolute()
  records = _records(folder)
  if not records:
    raise ValueError(
      f'{folder} has no prepare-SPLIT.json. Expected a folder that this command'
      ' has made.'
    )
  known, total = tfds_folder.splits(folder), 0
  for record in records:
    split = record['split']
    entries = record.get('files')
    log = _in_order(shards.Log(folder / f'prepare-{split}.jsonl'))
    entries = log if entries is None else entries
    _verify(folder, split, entries, read_features(record['features']))
    if record['state'] != 'verified':
      raise ValueError(
        f'the split {split!r} is incomplete: {len(entries)} of'
        f' {record["shards"]} shards are written. Run its command again.'
      )
    if known.get(split) != [entry['examples'] for entry in entries]:
      raise ValueError(
        f'dataset_info.json of {folder} lists other shards of the split'
        f' {split!r} than were written.'
      )
    total += record['examples']
  return total


def _verify(folder, split, entries, features):
  start, bad, done = time.monotonic(), [], 0
  checked = shards.verify(folder, entries, features)
  tracked = terminal.track(checked, len(entries), unit='shards verified')
  for found in tracked:
    if isinstance(found, shards.Damaged):
      bad.append(str(found))
    else:
      done += found['examples']
  if bad:
    raise ValueError(
      '\n'.join([*bad[:20], *(['...'] if len(bad) > 20 else [])])
      + f'\n{len(bad)} of {len(entries)} shards of the split {split!r} in'
      f' {folder} are damaged. Remove them and run the command that prepared'
      ' the split: it writes only these.'
    )
  seconds = terminal.duration(time.monotonic() - start)
  say(f'Verified {split}: {len(entries)} shards, {done:,} examples, {seconds}.')


def _in_order(log):
  """Return the entries of a log by the number of the shard."""
  found = log.read()
  return [found[shard] for shard in sorted(found)]


def _records(folder):
  """Return the records of all splits in a folder."""
  return [read_json(path) for path in sorted(folder.glob('prepare-*.json'))]


def _each(function, count):
  """Yield function(i) for i in range(count), by threads, with a bar."""
  threads = workers.cores() + 1
  found = workers.Threads(
    function, range(count), threads=threads, ahead=4 * threads
  )
  with contextlib.closing(found):
    yield from terminal.track(found, count, unit='evaluation examples')


def _check_target(folder, source):
  """Raise ValueError for a folder with other files than a data set."""
  if folder.exists() and not folder.is_dir():
    raise ValueError(f'{folder} is a file. Expected a folder for the data set.')
  if not folder.exists():
    return
  visible = sorted(x.name for x in folder.iterdir() if x.name[0] != '.')
  is_data_set = 'dataset_info.json' in visible or any(
    x.startswith('prepare-') for x in visible
  )
  if visible and not is_data_set:
    raise ValueError(
      f'{folder} has other files: {", ".join(visible[:5])}. Use a new folder'
      f' for what is prepared from {source}.'
    )


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
  """Context manager in which no other process prepares this folder.

  The folder is created, and removed if it is still empty at the end.
  """
  work = folder / _WORK
  try:
    work.mkdir(parents=True, exist_ok=True)
    (work / 'lock').touch()
  except OSError as error:
    raise ValueError(f'cannot write to {folder}: {error}.') from error
  with open(work / 'lock', 'w') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      raise ValueError(
        f'another process is preparing {folder}. Wait until it ends.'
      ) from error
    try:
      yield
    finally:
      if work.exists() and [x.name for x in work.iterdir()] == ['lock']:
        shutil.rmtree(work)
      with contextlib.suppress(OSError):
        folder.rmdir()


class _Progress:
  """Progress on stderr: images/s, bytes, shards and the time left.

  Args:
    total: number of examples to write.
    shards: number of shards to write.
  """

  def __init__(self, total: int, shards: int) -> None:
    self._total, self._shards = total, shards
    self._done = self._bytes = 0
    self._live = sys.stderr.isatty()
    self._every_s = 0.5 if self._live else 30
    self._start = self._shown = time.monotonic()

  def advance(self, size: int, shard: int) -> None:
    """Count an example whose record has so many bytes."""
    self._done, self._bytes = self._done + 1, self._bytes + size
    now = time.monotonic()
    if now - self._shown >= self._every_s:
      self._shown = now
      self._show(now, shard)

  def _show(self, now, shard):
    rate = self._done / (now - self._start)
    left = terminal.duration((self._total - self._done) / rate)
    text = (
      f'{self._done:,}/{self._total:,} images | {rate:,.0f}/s |'
      f' {rich.filesize.decimal(self._bytes)} |'
      f' shard {shard + 1}/{self._shards} | eta {left}'
    )
    print(
      f'\r\x1b[K{text}' if self._live else text,
      end='' if self._live else '\n',
      file=sys.stderr,
      flush=True,
    )

  def close(self) -> None:
    seconds = time.monotonic() - self._start
    count = self._done
    if self._live:
      print('\r\x1b[K', end='', file=sys.stderr, flush=True)
    say(
      f'Wrote {count:,} images, {rich.filesize.decimal(self._bytes)}, in'
      f' {terminal.duration(seconds)} ({count / max(seconds, 1e-3):,.0f}/s).'
    )


def say(text: str) -> None:
  """Print a line."""
  terminal.say(text)


def _now():
  return datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')


def _versions():
  found = {}
  for package in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[package] = importlib.metadata.version(package)
  return found
