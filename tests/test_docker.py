"""The Dockerfiles, without Docker: what they copy, install and start exists."""

import itertools
import pathlib
import re
import shlex

import pytest

from vit_jax import config

ROOT = pathlib.Path(__file__).parents[1]
FILES = [ROOT / f'docker/{name}.Dockerfile' for name in ('gpu', 'tpu')]


def instructions(path):
  """Return [(instruction, arguments)] with lines joined."""
  text = re.sub(r'^#.*\n', '', path.read_text(), flags=re.M)
  lines = text.replace('\\\n', ' ').splitlines()
  return [line.split(maxsplit=1) for line in lines if line.strip()]


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_dockerfile(path):
  steps = instructions(path)
  # Not ignored, and there; dependencies are installed before the code is
  # copied, so that their layer is kept when the code changes.
  kept = (ROOT / '.dockerignore').read_text().splitlines()
  copied = [text.split()[:-1] for name, text in steps if name == 'COPY']
  for source in itertools.chain(*copied):
    assert (ROOT / source).exists() and f'!{source}' in kept
  installs = [i for i, (_, text) in enumerate(steps) if 'pip install' in text]
  at = next(i for i, (_, text) in enumerate(steps) if 'vit_jax vit_jax' in text)
  assert installs[0] < at < installs[1]
  (extras,) = re.findall(r"pip install '\.\[(.*?)\]'", path.read_text())
  for extra in extras.split(','):
    assert f"    '{extra}': [" in (ROOT / 'setup.py').read_text()
  assert path.stem.replace('gpu', 'cuda') in extras
  # Neither the user nor the working directory is that of the build.
  last = dict(steps)
  assert last['USER'] == '1000' and last['WORKDIR'] == '/home/vit'
  assert last['ENTRYPOINT'] == '["python", "-m", "vit_jax.main"]'


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_the_command_in_the_header(path):
  comments = re.findall(r'^# ?(.*)', path.read_text(), re.M)
  text = '\n'.join(comments).replace('\\\n', ' ')
  build, start = re.findall(r'docker (?:build|run) .*', text)[:2]
  words = shlex.split(build)
  assert words[words.index('-f') + 1] == f'docker/{path.name}'
  image = words[words.index('-t') + 1]
  program = shlex.split(start)[shlex.split(start).index(image) + 1 :]
  (spec,) = [w[9:] for w in program if w.startswith('--config=')]
  assert config.load(spec).run
