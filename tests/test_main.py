"""The command line: errors are one message, before anything long starts."""

import json
import pathlib
import re

import grain  # noqa: F401 (defines absl flags, which flagsaver would drop)
import numpy as np
import packed
import pytest
import tiny
from absl import logging
from absl.testing import flagsaver
from processes import python

from vit_jax import main
from vit_jax.runs import checkpoint, workdirs

CONFIG = """
'''A small
run.

Of tests.'''
import ml_collections

def get_config(argument=''):
  source = dict(target='vit_jax.data.sources.digits.Digits', split='train')
  config = ml_collections.ConfigDict(dict(
    run='vit_jax.train.train',
    total_steps=4,
    logging=dict(every_steps=1),
    data=dict(source=source, batch_size=8),
    model=dict(target='vit_jax.models.vit.VisionTransformer', width=32,
               depth=1, mlp_dim=32, num_heads=2,
               embedding=dict(patch_size=4)),
    objective=dict(target='vit_jax.objectives.classification.softmax_xent'),
    optimizer=dict(target='vit_jax.optim.optimizers.sgd'),
    schedule=dict(lr=0.01),
  ))
  exec(argument.replace(';', '\\n'))
  return config
"""
EVALS = """config.evals = dict(test=dict(
  target='vit_jax.evals.classification.Classification', every_steps=1,
  data=dict(batch_size=64, source=dict(
    target='vit_jax.data.sources.digits.Digits', split='test'))))""".replace(
  '\n', ' '
)
RESIZE = 'vit_jax.data.transforms.Resize'


@pytest.fixture(scope='module')
def config(tmp_path_factory):
  path = tmp_path_factory.mktemp('main') / 'config.py'
  path.write_text(CONFIG)
  return path


def call(config, workdir, *flags):
  """Run the command line in this process."""
  words = ['main', f'--config={config}', f'--workdir={workdir}', *flags]
  with flagsaver.flagsaver():
    main.main(main.parse_flags(words))


@pytest.mark.parametrize(
  'argument, flags, message',
  [
    (
      'config.model.embedding.patch_size = 3',
      [],
      r'8x8 .* cannot be cut into patches of 3x3',
    ),
    (
      "config.optimizer.lr_multipliers = (('.*', 1e22),)",
      [],
      r'NonFiniteError: .* in step \d',
    ),
    (
      f"{EVALS};config.data.transforms = [dict(target='{RESIZE}', size=16)]",
      [],
      r'UserError: evals\.test: The images need position embeddings',
    ),
    (
      'config.data.source = dict('
      "target='vit_jax.data.sources.folder.Folder', path='/none')",
      [],
      r"FileNotFoundError: .*'/none'",
    ),
    (
      '',
      ['--config.total_epochs=1e18', '--config.total_steps=None'],
      r'epochs=1e\+18 are .* at most',
    ),
    ('', ['--study_member=1'], r'train has no argument member, which a flag'),
    ('', ['--workdir=/proc/none'], r"directory: '/proc/none'"),
  ],
)
def test_one_message(config, tmp_path, argument, flags, message):
  with pytest.raises(SystemExit) as stopped:
    call(f'{config}:{argument}', tmp_path, *flags)
  assert re.search(message, stopped.value.code)


def test_the_remedy_of_an_unreadable_image_can_be_pasted(tmp_path, capsys):
  images, work = tmp_path / 'images', tmp_path / 'run'
  rng = np.random.default_rng(0)
  for i, label in enumerate('aabb' * 10):
    made = tiny.encode(rng.integers(0, 256, (16, 16, 3), np.uint8))
    made = made[:300] if i in (4, 6) else made
    packed.write_folder(images, {f'{label}/{i}.png': made})
  preset = 'vit_jax:pretrain_folder:mae,tiny,labels'
  given = f'--config.data.source.path={images}'
  with pytest.raises(SystemExit) as stopped:
    call(preset, work, given)
  keys = 'labels.data.own.test', 'labels.data.own.train', 'watch.data'
  remedies = ['--config.data.on_error=skip']
  remedies += [f'--config.evals.{key}.on_error=skip' for key in keys]
  assert stopped.value.code.endswith(f"on_error='skip': {' '.join(remedies)}")
  for flags in (remedies, remedies[:1]):
    call(preset, work, given, *flags, '--print_config')
    found = re.findall(r'\.on_error = (.*)', capsys.readouterr().out)
    assert found == ["'skip'"] * 4
  call(preset, work, given, *remedies[:1], '--dry_run')


def test_one_message_of_a_process(config, tmp_path):
  flags = f'--config={config}', f'--workdir={tmp_path}', '--num_processes=2'
  done = python('-m', 'vit_jax.main', *flags, '--distributed', timeout=120)
  assert done.returncode == 1 and 'Traceback' not in done.stderr
  assert 'Pass --coordinator_address=HOST:PORT' in done.stderr


def test_a_full_disk_is_one_message(config, tmp_path, caplog, monkeypatch):
  """Errors that Orbax logs before it raises another one are not shown."""

  def fill(*args, **kwargs):
    try:
      pathlib.Path('/dev/full').write_text('x')
    except OSError as error:
      logging.exception('of a full disk')
      raise ValueError('of a checkpoint') from error

  monkeypatch.setattr(main.config, 'run', fill)
  with pytest.raises(SystemExit) as stopped:
    call(config, tmp_path)
  assert stopped.value.code.startswith('\nA disk is full. Free some space')
  assert not caplog.messages


SETTINGS = [
  '--config.optimizer.layer_decay.rate=0.75',
  "--config.optimizer.freeze=('embedding/.*',)",
  '--config.checkpoints.best_metric=test/accuracy',
  '--config.checkpoints.every_steps=2',
  '--config.mesh.fsdp=8',
  '--config.total_steps=2',
]


def test_keys_that_a_file_does_not_have(config, tmp_path, capsys, monkeypatch):
  flags = ['--config.seed=5', *SETTINGS, '--config.seed=0', '--print_config']
  call(f'{config}:{EVALS}', tmp_path, *flags)
  shown = capsys.readouterr().out
  assert 'config.optimizer.layer_decay.rate = 0.75' in shown
  assert 'config.total_steps = 2\n' in shown
  assert 'config.seed = 0\n' in shown  # the last of equal flags
  assert 'config.accum_steps = 1  # default' in shown
  assert not list(tmp_path.iterdir())

  call(f'{config}:{EVALS}', tmp_path, *SETTINGS, '--dry_run')
  shown = capsys.readouterr().out
  assert 'data 1, fsdp 8' in shown and '7,594' in shown
  assert not (tmp_path / 'config.json').exists()

  monkeypatch.setenv('HOME', str(tmp_path))
  call(f'{config}:{EVALS}', '~', *SETTINGS, '--config.logging.profile=2')
  assert list(tmp_path.glob('profile/0/plugins/profile/*/perfetto_trace*'))
  preset = json.loads((tmp_path / 'preset.json').read_text())
  assert preset['config'] == f'{config}:{EVALS}'
  assert preset['about'] == 'A small run.'
  assert preset['changed']['mesh.fsdp'] == [None, 8]
  assert preset['changed']['total_steps'][1] == 2
  assert preset['defaults']['seed'] == '0'
  assert 'mesh.fsdp' in (tmp_path / 'report.html').read_text()
  saved = json.loads((tmp_path / 'config.json').read_text())
  assert saved['optimizer']['layer_decay'] == {'rate': 0.75}
  assert workdirs.find_checkpoint(tmp_path).name == '2'
  params, _ = checkpoint.load_params(tmp_path)
  assert params['embedding/kernel'].shape == (4, 4, 1, 32)
