"""The command line: errors are one message, before anything long starts."""

import json
import os
import pathlib
import re
import subprocess
import sys

import grain  # noqa: F401 (defines absl flags, which flagsaver would drop)
import pytest
from absl.testing import flagsaver

from vit_jax import main
from vit_jax.runs import checkpoint

ROOT = pathlib.Path(__file__).parents[1]

CONFIG = """
'''A small
run.

Of tests.'''
import ml_collections

def get_config(argument=''):
  source = dict(target='vit_jax.data.embedded.digits.Digits', split='train')
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
    target='vit_jax.data.embedded.digits.Digits', split='test'))))""".replace(
  '\n', ' '
)
RESIZE = 'vit_jax.data.transforms.Resize'


@pytest.fixture(scope='module')
def config(tmp_path_factory):
  path = tmp_path_factory.mktemp('main') / 'config.py'
  path.write_text(CONFIG)
  return path


def _run(config, workdir, *flags, env=()):
  return subprocess.Popen(
    [
      *(sys.executable, '-m', 'vit_jax.main'),
      *(f'--config={config}', f'--workdir={workdir}', *flags),
    ],
    cwd=ROOT,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu', **dict(env)},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def call(config, workdir, *flags):
  """Run the command line in this process."""
  words = ['main', f'--config={config}', f'--workdir={workdir}', *flags]
  with flagsaver.flagsaver():
    main.main(main.parse_flags(words))


@pytest.mark.parametrize(
  'argument, flags, message',
  [
    (
      '',
      ['--config.totl_steps=3'],
      r"no argument 'totl_steps' \(did you mean 'total_steps'",
    ),
    (
      'config.model.embedding.patch_size = 3',
      [],
      r'8x8 .* cannot be cut into patches of 3x3',
    ),
    (
      'config.model.num_classes = 7',
      [],
      r'num_classes=7, but the training data has 10 classes',
    ),
    (
      'config.optimizer.weight_decays = 1.0',
      [],
      r"'?weight_decays'?.*(weight_decay)",
    ),
    ('config.modle = 1', [], r"no argument 'modle' \(did you mean 'model'"),
    (
      '',
      ['--config.optimizer.layer_decay.rte=0.5'],
      r"optimizer\.layer_decay\.rte: .*no argument 'rte' \(did you mean 'rate'",
    ),
    (
      '',
      ['--config.optimizer.layer_decy.rate=0.5'],
      r"optimizer\.layer_decy: .*did you mean 'layer_decay'",
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
      "target='vit_jax.data.folder.Folder', path='/none')",
      [],
      r"FileNotFoundError: .*'/none'",
    ),
    ('', ['--study_member=1'], r'train has no argument member, which a flag'),
    ('', ['--config.logging.profile=x'], r"profile='x' must be a step"),
  ],
)
def test_one_message(config, tmp_path, argument, flags, message):
  with pytest.raises(SystemExit) as stopped:
    call(f'{config}:{argument}', tmp_path, *flags)
  assert re.search(message, stopped.value.code)


def test_no_cluster(config, tmp_path):
  process = _run(config, tmp_path, '--distributed', '--num_processes=2')
  _, error = process.communicate(timeout=120)
  assert process.returncode == 1 and 'Traceback' not in error
  assert 'Pass --coordinator_address=HOST:PORT' in error


def test_no_right_to_write(config):
  process = _run(config, '/proc/no_such_place')
  _, error = process.communicate(timeout=120)
  assert process.returncode == 1
  assert "directory: '/proc/no_such_place'" in error
  assert 'Traceback' not in error


SETTINGS = [
  '--config.optimizer.layer_decay.rate=0.75',
  "--config.optimizer.freeze=('embedding/.*',)",
  '--config.checkpoints.best_metric=test/accuracy',
  '--config.checkpoints.every_steps=2',
  '--config.mesh.fsdp=8',
  '--config.total_steps=2',
]


def test_keys_that_the_file_does_not_have(config, tmp_path, capsys):
  """--print_config and --dry_run show them, and training uses them."""
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

  call(f'{config}:{EVALS}', tmp_path, *SETTINGS, '--config.logging.profile=2')
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
  assert checkpoint.find(tmp_path).name == '2'
  params, _ = checkpoint.load_params(tmp_path)
  assert params['embedding/kernel'].shape == (4, 4, 1, 32)
