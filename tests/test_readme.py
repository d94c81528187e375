"""The README and its pages say nothing that is not so."""

import ast
import importlib.util
import pathlib
import re
import shlex

import numpy as np
import pytest
from absl import flags

from vit_jax import build, names, tree
from vit_jax.weights import bundle, formats

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text()
TRAINING = (ROOT / 'docs/training.md').read_text()
# docs/hosts.md and docs/compile.md have commands with gaps, and no configs.
NAMES = ('training', 'evaluation', 'weights', 'inside')
PAGES = [(ROOT / f'docs/{name}.md').read_text() for name in NAMES]
TEXT = '\n'.join([README, *PAGES])


def _commands():
  blocks = re.findall(r'```bash\n(.*?)```', TEXT, re.S)
  blocks += re.findall(r'`(--config\.[^`]*)`', TEXT)
  lines = [line for block in blocks for line in block.splitlines()]
  return sorted({line.split('&&')[-1].strip() for line in lines})


def _config(command):
  """The config that a command loads."""
  (flag,) = [x for x in shlex.split(command) if x.startswith('--config=')]
  path, _, argument = flag.removeprefix('--config=').partition(':')
  spec = importlib.util.spec_from_file_location('config', ROOT / path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config(*([argument] if argument else []))


MAIN = [c for c in _commands() if 'vit_jax.main' in c]
COMPILE = [c for c in _commands() if 'vit_jax.tools.compile' in c]


@pytest.mark.parametrize('command', MAIN + COMPILE)
def test_commands_load_a_config_that_has_what_they_set(command):
  config = _config(command)
  build.locate(config.run)
  for word in shlex.split(command):
    if word.startswith('--config.'):
      *parents, last = word.removeprefix('--config.').split('=')[0].split('.')
      part = config
      for key in parents:
        part = part[key]
      assert last in part, word


def test_there_are_commands():
  assert len(MAIN) >= 6
  assert any('quickstart.py' in command for command in MAIN)


def test_paths_and_dotted_names_exist():
  for path in set(re.findall(r'(?:configs|tests)/\w+\.py', TEXT)):
    assert (ROOT / path).exists(), path
  for name in set(re.findall(r'`(vit_jax(?:\.\w+)+)`', TEXT)):
    try:
      build.locate(name)
    except build.ValueError:
      importlib.import_module(name)


def test_files_of_the_layout_exist():
  layout = README.split('## How the code is laid out')[1].split('```')[1]
  for name in re.findall(r'\b(\w+\.py)\b', layout):
    assert list((ROOT / 'vit_jax').rglob(name)), name
  assert {p.name for p in (ROOT / 'vit_jax').iterdir() if p.is_dir()} >= {
    name for name in re.findall(r'^  (\w+)/', layout, re.M)
  }


def test_table_of_keys_is_what_train_reads():
  """Every key that train() reads is in the table, and the other way round."""
  source = (ROOT / 'vit_jax/train.py').read_text()
  source += (ROOT / 'vit_jax/assemble.py').read_text()
  read = set(re.findall(r"config\.get\(\s*'(\w+)'", source))
  train = ast.parse((ROOT / 'vit_jax/train.py').read_text())
  for node in ast.walk(train):
    is_key = isinstance(node, ast.Attribute) and isinstance(
      node.value, ast.Name
    )
    if is_key and node.value.id == 'config' and node.attr not in ('get', 'run'):
      read.add(node.attr)
  read -= {'check_all_read'}
  table = TRAINING.split('## A training config')[1].split('Order of init')[0]
  first_cells = re.findall(r'^\| (`[^|]*) \|', table, re.M)
  listed = {n for cell in first_cells for n in re.findall(r'`(\w+)', cell)}
  listed -= {'run', 'total_steps', 'log_every_'}
  if 'preprocess' in listed:  # read as `'preprocess' in config`
    read.add('preprocess')
  assert read == listed


def test_python_examples_run(tmp_path):
  load, create = re.findall(r'```python\n(.*?)```', README, re.S)
  # A small model in place of a B/16; all else is the README's text.
  small = create.replace("'ViT-B/16'", "'ViT-mu/16'")
  scope = {}
  exec(compile(small, 'README.md', 'exec'), scope)
  assert small != create

  weights = bundle.Weights(
    model=names.create('ViT-mu/16', num_classes=1000),
    params={k: np.asarray(v) for k, v in tree.flatten(scope['params']).items()},
    image_shape=(224, 224, 3),
  )
  path = tmp_path / 'ViT-B_16.npz'
  formats.write(weights, path, 'npz')
  local = load.replace('gs://vit_models/imagenet21k/ViT-B_16.npz', str(path))
  assert local != load
  exec(compile(local, 'README.md', 'exec'), scope)
  assert scope['params']['pos_embedding'].shape == (1, 24, 24, 32)


@pytest.mark.parametrize('command', COMPILE)
def test_the_flags_of_compile_exist(command):
  importlib.import_module('vit_jax.tools.compile')
  words = shlex.split(command)
  given = {w[2:].split('=')[0] for w in words if w.startswith('--')}
  given = {name for name in given if not name.startswith('config.')}
  assert given <= set(flags.FLAGS)


@pytest.mark.parametrize(
  'tool', ['convert', 'predict', 'inspect', 'masked_patches', 'benchmark']
)
def test_tools_take_what_the_commands_give_them(tool):
  commands = [c for c in _commands() if f'vit_jax.tools.{tool}' in c]
  module = importlib.import_module(f'vit_jax.tools.{tool}')
  for command in commands:
    module.parser().parse_args(shlex.split(command)[3:])
  assert commands


def test_links_lead_somewhere():
  for page in (ROOT / 'README.md', *(ROOT / 'docs').glob('*.md')):
    for link in re.findall(r'\]\((?!http)([^)#]+)', page.read_text()):
      assert (page.parent / link).exists(), (page.name, link)
