"""The rules of the house, read off the source: who imports whom, and sizes.

What is listed here as an exception is one; the lists should shrink.
"""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted((ROOT / 'vit_jax').rglob('*.py'))
OURS = 'vit_jax.'
MAX_LINES, MAX_FUNCTION_LINES = 300, 50
LONGER_FILES = {}
LONGER_FUNCTIONS = {
  'vit_jax.train.train': 120,
}
# Beyond numpy, jax and the standard library. A prefix of the name is enough.
PURE = ('models.posemb', 'models.variants')  # numpy only, or not even that
FOLDERS = {  # folder: what it may import of ours
  'models': ('models.',),
  'objectives': ('objectives.', 'models.frame'),  # its patches
  'evals': (
    *('evals.', 'data.', 'sharding', 'tree', 'terminal'),
    'objectives.',
  ),
  'analysis': (),
  'reports': ('reports.', 'build', 'data.transforms', 'metrics', 'terminal'),
  'data': ('checks', 'data.', 'files'),
  'weights': ('weights.', 'build', 'checkpoint', 'workdirs', 'tree'),
}
TRAINING_STACK = ('build', 'sharding', 'checkpoint', 'metrics', 'data.', 'tree')
TRAINING_STACK += (  # the parts that train() was cut into
  'assemble',
  'durations',
  'interrupt',
  'terminal',
  'transfer',
  'weights.bundle',
  'weights.formats',
  'workdirs',
)
MODULES = {
  'main': (
    *('build', 'compilation_cache', 'environment', 'hosts', 'terminal'),
    *('train', 'evaluate', 'study'),
  ),
  # MFU needs the model's FLOPs.
  'train': (*TRAINING_STACK, 'analysis.flops'),
  'evaluate': (*TRAINING_STACK, 'reports.timm_csv'),
  'study': (*TRAINING_STACK, 'study_runs', 'reports.results'),
  'study_runs': ('build', 'metrics', 'terminal', 'weights.formats'),
  'transfer': ('build', 'tree', 'weights.formats', *PURE),
  'pretrained': ('build', 'transfer', 'tree', 'weights.'),
  'optim': ('build', 'tree'),
  'sharding': ('build', 'models.mesh', 'tree'),
  'recipes': ('build', 'models.mesh', 'sharding', 'tree'),
  'checkpoint': ('build', 'tree'),
  'compilation_cache': (),
  'hosts': ('build',),
  'metrics': ('terminal',),
  'names': ('build', 'terminal', *PURE),
  'schedules': ('build',),
  'build': (),
  'environment': (),
  'tree': (),
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
  return [p for p in FILES if p.parent == ROOT / 'vit_jax' / folder]


@pytest.mark.parametrize('folder', FOLDERS)
def test_folders_import_what_they_may(folder):
  assert in_folder(folder)
  for path in in_folder(folder):
    allowed = (*FOLDERS[folder], *PURE)
    beyond = {n for n in ours(path) if not n.startswith(allowed)}
    assert not beyond, path


@pytest.mark.parametrize('module', MODULES)
def test_modules_import_what_they_may(module):
  path = ROOT / 'vit_jax' / f'{module}.py'
  assert not {n for n in ours(path) if not n.startswith(MODULES[module])}


def test_who_imports_which_package():
  def folders(package):
    return {name.rsplit('.', 1)[0] for name in importers(package)}

  assert folders('flax') == {'vit_jax.models'}
  assert not {n for n in importers('jax') if n.startswith('vit_jax.data.')}
  assert folders('grain') == folders('cv2') == {'vit_jax.data'}
  assert folders('tensorflow_datasets') <= {'vit_jax.data', 'vit_jax.tools'}
  assert importers('orbax') == {'vit_jax.checkpoint'}
  assert not importers('configs') | importers('tensorflow')
  # No ConfigDict travels below these.
  assert importers('ml_collections') <= {
    'vit_jax.config',
    'vit_jax.main',
    'vit_jax.study_runs',
  }
  for path in in_folder('analysis'):
    used = {name.split('.')[0] for name in imports(path)}
    assert used <= {'jax', 'numpy'} | sys.stdlib_module_names


def test_training_imports_without_data_packages():
  """An accelerator box may have neither grain, tfds nor an image decoder."""
  modules = ['train', 'optim', 'names']
  modules += ['objectives.classification', 'objectives.masked_patches']
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


def test_files_are_short():
  for path in FILES:
    limit = LONGER_FILES.get(module_name(path), MAX_LINES)
    assert len(path.read_text().splitlines()) <= limit, path


def functions(node, prefix):
  for child in ast.iter_child_nodes(node):
    name = f'{prefix}.{getattr(child, "name", "")}'
    if isinstance(child, ast.FunctionDef):
      yield name, child
    if isinstance(child, ast.FunctionDef | ast.ClassDef):
      yield from functions(child, name)


def code_lines(function):
  """Lines of a function without its docstring."""
  lines = function.end_lineno - function.lineno + 1
  first = function.body[0]
  if ast.get_docstring(function) is not None:
    lines -= first.end_lineno - first.lineno + 1
  return lines


def test_functions_are_short():
  long = {}
  for path in FILES:
    for name, function in functions(
      ast.parse(path.read_text()), module_name(path)
    ):
      limit = LONGER_FUNCTIONS.get(name, MAX_FUNCTION_LINES)
      if code_lines(function) > limit:
        long[name] = code_lines(function)
  assert not long


def test_every_exception_is_needed():
  lengths = {module_name(p): len(p.read_text().splitlines()) for p in FILES}
  assert all(lengths[name] > MAX_LINES for name in LONGER_FILES)
  found = {
    name: code_lines(function)
    for path in FILES
    for name, function in functions(
      ast.parse(path.read_text()), module_name(path)
    )
  }
  assert all(found[name] > MAX_FUNCTION_LINES for name in LONGER_FUNCTIONS)
