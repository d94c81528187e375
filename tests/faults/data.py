"""Image bombs, orphans, killed workers, sources under attack."""

import contextlib
import io
import json
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image

from .harness import Case, fault
from .runs import ROOT, Run, difference, undisturbed

_SIDE = 30_000  # height and width of the bombs in pixels
# Largest CPU time and memory for refusing a bomb.
_SECONDS, _BYTES = 5, 2**30


def _encode(kind, **options):
  file = io.BytesIO()
  Image.new('RGB', (16, 16)).save(file, kind, **options)
  return bytearray(file.getvalue())


def _chunk(name, body):
  checksum = struct.pack('>I', zlib.crc32(name + body))
  return struct.pack('>I', len(body)) + name + body + checksum


def _zeros(size):
  """Return `size` zeros, compressed in blocks to save memory."""
  pack, block = zlib.compressobj(9), bytes(2**20)
  parts = [pack.compress(block) for _ in range(size >> 20)]
  return b''.join((*parts, pack.compress(bytes(size % 2**20)), pack.flush()))


def _png(side, bits, kind, pixels, extra=b''):
  header = struct.pack('>2I5B', side, side, bits, kind, 0, 0, 0)
  body = _chunk(b'IHDR', header) + extra + _chunk(b'IDAT', pixels)
  return b'\x89PNG\r\n\x1a\n' + body + _chunk(b'IEND', b'')


def _set(data, at, form, *values):
  struct.pack_into(form, data, at, *values)
  return bytes(data)


def _bombs() -> Iterator[tuple[str, bytes]]:
  """Yield (name, file) of images that need much memory or time to decode."""
  side = _SIDE
  grey = _zeros(side * (1 + side // 8))
  yield 'PNG of 1 bit', _png(side, 1, 0, grey)
  yield 'PNG with alpha', _png(side, 8, 6, grey)  # fewer bytes than pixels
  unpacked = _zeros(2**28)
  small = _zeros(16 * (1 + 3 * 16))
  for name, prefix in (
    ('zTXt', b'a\0\0'),
    ('iTXt', b'a\0\1\0\0\0'),
    ('iCCP', b'a\0\0'),
  ):
    extra = _chunk(name.encode(), prefix + unpacked)
    yield f'PNG with {name} of 256 MiB', _png(16, 8, 2, small, extra)
  icon = _png(side, 1, 0, grey)
  entry = struct.pack('<3H4B2H2I', 0, 1, 1, 16, 16, 0, 0, 1, 32, len(icon), 22)
  yield 'PNG in an ICO', entry + icon
  jpeg = _encode('JPEG')
  yield 'JPEG', _set(jpeg, jpeg.index(b'\xff\xc0') + 5, '>2H', 65_000, 65_000)
  file = io.BytesIO()
  Image.new('L', (9000, 9000)).save(file, 'JPEG', progressive=True)
  scans = file.getvalue()
  last = scans[scans.rindex(b'\xff\xda') : -2]
  yield 'JPEG of 3,000 scans', scans[:-2] + 3000 * last + scans[-2:]
  yield 'WebP', _set(_encode('WEBP'), 26, '<2H', 0x3FFF, 0x3FFF)
  bits = 0x3FFF | 0x3FFF << 14
  yield 'WebP, lossless', _set(_encode('WEBP', lossless=True), 21, '<I', bits)
  more = [Image.new('RGB', (16, 16), 'red')]
  animation = _encode('WEBP', save_all=True, append_images=more)
  yield 'WebP animation', _set(animation, 24, '<3H', 0xFFFE, 0xFE00, 0xFFFF)
  yield 'BMP', _set(_encode('BMP'), 18, '<2i', side, -side)
  yield 'GIF canvas', _set(_encode('GIF'), 6, '<2H', 65_535, 65_535)
  frame = _encode('GIF')
  at = frame.index(b',\0\0\0\0\x10\0\x10\0')
  yield 'GIF frame', _set(frame, at + 5, '<2H', 65_535, 65_535)
  replaced = frame[:at] + b'!\xf9\4\x08\0\0\0\0' + frame[at:]
  yield 'GIF frame, disposed of', bytes(replaced)
  tags = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1)]
  tags += [(322, side), (323, side), (324, 134), (325, len(unpacked))]
  entries = b''.join(struct.pack('<2H2I', tag, 4, 1, x) for tag, x in tags)
  tiff = b'II*\0' + struct.pack('<IH', 8, len(tags)) + entries + bytes(4)
  yield 'TIFF tiles', tiff + unpacked
  yield 'PPM', b'P6\n%d %d\n255\n' % (side, side) + bytes(99)
  yield 'TGA', _set(_encode('TGA'), 12, '<2H', side, side)


