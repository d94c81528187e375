"""The layers of the code, read off the source: who may import whom."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted((ROOT / 'vit_jax').rglob('*.py'))
OURS = 'vit_jax.'
# Leaves that every layer may import.
LEAVES = ('types', 'tree', 'runs.files', 'runs.terminal')
LAYERS = {  # a module or folder, and what else it may import of this package
  'main': (
    *('config', 'parallel.', 'reports.page', 'runs.canary'),
    *('runs.environment', 'runs.workdirs'),
  ),
  # They name no model, objective, optimizer or evaluator.
  'train': (
    *('analysis.flops', 'config', 'data.pipeline', 'evals.evaluators'),
    *('models.attention_choice', 'models.layers', 'optim.', 'parallel.'),
    *('reports.', 'runs.', 'step', 'weights.'),
  ),
  'evaluate': (
    *('config', 'data.pipeline', 'evals.evaluators', 'models.attention_choice'),
    *('models.layers', 'parallel.', 'reports.', 'runs.', 'weights.'),
  ),
  'study': ('config', 'reports.', 'runs.', 'weights.formats'),
  'step': (),
  'pretrained': ('data.transforms', 'models.', 'weights.'),
  'analysis': (),
  'config': ('optim.schedules',),
  'data': (),
  'evals': (
    *('analysis.embeddings', 'data.', 'objectives.', 'parallel.'),
    'runs.compiled',
  ),
  'models': (),
  'objectives': (
    *('models.', 'optim.schedules', 'parallel.', 'pretrained', 'weights.'),
  ),
  'optim': (),
  'parallel': ('models.layers',),
  'reports': ('config', 'runs.metrics'),
  'runs': ('config', 'data.', 'optim.', 'parallel.'),
  'weights': (
    *('config', 'data.transforms', 'models.', 'pretrained'),
    *('runs.checkpoint', 'runs.workdirs'),
  ),
}


def module_name(path):
  return '.'.join(path.relative_to(ROOT).with_suffix('').parts)


def imports(path):
  """Full names of all that a file imports, in functions too."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, f'{path}: relative import'
      names |= {f'{node.module}.{alias.name}' for alias in node.names}
  return names


def importers(package):
  """Modules of ours that import a package."""
  return {
    module_name(path)
    for path in FILES
    if any((name + '.').startswith(package + '.') for name in imports(path))
  }


def ours(path):
  return {n.removeprefix(OURS) for n in imports(path) if n.startswith(OURS)}


def in_folder(folder):
  files = [p for p in FILES if ROOT / 'vit_jax' / folder in p.parents]
  return [p for p in files if module_name(p) != 'vit_jax.models.names']


@pytest.mark.parametrize('layer', LAYERS)
def test_layers_import_what_they_may(layer):
  path = ROOT / 'vit_jax' / layer
  files = (
    list(path.rglob('*.py')) if path.is_dir() else [path.with_suffix('.py')]
  )
  for file in files:
    allowed = (f'{layer}.', *LAYERS[layer], *LEAVES)
    if file.match('models/names.py'):  # it makes models from settings
      allowed = (*allowed, 'config', 'analysis.flops')
    assert not {n for n in ours(file) if not n.startswith(allowed)}, file


def test_every_module_has_a_layer():
  names = {path.stem for path in (ROOT / 'vit_jax').iterdir()}
  assert (
    names - set(LAYERS)
    == {
      *('__init__', '__pycache__', 'py', 'tools', 'tree', 'types'),
    }
    & names
  )


def test_who_imports_which_package():
  def folders(package):
    return {name.rsplit('.', 1)[0] for name in importers(package)}

  assert folders('flax') == {'vit_jax.models'}
  assert not {n for n in importers('jax') if n.startswith('vit_jax.data.')}
  assert folders('grain') == {'vit_jax.data', 'vit_jax.tools'}
  assert folders('cv2') == {'vit_jax.data', 'vit_jax.data.embedded'}
  tfds = folders('tensorflow_datasets')
  assert tfds <= {'vit_jax.data', 'vit_jax.tools'}
  assert importers('orbax') == {'vit_jax.runs.checkpoint'}
  assert not importers('configs')
  assert not importers('tensorflow')
  # No ConfigDict travels below these.
  assert importers('ml_collections') <= {
    'vit_jax.config.values',
    'vit_jax.main',
    'vit_jax.study',
  }
  for path in in_folder('analysis'):
    used = {name.split('.')[0] for name in imports(path)}
    assert used <= {'jax', 'numpy', 'vit_jax'} | sys.stdlib_module_names


def test_training_imports_without_data_packages():
  """An accelerator box may have neither grain, tfds nor an image decoder."""
  modules = ['train', 'step', 'optim.optimizers', 'models.names']
  modules += ['objectives.classification', 'objectives.masked_patches']
  modules += ['objectives.distillation', 'objectives.mae']
  modules += ['models.vit', 'models.resnet', 'models.mixer', 'models.axial']
  code = f"""
import sys
missing = {{'grain', 'tensorflow_datasets', 'cv2', 'PIL', 'matplotlib'}}
class Missing:
  def find_spec(self, name, path=None, target=None):
    if name.split('.')[0] in missing:
      raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
import {', '.join(OURS + m for m in modules)}
"""
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
