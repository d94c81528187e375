"""Runs that are started again with another config or other data."""

import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import NamedTuple

import cv2
import numpy as np

from .harness import Case, fault
from .runs import Run, with_source

_SIZES = {'daisy': 7, 'roses': 6, 'tulips': 5}


def _write_images(folder: pathlib.Path) -> None:
  rng = np.random.default_rng(0)
  for name, count in _SIZES.items():
    (folder / name).mkdir(parents=True)
    for i in range(count):
      image = rng.integers(0, 256, (8, 8, 3), np.uint8)
      cv2.imwrite(str(folder / name / f'{i}.png'), image)


class _Change(NamedTuple):
  """A change, and the text expected in the message; None if harmless."""

  name: str
  expected: str | None
  flags: tuple[str, ...] = ()
  of_data: Callable[[pathlib.Path], None] = lambda images: None


def _grow(images):
  file = images / 'roses' / '0.png'
  file.write_bytes(file.read_bytes() + b'\0')


_CHANGES = (
  _Change(
    'a class removed',
    "data.source: class 'roses' is missing; 6 examples fewer (18 -> 12)",
    of_data=lambda images: shutil.rmtree(images / 'roses'),
  ),
  _Change(
    'learning rate', 'schedule.lr: 0.01 -> 0.02', ('--config.schedule.lr=0.02',)
  ),
  _Change(
    'logging, workers, checkpoints, evaluation every ...',
    None,
    (
      '--config.log_every_steps=1',
      '--config.data.num_workers=1',
      '--config.checkpoint.keep_last=3',
      '--config.evals.val.every_steps=1',
      '--config.checkpoint.every_steps=1',
      '--config.model.remat=full',
      '--config.on_nan=rollback',
    ),
  ),
  _Change(
    'files removed',
    "data.source: class 'daisy' has 2 examples fewer",
    of_data=lambda images: [
      (images / 'daisy' / f'{i}.png').unlink() for i in (2, 4)
    ],
  ),
  _Change(
    'a file replaced by another of the same name',
    'data.source: files of the same names have other sizes',
    of_data=_grow,
  ),
  _Change(
    'a file renamed',
    'data.source: other files',
    of_data=lambda images: (images / 'daisy' / '0.png').rename(
      images / 'daisy' / 'new.png'
    ),
  ),
  _Change('seed', 'seed: 3 -> 4', ('--config.seed=4',)),
  _Change(
    'batch size', 'data.batch_size: 8 -> 16', ('--config.data.batch_size=16',)
  ),
  _Change(
    'dropout', 'model.dropout: 0.2 -> 0.1', ('--config.model.dropout=0.1',)
  ),
  _Change(
    'weight decay',
    'optimizer.weight_decay: 0.1 -> 0.2',
    ('--config.optimizer.weight_decay=0.2',),
  ),
  _Change(
    'data split',
    "data.source.split: None -> '[:90%]'",
    ('--config.data.source.split=[:90%]',),
  ),
  _Change(
    'data of an evaluator',
    "evals.val.data.source.split: None -> '[:50%]'",
    ('--config.evals.val.data.source.split=[:50%]',),
  ),
  _Change('length', 'total_steps: 5 -> 9', ('--config.total_steps=9',)),
  _Change(
    'defaults written out',
    None,
    ('--config.preprocess.mean=127.5', '--config.model.scan=False'),
  ),
)


@fault(times=len(_CHANGES), in_ci=3)
def changed_run(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """The same workdir with another config or other data."""
  kept = folder / 'kept'
  _write_images(kept / 'images')
  images, workdir = folder / 'now' / 'images', folder / 'now' / 'run'
  source = {'target': 'vit_jax.data.folder.Folder', 'path': str(images)}
  config = with_source(source).replace('total_steps=40', 'total_steps=5')
  shutil.copytree(kept, folder / 'now')
  first = Run(folder, workdir, config=config)
  assert first.finish() == 0, first.output
  shutil.copytree(workdir, kept / 'run')
  for change in _CHANGES[:times]:
    shutil.rmtree(folder / 'now')
    shutil.copytree(kept, folder / 'now')
    change.of_data(images)
    run = Run(folder, workdir, *change.flags, config=config)
    status, lost = run.finish(), ''
    if change.expected is None:
      lost = '' if status == 0 else f'refused: {run.output[-300:]}'
    elif status == 0:
      lost = 'resumed without a message'
    elif change.expected not in run.output or 'Traceback' in run.output:
      lost = f'another message: {run.output[-300:]}'
    elif _files(workdir) != _files(kept / 'run'):
      lost = 'files were written'
    is_refused = change.expected is not None
    message = run.output.partition('...\n')[2] if is_refused else ''
    yield Case(change.name, lost, message.replace(str(folder), ''))


def _files(workdir):
  names = ('config.json', 'resume.json', 'metrics.jsonl', 'changes.jsonl')
  return {
    name: (workdir / name).read_text() if (workdir / name).exists() else None
    for name in names
  }