# Decodes each file in its own process and measures the memory of the process.
_DECODE = """
import json, os, pathlib, sys
from vit_jax.data import images
images.opencv()
import PIL.Image, PIL.ImageOps
PIL.Image.init()
for file in sorted(pathlib.Path(sys.argv[1]).iterdir()):
  before = int(pathlib.Path('/proc/self/statm').read_text().split()[1]) * 4096
  read, write = os.pipe()
  if not (pid := os.fork()):
    try:
      images.decode(file.read_bytes())
    except ValueError as error:
      os.write(write, str(error).encode())
    os._exit(0)
  os.close(write)
  _, status, usage = os.wait4(pid, 0)
  seconds = usage.ru_utime + usage.ru_stime
  message = os.read(read, 10_000).decode()
  size = usage.ru_maxrss * 1024 - before
  print(json.dumps([status, seconds, size, message]))
"""


@fault(times=1)
def image_bombs(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Small image files that need much memory or time to decode."""
  names = []
  for number, (name, data) in enumerate(_bombs()):
    names.append(f'{name} of {len(data) / 1e3:.0f} kB')
    (folder / f'{number:03}').write_bytes(data)
  done = subprocess.run(
    [sys.executable, '-c', _DECODE, str(folder)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  for name, line in zip(names, done.stdout.splitlines(), strict=True):
    status, seconds, size, message = json.loads(line)
    lost = f'status {status}' if status else ''
    if seconds > _SECONDS or size > _BYTES:
      lost = f'{seconds:.1f} s, {size / 1e9:.1f} GB'
    yield Case(name, lost, message)


def _processes(session: int) -> list[int]:
  """Return the live processes of a session, without its leader."""
  found = []
  for stat in pathlib.Path('/proc').glob('[0-9]*/stat'):
    with contextlib.suppress(OSError):
      fields = stat.read_text().rpartition(')')[2].split()
      pid = int(stat.parent.name)
      if int(fields[3]) == session != pid and fields[0] != 'Z':
        found.append(pid)
  return found


def _workers(run: Run) -> list[int]:
  """Return the worker processes of a run."""
  found = []
  for pid in _processes(run.process.pid):
    with contextlib.suppress(OSError):
      command = pathlib.Path(f'/proc/{pid}/cmdline').read_bytes()
      if b'spawn_main' in command:
        found.append(pid)
  return found


def _segments() -> set[str]:
  """Return the shared memory and semaphores of all processes."""
  shared = pathlib.Path('/dev/shm')
  return {file.name for file in shared.iterdir()} if shared.exists() else set()


def _is_training(run: Run) -> bool:
  return (run.workdir / 'metrics.jsonl').exists()


@fault(times=10, in_ci=1)
def orphans(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Kill -9 of the parent of workers: processes and memory left after 5 s."""
  flags = ('--config.data.num_workers=2', '--config.total_steps=100000')
  for number in range(times):
    before = _segments()
    run = Run(folder, folder / f'orphans{number}', *flags)
    run.wait_for(lambda run=run: _is_training(run))
    session, workers = run.process.pid, _workers(run)
    run.kill()
    end = time.monotonic() + 5
    while (alive := _processes(session)) and time.monotonic() < end:
      time.sleep(0.1)
    segments = _segments() - before
    lost = f'{len(alive)} processes, {len(segments)} segments are left'
    if not workers:
      lost = run.output[-500:]
    elif not alive and not segments:
      lost = ''
    for pid in alive:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    yield Case(f'of {len(workers)} workers', lost)


@fault(times=6, in_ci=1)
def killed_worker(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Kill -9 of a worker: the run reports it and ends bit-identical."""
  for number in range(times):
    workdir = folder / f'worker{number}'
    run = Run(folder, workdir, '--config.data.num_workers=2')
    # Early, because workers soon read ahead to the end of a short run.
    run.wait_for(lambda run=run: len(_workers(run)) == 2)
    for pid in _workers(run)[: 1 + number % 2]:
      os.kill(pid, signal.SIGKILL)
    try:
      status = run.finish(120)
    except subprocess.TimeoutExpired:
      status = -1
    message = re.search(r'data worker .*', run.output)
    lost = (
      difference(undisturbed(), workdir) if status == 0 else run.output[-500:]
    )
    name = f'{1 + number % 2} of 2'
    yield Case(name, lost, message[0] if message else '')


_WAITING = re.compile('Waiting for data .*')


@fault(times=1)
def stopped_worker(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """SIGSTOP of a worker: the run reports that it waits for data."""
  flags = ('--config.data.num_workers=1', '--config.total_steps=100000')
  for _ in range(times):
    run = Run(folder, folder / 'stopped', *flags)
    run.wait_for(lambda run=run: _is_training(run))
    for pid in (workers := _workers(run)):
      os.kill(pid, signal.SIGSTOP)
    run.wait_for(lambda run=run: _WAITING.search(run.output), 60)
    message = _WAITING.search(run.output)
    for pid in workers:
      os.kill(pid, signal.SIGCONT)
    run.kill()
    lost = '' if message else 'no message'
    yield Case('SIGSTOP', lost, message[0] if message else '')


@fault(times=1)
def too_many_workers(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Invalid numbers of workers."""
  for value in ('10000', '-1', 'True', '1.5'):
    run = Run(folder, folder / 'many', f'--config.data.num_workers={value}')
    lost, message = '', ''
    try:
      status = run.finish(60)
    except subprocess.TimeoutExpired:
      status, lost = -1, 'hangs'
    message = run.output.strip().splitlines()[-1] if run.output.strip() else ''
    if not lost and (status == 0 or 'Traceback' in run.output):
      lost = 'accepted' if status == 0 else 'a traceback'
    yield Case(f'num_workers={value}', lost, message)


_FOLDER = """
import ml_collections

def get_config():
  t = 'vit_jax.data.transforms.'
  return ml_collections.ConfigDict(dict(
    run='vit_jax.train.train',
    total_steps=100000,
    log_every_steps=1,
    model=dict(target='vit_jax.models.vit.VisionTransformer', width=16,
               depth=1, mlp_dim=16, num_heads=1,
               embedding=dict(patch_size=4)),
    objective=dict(
      target='vit_jax.objectives.classification.softmax_xent'),
    optimizer=dict(target='optax.sgd'),
    schedule=dict(lr=1e-3),
    data=dict(
      source=dict(target='vit_jax.data.folder.Folder', path='PATH'),
      transforms=[dict(target=t + 'Resize', size=8)],
      batch_size=8,
    ),
  ))
"""


def _make_images(folder):
  for name in ('cat', 'dog'):
    (folder / name).mkdir(parents=True)
    for number in range(20):
      pixels = np.full((12, 12, 3), 12 * number, np.uint8)
      Image.fromarray(pixels).save(folder / name / f'{number}.png')


def _attacks() -> Iterator[tuple[str, object, bool]]:
  """Yield (name, function of the folder, whether to call it before the run)."""

  def vanish(images):
    shutil.rmtree(images / 'dog')

  def one(images):
    return images / 'cat' / '3.png'

  def become_a_folder(images):
    one(images).unlink()
    one(images).mkdir()

  def truncate(images):
    os.truncate(one(images), 40)

  def empty(images):
    os.truncate(one(images), 0)

  def loop(images):
    (images / 'cat' / 'loop').symlink_to(images)

  def dangle(images):
    (images / 'cat' / 'nowhere.png').symlink_to('/nowhere.png')

  def pipe(images):
    os.mkfifo(images / 'cat' / 'pipe.png')

  def not_utf8(images):
    shutil.copy(one(images), os.fsencode(images) + b'/cat/\xff\xfe.png')

  def no_class(images):
    (images / 'mouse').mkdir()

  yield 'a class folder vanishes', vanish, False
  yield 'a file becomes a folder', become_a_folder, False
  yield 'a file is truncated', truncate, False
  yield 'a file is emptied', empty, False
  yield 'a loop of symbolic links', loop, True
  yield 'a symbolic link to nothing', dangle, True
  yield 'a named pipe', pipe, True
  yield 'a name that is not UTF-8', not_utf8, True
  yield 'a class without images', no_class, True


@fault(times=1)
def attacked_folder(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """A folder of images that changes, or contains odd things."""
  for number, (name, attack, early) in enumerate(_attacks()):
    images = folder / f'images{number}'
    _make_images(images)
    if early:
      attack(images)
    config = _FOLDER.replace('PATH', str(images))
    flags = ['--config.total_steps=10'] if early else []
    run = Run(folder, folder / f'attacked{number}', *flags, config=config)
    run.wait_for(lambda run=run: _is_training(run), 60)
    if not early:
      attack(images)
    lost = ''
    try:
      status = run.finish(60)
    except subprocess.TimeoutExpired:
      status, lost = -1, 'hangs'
    lines = run.output.strip().splitlines()
    if 'Traceback' in run.output:
      lost = f'a traceback: {lines[-1]}'
    yield Case(name, lost, lines[-1] if lines and status else '')
