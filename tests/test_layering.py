"""The floors of the code, computed from the imports."""

import ast
import pathlib
import re
import sys

import pytest
from processes import python

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted((ROOT / 'vit_jax').rglob('*.py'))
OURS = 'vit_jax.'
# Floors from the top: folders and modules that import only lower ones.
FLOORS = (
  {'tools'},
  {'train'},
  {'setup', 'evaluate'},
  {'training'},
  {'evals'},
  {'objectives', 'pretrained', 'main', 'study', 'science'},
  {'weights', 'reports'},
  {'runs', 'zoo'},
  {'config', 'data', 'optim', 'parallel', 'probes', 'step'},
  {'analysis', 'durations', 'io', 'kernels', 'models', 'tree'},
  {'meshes', 'types'},
)
GROUND = {'durations', 'io', 'kernels', 'meshes', 'tree', 'types'}
# These import nothing else: models, objectives, optimizers and evaluators come
# from the config.
NARROW = 'step', 'models', 'analysis', 'optim', 'data', 'config', 'parallel'
NARROW += ('probes',)


# The trunk names no leaf: neither a module, nor a class of one, nor a word that
# only leaves understand. Tables name leaves: a leaf is deleted with its row.
TRUNK = {
  *('main', 'train', 'training', 'setup', 'step', 'evaluate'),
  *('models.vit', 'models.dense', 'models.pooling', 'models.posemb'),
  *('objectives.classification', 'evals.evaluators'),
  *('optim.optimizers', 'optim.schedules', 'data.pipeline'),
}
TABLES = 'models.attention', 'models.pallas.choice', 'weights.formats'
LEAVES = (
  *('models.axial', 'models.flexi', 'models.mixer', 'models.pallas.'),
  *('models.resnet', 'models.rotary', 'models.stem', 'data.augment'),
  *('data.imagenet', 'data.sources.', 'data.vtab', 'evals.', 'objectives.'),
  *('science.', 'tools.', 'weights.families.', 'zoo.'),
)
PARTS_OF_TRUNK = 'evals.collect', 'objectives.encode'
# Those that get all parts from the config name neither a model nor a loss.
STORY = 'main', 'train', 'training', 'setup', 'evaluate'
PARTS = 'models.vit', 'models.pooling', 'models.posemb', 'objectives.'
LEAF_WORDS = {'KeepAspect', 'area', 'grid', 'patch_size', 'patch_sizes'}


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


def room(path):
  """The folder or top-level module of a file."""
  return path.relative_to(ROOT / 'vit_jax').parts[0].removesuffix('.py')


def test_no_import_leads_upward():
  floors = {name: i for i, names in enumerate(FLOORS) for name in names}
  assert len(FLOORS) <= 11
  assert {room(path) for path in FILES} == {*floors, '__init__'}
  for path in FILES:
    if (here := room(path)) == '__init__':
      continue
    lower = {x for x, floor in floors.items() if floor > floors[here]}
    found = {name.split('.')[0] for name in ours(path)}
    assert found <= lower | {here}, path


def test_the_page_shows_the_floors():
  page = (ROOT / 'docs/architecture.md').read_text().split('```')[1]
  floors = re.split(r'^ ?\d+  ', page.split('benchmarks')[0], flags=re.M)[1:]
  names = [re.findall(r'^ *(\w+)', floor, re.M) for floor in floors]
  assert tuple(map(set, names)) == FLOORS


@pytest.mark.parametrize('here', NARROW)
def test_what_a_room_may_import(here):
  allowed = (here, *GROUND)
  for path in FILES:
    if room(path) == here:
      assert not {x for x in ours(path) if not x.startswith(allowed)}, path


def is_leaf(name):
  return name.startswith(LEAVES) and not name.startswith(
    (*TRUNK, *TABLES, *PARTS_OF_TRUNK)
  )


def words(path):
  """Names, keywords and strings of the code of a file, without docstrings."""
  nodes = [*ast.walk(ast.parse(path.read_text()))]
  docs = {x.value for x in nodes if isinstance(x, ast.Expr)}
  strings = {x for x in nodes if isinstance(x, ast.Constant)} - docs
  names = 'id', 'attr', 'arg', 'name'
  return {x.value for x in strings} | {
    getattr(node, name, None) for node in nodes for name in names
  }


def classes(path):
  nodes = ast.parse(path.read_text()).body
  names = {x.name for x in nodes if isinstance(x, ast.ClassDef)}
  return {x for x in names if not x.startswith('_')}


def test_the_trunk_names_no_leaf():
  files = {module_name(x).removeprefix(OURS): x for x in FILES}
  assert files.keys() >= TRUNK and is_leaf('models.flexi')
  of_leaves = {c for n, x in files.items() if is_leaf(n) for c in classes(x)}
  of_leaves -= {c for n in TRUNK for c in classes(files[n])}
  of_leaves.discard('Table')  # also a name in posemb.py
  for name in TRUNK:
    assert not {*filter(is_leaf, ours(files[name]))}, name
    if name in STORY:
      assert not [x for x in ours(files[name]) if x.startswith(PARTS)], name
      assert not words(files[name]) & LEAF_WORDS, name
    assert not words(files[name]) & of_leaves, name


def test_single_studies_are_imported_by_nobody():
  names = {room(x) for x in FILES if any('science.' in y for y in ours(x))}
  assert names <= {'science'}


def test_who_imports_which_package():
  def folders(package):
    return {name.rsplit('.', 1)[0] for name in importers(package)}

  found = folders('flax') - {'vit_jax.models.pallas'}
  assert found <= {'vit_jax.models', 'vit_jax.science'}
  assert not {n for n in importers('jax') if n.startswith('vit_jax.data.')}
  assert folders('grain') == {'vit_jax.data', 'vit_jax.tools'}
  # Another import could come before opencv.py has set the number of threads.
  assert importers('cv2') == {'vit_jax.data.opencv'}
  tfds = folders('tensorflow_datasets')
  assert tfds <= {'vit_jax.data', 'vit_jax.data.sources', 'vit_jax.tools'}
  assert importers('orbax') == {'vit_jax.runs.checkpoint'}
  assert not importers('configs')
  assert not importers('tensorflow')
  # No ConfigDict travels below these.
  assert importers('ml_collections') <= {
    'vit_jax.config.values',
    'vit_jax.main',
    'vit_jax.study',
  }
  for path in FILES:
    if room(path) == 'analysis':
      used = {name.split('.')[0] for name in imports(path)}
      assert used <= {'jax', 'numpy', 'vit_jax'} | sys.stdlib_module_names


DATA = sorted({module_name(x) for x in FILES if room(x) == 'data'})


@pytest.mark.parametrize(
  ('modules', 'packages'),
  [
    # Workers start in a fraction of a second, and take little memory.
    (DATA, {'jax', 'flax', 'optax', 'tensorflow', 'grain'}),
    # Images are predicted sooner.
    (
      ['vit_jax.tools.predict'],
      {'orbax', 'tensorstore', 'optax', 'grain', 'scipy', 'matplotlib', 'onnx'},
    ),
  ],
)
def test_what_an_import_does_not_load(modules, packages):
  code = (
    f'import sys, {", ".join(modules)}; print(*{packages} & {{*sys.modules}})'
  )
  done = python('-c', code)
  assert (done.returncode, done.stdout) == (0, '\n'), done.stderr


def test_training_imports_without_data_packages():
  """An accelerator box may have neither grain, tfds nor an image decoder."""
  modules = ['train', 'step', 'optim.optimizers', 'zoo.names']
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
  done = python('-c', code)
  assert done.returncode == 0, done.stderr
