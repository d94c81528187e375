"""Tests that the pages of the site are true and that it has all of the code."""

import ast
import importlib.util
import pathlib
import re
import types

import numpy as np
import packed
import pytest
import tiny

from vit_jax import config
from vit_jax.durations import epochs

ROOT = pathlib.Path(__file__).parents[1]


def test_commands_name_modules():
  pages = [*ROOT.glob('*.md'), *(ROOT / 'docs').glob('*.md')]
  found = {
    name
    for page in pages
    for name in re.findall(r'python -m (vit_jax[.\w]+)', page.read_text())
  }
  assert len(found) > 10
  for name in found:
    assert importlib.util.find_spec(name.rstrip('.')), name


def test_golden_files_are_listed():
  text = (ROOT / 'CONTRIBUTING.md').read_text().split('## Golden files')[1]
  cells = [row.split('|')[1] for row in re.findall(r'^\| `.*', text, re.M)]
  listed = [name for cell in cells for name in re.findall('`(.*?)`', cell)]
  root = ROOT / 'tests/golden'
  files = {x for name in listed for x in root.glob(name)}
  assert files == {x for x in root.rglob('*') if x.suffix in ('.npz', '.json')}


def test_config_of_a_subset(tmp_path):
  page = (ROOT / 'docs/data.md').read_text()
  (code,) = re.findall(r'```python\n(.*?)```', page, re.S)
  files = (f'{name}/{i}.png' for name in ('cat', 'dog') for i in range(5))
  packed.write_folder(tmp_path, dict.fromkeys(files, b''))
  source = {
    'target': 'vit_jax.data.sources.folder.Folder',
    'path': str(tmp_path),
  }
  made = config.ConfigDict({'data': {'source': source}})
  exec(code.replace('100', '2').replace('5000', '3'), {'config': made})
  assert len(config.resolve(made.data.source)) == 3


def test_configs_of_augmentation():
  page = (ROOT / 'docs/data.md').read_text()
  (code,) = re.findall(r'```py\n(.*?)```', page, re.S)
  image = np.zeros((50, 60, 3), np.uint8)
  for recipe in re.findall(r'= (\[.*?\n\])', code, re.S):
    names = {'T': 'vit_jax.data.transforms.', 'A': 'vit_jax.data.augment.'}
    transforms = config.resolve(eval(recipe, names))
    assert len(transforms) == 4
    out = image
    for transform in transforms:
      out = transform(out, np.random.default_rng(0))
    assert out.shape == (224, 224, 3)


def test_config_of_the_first_hour(tmp_path, capsys):
  page = (ROOT / 'docs/first_hour.md').read_text()
  (code,) = re.findall(r'```python\n(.*?)```', page, re.S)
  for i in range(20):
    image = tiny.encode(np.full((9, 9, 3), 10 * i, np.uint8))
    packed.write_folder(tmp_path, {f'flowers/{"ab"[i % 2]}/{i}.png': image})
  code = code.replace('/data/flowers', f'{tmp_path}/flowers')
  (tmp_path / 'mine.py').write_text(code)
  loaded = config.load(tmp_path / 'mine.py')
  assert config.plan_run(loaded).kwargs['total'] == epochs(100)
  smaller = {'model.width': 3, 'model.depth': 1, 'data.batch_size': 8}
  config.override(loaded, [f'{key}={value}' for key, value in smaller.items()])
  config.run(loaded, tmp_path / 'run', dry_run=True)
  assert ' 225 ' in capsys.readouterr().out  # 100 epochs of 90% of 20 images


@pytest.fixture(scope='module')
def hooks():
  pytest.importorskip('mkdocs')
  path = ROOT / 'docs/hooks.py'
  spec = importlib.util.spec_from_file_location('hooks', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_links_into_the_repository_lead_to_pages(hooks):
  file = types.SimpleNamespace(src_uri='hosts.md')
  page = types.SimpleNamespace(file=file)
  text = (
    '[`train`](../vit_jax/train.py), [c](../configs/vtab.py), `[x](y)`, '
    '[r](../README.md#results), [s](../setup.py), [t](training.md#configs)'
  )
  site = types.SimpleNamespace(generated={'configs/index.md': ''})
  assert hooks.on_page_markdown(text, page, config=site) == (
    '[`train`](api/vit_jax.train.md), [c](configs/vtab.md), `[x](y)`, '
    '[r](index.md#results), s, [t](training.md#configs)'
  )
  file.src_uri, text = 'configs/index.md', '[a](ablations.md)'
  assert hooks.on_page_markdown(text, page, config=site) == text


def test_long_commands_are_broken_and_commands_have_examples(hooks):
  line = f'python -m vit_jax.main --config={"c" * 40} --workdir=/x --dry_run'
  broken = hooks._broken(line)
  assert max(map(len, broken.splitlines())) <= 70
  assert broken.replace(' \\\n   ', '') == line
  assert hooks._broken('python -m vit_jax.main') == 'python -m vit_jax.main'
  page = hooks._commands()
  assert '| `python -m vit_jax.tools.predict` | ' in page
  assert '--top_k=3' in page and '[The first hour](first_hour.md)' in page


def test_docstrings_of_configs_keep_continued_lines():
  for path in (ROOT / 'configs').rglob('*.py'):
    doc = ast.get_docstring(ast.parse(path.read_text())) or ''
    assert max(map(len, doc.splitlines()), default=0) <= 80, path.name


def test_docstrings_are_no_markdown(hooks):
  doc = 'rate ** L of `a ** b`, [B, L]\n**fields: x < 2'
  assert hooks.escape(doc) == (
    r'rate \*\* L of `a ** b`, \[B, L]' + '\n**fields: x \\< 2'
  )
  doc = 'Train.\n\n  python x\n    --y\n\n- a\n  b\n\nArgs:\n  z: it.'
  assert hooks.fence_blocks(doc) == (
    'Train.\n\n\n```text\npython x\n  --y\n```\n\n- a\n  b\n\nArgs:\n  z: it.'
  )


def test_reference_has_every_config_and_all_that_configs_name(hooks):
  pages = hooks.config_pages()
  files = [p for p in (ROOT / 'configs').rglob('*.py')]
  files = [p for p in files if 'def get_config' in p.read_text()]
  assert len(files) > 15
  for path in files:
    page = pages[f'{path.relative_to(ROOT).with_suffix("")}.md']
    assert 'config.run = vit_jax.' in page, path
  targets = pages['configs/targets.md']
  for name in (
    'train.train',
    'runs.checkpoint.Checkpoints',
    'optim.schedules.Schedule',
  ):
    assert f'::: vit_jax.{name}\n' in targets
