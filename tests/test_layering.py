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
LEAVES = ('checks', 'domains', 'files', 'tree', 'durations', 'types')
FOLDERS = {  # folder: what it may import of this package
  'models': ('models.',),
  # Masked patches: what patches are, and a model that does not pool them.
  # Distillation: its teacher.
  'objectives': ('objectives.', 'models.common', 'models.pooling', 'teacher'),
  'evals': ('evals.', 'data.', 'sharding', 'terminal', 'objectives.'),
  'analysis': ('analysis.',),
  'reports': (
    *('reports.', 'data.images', 'data.transforms', 'metrics', 'terminal'),
  ),
  # Progress while shards are indexed.
  'data': ('data.', 'terminal'),
  'weights': (
    *('weights.', 'config', 'stored', 'workdirs', 'models.'),
    *('averages', 'preprocess', 'data.transforms', 'data.vtab', 'terminal'),
  ),
}
# Config files -> values -> calls -> objects.
CONFIG = (
  *('errors', 'values', 'signatures', 'calls', 'entries', 'plan', 'files'),
  'objects',
)
MODULES = {
  'main': (
    'changes',
    *('canary', 'compilation_cache', 'config', 'distributed', 'environment'),
    *('signals', 'terminal', 'workdirs'),
    *('train', 'evaluate', 'study'),
  ),
  'models/names': ('config', 'models.'),
  'names': ('models.names', 'tools.parsers', 'analysis.summary'),
  'step': ('averages', 'models.products', 'sharding'),
  # It names no model, objective, optimizer rule or evaluator. MFU needs FLOPs.
  'train': (
    *(
      'ahead',
      'autotune',
      'changes',
      'analysis.flops',
      'checkpoint',
      'config',
      'data.pipeline',
      'distributed',
    ),
    *(
      'frozen',
      'reuse',
      'terminal',
      'dry_runs',
      'evaluators',
      'metrics',
      'optim',
      'preprocess',
      'profiling',
    ),
    *(
      'device_memory',
      'divergence',
      'reports.confusion',
      'storage',
      'reports.page',
      'sharding',
      'step',
    ),
    'weights.',
    *('workdirs', 'writers'),
  ),
  'evaluate': (
    *(
      'autotune',
      'data.pipeline',
      'changes',
      'config',
      'device_memory',
      'evaluators',
      'metrics',
    ),
    *('preprocess', 'reports.', 'sharding', 'terminal', 'weights.'),
    *('workdirs', 'writers'),
  ),
  'autotune': ('distributed', 'models.', 'terminal', 'workdirs'),
  'evaluators': ('data.pipeline', 'device_memory'),
  'study': (
    *(
      'changes',
      'config',
      'metrics',
      'reports.page',
      'reports.results',
      'terminal',
    ),
    *('distributed', 'eta', 'reuse', 'weights.formats', 'workdirs'),
  ),
  'eta': ('analysis.flops', 'config', 'data.pipeline', 'durations', 'reuse'),
  'reuse': (),
  'frozen': ('sharding',),
  'teacher': ('frozen', 'models.', 'pretrained', 'weights.'),
  'optim': ('averages', 'multipliers', 'muon', 'rules', 'transformations'),
  'rules': ('transformations',),
  'muon': ('transformations',),
  'transformations': (),
  'multipliers': (),
  'averages': (),
  'sharding': ('models.mesh',),
  'checkpoint': ('checksums', 'storage', 'stored', 'terminal'),
  'stored': ('checksums', 'workdirs'),
  'checksums': ('sharding',),
  'storage': (),
  'compilation_cache': (),
  'device_memory': (),
  'distributed': ('signals',),
  'signals': (),
  'metrics': ('divergence', 'records', 'terminal'),
  'divergence': ('sharding',),
  'records': (),
  'profiling': ('terminal',),
  'writers': (),
  **{f'config/{each}': ('config.',) for each in CONFIG},
  'config/__init__': ('config.',),
  'environment': (),
  'canary': ('environment',),
  'changes': (
    *('config', 'workdirs'),
    *('data.fingerprints', 'data.pipeline', 'data.sampling'),
  ),
  **{leaf: ('checks', 'domains', 'types') for leaf in LEAVES},
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


@pytest.mark.parametrize('folder', FOLDERS)
def test_folders_import_what_they_may(folder):
  assert in_folder(folder)
  for path in in_folder(folder):
    allowed = (*FOLDERS[folder], *LEAVES)
    beyond = {n for n in ours(path) if not n.startswith(allowed)}
    assert not beyond, path


@pytest.mark.parametrize('module', MODULES)
def test_modules_import_what_they_may(module):
  path = ROOT / 'vit_jax' / f'{module}.py'
  allowed = (*MODULES[module], *(() if module in LEAVES else LEAVES))
  assert not {n for n in ours(path) if not n.startswith(allowed or ('-',))}


def test_who_imports_which_package():
  def folders(package):
    return {name.rsplit('.', 1)[0] for name in importers(package)}

  assert folders('flax') == {'vit_jax.models'}
  assert not {n for n in importers('jax') if n.startswith('vit_jax.data.')}
  assert folders('grain') == {'vit_jax.data'}
  assert folders('cv2') == {'vit_jax.data', 'vit_jax.data.embedded'}
  tfds = folders('tensorflow_datasets')
  assert tfds <= {'vit_jax.data', 'vit_jax.tools', 'vit_jax.tools.prepare'}
  assert importers('orbax') == {
    'vit_jax.checkpoint',
    'vit_jax.checksums',
    'vit_jax.stored',
  }
  assert not importers('configs')
  assert importers('tensorflow') == {'vit_jax.tools.benchmark.tf_data'}
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
  modules = ['train', 'step', 'optim', 'models.names']
  modules += ['objectives.classification', 'objectives.masked_patches']
  modules += ['objectives.distillation']
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


def test_one_training_step_is_short():
  """A newcomer reads at most four files and 900 lines for one step."""
  files = ('step', 'objectives/classification', 'models/vit', 'optim')
  paths = [ROOT / 'vit_jax' / f'{name}.py' for name in files]
  assert sum(len(p.read_text().splitlines()) for p in paths) <= 900
