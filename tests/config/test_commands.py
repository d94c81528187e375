"""The commands as users type them: help, and one line for each mistake."""

import pathlib
import re
import shlex

import grain  # noqa: F401 (defines absl flags, which flagsaver would drop)
import pytest
from absl.testing import flagsaver
from processes import python

from vit_jax import config, main

ROOT = pathlib.Path(__file__).parents[2]


def end_of(*words):
  """Return the text with which vit_jax.main ends."""
  with pytest.raises(SystemExit) as stopped, flagsaver.flagsaver():
    main.main(main.parse_flags(['main', *words]))
  return str(stopped.value.code).strip()


def error_of(*words):
  """Return the line with which vit_jax.main ends."""
  (line,) = end_of(*words).splitlines()
  return line


# Every program is imported here once and then runs in a fork of its own.
HELP = """
import io, os, runpy, sys
import grain, matplotlib.pyplot, rich.progress
from vit_jax import pretrained
for name in sys.argv[1:]:
  if not (child := os.fork()):
    sys.argv = [name, '--help']
    sys.stdout = io.StringIO()
    try:
      runpy.run_module(name, run_name='__main__', alter_sys=True)
      code = 'no exit'
    except SystemExit as stopped:
      code = stopped.code or 0
    text = sys.stdout.getvalue()
    if code not in (0, 1) or len(text) < 100:
      print(name, code, text, file=sys.stderr, flush=True)
    os._exit(0)
  os.waitpid(child, 0)
"""


def test_help_is_a_success(tmp_path):
  programs = [
    '.'.join(path.relative_to(ROOT).with_suffix('').parts)
    for path in sorted((ROOT / 'vit_jax').rglob('*.py'))
    if "if __name__ == '__main__':" in path.read_text()
  ]
  assert 'vit_jax.main' in programs and len(programs) >= 9
  done = python('-c', HELP, *programs, cwd=tmp_path, GLIBC_TUNABLES='')
  assert done.returncode == 0
  complaints = [x for x in done.stderr.splitlines() if x.startswith('vit_jax')]
  assert not complaints


@pytest.mark.parametrize(
  'words, message',
  [
    ('', r'--config=FILE is missing, such as --config=vit_jax:quickstart'),
    ('--config=vit_jax:deit --noprint_config', r'--workdir=DIR is missing'),
    ('configs/quickstart.py', r'Write --config=configs/quickstart.py'),
    ('--config=no/such.py', r'no/such\.py is not a file'),
    ('--config=configs/evaluat.py', r"did you mean 'evaluate'\?"),
    ('--config=vit_jax:evaluat', r"'evaluat' \(did you mean 'evaluate'\?\)"),
    ('--config=vit_jax:common', r"no config 'common'.* has ablations, "),
    ('--config=configs/common.py', 'common.py: it has no function get_config'),
    (
      '--config=configs/evaluate.py:folder,acuracy',
      r"'acuracy' \(did you mean 'accuracy'\?\)\. .*folder, tfds, size=",
    ),
    ('--config=vit_jax:quickstart --config.=3', r'--config\.=3 lacks a key'),
    (
      '--config=vit_jax:finetune:pets,B/16 --config.model=3',
      r'keys of its own: .*width\. Set these, as in --config\.model\.KEY=VALUE',
    ),
    (
      '--config=vit_jax:finetune:pets --config.evals.tset.every_steps=3',
      r"evals\.tset needs a 'target'.*\(did you mean 'test'\?\)",
    ),
    (
      '--config=vit_jax:pretrain_paper:B/16 --config.optimizer.mu_dtype=',
      r"optimizer\.mu_dtype='': must be one of 'float32', 'bfloat16'",
    ),
    (
      '--config=vit_jax:pretrain_paper:B/16 "--config.optimizer.eps_root=()"',
      r'optimizer\.eps_root=\(\): .* must be a valid number\.',
    ),
    (
      '--config=vit_jax:pretrain_paper:B/16 --config.model.depth=1000000000',
      r'model\.depth=1000000000: must be between 1 and 1000\.',
    ),
    (
      '--config=vit_jax:finetune:pets --config.optimizer.learning_rate=1e-3',
      r'optimizer\.learning_rate: .*sets it\. Set schedule\.lr instead',
    ),
    (
      '--config=vit_jax:deit:deit,S/16 --config.objective.objective.model=3',
      r'objective\.objective\.model: .*_xent sets it\. Set model instead',
    ),
    (
      '--config=vit_jax:evaluate:folder --config.evals.test.mesh.data=8',
      r'evals\.test\.mesh: .*Classification sets it\. Set mesh instead',
    ),
    (
      '--config=vit_jax:finetune:pets --config.optimizer.lr=1e-3',
      r"no argument 'lr'\. It takes: (?!.*(learning_rate|\bmask))",
    ),
    (
      '--config=vit_jax:transfer --config.shared.wieghts=/tmp/x',
      r"no run refers to 'wieghts' \(did you mean 'weights'\?\)",
    ),
  ],
)
def test_a_mistake_is_one_line(words, message, monkeypatch, tmp_path):
  monkeypatch.chdir(ROOT)
  line = error_of('--print_config', *shlex.split(words))
  assert re.search(message, line), line
  assert 'WHOLE_NUMBER' not in line


