"""Tests that the pages of the site are true and that it has all of the code."""

import ast
import importlib.util
import pathlib
import re

import pytest

from vit_jax import config

ROOT = pathlib.Path(__file__).parents[1]
FAQ = (ROOT / 'docs/faq.md').read_text()


def texts(path):
  """Yield the strings of a source file, with '{}' for what is formatted."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.JoinedStr):
      yield ''.join(
        value.value if isinstance(value, ast.Constant) else '{}'
        for value in node.values
      )
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
      yield node.value


def test_messages_in_the_faq_exist():
  sources = [
    text
    for folder in ('vit_jax', 'configs')
    for path in (ROOT / folder).rglob('*.py')
    for text in texts(path)
  ]
  quoted = re.findall(r'^### `(.*)`$', FAQ, re.M)
  assert len(quoted) > 20
  for message in quoted:
    parts = [part.strip() for part in message.split('…')]
    pattern = '.*'.join(re.escape(part) for part in parts if part)
    assert any(re.search(pattern, text, re.S) for text in sources), message
