"""Tests of the notebooks: format, imports, and a tiny run without a network."""

import ast
import importlib
import json
import pathlib
import re
import subprocess
import sys
import types

import pytest
import tiny
from processes import python

from vit_jax import config
from vit_jax.io import terminal
from vit_jax.weights import formats

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / 'notebooks'
NAMES = sorted(path.stem for path in FOLDER.glob('*.ipynb'))
MAX_BYTES = 200_000  # per output


def cells(name, kind):
  notebook = json.loads((FOLDER / f'{name}.ipynb').read_text())
  return [c for c in notebook['cells'] if c['cell_type'] == kind]


def code(name):
  return [''.join(cell['source']) for cell in cells(name, 'code')]


@pytest.mark.parametrize('name', NAMES)
def test_format(name):
  """Check the fields that version 4.5 of the notebook format requires."""
  notebook = json.loads((FOLDER / f'{name}.ipynb').read_text())
  assert (notebook['nbformat'], notebook['nbformat_minor']) == (4, 5)
  assert notebook['metadata']['kernelspec']['name'] == 'python3'
  ids = [cell['id'] for cell in notebook['cells']]
  assert len(set(ids)) == len(ids)
  for cell in notebook['cells']:
    needed = {'cell_type', 'id', 'metadata', 'source'}
    if cell['cell_type'] == 'code':
      needed |= {'execution_count', 'outputs'}
    else:
      assert cell['cell_type'] == 'markdown'
    assert set(cell) == needed
    assert re.fullmatch('[a-zA-Z0-9_-]{1,64}', cell['id'])
    assert isinstance(cell['source'], str | list)


@pytest.mark.parametrize('name', NAMES)
def test_outputs_are_small_and_without_errors(name):
  for cell in cells(name, 'code'):
    for output in cell['outputs']:
      kinds = 'stream', 'display_data', 'execute_result'
      assert output['output_type'] in kinds
      assert output.get('name') != 'stderr', output
      assert len(json.dumps(output)) < MAX_BYTES
  counts = [cell['execution_count'] for cell in cells(name, 'code')]
  assert counts == [*range(1, len(counts) + 1)]  # run once, in order


@pytest.mark.parametrize('name', NAMES)
def test_text_names_no_machine_and_no_dead_link(name):
  text = (FOLDER / f'{name}.ipynb').read_text()
  assert '_OWNER_' not in text and 'colab-badge' not in text
  assert not re.findall(r'/(?:home|root|Users|work)/[^"\s]*', text)
  assert set(re.findall(r'/tmp/(\w+)', text)) <= {'vit_jax'}


def test_the_install_cell_is_the_same():
  assert len({code(name)[0] for name in NAMES}) == 1


def install_command(monkeypatch, install_from, cwd):
  """Run the install cell where vit_jax is missing; return pip's arguments."""
  commands = []
  monkeypatch.chdir(cwd)
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  monkeypatch.setattr(subprocess, 'run', lambda x, check: commands.append(x))
  monkeypatch.setattr('glob.glob', lambda pattern: [])
  monkeypatch.setattr('shutil.which', lambda name: '/usr/bin/nvidia-smi')
  cell = code(NAMES[0])[0]
  assert "INSTALL_FROM = ''" in cell
  cell = cell.replace("INSTALL_FROM = ''", f'INSTALL_FROM = {install_from!r}')
  exec(compile(cell, 'cell', 'exec'), {})
  ((*pip, requirement),) = commands
  assert pip == [sys.executable, '-m', 'pip', 'install', '-q']
  return requirement


@pytest.mark.parametrize('kind', ['folder', 'wheel', 'git', 'clone'])
def test_installs_from_one_variable(kind, monkeypatch, tmp_path):
  wheel = 'vit_jax-0.1.0-py3-none-any.whl'
  install_from, cwd, url = {
    'folder': ('.', tmp_path, tmp_path.as_uri()),
    'wheel': (wheel, tmp_path, f'{tmp_path.as_uri()}/{wheel}'),
    'git': ('git+https://x.org/a', tmp_path, 'git+https://x.org/a'),
    'clone': ('', FOLDER, ROOT.as_uri()),
  }[kind]
  found = install_command(monkeypatch, install_from, cwd)
  assert found == f'vit_jax[cuda] @ {url}'


def test_says_that_nothing_is_installed(monkeypatch, tmp_path):
  with pytest.raises(ValueError, match='Set INSTALL_FROM'):
    install_command(monkeypatch, '', tmp_path)