FLAG = re.compile(r'--(config\.\S+)=\.\.\.')


@pytest.mark.parametrize(
  'spec, count',
  [
    ('evaluate:folder', 2),
    ('evaluate:folder,accuracy,knn', 3),
    ('finetune:folder', 2),
    ('finetune:cifar10', 1),
    ('fewshot:pets', 1),
    ('evaluate_imagenet:val', 1),
    ('pretrain_paper:folder', 1),
  ],
)
def test_values_to_set_are_named_by_flags_that_exist(spec, count, tmp_path):
  words = [f'--config=vit_jax:{spec}', f'--workdir={tmp_path}', '--dry_run']
  flags = FLAG.findall(error_of(*words))
  assert len(flags) == count
  none = tmp_path / 'none'
  text = end_of(*words, *(f'--{flag}={none}' for flag in flags))
  assert not FLAG.search(text)  # what comes next: nothing is at that path
  assert str(none) in text or 'is not prepared' in text


# Configs of users.


def test_an_error_in_a_config_of_a_user_keeps_its_traceback(tmp_path):
  path = tmp_path / 'bad.py'
  path.write_text('def get_config():\n  return undefined')
  with pytest.raises(NameError):
    config.load(path)
  path.write_text('def get_config():\n  raise ValueError("no such model")')
  line = error_of(f'--config={path}', '--print_config')
  assert 'bad.py' in line and 'no such model' in line


def test_a_config_without_arguments(tmp_path):
  path = tmp_path / 'plain.py'
  path.write_text('def get_config():\n  return {}')
  assert config.load(path) == {}
  line = error_of(f'--config={path}:tiny', '--print_config')
  assert 'its get_config: too many positional arguments' in line


@pytest.mark.parametrize('name', config.shipped_configs())
def test_configs_are_found_by_name(name, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  by_name = config.load(f'vit_jax:{name}')
  (path,) = (ROOT / 'configs').rglob(f'{name}.py')
  by_path = config.load(path)
  assert by_name.to_json_best_effort() == by_path.to_json_best_effort()


LOAD = """
import sys
from vit_jax import config
for spec in sys.argv[1:]:
  print(config.load(spec))
"""


def write(folder, **files):
  folder.mkdir(parents=True, exist_ok=True)
  for name, text in files.items():
    (folder / f'{name}.py').write_text(text)


def test_imports_of_a_config(tmp_path):
  write(tmp_path / 'mine', helper='x = 1')
  write(
    tmp_path / 'mine',
    exp="""
import helper
from configs import common, finetune
def get_config(word):
  return word, helper.x, common.__file__, len(finetune.MODELS) > 5
""",
  )
  (tmp_path / 'elsewhere').mkdir()
  spec = tmp_path / 'mine' / 'exp.py:word'
  done = python('-c', LOAD, spec, cwd=tmp_path / 'elsewhere')
  expected = ('word', 1, str(ROOT / 'configs' / 'common.py'), True)
  assert done.stdout.strip() == str(expected), done.stderr


def test_a_folder_of_the_user_named_configs(tmp_path):
  write(
    tmp_path / 'configs',
    common='number = 7',
    more='number = 8',
    mine="""
from configs import arguments, common, more
def get_config():
  return common.number, more.number, arguments.__name__
""",
  )
  mine = tmp_path / 'configs' / 'mine.py'
  specs = [mine, 'vit_jax:pretrain_paper:imagenet,tiny', mine]
  done = python('-c', LOAD, *specs, cwd='/')
  lines = done.stdout.splitlines()
  assert lines[0] == lines[-1] == "(7, 8, 'configs.arguments')", done.stderr
  assert 'optax.adamw' in done.stdout
