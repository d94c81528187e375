"""Tests that the README and the pages in docs/ match the code."""

import importlib
import pathlib
import re
import shlex
import sys
import types

import ml_collections
import numpy as np
import pytest
import tiny
import traced_step
from absl import flags

from vit_jax import config, tree
from vit_jax.runs import records
from vit_jax.weights import formats
from vit_jax.weights.bundle import Weights

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]
common = importlib.import_module('configs.common')
README = (ROOT / 'README.md').read_text()
# The commands in docs/hosts.md have gaps.
NAMES = 'architecture', 'compile', 'curate', 'evaluation', 'first_hour'
NAMES += 'inside', 'python', 'rasters', 'training', 'weights'
PAGES = {name: (ROOT / f'docs/{name}.md').read_text() for name in NAMES}
TEXT = '\n'.join([README, *PAGES.values()])


def _commands(program):
  blocks = '\n'.join(re.findall(r'```bash\n(.*?)```', TEXT, re.S))
  lines = re.sub(r' *\\\n *', ' ', blocks).splitlines()  # continued lines
  commands = {line.split('&&')[-1].strip() for line in lines}
  commands = {re.sub(r'^([A-Z_]+=\S* )+', '', command) for command in commands}
  return sorted(c for c in commands if c.startswith(f'python -m {program} '))


MAIN = _commands('vit_jax.main')
COMPILE = _commands('vit_jax.tools.compile')


@pytest.mark.parametrize('command', MAIN + COMPILE)
def test_commands_have_valid_configs(command):
  words = shlex.split(command)
  (spec,) = [w for w in words if w.startswith('--config=')]
  loaded = config.load(ROOT / spec.removeprefix('--config='))
  prefix = '--config.'
  given = [w.removeprefix(prefix) for w in words if w.startswith(prefix)]
  config.override(loaded, given)
  config.plan_run(loaded)


def test_there_are_commands():
  assert len(MAIN) >= 20
  assert any('train_folder.py' in command for command in MAIN)


def test_the_install_section_begins_with_the_scripts_of_ci():
  install = README.split('## Install')[1].split('\n## ')[0]
  lines = re.findall(r'```bash\n(.*?)```', install, re.S)[0].splitlines()
  assert lines == ['script/quickstart', 'script/test']
  assert lines[1] in (ROOT / '.ci/run').read_text().splitlines()


def test_settings_in_the_text_are_valid():
  """Check `--config.KEY=VALUE` outside of commands, on a config with a ViT."""
  found = set(re.findall(r'`(--config\.\w+\.[^`]*=[^`]*)`', TEXT))
  assert len(found) >= 3
  for setting in found:
    loaded = config.load(ROOT / 'configs/finetune.py:folder,B/16')
    loaded.init_from.path = loaded.data.source.path = '/tmp/none'
    words = shlex.split(setting)
    config.override(loaded, [w.removeprefix('--config.') for w in words])
    config.plan_run(loaded)


def test_paths_and_dotted_names_exist():
  for path in set(re.findall(r'(?:configs|tests|vit_jax)/[\w/]+\.py', TEXT)):
    assert (ROOT / path).exists(), path
  for name in set(re.findall(r'`(vit_jax(?:\.\w+)+)`', TEXT)):
    try:
      importlib.import_module(name)
    except ModuleNotFoundError:
      config.locate(name)


def test_the_reading_order_names_files():
  order = PAGES['architecture'].split('## Reading order')[1]
  names = re.findall(r'`([\w/]+\.py)`', order)
  assert len(names) == 9
  for name in names:
    assert any((ROOT / x / name).exists() for x in ('', 'vit_jax')), name


def test_one_step_is_as_long_as_the_readme_says():
  lines = traced_step.step_lines()
  said = re.search(r'about (\d+) lines\s+of\s+code\s+in (\d+) files', README)
  assert len(lines) == int(said[2]) <= 8
  assert abs(sum(lines.values()) - int(said[1])) <= 50


def _python(name):
  return re.findall(r'```python\n(.*?)```', PAGES[name], re.S)


def _run(code, scope, replace):
  """Run an example with some of its text replaced."""
  for old, new in replace.items():
    assert old in code, old
    code = code.replace(old, new)
  exec(compile(code, 'example', 'exec'), scope)