@pytest.mark.parametrize('name', NAMES)
def test_imports_and_mentioned_files_exist(name):
  """Check imported names, and files and modules that the text mentions."""
  tree = ast.parse('\n'.join(code(name)))
  found = 0
  for node in ast.walk(tree):
    if not isinstance(node, ast.ImportFrom):
      continue
    package = node.module.partition('.')[0]
    for alias in node.names:
      if package == 'vit_jax':
        found += 1
        _locate(f'{node.module}.{alias.name}')
      elif package == 'configs':
        folder = ROOT / node.module.replace('.', '/')
        assert (folder / f'{alias.name}.py').exists()
  assert found
  text = ''.join(''.join(cell['source']) for cell in cells(name, 'markdown'))
  for path in re.findall(r'(?:configs|docs)/\w[\w/.]*\.\w+', text):
    assert (ROOT / path).exists(), path
  for module in re.findall(r'python -m (vit_jax[\w.]*\w)', text):
    assert importlib.util.find_spec(module), module
  for path in re.findall(r'\((\w+\.ipynb)\)', text):
    assert (FOLDER / path).exists(), path


def _locate(name):
  try:
    config.locate(name)
  except ValueError:
    importlib.import_module(name)


def test_progress_is_plain_lines_in_a_notebook(monkeypatch):
  """Notebooks report a terminal, but progress bars would fill the page."""
  monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
  monkeypatch.setenv('TERM', 'xterm')
  assert terminal.console().is_terminal
  monkeypatch.setitem(sys.modules, 'ipykernel', types.ModuleType('ipykernel'))
  assert not terminal.console().is_terminal


# Runs in its own process, with a replacement for IPython's display functions.
RUN = """
import json, pathlib, sys, types
import matplotlib
matplotlib.use('Agg')
shown = []
def show(filename, **kwargs):
  shown.append(pathlib.Path(filename).read_bytes())
display = types.ModuleType('IPython.display')
display.Image = show
display.Markdown = lambda *text, filename=None: filename and show(filename)
sys.modules['IPython.display'] = display
scope = {'__name__': '__main__'}
for cell in json.loads(pathlib.Path(sys.argv[1]).read_text())['cells']:
  if cell['cell_type'] == 'code':
    exec(compile(''.join(cell['source']), cell['id'], 'exec'), scope)
from matplotlib import pyplot
assert all(shown) and len(shown) + len(pyplot.get_fignums()) >= 2
"""


def execute(name, workdir, **settings):
  """Run the code cells in tiny form; they write to workdir. Return stdout."""
  settings |= {'TINY': 1, 'WORKDIR': workdir}
  environ = {f'VIT_JAX_{key}': str(value) for key, value in settings.items()}
  done = python('-c', RUN, FOLDER / f'{name}.ipynb', cwd=FOLDER, **environ)
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
  return done.stdout


@pytest.mark.slow
def test_pretraining_fine_tuning_and_looking(tmp_path):
  """Each notebook starts from the weights of the notebook before."""
  quick, tuned = tmp_path / 'quick', tmp_path / 'tuned'
  execute('pretrain_and_transfer', quick)
  assert 'fine-tuned at 36 px' in (quick / 'table.md').read_text()
  text = execute(
    'finetune_your_folder',
    tuned,
    WEIGHTS=quick / 'pretrain',
    FOLDER=tmp_path / 'tiles',
  )
  assert 'pos_embedding 1x4x4x96 resized to 1x6x6x96' in text
  execute('predict_and_look', tmp_path / 'figures', WEIGHTS=tuned)
  assert (tmp_path / 'figures' / 'rollout.npz').exists()


@pytest.mark.slow
def test_weights_without_classes(tmp_path):
  """As DINOv2-S: predictions are learned from features."""
  weights = tiny.weights(tiny.vit(num_classes=None), (8, 8, 3))
  formats.write(weights, tmp_path / 'own.npz', 'vit_jax')
  text = execute('predict_and_look', tmp_path, WEIGHTS=tmp_path / 'own.npz')
  assert '% of 60 other pictures are right' in text
  assert (tmp_path / 'similarity.npz').exists()


@pytest.mark.slow
def test_scaling_study(tmp_path):
  text = execute('read_a_scaling_study', tmp_path)
  assert '1 of 6 runs are done' in text
  assert len(json.loads((tmp_path / 'scaling.json').read_text())) == 2


@pytest.mark.slow
def test_tpu_pods(tmp_path):
  execute('tpu_pods', tmp_path)