def test_python_examples_of_predictions(tmp_path, capsys):
  (predict, _), (look, attend) = _python('python'), _python('inside')
  own, image = str(tmp_path / 'own.npz'), str(tmp_path / 'a.png')
  weights = tiny.weights(tiny.vit(num_classes=3), (8, 8, 3))
  weights.class_names = ['disc', 'ring', 'star']
  formats.write(weights, own, 'vit_jax')
  pixels = np.random.default_rng(0).integers(0, 256, (1, 8, 8, 3), np.uint8)
  pathlib.Path(image).write_bytes(tiny.encode(pixels))
  scope = {'pixels': pixels}
  _run(predict, scope, {'/tmp/own': own, '/tmp/samples/star/00.jpg': image})
  p = scope['image']['probabilities']
  expected = [f'{weights.class_names[i]} {p[i]!s}' for i in np.argsort(-p)]
  assert capsys.readouterr().out.splitlines() == expected
  _run(look, scope, {'/tmp/flowers': own, 'rose.jpg': image})
  assert capsys.readouterr().out == '(1, 2, 2, 2) (2, 2)\n'
  _run(attend, scope, {})
  for key in 'maps', 'rollout':  # from the class token to the patches
    found = scope['image'][key].ravel()
    expected = np.ravel(scope[key][0, ..., 0, 1:])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_python_examples_of_models(tmp_path):
  (_, create), (load, _) = _python('python'), _python('weights')
  scope = {}
  # A small model replaces B/16; the rest is the text of the pages.
  _run(create, scope, {"'ViT-B/16'": "'ViT-mu/16'"})

  path = tmp_path / 'ViT-B_16.npz'
  weights = Weights(
    model=scope['model'],
    params={k: np.asarray(v) for k, v in tree.flatten(scope['params']).items()},
    image_shape=(224, 224, 3),
  )
  formats.write(weights, path, 'npz')
  _run(load, scope, {'gs://vit_models/imagenet21k/ViT-B_16.npz': str(path)})
  assert scope['params']['pos_embedding'].shape == (1, 24, 24, 32)


def test_python_examples_of_the_training_page(tmp_path, monkeypatch):
  mixed, wrapper, wrapped, train = _python('training')
  package = types.ModuleType('my_package')
  package.objectives = types.ModuleType('my_package.objectives')
  monkeypatch.setitem(sys.modules, 'my_package', package)
  monkeypatch.setitem(sys.modules, 'my_package.objectives', package.objectives)
  _run(wrapper, vars(package.objectives), {})
  scope = {'config': ml_collections.ConfigDict()}
  _run(wrapped, scope, {})
  scope['wrapped'] = config.resolve(scope['config'].objective)
  shorter = {
    "'/tmp/digits'": repr(str(tmp_path)),
    'objective=softmax_xent': 'objective=wrapped',
    'steps(200)': 'steps(2)',
    'steps(100)': 'steps(2)',
    'steps(20)': 'steps(1)',
  }
  _run(train, scope, shorter)
  assert scope['state'].step == 2
  assert any('test/accuracy' in r for r in records.read_records(tmp_path))
  _run(mixed, scope, {})
  found = config.resolve(scope['config'].objective)
  assert found == config.resolve(
    common.mixed(common.bce(), mixup=0.8, cutmix=1.0)
  )


@pytest.mark.parametrize('command', COMPILE)
def test_flags_of_compile_exist(command):
  importlib.import_module('vit_jax.tools.compile.__main__')
  given = re.findall(r' --(?!config\.)(\w+)', command)
  assert given and set(given) <= set(flags.FLAGS)


@pytest.mark.parametrize(
  'tool', ['convert', 'curate', 'predict', 'look', 'demo', 'report']
)
def test_tools_accept_the_arguments_of_the_commands(tool):
  commands = _commands(f'vit_jax.tools.{tool}')
  module = importlib.import_module(f'vit_jax.tools.{tool}')
  if not hasattr(module, 'parser'):
    module = importlib.import_module(f'vit_jax.tools.{tool}.__main__')
  for command in commands:
    module.parser().parse_args(shlex.split(command)[3:])
  assert commands


def test_links_exist():
  for page in (*ROOT.glob('*.md'), *(ROOT / 'docs').glob('*.md')):
    for link in re.findall(r'\]\((?!http)([^)#]+)', page.read_text()):
      assert (page.parent / link).exists(), (page.name, link)
